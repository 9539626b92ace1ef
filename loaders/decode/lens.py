"""Where each output pixel is sampled in a distorted image: undistortion and the affine map in one
step.

An output pixel goes back through the affine map to the rectified image, through its K to a ray,
through the lens to the stored image. So pixels are interpolated once, and the matrices (of the
rectified camera) are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings
from fuelrail.pipeline.transforms.lens import (
    OWN_MODELS,
    UNBENT,
    Lens,
    Matrix3,
    read_lens,
    rectified_places,
    source_places,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import F32, F64, Mask
    from fuelrail.pipeline.sample.schema import Sample
    from fuelrail.pipeline.transforms.image_map import ImageMap

_COARSE_PX = 16
"""Distance of the places at which the local scale is looked at."""

_GRID = 9
"""Places along each side of an image at which the rectangle of a lens is looked at, as OpenCV
does.
"""

_UNIT: Matrix3 = (
    (1.0, 0.0, 0.0),
    (0.0, 1.0, 0.0),
    (0.0, 0.0, 1.0),
)

_NUM_KEPT = 12
"""Samplings that are kept: two rigs of six cameras, for evaluation, where the maps repeat."""


class Sampling(NamedTuple):
    """Source coordinates (centre-origin) of each output pixel, and which of them lie outside of
    the source.
    """

    x: F32
    y: F32
    unseen: Mask | None


@functools.lru_cache(maxsize=64)
def rectified_camera(lens: Lens, wh: tuple[int, int], alpha: float) -> Matrix3:
    """Return K that shows all of the stored image (``alpha`` 1), only its part without black (0),
    or between.

    ``cv2.getOptimalNewCameraMatrix``, its fisheye counterpart, and the same rule for the lenses
    that OpenCV lacks.
    """
    if lens.kind not in OWN_MODELS:
        camera = np.array(lens.stored)
        coefficients = np.array(lens.coefficients)
        if lens.kind == "fisheye":
            chosen = cv2.fisheye.estimateNewCameraMatrixForUndistortRectify(
                camera,
                coefficients,
                wh,
                R=np.eye(3),
                balance=alpha,
            )
        else:
            chosen, _ = cv2.getOptimalNewCameraMatrix(camera, coefficients, wh, alpha)
        return tuple(tuple(row) for row in chosen.tolist())
    # Between the camera of the largest rectangle within the straightened image and that of the one
    # around it.
    corner = np.array(wh) - 1.0
    columns = np.linspace(0.0, corner[0], _GRID)
    rows = np.linspace(0.0, corner[1], _GRID)
    grid = np.stack(np.meshgrid(columns, rows), -1)
    pixels = grid.reshape(-1, 2)
    unit_lens = dataclasses.replace(lens, rectified=_UNIT)
    rays = rectified_places(pixels, unit_lens).reshape(grid.shape)
    x = rays[..., 0]
    y = rays[..., 1]
    inner = np.array(
        [
            x[:, 0].max(),
            y[0].max(),
            x[:, -1].min(),
            y[-1].min(),
        ]
    )
    outer = np.array([x.min(), y.min(), x.max(), y.max()])
    inner_focal, inner_centre = _rectangle_camera(inner, corner)
    outer_focal, outer_centre = _rectangle_camera(outer, corner)
    fx, fy = (1.0 - alpha) * inner_focal + alpha * outer_focal
    cx, cy = (1.0 - alpha) * inner_centre + alpha * outer_centre
    return (
        (fx, 0.0, cx),
        (0.0, fy, cy),
        (0.0, 0.0, 1.0),
    )


def _rectangle_camera(sides: F64, corner: F64) -> tuple[F64, ...]:
    """Return focal lengths and centre that show a rectangle (left, top, right, bottom) of rays
    as a whole image.
    """
    first = sides[:2]
    last = sides[2:]
    focal = corner / (last - first)
    return focal, -focal * first


def largest_scale(image_map: ImageMap, lens: Lens) -> float:
    """Return the largest number of output pixels that a stored pixel's length becomes, over the
    whole output.
    """
    x, y, step_x, step_y = _coarse_places(image_map, lens)
    across = np.hypot(np.diff(x, axis=1), np.diff(y, axis=1))
    across /= max(step_x, 1e-9)
    down = np.hypot(np.diff(x, axis=0), np.diff(y, axis=0))
    down /= max(step_y, 1e-9)
    steps = np.concatenate((across.ravel(), down.ravel()))
    is_length = np.isfinite(steps) & (steps > 1e-6)
    steps = steps[is_length]
    if steps.size:
        return float(1.0 / steps.min())
    return 1.0


def source_rows(
    image_map: ImageMap,
    lens: Lens,
    support_px: float,
) -> tuple[int, int]:
    """Return (top, bottom): pixel rows of the stored image that the output samples, or some more,
    within the image.

    ``support_px`` widens it by the reach of the resampling filter, in stored pixels.
    """
    _, y, _, _ = _coarse_places(image_map, lens)
    height = image_map.source_wh[1]
    if not np.isfinite(y).all():
        return 0, height
    # Between the coarse places the lens bends by less than from one of them to the next.
    bend = 0.0
    for axis in (0, 1):
        bends = np.abs(np.diff(y, 2, axis))
        bend = max(bend, float(bends.max(initial=0.0)))
    margin = support_px + bend + 1.0
    top = math.floor(float(y.min()) + 0.5 - margin)
    bottom = math.ceil(float(y.max()) + 0.5 + margin)
    return max(0, min(top, height)), max(0, min(bottom, height))


@functools.lru_cache(maxsize=256)
def _coarse_places(image_map: ImageMap, lens: Lens) -> tuple[F32, F32, float, float]:
    """Return stored places of about every 16th output pixel, the outermost included, and their
    steps across and down.

    Shared, not to be written to.
    """
    out_width, out_height = image_map.out_wh
    width = max(2, -(-out_width // _COARSE_PX))
    height = max(2, -(-out_height // _COARSE_PX))
    # A map of its own, shrunk about the first pixel's centre.
    step_x = (out_width - 1) / (width - 1)
    step_y = (out_height - 1) / (height - 1)
    scale_x = 1.0 / max(step_x, 1e-9)
    scale_y = 1.0 / max(step_y, 1e-9)
    shrink = np.diag((scale_x, scale_y, 1.0))
    matrix = shrink @ _centre_matrix(image_map)
    x, y = source_places(matrix, lens, (width, height))
    return x, y, step_x, step_y


@functools.lru_cache(maxsize=_NUM_KEPT)
def sampling(
    image_map: ImageMap,
    lens: Lens,
    scale: tuple[float, float],
    size: tuple[int, int],
    top: int = 0,
) -> Sampling:
    """Return where to sample a source that is the stored image from row ``top`` on, scaled by
    exactly ``scale``.

    It is scaled about its corner. ``size`` is its (width, height), which may hold a partial last
    pixel, and need not hold rows that the output does not see (`source_rows`). Arrays (height,
    width) of the output; shared, not to be written to.
    """
    x, y = source_places(_centre_matrix(image_map), lens, image_map.out_wh)
    width, height = image_map.source_wh
    sx, sy = scale
    if top:
        y -= top
    for places, factor in ((x, sx), (y, sy)):
        if factor != 1.0:
            places *= factor
            places += 0.5 * factor - 0.5
    is_seen = (
        (x >= -0.5)
        & (x <= width * sx - 0.5)
        & (y >= -top * sy - 0.5)
        & (y <= (height - top) * sy - 0.5)
    )
    visible_columns = image_map.visible_columns()
    # The rectified image's own border, and what crops before a rotation left out.
    if visible_columns is not None:
        starts, stops = visible_columns
        columns = np.arange(x.shape[1])
        is_seen &= columns >= starts[:, None]
        is_seen &= columns < stops[:, None]
    if is_seen.all():
        return Sampling(x, y, None)
    for places, side in ((x, size[0]), (y, size[1])):
        np.nan_to_num(places, copy=False, nan=0.0)
        np.clip(places, 0.0, side - 1.0, out=places)
    return Sampling(x, y, ~is_seen)


def _centre_matrix(image_map: ImageMap) -> F64:
    """Return the true map on centre-origin pixels, (3, 3), not the matrix that is published in
    its place.
    """
    return dataclasses.replace(image_map, published=None).centre_matrix()


class Undistort(Settings, frozen=True):
    """Straightens the images of distorted cameras (OpenCV's pinhole models and fisheye, f-theta,
    Mei) as it decodes.

    Attributes:
        alpha: None keeps each camera's own K; else it is chosen so that nothing of the image is
            lost (1), nothing black is seen (0), or in between.

    Raises ConfigError for an ``alpha`` out of range.
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha={self.alpha} must lie in 0 to 1, or be None")

    def __call__(
        self,
        sample: Sample,
        maps: Sequence[ImageMap],
        cameras: Sequence[str],
    ) -> tuple[Sample, list[ImageMap]]:
        """Return the sample with the geometry of the rectified cameras, and the maps with the
        lenses to undo.

        ``cameras`` are the channels of ``maps``. Raises ConfigError for a camera whose model cannot
        be undone.
        """
        geometry = sample.geometry
        intrinsics = geometry.intrinsics.copy()
        dist = geometry.dist.copy()
        bent = list(maps)
        for row, channel in enumerate(cameras):
            camera = sample.meta.cameras.get(channel)
            if not geometry.cam_valid[row]:
                continue
            model = UNBENT if camera is None else camera.dist_model
            lens = read_lens(model, dist[row], intrinsics[row])
            if lens is None:
                continue
            if self.alpha is not None:
                lens = dataclasses.replace(
                    lens,
                    rectified=rectified_camera(lens, maps[row].source_wh, self.alpha),
                )
            bent[row] = dataclasses.replace(maps[row], lens=lens)
            intrinsics[row] = lens.rectified
            dist[row] = np.nan
        geometry = dataclasses.replace(geometry, intrinsics=intrinsics, dist=dist)
        return dataclasses.replace(sample, geometry=geometry), bent
