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
SAMPLES = {"transforms": TRANSFORMS}
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=1e-2)


class Bottleneck(nn.Module):
    """A block of ResNet-50 (arXiv 1512.03385), its stride in the 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
            nn.BatchNorm2d(outputs),
        )
        has_same_shape = inputs == outputs and stride == 1
        self.downsample = nn.Sequential() if has_same_shape else shortcut

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps of four times the width."""
        hidden = F.relu(self.bn1(self.conv1(maps)))
        hidden = F.relu(self.bn2(self.conv2(hidden)))
        residual = self.bn3(self.conv3(hidden))
        return F.relu(residual + self.downsample(maps))


class ResNet(nn.Module):
    """Images to maps of strides 16 and 32."""

    def __init__(self, width: int, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for number, num_blocks in enumerate(blocks):
            stage_width = width * 2**number
            stage: list[nn.Module] = []
            for block in range(num_blocks):
                stride = 2 if number > 0 and block == 0 else 1
                stage.append(Bottleneck(inputs, stage_width, stride))
                inputs = 4 * stage_width
            self.add_module(f"layer{number + 1}", nn.Sequential(*stage))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maps of the last two stages."""
        maps = F.relu(self.bn1(self.conv1(images)))
        maps = F.max_pool2d(maps, 3, stride=2, padding=1)
        fine = self.layer3(self.layer2(self.layer1(maps)))
        return fine, self.layer4(fine)


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
        self.cell_m = RANGE_M * 2 / grid
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
                nn.Conv2d(inputs, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
        layers += [
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
        ]
        self.encoder = nn.Sequential(*layers)
        self.heat = nn.Conv2d(channels, classes, 1)
        self.box = nn.Conv2d(channels, 8, 1)

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Return the losses by name; in evaluation mode a list of [K, 9]: x y z l w h yaw,
        score, class.
        """
        images = batch["img"].flatten(0, 1).float()
        fine, coarse = self.backbone((images - self.mean) / self.std)
        maps = self.fine(fine) + F.interpolate(
            self.coarse(coarse),
            fine.shape[-2:],
            mode="bilinear",
            align_corners=False,
        )
        maps_of_sample = maps.unflatten(0, batch["img"].shape[:2])
        features = self.encoder(self.lift(maps_of_sample, batch))
        heat = self.heat(features).float() - 2
        box = self.box(features).float()
        if self.training:
            return self.losses(heat, box, batch)
        return self.decode(heat, box)

    def centres(self, device: torch.device) -> Tensor:
        """Return x and y of the cells in metres [G, G, 2]; x along the first axis."""
        cells = torch.arange(self.grid, device=device) + 0.5
        line = (cells / self.grid * 2 - 1) * RANGE_M
        x, y = torch.meshgrid(line, line, indexing="ij")
        return torch.stack((x, y), dim=-1)

    def lift(self, maps: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Return the mean of what the cameras see at points of the grid, [B, C * heights, G, G]."""
        centres = self.centres(maps.device).flatten(0, 1)
        points_of_height = []
        for height_m in HEIGHTS_M:
            xyz = F.pad(centres, (0, 1), value=height_m)
            points_of_height.append(F.pad(xyz, (0, 1), value=1))
        points = torch.cat(points_of_height)  # [P, 4]: x, y, z, 1
        is_valid = batch["cam_valid"][..., None, None] != 0
        ego2img = torch.where(is_valid, batch["ego2img"], 0).nan_to_num()
        rows = ego2img[:, :, None, :3].float()
        projected = (rows * points[:, None]).sum(-1)  # [B, N, P, 3]
        depth = projected[..., 2]
        pixels = projected[..., :2] / depth.clamp(min=0.1)[..., None] + 0.5
        height, width = batch["img"].shape[-2:]
        size = torch.tensor([width, height], device=maps.device)
        positions = pixels / size * 2 - 1  # -1 to 1 in the image
        is_seen = (depth > 0.5) & (positions.abs() < 1).all(-1)
        features = F.grid_sample(
            maps.flatten(0, 1),
            positions.flatten(0, 1)[:, None].clamp(-2, 2),
            align_corners=False,
        )
        features = features[:, :, 0].unflatten(0, maps.shape[:2])
        num_cameras = is_seen.sum(1).clamp(min=1)
        sums = (features * is_seen[:, :, None]).sum(1)
        means = sums / num_cameras[:, None]
        return means.unflatten(2, (len(HEIGHTS_M), self.grid, self.grid)).flatten(1, 2)

    def losses(self, heat: Tensor, box: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the focal loss of centres (arXiv 1904.07850) and the distance of boxes, both by
        the batch's boxes.
        """
        centres = self.centres(heat.device)
        expected = torch.zeros_like(heat)
        distance = heat.new_zeros(())
        num_boxes = 0
        for sample, boxes in enumerate(batch["gt_boxes_3d"]):
            labels = batch["gt_labels_3d"][sample]
            is_labelled = (labels >= 0) & (labels < self.classes)
            is_inside = is_labelled & (boxes[:, :2].abs() < RANGE_M).all(-1)
            for row, label in zip(boxes[is_inside], labels[is_inside], strict=True):
                x, y = ((row[:2] / RANGE_M + 1) / 2 * self.grid).long()
                squared = (centres - centres[x, y]).square().sum(-1)
                blob = torch.exp(-squared / 2 / self.cell_m**2)
                expected[sample, label] = torch.maximum(expected[sample, label], blob)
                offset = (row[:2] - centres[x, y]) / self.cell_m
                size = row[3:6].clamp(min=0.1).log()
                direction = torch.stack((torch.sin(row[6]), torch.cos(row[6])))
                target = torch.cat((offset, row[2:3], size, direction))
                distance = distance + (box[sample, :, x, y] - target).abs().mean()
                num_boxes += 1
        log_centre = F.logsigmoid(heat)
        log_background = F.logsigmoid(-heat)
        probability = heat.sigmoid()
        centre_loss = (1 - probability) ** 2 * log_centre
        background_loss = (1 - expected) ** 4 * probability**2 * log_background
        focal = torch.where(expected == 1, centre_loss, background_loss)
        return {
            "heat": -focal.sum() / max(1, num_boxes),
            # Without boxes too, the weights of the boxes have a gradient.
            "box": distance / max(1, num_boxes) + 0 * box.sum(),
        }

    def decode(self, heat: Tensor, box: Tensor, max_boxes: int = 50) -> list[Tensor]:
        """Return the boxes of the highest peaks."""
        probability = heat.sigmoid()
        is_peak = F.max_pool2d(probability, 3, stride=1, padding=1) == probability
        peaks = torch.where(is_peak, probability, 0).flatten(1)
        scores, indices = peaks.topk(min(max_boxes, peaks.shape[1]))
        labels = indices // self.grid**2
        cells = indices % self.grid**2
        rows = cells[:, None].expand(-1, 8, -1)
        values = box.flatten(2).gather(2, rows).transpose(1, 2)  # [B, K, 8]
        centre = self.centres(box.device).flatten(0, 1)[cells]
        centre = centre + values[..., :2] * self.cell_m
        yaw = torch.atan2(values[..., 6], values[..., 7])
        columns = (
            centre,
            values[..., 2:3],
            values[..., 3:6].clamp(max=4).exp(),
            yaw[..., None],
            scores[..., None],
            labels[..., None].float(),
        )
        return list(torch.cat(columns, dim=-1))


def score(outputs: Sequence[Tensor], batch: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Predicted and true boxes of each sample."""
    true = [
        torch.cat((boxes, labels[:, None].float()), dim=1)
        for boxes, labels in zip(batch["gt_boxes_3d"], batch["gt_labels_3d"], strict=True)
    ]
    return {"found": list(outputs), "true": true}


def average_precision(scores: Mapping[str, Any], names: Sequence[str]) -> float:
    """Return the mean average precision over classes and distances, computed by nuscenes-devkit."""
    from nuscenes.eval.common.data_classes import EvalBoxes
    from nuscenes.eval.common.utils import center_distance
    from nuscenes.eval.detection.algo import accumulate, calc_ap
    from nuscenes.eval.detection.data_classes import DetectionBox

    def make_boxes(key: str, rows: Tensor, *, are_scored: bool) -> list[DetectionBox]:
        boxes = []
        for row in rows.tolist():
            if 0 <= row[-1] < len(names):
                box = DetectionBox(
                    sample_token=key,
                    translation=tuple(row[:3]),
                    size=tuple(row[3:6]),
                    rotation=(1.0, 0.0, 0.0, 0.0),
                    detection_name=names[int(row[-1])],
                    detection_score=row[7] if are_scored else -1.0,
                )
                boxes.append(box)
        return boxes

    true = EvalBoxes()
    predicted = EvalBoxes()
    for sample, key in enumerate(scores["sample_key"]):
        true.add_boxes(key, make_boxes(key, scores["true"][sample], are_scored=False))
        predicted.add_boxes(key, make_boxes(key, scores["found"][sample], are_scored=True))
    names_of_boxes = {box.detection_name for box in true.all}
    precisions = []
    for name in names:
        if name not in names_of_boxes:
            continue
        for distance_m in DISTANCES_M:
            curve = accumulate(
                gt_boxes=true,
                pred_boxes=predicted,
                class_name=name,
                dist_fcn=center_distance,
                dist_th=distance_m,
            )
            precisions.append(calc_ap(curve, min_recall=0.1, min_precision=0.1))
    return sum(precisions) / max(1, len(precisions))


def divide(model: Callable[[], Detector], optimiser: Any = ADAMW, **options: Any) -> Parallel:
    """Divide the detector over the ranks."""
    return bench.parallelise(
        model,
        wrap=[Bottleneck],
        optimiser=optimiser,
        clip_norm=5.0,
        **options,
    )


def main(
    argv: Sequence[str] | None = None,
    on_step: Callable[[StepRecord, dict[str, float]], object] | None = None,
) -> None:
    """Train from the newest checkpoint; print each step's losses and, at the end, the precision
    over all samples.
    """
    settings: dict[str, str] = {}
    words: list[str] = []
    for word in sys.argv[1:] if argv is None else argv:
        name, _, value = word.partition("=")
        if name in ("--small", "--strategy", "--weights"):
            settings[name] = value
        else:
            words.append(word)
    options = arguments(words)
    names = list(fr.open(options.dataset).manifest.classes)
    sizes: dict[str, Any] = {}
    if "--small" in settings:
        sizes = {"width": 8, "blocks": (1, 1, 1, 1), "grid": 16, "channels": 16}
    is_first = os.environ.get("RANK", "0") == "0"

    def report_step(record: StepRecord, losses: dict[str, float]) -> None:
        if is_first:
            text = " ".join(f"{name} {value:.6f}" for name, value in losses.items())
            print(f"step {record.step} {text}")  # noqa: T201
        if on_step is not None:
            on_step(record, losses)

    parallel = divide(
        partial(Detector, len(names), **sizes),
        strategy=settings.get("--strategy", "fsdp2"),
        batch_norm="frozen" if "--weights" in settings else "local",
    )
    if "--weights" in settings:
        report = bench.load_weights(
            parallel,
            settings["--weights"],
            rename=lambda name: f"backbone.{name}",
        )
        print(  # noqa: T201
            f"{len(report.loaded)} tensors loaded, {report.unexpected} unknown, "
            f"{report.other_shape}"
        )
    loading: dict[str, Any] = {**SAMPLES, "device": parallel.device, "world": parallel.mesh}
    with (
        fr.DataLoader(
            options.dataset,
            batch_size=2,
            shuffle=True,
            drop_last=True,
            seed=7,
            **loading,
        ) as train_loader,
        fr.DataLoader(options.dataset, batch_size=2, **loading) as test_loader,
        bench.Checkpoints(options.checkpoint / "detector") as checkpoints,
    ):
        bench.train(
            parallel,
            train_loader,
            steps=options.steps,
            save_every=options.every,
            checkpoints=checkpoints,
            on_step=report_step,
        )
        scores = bench.evaluate(parallel, test_loader, score)
        if is_first:
            precision = average_precision(scores, names)
            print(f"precision {precision:.4f} over {len(scores['sample_key'])} samples")  # noqa: T201


if __name__ == "__main__":
    main()
