"""Undistortion while decoding: from now on the camera is the pinhole that the images are resampled to."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from fuelrail.loaders.decode.lens import rectified_camera
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.lens import UNBENT, read_lens
from fuelrail.pipeline.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.pipeline.geometry import ImageMap
    from fuelrail.pipeline.schema import Sample


class Undistort(Settings, frozen=True):
    """Straightens the images of distorted cameras (OpenCV's pinhole models and its fisheye) as they are decoded.

    Attributes:
        alpha: None keeps each camera's own K; else it is chosen so that nothing of the image is lost (1), nothing black
            is seen (0), or in between.

    Raises ConfigError for an ``alpha`` out of range.
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha={self.alpha} must lie in 0 to 1, or be None")

    def __call__(
        self, sample: Sample, maps: Sequence[ImageMap], cameras: Sequence[str]
    ) -> tuple[Sample, list[ImageMap]]:
        """The sample with the rectified cameras' geometry, and the maps with the lenses to undo.

        ``cameras`` are the channels of ``maps``. Raises ConfigError for a camera whose model cannot be undone.
        """
        geometry = sample.geometry
        intrinsics, dist = geometry.intrinsics.copy(), geometry.dist.copy()
        bent = list(maps)
        for at, channel in enumerate(cameras):
            camera = sample.meta.cameras.get(channel)
            if not geometry.cam_valid[at]:
                continue
            model = UNBENT if camera is None else camera.dist_model
            lens = read_lens(model, dist[at], intrinsics[at])
            if lens is None:
                continue
            if self.alpha is not None:
                lens = dataclasses.replace(lens, rectified=rectified_camera(lens, maps[at].source_wh, self.alpha))
            bent[at] = dataclasses.replace(maps[at], lens=lens)
            intrinsics[at], dist[at] = lens.rectified, np.nan
        geometry = dataclasses.replace(geometry, intrinsics=intrinsics, dist=dist)
        return dataclasses.replace(sample, geometry=geometry), bent
