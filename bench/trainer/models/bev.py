"""The bird's-eye model, and what all camera models share: inputs, pixels, rays, and the head of an
occupancy grid.

Each token of a feature map carries the ray of its pixel in the ego frame (from the batch's
intrinsics and extrinsics, as PETR embeds positions, arXiv 2203.05625); the cells of a grid around
the vehicle attend to all tokens of all cameras; a linear layer says whether a box has its centre in
the cell. The loss (binary cross-entropy) falls when images, geometry and boxes belong together.

Letters in shape comments: B samples, N cameras, C channels, H W pixels, h w feature cells, T
tokens, G grid cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)

from fuelrail.bench.trainer.models.staged import StagedModel
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import (
        BevSettings,
        ResNetSettings,
        VitSettings,
    )

# ImageNet statistics of 0..255 RGB, as everybody's pretrained backbones expect.
_MEAN = (123.675, 116.28, 103.53)
_STD = (58.395, 57.12, 57.375)
_STEM_STRIDE = 4

# What tensor parallel shards of the head: the embedding of rays. Torch shards no convolutions.
HEAD_PLAN: dict[str, ParallelStyle] = {
    "ray_embedding.0": ColwiseParallel(),
    "ray_embedding.2": RowwiseParallel(),
}


class ImageStem(nn.Module):
    """uint8 images [B, N, 3, H, W] to features [B * N, C, h, w]: every n-th pixel, normalised,
    through the layers.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        subsample: int,
        *layers: nn.Module,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__()
        self.subsample = subsample
        self.layout = layout
        mean = torch.tensor(_MEAN).view(3, 1, 1)
        std = torch.tensor(_STD).view(3, 1, 1)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self.layers = nn.Sequential(*layers)

    def forward(self, img: Tensor, *_: Tensor) -> Tensor:
        """Return the features."""
        step = self.subsample
        start = step // 2
        pixels = img[..., start::step, start::step].flatten(0, 1)
        normalised = (pixels.float() - self.mean) / self.std
        try:
            features: Tensor = self.layers(normalised.contiguous(memory_format=self.layout))
        except RuntimeError as error:
            if "Kernel size" not in str(error):
                raise
            raise ConfigError(
                f"images of {img.shape[-2]} x {img.shape[-1]} pixels are smaller than what "
                f"the model's first layers look at, of every {step}. pixel in both "
                "directions; use larger ones"
            ) from error
        return features


class CameraModel(StagedModel):
    """A model of images, their geometry, and the grid of boxes around the vehicle; its head says
    what is occupied.
    """

    settings: BevSettings | VitSettings | ResNetSettings

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return img, cam_valid, intrinsics, cam2ego, target [B, grid * grid], weight [B]."""
        img = batch["img"]
        cam_valid = batch["cam_valid"]
        boxes = batch.get("gt_boxes_3d")
        if not boxes:
            # A dataset without boxes trains towards an empty grid: its run measures time, its
            # loss means nothing.
            boxes = [torch.zeros(0, 7, device=img.device)] * len(img)
        target = occupied_cells(boxes, self.settings.grid, self.settings.range_m)
        # One without calibration, likewise, has cameras of unit matrices.
        matrices = []
        for name, size in (("intrinsics", 3), ("cam2ego", 4)):
            if name in batch:
                matrices.append(batch[name])
            else:
                unit = torch.eye(size, device=img.device)
                matrices.append(unit.repeat(*cam_valid.shape, 1, 1))
        weight = batch["valid"].float()
        return img, cam_valid, *matrices, target, weight

    def losses(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the binary cross-entropy of each cell [B, G]."""
        return F.binary_cross_entropy_with_logits(logits, inputs[-2], reduction="none")


class OccupancyHead(nn.Module):
    """Features of all cameras and their geometry to the logits of an occupancy grid; see the
    module's docstring.
    """

    def __init__(self, width: int, stride: int, grid: int) -> None:
        super().__init__()
        self.stride = stride
        self.ray_embedding = nn.Sequential(
            nn.Linear(6, width),
            nn.ReLU(),
            nn.Linear(width, width),
        )
        self.queries = nn.Parameter(torch.randn(grid**2, width) / width**0.5)
        self.keys_values = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(
        self,
        features: Tensor,
        img: Tensor,
        cam_valid: Tensor,
        intrinsics: Tensor,
        cam2ego: Tensor,
        *_: Tensor,
    ) -> Tensor:
        """Return logits of the cells, float [B, G].

        features [B * N, C, h, w]; img uint8 [B, N, 3, H, W] (of which the shape is read); cam_valid
        [B, N]; intrinsics [B, N, 3, 3] of the delivered pixels; cam2ego [B, N, 4, 4].
        """
        num_samples, num_cameras = img.shape[:2]
        height, width = features.shape[-2:]
        # Centre of a feature cell in delivered pixels, whose top-left pixel has its centre at (0,
        # 0).
        rows = (torch.arange(height, device=cam2ego.device) + 0.5) * self.stride - 0.5
        columns = (torch.arange(width, device=cam2ego.device) + 0.5) * self.stride - 0.5
        v, u = torch.meshgrid(rows, columns, indexing="ij")
        pixels = torch.stack((u, v, torch.ones_like(u)), dim=-1).reshape(-1, 3)
        projections = intrinsics.flatten(0, 1).float()
        inverse, _ = torch.linalg.inv_ex(projections)  # an absent camera's zeros are masked
        inverse = inverse.nan_to_num(0, 0, 0)
        extrinsics = cam2ego.flatten(0, 1).float()
        # Products written out: autocast would compute matrix products in low precision, too little
        # for geometry.
        rotated = (extrinsics[:, :3, :3, None] * inverse[:, None]).sum(dim=2)  # [B*N, 3, 3]
        rays = (pixels[None, :, None, :] * rotated[:, None]).sum(dim=-1)
        origins = extrinsics[:, None, :3, 3].expand_as(rays) / 10
        rays = F.normalize(rays, dim=-1)
        rays = torch.cat((rays, origins), dim=-1)
        tokens = features.flatten(2).transpose(1, 2)
        tokens = tokens + self.ray_embedding(rays)
        tokens = tokens.reshape(num_samples, -1, tokens.shape[-1])  # [B, T, C] with T = N*h*w
        keys, values = self.keys_values(tokens).chunk(2, dim=-1)
        # Finite, not -inf: a sample without any valid camera must not turn the softmax into NaN.
        tokens_per_camera = tokens.shape[1] // num_cameras
        absent = (cam_valid == 0).repeat_interleave(tokens_per_camera, dim=1)
        mask = absent.to(keys.dtype).mul(-1e4)[:, None, :]  # [B, 1, T]
        queries = self.queries.to(keys.dtype).expand(num_samples, -1, -1)
        cells = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)  # [B, G, C]
        logits: Tensor = self.head(self.norm(cells + queries)).squeeze(-1).float()
        return logits


def occupied_cells(boxes: Sequence[Tensor], grid: int, range_m: float) -> Tensor:
    """Return which cells of a square grid around the ego origin hold a box centre: float [B, grid *
    grid], 0 or 1.

    ``boxes`` holds for each sample [M, 7] boxes in the ego frame, of which x (forward) and y
    (left), in metres, are read. The grid covers -range_m to range_m in both; centres outside are
    left out. The result lies on the boxes' device; nothing waits for it.
    """
    device = boxes[0].device
    centres = torch.cat([sample[:, :2].float() for sample in boxes])
    sample_numbers: list[int] = []
    for number, sample in enumerate(boxes):
        sample_numbers += [number] * len(sample)
    rows = torch.tensor(sample_numbers, dtype=torch.long)
    rows = rows.to(device, non_blocking=True)
    cells = torch.floor((centres + range_m) / (2 * range_m) * grid).long()
    inside = ((cells >= 0) & (cells < grid)).all(dim=1)
    # One cell more than there are takes the centres outside: picking the others would mean waiting
    # for the device.
    num_cells = grid * grid
    indices = cells[:, 0] * grid + cells[:, 1]
    indices = torch.where(inside, indices, num_cells)
    target = torch.zeros(len(boxes), num_cells + 1, device=device)
    target[rows, indices] = 1
    return target[:, :-1]


class BevOccupancy(CameraModel):
    """Multi-camera images and their geometry to the loss of an occupancy grid, by convolutions."""

    settings: BevSettings
    plan: Mapping[str, ParallelStyle] = {f"head.{name}": style for name, style in HEAD_PLAN.items()}

    def __init__(self, settings: BevSettings) -> None:
        super().__init__(settings)
        width = settings.width
        self.stem = ImageStem(
            settings.subsample,
            _convolution(3, width, stride=2),
            _convolution(width, width, stride=2),
        )
        blocks: list[nn.Module] = []
        for _ in range(settings.num_stages - 1):
            blocks += [_Residual(width) for _ in range(settings.blocks_per_stage)]
            blocks.append(_convolution(width, 2 * width, stride=2))
            width *= 2
        blocks += [_Residual(width) for _ in range(settings.blocks_per_stage)]
        self.blocks = nn.ModuleList(blocks)
        blocks_stride = 2 ** (settings.num_stages - 1)
        stride = settings.subsample * _STEM_STRIDE * blocks_stride
        self.head = OccupancyHead(width, stride, settings.grid)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(width, width, stride=1),
            _convolution(width, width, stride=1),
        )

    def forward(self, features: Tensor) -> Tensor:
        body: Tensor = self.body(features)
        return features + body


def _convolution(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    # Groups of two channels or more: of one value there is nothing to norm.
    num_groups = min(8, outputs // 2)
    return nn.Sequential(
        nn.Conv2d(
            inputs,
            outputs,
            kernel_size=3,
            stride=stride,
            padding=1,
            bias=False,
        ),
        nn.GroupNorm(num_groups, outputs),
        nn.ReLU(inplace=True),
    )
