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
from numpy.typing import NDArray

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
    return dataclasses.replace(sample, geometry=geometry, images={}, points={})


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
        sample_matrices = (
            np.array([entry.bev.matrix for entry in decoded]),
            np.array([entry.bev.inverse for entry in decoded]),
            np.array([entry.sample.geometry.ego2global for entry in decoded]),
        )
        bda, undo_bda, key2global = (
            matrices[:, None] if has_windows else matrices for matrices in sample_matrices
        )
        geometry = Geometry.stack([sample.geometry for sample in samples], *axes)
        ida_mat = ida_mats(image_maps).reshape(*axes, -1, 4, 4)
        ego2key = None
        if has_windows:
            ego2key = bda @ (invert_rigid(key2global) @ geometry.ego2global) @ undo_bda
        return cls(
            axes=axes,
            geometry=geometry,
            ida_mat=ida_mat,
            bda=sample_matrices[0],
            intrinsics=apply_to_intrinsics(ida_mat, geometry.intrinsics),
            ego2global=geometry.ego2global @ undo_bda,
            cam2keyego=bda[..., None, :, :] @ geometry.cam2keyego(key2global),
            ego2img=ida_mat @ geometry.ego2img() @ undo_bda[..., None, :, :],
            lidar2ego=geometry.lidar2keyego() if geometry.lidar2ego.shape[-3] else None,
            ego2key=ego2key,
            timestamp_ns=np.array([sample.meta.timestamp_ns for sample in samples]).reshape(axes),
        )

    @property
    def has_windows(self) -> bool:
        """Whether an axis of T frames follows B."""
        return len(self.axes) > 1

    def shaped(self, values: Sequence[Any]) -> NDArray[Any]:
        """Return a value of each frame as an array [B, T, ...], or [B, ...] without windows."""
        stacked = np.array(values)
        return stacked.reshape(*self.axes, *stacked.shape[1:])

    def listed(self, values: list[Any]) -> list[Any]:
        """Return a value of each frame as a list for each sample; without windows as it is."""
        if not self.has_windows:
            return values
        num_samples, t = self.axes
        return [values[number * t : (number + 1) * t] for number in range(num_samples)]
