"""The bird's-eye model: a convolutional backbone, shared by all cameras, and the head of ``occupancy.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from fuelrail.bench.trainer.models.occupancy import OccupancyHead, OccupancyModel, Pixels, head_plan

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import BevSettings
    from fuelrail.bench.trainer.models.staged import TensorPlans

_STEM_STRIDE = 4


class BevOccupancy(OccupancyModel):
    """Multi-camera images and their geometry to the loss of an occupancy grid, by convolutions."""

    settings: BevSettings

    def __init__(self, settings: BevSettings) -> None:
        super().__init__()
        self.settings = settings
        width = settings.width
        self.stem = _Stem(settings)
        blocks: list[nn.Module] = []
        for _ in range(settings.num_stages - 1):
            blocks += [_Residual(width) for _ in range(settings.blocks_per_stage)]
            blocks.append(_convolution(width, 2 * width, stride=2))
            width *= 2
        blocks += [_Residual(width) for _ in range(settings.blocks_per_stage)]
        self.blocks = nn.ModuleList(blocks)
        stride = settings.subsample * _STEM_STRIDE * 2 ** (settings.num_stages - 1)
        self.head = OccupancyHead(width, stride, settings.grid)

    def tensor_plans(self) -> TensorPlans:
        """Return the head's plan: torch shards no convolutions, so each rank computes all of them."""
        return {}, {}, head_plan()


class _Stem(nn.Module):
    def __init__(self, settings: BevSettings) -> None:
        super().__init__()
        width = settings.width
        self.pixels = Pixels(settings.subsample)
        self.body = nn.Sequential(_convolution(3, width, stride=2), _convolution(width, width, stride=2))

    def forward(self, img: Tensor, *_: Tensor) -> Tensor:
        features: Tensor = self.body(self.pixels(img))
        return features


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(width, width, stride=1), _convolution(width, width, stride=1))

    def forward(self, features: Tensor) -> Tensor:
        body: Tensor = self.body(features)
        return features + body


def _convolution(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(min(8, outputs // 2), outputs),  # two channels or more: of one value there is nothing to norm
        nn.ReLU(inplace=True),
    )
