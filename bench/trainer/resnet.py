"""ResNet-50 as published (arXiv 1512.03385, with the stride in the 3x3 convolution as torchvision has it), by images.

Every image of every camera is one input; what is learnt is whether its sample has boxes at all. It measures time: the
network is the one that storage benchmarks and accelerators' figures speak of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

_MEAN = (123.675, 116.28, 103.53)
_STD = (58.395, 57.12, 57.375)
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
_EXPANSION = 4


class ResNet50(nn.Module):
    """Takes the same inputs as :class:`~fuelrail.bench.trainer.model.BevOccupancy`, and uses images and targets."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(3, 1, 1), persistent=False)
        layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        inputs = 64
        for width, count, stride in _STAGES:
            for number in range(count):
                layers.append(_Bottleneck(inputs, width, stride if number == 0 else 1))
                inputs = width * _EXPANSION
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, 1)

    def forward(
        self,
        img: Tensor,
        cam_valid: Tensor,
        intrinsics: Tensor,  # noqa: ARG002 - this network knows no geometry
        cam2ego: Tensor,  # noqa: ARG002
        target: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """Mean loss over the batch's present images; img uint8 [B, N, 3, H, W], target [B, G], weight [B]."""
        pixels = (img.flatten(0, 1).float() - self.mean) / self.std
        features = self.backbone(pixels.contiguous(memory_format=torch.channels_last)).mean(dim=(2, 3))
        logits = self.head(features).view(img.shape[:2]).float()
        labels = target.amax(dim=1, keepdim=True).expand_as(logits)
        counts = weight[:, None] * (cam_valid != 0)
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (loss * counts).sum() / counts.sum().clamp(min=1)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        relu = nn.ReLU(inplace=True)
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1, 1), relu, *_convolution(width, width, 3, stride), relu,
            *_convolution(width, outputs, 1, 1),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, features: Tensor) -> Tensor:
        body: Tensor = self.body(features)
        return F.relu(body + self.shortcut(features))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> Sequence[nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)
