"""Rasters moved by an image's map or by the ego map: each output pixel or cell is looked up where
it came from.

``nearest`` takes the pixel or cell in which the place lies; ``linear`` interpolates between the
centres of the nearest ones, those at the border being continued outwards by half a pixel. Where
nothing was stored, there is ``fill``. Places are computed in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.transforms.lens import source_places

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import F64, Mask
    from fuelrail.pipeline.transforms.ego import BevMap
    from fuelrail.pipeline.transforms.image_map import ImageMap

_FUZZ = 1e-6
"""A place outside by no more than this many pixels of rounding error is inside."""


class _Axis(NamedTuple):
    """Along one axis: the element in which each place lies, the two whose centres are about it,
    and what is inside.
    """

    nearest: NDArray[np.intp]
    lower: NDArray[np.intp]
    upper: NDArray[np.intp]
    weight: F64
    """Weight of the upper element, 0 to 1."""
    inside: Mask


def warp_image(
    raster: NDArray[np.generic],
    image_map: ImageMap,
    *,
    linear: bool = False,
    fill: float = 0.0,
    fraction: int = 1,
) -> NDArray[np.generic]:
    """Return a raster (h, w) or (h, w, C) on a camera's stored image as (H, W[, C]) of the map's
    output image.

    The raster has ceil(side / fraction) pixels of each side of the stored image. Raises SchemaError
    for another size.
    """
    expected = tuple(-(-side // fraction) for side in reversed(image_map.source_wh))
    if raster.shape[:2] != expected:
        raise SchemaError(
            f"a raster of {raster.shape[1]} x {raster.shape[0]} pixels; on a stored image of "
            f"{image_map.source_wh[0]} x {image_map.source_wh[1]} at 1/{fraction} it has "
            f"{expected[1]} x {expected[0]}"
        )
    width, height = image_map.out_wh
    left, top, right, bottom = image_map.visible
    a, b, tx, c, d, ty = image_map.inverse_coefficients()
    u = np.arange(width) + 0.5
    v = np.arange(height) + 0.5
    if b == 0.0 and c == 0.0 and image_map.lens is None:
        x = a * u + tx
        y = d * v + ty
    else:
        x = a * u + b * v[:, None] + tx
        y = c * u + d * v[:, None] + ty
    seen_x = _within(x, left, right)
    seen_y = _within(y, top, bottom)
    if image_map.lens is not None:
        true = dataclasses.replace(image_map, published=None).centre_matrix()
        x, y = (
            places.astype(np.float64) + 0.5
            for places in source_places(true, image_map.lens, image_map.out_wh)
        )
        seen_x = seen_x & _within(x, 0.0, image_map.source_wh[0])
        seen_y = seen_y & _within(y, 0.0, image_map.source_wh[1])
    rows = _axis(y / fraction, raster.shape[0], seen_y)
    columns = _axis(x / fraction, raster.shape[1], seen_x)
    return _look_up(raster, [rows, columns], linear=linear, fill=fill)


def warp_grid(
    grid: NDArray[np.generic],
    axes: Sequence[str],
    extent_m: Sequence[float],
    ego: BevMap,
    *,
    linear: bool = False,
    fill: float = 0.0,
) -> NDArray[np.generic]:
    """Return a raster over ego's x and y (and z) moved to augmented ego; same shape and extent.

    ``axes`` names the axes; ``x``, ``y`` and ``z`` are those of space, others are kept as they are.
    ``extent_m`` has the outer borders of the first cells along x, y (and z), then those of the last
    ones.
    """
    space = [name for name in ("x", "y", "z") if name in axes]
    places = [axes.index(name) for name in space]
    moved = np.moveaxis(grid, places, range(len(places)))
    inverse = ego.inverse
    half = len(space)
    centres = []
    borders = list(zip(moved.shape, extent_m[:half], extent_m[half:], strict=False))
    for size, low, high in borders:
        cell = (high - low) / size
        centres.append(low + (np.arange(size) + 0.5) * cell)
    x = centres[0][:, None]
    y = centres[1]
    source_places = [row[0] * x + row[1] * y + row[3] for row in inverse[:2]]
    if half == 3:
        source_places.append(inverse[2, 2] * centres[2] + inverse[2, 3])
    looks = []
    for (size, low, high), where in zip(borders, source_places, strict=True):
        in_cells = (where - low) * (size / (high - low))
        inside = _within(in_cells, 0.0, size)
        looks.append(_axis(in_cells, size, inside))
    flat = _look_up(moved, looks[:2], linear=linear, fill=fill)
    if half == 3:
        columns = np.moveaxis(flat, 2, 0)
        columns = _look_up(columns, looks[2:], linear=linear, fill=fill)
        flat = np.moveaxis(columns, 0, 2)
    return np.ascontiguousarray(np.moveaxis(flat, range(len(places)), places))


def _within(places: NDArray[np.floating[Any]], low: float, high: float) -> Mask:
    return np.asarray((places >= low - _FUZZ) & (places <= high + _FUZZ) & (low < high))


def _axis(places: F64, size: int, inside: Mask) -> _Axis:
    """Return the elements for places that are counted in elements from the outer border of the
    first one.
    """
    finite = np.nan_to_num(places, nan=0.0, posinf=0.0, neginf=0.0)
    nearest = np.clip(np.floor(finite), 0, size - 1).astype(np.intp)
    between = np.clip(finite - 0.5, 0.0, size - 1.0)
    lower = np.floor(between).astype(np.intp)
    return _Axis(
        nearest=nearest,
        lower=lower,
        upper=np.minimum(lower + 1, size - 1),
        weight=between - lower,
        inside=inside,
    )


def _look_up(
    raster: NDArray[Any],
    axes: list[_Axis],
    *,
    linear: bool,
    fill: float,
) -> NDArray[Any]:
    """Look up elements of the raster's first axes: one axis, or two whose places are a line each
    or a plane of both.
    """
    plane = len(axes) == 2 and axes[0].nearest.ndim == 1
    out = raster
    if len(axes) == 1 or plane:  # one axis after the other: a rotation is not in it
        for number, axis in enumerate(axes):
            if not linear:
                out = out.take(axis.nearest, number)
                continue
            lower = out.take(axis.lower, number)
            upper = out.take(axis.upper, number)
            weight = axis.weight.reshape(-1, *(1,) * (out.ndim - number - 1))
            out = lower + (upper.astype(np.float64) - lower) * weight
        inside = axes[0].inside
        if plane:
            inside = inside[:, None] & axes[1].inside
    elif not linear:
        out = raster[axes[0].nearest, axes[1].nearest]
        inside = axes[0].inside & axes[1].inside
    else:
        rows, columns = axes
        more = (1,) * (raster.ndim - 2)
        across = columns.weight.reshape(*columns.weight.shape, *more)
        down = rows.weight.reshape(*rows.weight.shape, *more)
        lines = []
        for row in (rows.lower, rows.upper):
            lower = raster[row, columns.lower] * (1.0 - across)
            upper = raster[row, columns.upper] * across
            lines.append(lower + upper)
        above, below = lines
        out = above * (1.0 - down) + below * down
        inside = axes[0].inside & axes[1].inside
    if linear and raster.dtype.kind in "iub":
        out = np.rint(out)
    out = out.astype(raster.dtype, copy=not np.shares_memory(out, raster))
    out[~inside] = fill
    return out
