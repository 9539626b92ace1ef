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
    raster_height, raster_width = raster.shape[:2]
    source_width, source_height = image_map.source_wh
    expected_width = -(-source_width // fraction)
    expected_height = -(-source_height // fraction)
    if (raster_width, raster_height) != (expected_width, expected_height):
        raise SchemaError(
            f"a raster of {raster_width} x {raster_height} pixels; on a stored image of "
            f"{source_width} x {source_height} at 1/{fraction} it has "
            f"{expected_width} x {expected_height}"
        )
    width, height = image_map.out_wh
    left, top, right, bottom = image_map.visible
    a, b, tx, c, d, ty = image_map.inverse_coefficients()
    u = np.arange(width) + 0.5
    v = np.arange(height) + 0.5
    if image_map.is_axis_aligned and image_map.lens is None:
        x = a * u + tx
        y = d * v + ty
    else:
        v = v[:, None]
        x = a * u + b * v + tx
        y = c * u + d * v + ty
    seen_x = _within(x, left, right)
    seen_y = _within(y, top, bottom)
    if image_map.lens is not None:
        true_map = dataclasses.replace(image_map, published=None)
        places = source_places(
            true_map.centre_matrix(),
            image_map.lens,
            image_map.out_wh,
        )
        x = places[0].astype(np.float64) + 0.5
        y = places[1].astype(np.float64) + 0.5
        seen_x = seen_x & _within(x, 0.0, source_width)
        seen_y = seen_y & _within(y, 0.0, source_height)
    rows = _axis(y / fraction, raster_height, seen_y)
    columns = _axis(x / fraction, raster_width, seen_x)
    return _look_up(
        raster,
        [rows, columns],
        linear=linear,
        fill=fill,
    )


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
    space_axes = [axes.index(name) for name in ("x", "y", "z") if name in axes]
    num_space = len(space_axes)
    raster = np.moveaxis(grid, space_axes, range(num_space))
    sizes = raster.shape[:num_space]
    lows = extent_m[:num_space]
    highs = extent_m[num_space:]
    borders = list(zip(sizes, lows, highs, strict=True))
    centres = []
    for size, low, high in borders:
        cell = (high - low) / size
        centres.append(low + (np.arange(size) + 0.5) * cell)
    inverse = ego.inverse
    x = centres[0][:, None]
    y = centres[1]
    source_places = [row[0] * x + row[1] * y + row[3] for row in inverse[:2]]
    if num_space == 3:
        z = centres[2]
        source_places.append(inverse[2, 2] * z + inverse[2, 3])
    space = []
    for (size, low, high), places in zip(borders, source_places, strict=True):
        in_cells = (places - low) * (size / (high - low))
        inside = _within(in_cells, 0.0, size)
        space.append(_axis(in_cells, size, inside))
    raster = _look_up(
        raster,
        space[:2],
        linear=linear,
        fill=fill,
    )
    if num_space == 3:
        columns = _look_up(
            np.moveaxis(raster, 2, 0),
            space[2:],
            linear=linear,
            fill=fill,
        )
        raster = np.moveaxis(columns, 0, 2)
    moved = np.moveaxis(raster, range(num_space), space_axes)
    return np.ascontiguousarray(moved)


def _within(places: NDArray[np.floating[Any]], low: float, high: float) -> Mask:
    return np.asarray((places >= low - _FUZZ) & (places <= high + _FUZZ) & (low < high))


def _axis(places: F64, size: int, inside: Mask) -> _Axis:
    """Return the elements for places that are counted in elements from the outer border of the
    first one.
    """
    finite = np.nan_to_num(places, nan=0.0, posinf=0.0, neginf=0.0)
    last = size - 1
    nearest = np.clip(np.floor(finite), 0, last)
    between = np.clip(finite - 0.5, 0.0, float(last))
    lower = np.floor(between).astype(np.intp)
    return _Axis(
        nearest=nearest.astype(np.intp),
        lower=lower,
        upper=np.minimum(lower + 1, last),
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
    is_plane = len(axes) == 2 and axes[0].nearest.ndim == 1
    out = raster
    if len(axes) == 1 or is_plane:  # one axis after the other: a rotation is not in it
        for number, axis in enumerate(axes):
            if not linear:
                out = out.take(axis.nearest, number)
                continue
            lower = out.take(axis.lower, number)
            upper = out.take(axis.upper, number)
            num_inner = out.ndim - number - 1
            weight = axis.weight.reshape(-1, *(1,) * num_inner)
            out = lower + (upper.astype(np.float64) - lower) * weight
        inside = axes[0].inside
        if is_plane:
            inside = inside[:, None] & axes[1].inside
    else:
        rows, columns = axes
        inside = rows.inside & columns.inside
        if linear:
            num_inner = raster.ndim - 2
            inner_shape = (1,) * num_inner
            across = columns.weight.reshape(*columns.weight.shape, *inner_shape)
            down = rows.weight.reshape(*rows.weight.shape, *inner_shape)
            lines = []
            for row in (rows.lower, rows.upper):
                lower = raster[row, columns.lower] * (1.0 - across)
                upper = raster[row, columns.upper] * across
                lines.append(lower + upper)
            above, below = lines
            out = above * (1.0 - down) + below * down
        else:
            out = raster[rows.nearest, columns.nearest]
    if linear and raster.dtype.kind in "iub":
        out = np.rint(out)
    # Each way above has copied: nothing of the raster is written to.
    out = out.astype(raster.dtype, copy=False)
    out[~inside] = fill
    return out
