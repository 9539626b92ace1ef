"""A multi-camera vision transformer: patches of each image as tokens (arXiv 2010.11929), the
occupancy head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput

from fuelrail.bench.trainer.models.bev import (
    HEAD_PLAN,
    CameraModel,
    ImageStem,
    OccupancyHead,
)
from fuelrail.bench.trainer.models.staged import TRANSFORMER_PLAN, Block

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import VitSettings


class MultiCameraVit(CameraModel):
    """Multi-camera images and their geometry to the loss of an occupancy grid, by a transformer
    over each image.
    """

    settings: VitSettings
    plan: Mapping[str, ParallelStyle] = {
        **TRANSFORMER_PLAN,
        "head.norm": PrepareModuleInput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_output=True,
        ),
        **{f"head.cells.{name}": style for name, style in HEAD_PLAN.items()},
    }

    def __init__(self, settings: VitSettings) -> None:
        super().__init__(settings)
        self.stem = _Patches(settings)
        self.blocks = nn.ModuleList()
        for _ in range(settings.depth):
            block = Block(settings.width, settings.heads, causal=False)
            self.blocks.append(block)
        self.head = _Head(settings)

    def feature_map(self, hidden: Tensor, *inputs: Tensor) -> Tensor:
        """Return the tokens as maps of the images [B, N, C, h, w]."""
        img = inputs[0]
        num_images, _, width = hidden.shape
        columns = self.settings.patches_along(img.shape[-1])
        maps = hidden.transpose(1, 2).reshape(num_images, width, -1, columns)
        return super().feature_map(maps, *inputs)


class _Patches(ImageStem):
    """Images to tokens [B * N, T, C]; where a token is in the world is the head's to say, within
    its image here.
    """

    def __init__(self, settings: VitSettings) -> None:
        width = settings.width
        embedding = nn.Conv2d(3, width, kernel_size=settings.patch, stride=settings.patch)
        super().__init__(settings.subsample, embedding)
        # Relative to neighbours, and for any size of image (arXiv 2102.10882).
        self.positions = nn.Conv2d(width, width, kernel_size=3, padding=1, groups=width)

    def forward(self, img: Tensor, *_: Tensor) -> Tensor:
        patches = super().forward(img)
        tokens: Tensor = (patches + self.positions(patches)).flatten(2).transpose(1, 2)
        return tokens


class _Head(nn.Module):
    def __init__(self, settings: VitSettings) -> None:
        super().__init__()
        self.settings = settings
        self.norm = nn.LayerNorm(settings.width)
        stride = settings.patch * settings.subsample
        self.cells = OccupancyHead(settings.width, stride, settings.grid)

    def forward(self, tokens: Tensor, img: Tensor, *inputs: Tensor) -> Tensor:
        columns = self.settings.patches_along(img.shape[-1])
        channels = self.norm(tokens).transpose(1, 2)
        features = channels.unflatten(2, (-1, columns))
        logits: Tensor = self.cells(features, img, *inputs)
        return logits
