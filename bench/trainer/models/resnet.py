"""ResNet-50 as published (arXiv 1512.03385, with the stride in the 3x3 convolution as torchvision
has it), by images.

Every image of every camera is one input; the class is how many cells of the grid around the vehicle
hold a box. It measures time: the network is the one that storage benchmarks and accelerators'
figures speak of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from fuelrail.bench.trainer.models.bev import CameraModel, ImageStem

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import ResNetSettings

_EXPANSION = 4


class ResNet(CameraModel):
    """A classifier of images; takes the inputs of all camera models, and uses images and
    targets.
    """

    settings: ResNetSettings
    plan: Mapping[str, ParallelStyle] = {
        "head.classes": ColwiseParallel(output_layouts=Replicate())
    }

    def __init__(self, settings: ResNetSettings) -> None:
        super().__init__(settings)
        convolution = _convolution(3, settings.width, 7, 2)
        pool = nn.MaxPool2d(3, 2, 1)
        self.stem = ImageStem(
            settings.subsample,
            *convolution,
            nn.ReLU(inplace=True),
            pool,
            layout=torch.channels_last,
        )
        blocks: list[nn.Module] = []
        inputs = settings.width
        for stage, count in enumerate(settings.blocks):
            width = settings.width * 2**stage
            for number in range(count):
                blocks.append(_Bottleneck(inputs, width, 2 if number == 0 and stage > 0 else 1))
                inputs = width * _EXPANSION
        self.blocks = nn.ModuleList(blocks)
        self.head = _Classifier(inputs, settings.classes)

    def losses(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the cross-entropy of each image [B, N]."""
        images, classes = logits.shape[1:]
        labels = inputs[-2].sum(dim=1).long().clamp(max=classes - 1).repeat_interleave(images)
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="none").view(-1, images)

    def by_sample(self, losses: Tensor, *inputs: Tensor) -> Tensor:
        """Return the mean over the sample's present images [B]."""
        present = (inputs[1] != 0).float()
        return (losses * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)


class _Classifier(nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.classes = nn.Linear(inputs, classes)

    def forward(self, features: Tensor, img: Tensor, *_: Tensor) -> Tensor:
        """Return logits [B, N, classes] of features [B * N, C, h, w]."""
        logits: Tensor = self.classes(features.mean(dim=(2, 3))).float()
        return logits.reshape(*img.shape[:2], -1)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        relu = nn.ReLU(inplace=True)
        last, norm = _convolution(width, outputs, 1, 1)
        # A block starts as the identity, which keeps deep networks well conditioned (arXiv
        # 1706.02677, section 5.1).
        nn.init.zeros_(norm.weight)
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1, 1),
            relu,
            *_convolution(width, width, 3, stride),
            relu,
            last,
            norm,
        )
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        )

    def forward(self, features: Tensor) -> Tensor:
        body: Tensor = self.body(features)
        return F.relu(body + self.shortcut(features))


def _convolution(
    inputs: int, outputs: int, size: int, stride: int
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)
