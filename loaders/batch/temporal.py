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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fuelrail.loaders.records import Parsed
    from fuelrail.pipeline.sample.schema import Sample
    from fuelrail.pipeline.transforms.image_map import ImageMap

T = TypeVar("T")


def hidden(sample: Sample) -> Sample:
    """Return the sample without images and points, every camera marked as missing."""
    geometry = dataclasses.replace(
        sample.geometry, cam_valid=np.zeros_like(sample.geometry.cam_valid)
    )
    return dataclasses.replace(sample, geometry=geometry, images={}, points={})


class Frames(NamedTuple):
    """The frames of a batch's samples, one after the other: what decides which axes follow B."""

    samples: Sequence[Sample]
    maps: Sequence[Sequence[ImageMap]]
    axes: tuple[int, ...]
    """(B, T) with windows, (B,) without."""

    @classmethod
    def collect(cls, decoded: Sequence[Parsed]) -> Self:
        """Collect the frames of some samples, of which all or none have windows."""
        samples = [sample for entry in decoded for sample in entry.samples]
        maps = [maps for entry in decoded for maps in entry.maps]
        num_frames = (len(decoded[0].samples),) if decoded[0].slot.has_windows else ()
        return cls(samples, maps, (len(decoded), *num_frames))

    @property
    def has_windows(self) -> bool:
        """Whether an axis of T frames follows B."""
        return len(self.axes) > 1

    def shaped(self, values: Sequence[Any]) -> NDArray[Any]:
        """Return a value of each frame as an array [B, T, ...], or [B, ...] without windows."""
        stacked = np.array(values)
        return stacked.reshape(*self.axes, *stacked.shape[1:])

    def of_samples(self, matrices: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a matrix of each sample, (B, 4, 4), shaped to broadcast over its frames."""
        return matrices[:, None] if self.has_windows else matrices

    def repeated(self, values: Sequence[T]) -> Iterator[T]:
        """Return a value of each sample, repeated for each of its frames."""
        return (value for value in values for _ in range(self.axes[1] if self.has_windows else 1))

    def listed(self, values: list[Any]) -> list[Any]:
        """Return a value of each frame as a list for each sample; without windows as it is."""
        if not self.has_windows:
            return values
        num_samples, t = self.axes
        return [values[number * t : (number + 1) * t] for number in range(num_samples)]


def frame_facts(decoded: Sequence[Parsed]) -> dict[str, torch.Tensor]:
    """Return which frames the samples' windows show."""
    frames = [entry.task.frames for entry in decoded]
    return {
        "frame_valid": torch.tensor(
            [[frame.present for frame in of_sample] for of_sample in frames]
        ),
        "frame_global_index": torch.tensor(
            [[frame.row for frame in of_sample] for of_sample in frames]
        ),
    }
