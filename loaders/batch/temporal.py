"""Temporal windows in a batch: which entries have an axis of T frames, and which entries are added.

With ``DataLoader(window=...)`` the entries that belong to a frame have an axis of T frames behind
B, in the order of ``frames``; what belongs to the sample as such has none, and is that of its own
frame (offset 0, the *key* frame). Each frame's ``ego`` is its own, at its own time; ``ego2key``
leads from it to the key frame's, and ``cam2keyego`` always ends in the key frame's. Boxes are those
of the key frame, in its ego frame or in its lidar's. Images, pixels and ego frame are augmented
alike in all frames of a sample: the draw is the sample's. ``points`` has a list of T clouds for
each sample. `fuelrail.loaders.records.Batch` shows which entries have the axis.

Of a dataset without ego poses there is no ``ego2global``, ``ego2key`` or ``cam2keyego``: how the
vehicle moved between the frames is not known. Each frame's own matrices (``ego2img``,
``lidar2img``) are there.

Where the clip has no such frame, ``pad`` decides (`fuelrail.pipeline.order.windows`): another frame
is shown in its place, with its own matrices and times (``repeat_edge``, ``repeat_current``); or
nothing is (``mask``): images are zeros, ``cam_valid`` False, points empty, and matrices and times
are the key frame's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from fuelrail.pipeline.channels.kinds import Packed
from fuelrail.pipeline.channels.logits import Logits
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.pipeline.sample.schema import Geometry
from fuelrail.pipeline.transforms.image_map import apply_to_intrinsics, ida_mats

if TYPE_CHECKING:
    from fuelrail.loaders.records import Parsed
    from fuelrail.pipeline.dtypes import F64, I64
    from fuelrail.pipeline.sample.schema import Sample
    from fuelrail.pipeline.transforms.image_map import ImageMap


def hidden(sample: Sample) -> Sample:
    """Return the sample without images and points, every camera marked as missing."""
    geometry = dataclasses.replace(
        sample.geometry, cam_valid=np.zeros_like(sample.geometry.cam_valid)
    )
    return dataclasses.replace(
        sample,
        geometry=geometry,
        images={},
        points={},
    )


class Frames(NamedTuple):
    """The frames of a batch's samples: which axes follow B, and the arrays that have them."""

    axes: tuple[int, ...]
    """(B, T) with windows, (B,) without."""
    geometry: Geometry
    """That of the frames as stored, with these axes in front."""
    ida_mat: F64
    """What augmentation does to the images: (*axes, N, 4, 4)."""
    bda: F64
    """What augmentation does to the ego frame of each sample: (B, 4, 4)."""
    intrinsics: F64
    """As all that follows, after augmentation."""
    ego2global: F64
    cam2keyego: F64
    ego2img: F64
    lidar2ego: F64 | None
    """That of the first lidar, as stored; None without one."""
    ego2key: F64 | None
    """From each frame's ego to that of the sample's own frame; None without windows."""
    timestamp_ns: I64
    """The times of the frames: ``axes``."""

    @classmethod
    def collect(cls, decoded: Sequence[Parsed]) -> Self:
        """Collect the frames of some samples, of which all or none have windows."""
        has_windows = decoded[0].slot.has_windows
        axes = (len(decoded), len(decoded[0].samples)) if has_windows else (len(decoded),)
        samples = [sample for entry in decoded for sample in entry.samples]
        image_maps: list[ImageMap] = []
        for entry in decoded:
            for frame_maps in entry.maps:
                image_maps += frame_maps
        bda_of_samples = np.array([entry.bev.matrix for entry in decoded])
        bda = bda_of_samples
        undo_bda = np.array([entry.bev.inverse for entry in decoded])
        key2global = np.array([entry.sample.geometry.ego2global for entry in decoded])
        if has_windows:
            # The same for all frames of a sample.
            bda = bda[:, None]
            undo_bda = undo_bda[:, None]
            key2global = key2global[:, None]
        geometry = Geometry.stack([sample.geometry for sample in samples], *axes)
        cam2keyego = bda[..., None, :, :] @ geometry.cam2keyego(key2global)
        ego2img = geometry.ego2img()
        lidar2ego = None
        if geometry.lidar2ego.shape[-3]:
            lidar2ego = geometry.lidar2keyego()
        ego2key = None
        if has_windows:
            ego2key = bda @ (invert_rigid(key2global) @ geometry.ego2global) @ undo_bda
        ida_mat = ida_mats(image_maps).reshape(*axes, -1, 4, 4)
        timestamps = np.array([sample.meta.timestamp_ns for sample in samples])
        return cls(
            axes=axes,
            geometry=geometry,
            ida_mat=ida_mat,
            bda=bda_of_samples,
            intrinsics=apply_to_intrinsics(ida_mat, geometry.intrinsics),
            ego2global=geometry.ego2global @ undo_bda,
            cam2keyego=cam2keyego,
            ego2img=ida_mat @ ego2img @ undo_bda[..., None, :, :],
            lidar2ego=lidar2ego,
            ego2key=ego2key,
            timestamp_ns=timestamps.reshape(axes),
        )


def make_tensors(collated: Any, axes: Sequence[int]) -> Any:
    """Return what a kind of channels collated over all frames as tensors, with the axes of the
    batch.
    """
    if isinstance(collated, np.ndarray):
        return _own_tensor(collated).reshape(*axes, *collated.shape[1:])
    if isinstance(collated, dict):
        return {name: make_tensors(value, axes) for name, value in collated.items()}
    if isinstance(collated, Logits) and collated.offsets is None:
        return collated.map(lambda array: make_tensors(array, axes))
    if isinstance(collated, Packed | Logits):
        return type(collated)(*(_own_tensor(array) for array in collated))
    values = [_own_tensor(value) for value in collated]
    if len(axes) == 1:
        return values
    num_samples, num_frames = axes
    return [
        values[number * num_frames : (number + 1) * num_frames] for number in range(num_samples)
    ]


def _own_tensor(value: Any) -> Any:
    """Return an array as a tensor on writable memory of its own; everything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(value if value.flags.writeable else value.copy())
