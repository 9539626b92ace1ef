"""Decoded samples to one batch: the tensors of FORMAT's sample, stacked, after image augmentation.

`fuelrail.loaders.records.Batch` has form and meaning of each entry. Computed in float64, cast last.
Frames as in :mod:`fuelrail.pipeline.sample.schema`; `ego` is the ego frame at the sample's own
time, moved by ``bda_mat`` where the loader augments it (:mod:`fuelrail.pipeline.transforms.ego`):
boxes, points and all matrices from and to ego agree with each other. ``cam2ego`` and ``lidar2ego``
alone stay as calibrated.

Boxes are in ego and pair with ``ego2img``. With ``Transforms(box_frame="lidar")`` they are in the
first lidar's frame at its own time, beside ``points``, and pair with ``lidar2img``; yaw then counts
counter-clockwise from the lidar's +x. In both frames x y z is the gravity centre; mmdetection3d's
boxes have the centre of the bottom, half a height below.

With temporal windows an axis of T frames follows B in some entries:
:mod:`fuelrail.loaders.batch.temporal`. Entries of boxes (``gt_*``, ``instance_id``) exist for
labelled datasets, those of the lidar for datasets with one. ``points`` of several sweeps
(`PointSweeps`) have ``dt_s``, the seconds since each was measured, in the place of ``ring``, or
last.

With ``Transforms(two_views=True)`` the batch has 2 B rows: B samples under their first draw, which
is that of a loader without it, and the same samples in the same order under a second one, so
``batch["img"].chunk(2)`` are the two views. Every entry with a B axis, and every list, has both;
sweeps are accumulated once.

With ``Transforms(camera_groups=...)`` ``img`` is a dict of group name to [B, N', 3, H', W'], the N'
cameras as their group lists them. All other entries keep the N cameras of the rig.

Selected channels add entries of their own: :mod:`fuelrail.loaders.batch.channels`; so do packs,
whose batches have as many rows as their packs have samples: :mod:`fuelrail.loaders.batch.packs`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from fuelrail.loaders.batch.channels import SelectedChannels
from fuelrail.loaders.batch.packs import packed_entries
from fuelrail.loaders.batch.temporal import Frames
from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.rigid import invert_rigid, rotation_matrices

if TYPE_CHECKING:
    from fuelrail.loaders.config import BoxFrame
    from fuelrail.loaders.records import Parsed
    from fuelrail.pipeline.channels.sensors import LidarEntry
    from fuelrail.pipeline.dtypes import F64

NO_CHANNELS: Final = SelectedChannels()
_OF_CAMERAS: Final = (
    "intrinsics",
    "dist",
    "cam2ego",
    "cam2keyego",
    "ego2img",
    "lidar2img",
)
"""Entries that need a calibration of the cameras."""


def assemble(
    decoded: Sequence[Parsed],
    *,
    lidar: LidarEntry | None = None,
    box_frame: BoxFrame = "ego",
    channels: SelectedChannels = NO_CHANNELS,
    unknown: Collection[str] = (),
) -> dict[str, Any]:
    """Build the batch of samples that share a slot and a rig: a `Batch`.

    ``lidar`` is the one whose sweeps become ``points``, ``box_frame`` is the frame of the boxes,
    ``channels`` are the selected ones. ``unknown`` is what the dataset does not know. Without
    "poses" nothing leads from one time to another: there is no ``ego2global``, and of windows
    neither ``ego2key`` nor ``cam2keyego``. Without "calibration" there are no matrices and lens
    coefficients of cameras. Raises SchemaError where some samples are labelled and some are not,
    and where values of a channel cannot be stacked.
    """
    slot = decoded[0].slot
    samples = [entry.sample for entry in decoded]
    tasks = [entry.task for entry in decoded]
    labels = _collect_labels(decoded, box_frame)
    frames = Frames.collect(decoded)
    geometry = frames.geometry
    dist = np.where(np.isnan(geometry.dist), 0.0, geometry.dist)
    batch: dict[str, Any] = {
        "img": slot.img(),
        "cam_valid": torch.from_numpy(geometry.cam_valid.astype(bool)),
        "intrinsics": _float32(frames.intrinsics),
        "dist": _float32(dist),
        "ida_mat": _float32(frames.ida_mat),
        "cam2ego": _float32(geometry.cam2ego),
        "cam2keyego": _float32(frames.cam2keyego),
        "ego2img": _float32(frames.ego2img),
        "ego2global": torch.from_numpy(frames.ego2global),
        "bda_mat": _float32(frames.bda),
        "timestamp_ns": torch.from_numpy(frames.timestamp_ns),
        "img_timestamp_ns": torch.from_numpy(geometry.cam_timestamp_ns),
        "sample_key": [sample.key for sample in samples],
        "sample_token": [sample.meta.sample_token for sample in samples],
        "clip_id": [sample.meta.clip_id for sample in samples],
        "frame": _tensor([sample.meta.frame_idx for sample in samples]),
        "global_index": _tensor([task.row for task in tasks]),
        "valid": _tensor([task.valid for task in tasks]),
        "epoch": slot.epoch,
        "step": slot.step,
    }
    batch_rows = [task.batch_row for task in tasks]
    for name, values in slot.flags.items():
        # Of a second view the row wraps around to that of the first.
        flags = np.take(values, batch_rows, mode="wrap")
        batch[name] = torch.from_numpy(flags)
    if decoded[0].view is not None:
        batch["view"] = torch.tensor([entry.view for entry in decoded])
    if tasks[0].source.name is not None:
        batch["dataset"] = [task.source.name for task in tasks]
    if frames.ego2key is not None:
        batch["ego2key"] = _float32(frames.ego2key)
        batch["frame_valid"] = torch.tensor(
            [[frame.present for frame in task.frames] for task in tasks]
        )
        batch["frame_global_index"] = torch.tensor(
            [[frame.row for frame in task.frames] for task in tasks]
        )
    if frames.lidar2ego is not None:
        batch["lidar2ego"] = _float32(frames.lidar2ego)
        lidar2img = frames.ego2img @ frames.lidar2ego[..., None, :, :]
        batch["lidar2img"] = _float32(lidar2img)
    lacking: list[str] = []
    if "poses" in unknown:
        lacking.append("ego2global")
        if slot.has_windows:
            lacking += ["ego2key", "cam2keyego"]
    if "calibration" in unknown:
        lacking += _OF_CAMERAS
    for name in lacking:
        batch.pop(name, None)
    if lidar is not None:
        batch["points"] = []
        for entry in decoded:
            sweeps = []
            for sample in entry.samples:
                points = sample.points.get(lidar.channel)
                # A sweep that is missing is an empty one: the batch's list must keep its length.
                if points is None:
                    sweep = np.empty((0, len(lidar.columns)), np.float32)
                else:
                    sweep = entry.bev.points(points, sample.geometry.lidar2keyego())
                sweeps.append(torch.from_numpy(sweep))
            batch["points"].append(sweeps if slot.has_windows else sweeps[0])
    if channels.channels:
        batch.update(channels.entries(decoded, frames.axes))
    if "pack" in batch:
        batch.update(packed_entries(batch))
    batch.update(labels)
    return batch


def _collect_labels(
    decoded: Sequence[Parsed], box_frame: BoxFrame
) -> dict[str, list[torch.Tensor]]:
    """Return the boxes of the samples and what goes with them, as augmented, in a frame; nothing
    where no sample has boxes.
    """
    if all(entry.sample.boxes is None for entry in decoded):
        return {}
    entries: dict[str, list[torch.Tensor]] = {
        "gt_boxes_3d": [],
        "gt_labels_3d": [],
        "gt_velocity": [],
        "gt_valid": [],
        "instance_id": [],
    }
    for entry in decoded:
        boxes = entry.sample.boxes
        if boxes is None:
            raise SchemaError(
                "the sample has no boxes, others of its batch have",
                key=entry.sample.key,
            )
        if box_frame == "lidar":
            ego2lidar = invert_rigid(entry.sample.geometry.lidar2keyego())
            augmented2lidar = ego2lidar @ entry.bev.matrix
            rotation = augmented2lidar[:3, :3].T
            stored = boxes.boxes3d.astype(np.float64)
            centre = stored[:, :3] @ rotation + augmented2lidar[:3, 3]
            size = stored[:, 3:6] * entry.bev.scale
            # The heading is that of the full rotation, as nuscenes-devkit turns a box before it
            # takes the yaw.
            rotation_wxyz = boxes.rotation_wxyz.astype(np.float64)
            axes = rotation_matrices(rotation_wxyz)
            heading = axes[:, :, 0] @ rotation
            yaw = np.arctan2(heading[:, 1], heading[:, 0])
            boxes3d = _float32(np.column_stack([centre, size, yaw]))
            stored_velocity = boxes.velocity.astype(np.float64)
            velocity = _float32(stored_velocity @ rotation)
        else:
            boxes3d = torch.from_numpy(entry.bev.boxes3d(boxes.boxes3d))
            velocity = torch.from_numpy(entry.bev.vectors(boxes.velocity))
        label = boxes.label.astype(np.int64)
        valid = boxes.valid.astype(bool)
        instance_id = boxes.instance_id.copy()
        entries["gt_boxes_3d"].append(boxes3d)
        entries["gt_labels_3d"].append(torch.from_numpy(label))
        entries["gt_velocity"].append(velocity)
        entries["gt_valid"].append(torch.from_numpy(valid))
        entries["instance_id"].append(torch.from_numpy(instance_id))
    return entries


def _tensor(values: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values))  # half the time of torch.tensor()


def _float32(matrices: F64) -> torch.Tensor:
    return torch.from_numpy(matrices.astype(np.float32))
