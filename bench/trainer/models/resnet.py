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
        self.stem = ImageStem(
            settings.subsample,
            *_convolution(3, settings.width, size=7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            layout=torch.channels_last,
        )
        self.blocks = nn.ModuleList()
        channels = settings.width
        for stage, count in enumerate(settings.blocks):
            width = settings.width * 2**stage
            for number in range(count):
                halves = number == 0 and stage > 0
                block = _Bottleneck(channels, width, stride=2 if halves else 1)
                self.blocks.append(block)
                channels = width * _EXPANSION
        self.head = _Classifier(channels, settings.classes)

    def losses(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the cross-entropy of each image [B, N]."""
        num_images, num_classes = logits.shape[1:]
        occupied_cells = inputs[-2].sum(dim=1).long()
        classes = occupied_cells.clamp(max=num_classes - 1)
        labels = classes.repeat_interleave(num_images)
        losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
        return losses.view(-1, num_images)

    def by_sample(self, losses: Tensor, *inputs: Tensor) -> Tensor:
        """Return the mean over the sample's present images [B]."""
        present = (inputs[1] != 0).float()
        total = (losses * present).sum(dim=1)
        num_present = present.sum(dim=1).clamp(min=1)
        return total / num_present


class _Classifier(nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.classes = nn.Linear(inputs, classes)

    def forward(self, features: Tensor, img: Tensor, *_: Tensor) -> Tensor:
        """Return logits [B, N, classes] of features [B * N, C, h, w]."""
        means = features.mean(dim=(2, 3))
        logits: Tensor = self.classes(means).float()
        num_samples, num_cameras = img.shape[:2]
        return logits.reshape(num_samples, num_cameras, -1)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        relu = nn.ReLU(inplace=True)
        last, norm = _convolution(width, outputs, size=1, stride=1)
        # A block starts as the identity, which keeps deep networks well conditioned (arXiv
        # 1706.02677, section 5.1).
        nn.init.zeros_(norm.weight)
        self.body = nn.Sequential(
            *_convolution(inputs, width, size=1, stride=1),
            relu,
            *_convolution(width, width, size=3, stride=stride),
            relu,
            last,
            norm,
        )
        self.shortcut: nn.Module
        if inputs == outputs and stride == 1:
            self.shortcut = nn.Identity()
        else:
            projection = _convolution(inputs, outputs, size=1, stride=stride)
            self.shortcut = nn.Sequential(*projection)

    def forward(self, features: Tensor) -> Tensor:
        body: Tensor = self.body(features)
        return F.relu(body + self.shortcut(features))


def _convolution(
    inputs: int,
    outputs: int,
    *,
    size: int,
    stride: int,
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution = nn.Conv2d(
        inputs,
        outputs,
        kernel_size=size,
        stride=stride,
        padding=size // 2,
        bias=False,
    )
    norm = nn.BatchNorm2d(outputs)
    return convolution, norm
