"""A camera detector of the BEVDet kind: ``torchrun --nproc-per-node 2 configs/trainers/detector.py
DATASET``.

A ResNet-50 with torchvision's names (``--weights=FILE``: safetensors), the maps of all cameras
sampled at points of a grid around the vehicle, convolutions over the grid, a heat map of box
centres and a box for each cell. Fuelrail's `parallelise` divides it (``--strategy=ddp``),
`Checkpoints` save it, `train` and `evaluate` are the loops, and nuscenes-devkit (``pip install
nuscenes-devkit``) computes the mean average precision. ``--small`` is for a trial.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from example import TRANSFORMS, arguments
from torch import Tensor, nn

import fuelrail as fr
from fuelrail import bench

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fuelrail.bench.measure.records import StepRecord
    from fuelrail.bench.trainer.strategies.step import Parallel

RANGE_M = 51.2
HEIGHTS_M = (-1.0, 0.5, 2.0)
DISTANCES_M = (0.5, 1.0, 2.0, 4.0)  # of nuScenes' average precision


class Bottleneck(nn.Module):
    """A block of ResNet-50 (arXiv 1512.03385), its stride in the 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        same = inputs == 4 * width and stride == 1
        short = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = nn.Sequential() if same else nn.Sequential(*short)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps of four times the width."""
        inner = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(maps))))))
        return F.relu(self.bn3(self.conv3(inner)) + self.downsample(maps))


class ResNet(nn.Module):
    """Images to maps of strides 16 and 32."""

    def __init__(self, width: int, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for number, count in enumerate(blocks):
            wide = width * 2**number
            strides = [2 if number and not block else 1 for block in range(count)]
            layer = [
                Bottleneck(4 * wide if block else inputs, wide, stride)
                for block, stride in enumerate(strides)
            ]
            self.add_module(f"layer{number + 1}", nn.Sequential(*layer))
            inputs = 4 * wide

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maps of the last two stages."""
        maps = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        middle = self.layer3(self.layer2(self.layer1(maps)))
        return middle, self.layer4(middle)


class Detector(nn.Module):
    """Images and their geometry to the losses of heat map and boxes; in evaluation mode to boxes
    of each sample.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        classes: int = 10,
        width: int = 64,
        blocks: Sequence[int] = (3, 4, 6, 3),
        grid: int = 128,
        channels: int = 64,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.grid = grid
        self.register_buffer("mean", torch.tensor([123.675, 116.28, 103.53]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([58.395, 57.12, 57.375]).view(3, 1, 1))
        self.backbone = ResNet(width, blocks)
        self.fine = nn.Conv2d(16 * width, channels, 1)
        self.coarse = nn.Conv2d(32 * width, channels, 1)
        layers: list[nn.Module] = []
        for inputs in (channels * len(HEIGHTS_M), channels, channels):
            # A bias in front of batch norm has no gradient but rounding errors, which AdamW makes
            # whole steps of.
            layers += [
                nn.Conv2d(inputs, channels, 3, 1, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
        self.encoder = nn.Sequential(*layers, nn.Conv2d(channels, channels, 3, 1, 1), nn.ReLU())
        self.heat = nn.Conv2d(channels, classes, 1)
        self.box = nn.Conv2d(channels, 8, 1)

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Return the losses by name; in evaluation mode a list of [K, 9]: x y z l w h yaw,
        score, class.
        """
        images = batch["img"].flatten(0, 1).float()
        middle, last = self.backbone((images - self.mean) / self.std)
        size = middle.shape[-2:]
        maps = self.fine(middle) + F.interpolate(
            self.coarse(last), size, mode="bilinear", align_corners=False
        )
        seen = self.encoder(self.lift(maps.unflatten(0, batch["img"].shape[:2]), batch))
        heat = self.heat(seen).float() - 2
        box = self.box(seen).float()
        return self.losses(heat, box, batch) if self.training else self.decode(heat, box)

    def centres(self, device: torch.device) -> Tensor:
        """Return x and y of the cells in metres [G, G, 2]; x along the first axis."""
        line = ((torch.arange(self.grid, device=device) + 0.5) / self.grid * 2 - 1) * RANGE_M
        return torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1)

    def lift(self, maps: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Return the mean of what the cameras see at points of the grid, [B, C * heights, G, G]."""
        centres = self.centres(maps.device).flatten(0, 1)
        points = torch.cat(
            [F.pad(F.pad(centres, (0, 1), value=z), (0, 1), value=1) for z in HEIGHTS_M]
        )  # [P, 4]
        matrices = torch.where(
            batch["cam_valid"][..., None, None] != 0, batch["ego2img"], 0
        ).nan_to_num()
        projected = (matrices[:, :, None, :3].float() * points[:, None]).sum(-1)  # [B, N, P, 3]
        depth = projected[..., 2]
        height, width = batch["img"].shape[-2:]
        pixels = projected[..., :2] / depth.clamp(min=0.1)[..., None] + 0.5
        place = pixels / torch.tensor([width, height], device=maps.device) * 2 - 1
        there = (depth > 0.5) & (place.abs() < 1).all(-1)
        found = F.grid_sample(
            maps.flatten(0, 1), place.flatten(0, 1)[:, None].clamp(-2, 2), align_corners=False
        )
        found = found[:, :, 0].unflatten(0, maps.shape[:2]) * there[:, :, None]
        value = found.sum(1) / there.sum(1).clamp(min=1)[:, None]
        return value.unflatten(2, (len(HEIGHTS_M), self.grid, self.grid)).flatten(1, 2)

    def losses(self, heat: Tensor, box: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the focal loss of centres (arXiv 1904.07850) and the distance of boxes, both by
        the batch's boxes.
        """
        centres = self.centres(heat.device)
        wanted = torch.zeros_like(heat)
        distance = heat.new_zeros(())
        count = 0
        for row, (boxes, labels) in enumerate(
            zip(batch["gt_boxes_3d"], batch["gt_labels_3d"], strict=True)
        ):
            inside = (
                (labels >= 0) & (labels < self.classes) & (boxes[:, :2].abs() < RANGE_M).all(-1)
            )
            for one, label in zip(boxes[inside], labels[inside], strict=True):
                cell = ((one[:2] / RANGE_M + 1) / 2 * self.grid).long()
                far = (centres - centres[cell[0], cell[1]]).square().sum(-1)
                blob = torch.exp(-far / 2 / (RANGE_M * 2 / self.grid) ** 2)
                wanted[row, label] = torch.maximum(wanted[row, label], blob)
                offset = (one[:2] - centres[cell[0], cell[1]]) / (RANGE_M * 2 / self.grid)
                turn = torch.stack((torch.sin(one[6]), torch.cos(one[6])))
                target = torch.cat((offset, one[2:3], one[3:6].clamp(min=0.1).log(), turn))
                distance = distance + (box[row, :, cell[0], cell[1]] - target).abs().mean()
                count += 1
        known = wanted == 1
        logs = (F.logsigmoid(heat), F.logsigmoid(-heat))
        chance = heat.sigmoid()
        right = torch.where(
            known, (1 - chance) ** 2 * logs[0], (1 - wanted) ** 4 * chance**2 * logs[1]
        )
        return {
            "heat": -right.sum() / max(1, count),
            "box": distance / max(1, count) + 0 * box.sum(),
        }

    def decode(self, heat: Tensor, box: Tensor, most: int = 50) -> list[Tensor]:
        """Return the boxes of the highest peaks."""
        chance = heat.sigmoid()
        peaks = torch.where(F.max_pool2d(chance, 3, 1, 1) == chance, chance, 0).flatten(1)
        scores, places = peaks.topk(min(most, peaks.shape[1]))
        labels = places // self.grid**2
        cells = places % self.grid**2
        parts = (
            box.flatten(2).gather(2, cells[:, None].expand(-1, 8, -1)).transpose(1, 2)
        )  # [B, K, 8]
        centre = self.centres(box.device).flatten(0, 1)[cells] + parts[..., :2] * (
            RANGE_M * 2 / self.grid
        )
        yaw = torch.atan2(parts[..., 6], parts[..., 7])
        columns = (
            centre,
            parts[..., 2:3],
            parts[..., 3:6].clamp(max=4).exp(),
            yaw[..., None],
            scores[..., None],
        )
        return list(torch.cat((*columns, labels[..., None].float()), dim=-1))


def score(outputs: Sequence[Tensor], batch: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Predicted and true boxes of each sample."""
    labels = [one[:, None].float() for one in batch["gt_labels_3d"]]
    true = [
        torch.cat((boxes, one), dim=1)
        for boxes, one in zip(batch["gt_boxes_3d"], labels, strict=True)
    ]
    return {"found": list(outputs), "true": true}


def average_precision(scores: Mapping[str, Any], names: Sequence[str]) -> float:
    """Return the mean average precision over classes and distances, computed by nuscenes-devkit."""
    from nuscenes.eval.common.data_classes import EvalBoxes
    from nuscenes.eval.common.utils import center_distance
    from nuscenes.eval.detection.algo import accumulate, calc_ap
    from nuscenes.eval.detection.data_classes import DetectionBox

    true = EvalBoxes()
    found = EvalBoxes()
    for key, own, theirs in zip(scores["sample_key"], scores["true"], scores["found"], strict=True):
        for boxes, rows in ((true, own), (found, theirs)):
            made = [
                DetectionBox(
                    sample_token=key,
                    translation=tuple(row[:3]),
                    size=tuple(row[3:6]),
                    rotation=(1.0, 0.0, 0.0, 0.0),
                    detection_name=names[int(row[-1])],
                    detection_score=-1.0 if boxes is true else row[7],
                )
                for row in rows.tolist()
                if 0 <= row[-1] < len(names)
            ]
            boxes.add_boxes(key, made)
    values = [
        calc_ap(accumulate(true, found, name, center_distance, far), 0.1, 0.1)
        for name in names
        for far in DISTANCES_M
        if any(box.detection_name == name for box in true.all)
    ]
    return sum(values) / max(1, len(values))


SAMPLES = {"transforms": TRANSFORMS}


ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=1e-2)


def divided(model: Callable[[], Detector], optimiser: Any = ADAMW, **options: Any) -> Parallel:
    """Divide the detector over the ranks."""
    return bench.parallelise(
        model, wrap=[Bottleneck], optimiser=optimiser, clip_norm=5.0, **options
    )


def main(
    argv: Sequence[str] | None = None,
    on_step: Callable[[StepRecord, dict[str, float]], object] | None = None,
) -> None:
    """Train from the newest checkpoint; print each step's losses and, at the end, the precision
    over all samples.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    pairs = [word.partition("=")[::2] for word in words]
    own = {name: value for name, value in pairs if name in ("--small", "--strategy", "--weights")}
    options = arguments([word for word in words if word.partition("=")[0] not in own])
    names = list(fr.open(options.dataset).manifest.classes)
    small = (
        {"width": 8, "blocks": (1, 1, 1, 1), "grid": 16, "channels": 16} if "--small" in own else {}
    )
    is_first = os.environ.get("RANK", "0") == "0"

    def note(record: StepRecord, losses: dict[str, float]) -> None:
        if is_first:
            print(  # noqa: T201
                f"step {record.step} "
                + " ".join(f"{name} {value:.6f}" for name, value in losses.items())
            )
        if on_step is not None:
            on_step(record, losses)

    parallel = divided(
        partial(Detector, len(names), **small),
        strategy=own.get("--strategy", "fsdp2"),
        batch_norm="frozen" if "--weights" in own else "local",
    )
    if "--weights" in own:
        report = bench.load_weights(
            parallel, own["--weights"], rename=lambda name: f"backbone.{name}"
        )
        print(  # noqa: T201
            f"{len(report.loaded)} tensors loaded, {report.unexpected} unknown, "
            f"{report.other_shape}"
        )
    same = {**SAMPLES, "device": parallel.device, "world": parallel.mesh}
    with (
        fr.DataLoader(
            options.dataset, batch_size=2, shuffle=True, drop_last=True, seed=7, **same
        ) as loader,
        fr.DataLoader(options.dataset, batch_size=2, **same) as everything,
        bench.Checkpoints(options.checkpoint / "detector") as checkpoints,
    ):
        bench.train(
            parallel,
            loader,
            steps=options.steps,
            save_every=options.every,
            checkpoints=checkpoints,
            on_step=note,
        )
        scores = bench.evaluate(parallel, everything, score)
        if is_first:
            precision = average_precision(scores, names)
            print(f"precision {precision:.4f} over {len(scores['sample_key'])} samples")  # noqa: T201


if __name__ == "__main__":
    main()
