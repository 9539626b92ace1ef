"""Which source lines `cv2.resize` must get, and with which factors, to do an image map to the
pixel; computed only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from fuelrail.pipeline.transforms.image_map import (
        Coefficients,
        ImageMap,
        Rectangle,
    )

REACH: Final = {"bilinear": 1, "bicubic": 2}
"""Source pixels on each side of a sampled place that the filter reads."""

_MAX_SHIFT_PX = 0.02
"""Largest displacement, in output pixels, that the fast path may have against the exact map."""

_GOOD_SHIFT_PX = 0.01

_MAX_EXTRA = 128
"""Source rows or columns searched for a place where the output's grid meets the source's."""


class Span(NamedTuple):
    """Source lines [start, stop) to resize on one axis, the lines that makes, and how many of them
    to drop first.

    Lines before ``first_needed`` are read for lines that are dropped.
    """

    start: int
    stop: int
    num_lines: int
    skip: int
    first_needed: int

    @property
    def source_lines(self) -> tuple[int, int]:
        """The source lines from which kept lines are made."""
        return self.first_needed, self.stop


class ResizeGrid(NamedTuple):
    """How `cv2.resize` does an axis-aligned map: region, factors, then ``flip`` (its code, None
    for none).
    """

    covered: tuple[int, int, int, int]
    columns: Span
    rows: Span
    scale: tuple[float, float]
    flip: int | None


_FLIP_CODES = {
    (False, False): None,
    (False, True): 0,
    (True, False): 1,
    (True, True): -1,
}
"""OpenCV's codes by whether an image is mirrored left-right, and top-bottom."""
_NOTHING = Span(start=0, stop=0, num_lines=0, skip=0, first_needed=0)


def resize_grid(image_map: ImageMap, interpolation: str) -> ResizeGrid | None:
    """Plan a map for `cv2.resize`. None where it cannot do it.

    `cv2.resize` with explicit factors scales about the top-left edge of the region that it gets. So
    the region starts at a source row and column whose place in the output is a whole number: a few
    lines before the first one needed, which are then dropped from the result.
    """
    if not image_map.is_axis_aligned or image_map.max_scale <= 0.5:
        return None
    flip_x, flip_y = image_map.flips
    out_width, out_height = image_map.out_wh
    a, _, tx, _, d, ty = image_map.coefficients
    covered = image_map.covered_output()
    x0, y0, x1, y1 = covered
    if x0 >= x1:
        return ResizeGrid(
            covered=covered,
            columns=_NOTHING,
            rows=_NOTHING,
            scale=(1.0, 1.0),
            flip=None,
        )
    if flip_x:
        a = -a
        tx = out_width - tx
        x0, x1 = out_width - x1, out_width - x0
    if flip_y:
        d = -d
        ty = out_height - ty
        y0, y1 = out_height - y1, out_height - y0
    reach = REACH[interpolation]
    columns = _aligned_span(
        a,
        offset=tx,
        first=x0,
        last=x1,
        size=image_map.source_wh[0],
        reach=reach,
    )
    rows = _aligned_span(
        d,
        offset=ty,
        first=y0,
        last=y1,
        size=image_map.source_wh[1],
        reach=reach,
    )
    if columns is None or rows is None:
        return None
    same_size = (
        columns.num_lines == columns.stop - columns.start
        and rows.num_lines == rows.stop - rows.start
    )
    if same_size and (a, d) != (1.0, 1.0):
        return None  # OpenCV copies where the rounded size is the same, for any factors
    return ResizeGrid(
        covered=covered,
        columns=columns,
        rows=rows,
        scale=(a, d),
        flip=_FLIP_CODES[flip_x, flip_y],
    )


def bilinear_rows(image_map: ImageMap) -> tuple[int, int]:
    """Return the source rows [first, last) that bilinear interpolation reads, and one more on each
    side.

    For an axis-aligned map. The native decoder reads the same rows (resized in camera_jpeg.c), so
    that it depends on neither which damaged files are refused.
    """
    _, top, _, bottom = image_map.covered_output()
    d, ty = image_map.coefficients[4:]
    if top >= bottom:
        return 0, 0
    places = [(line + 0.5 - ty) / d - 0.5 for line in (top, bottom - 1)]
    last = image_map.source_wh[1] - 1
    low = math.floor(min(max(min(places), 0.0), last))
    high = math.floor(min(max(max(places), 0.0), last))
    return max(0, low - 1), min(last, high + 2) + 1


def _aligned_span(
    scale: float,
    offset: float,
    first: int,
    last: int,
    size: int,
    reach: int,
) -> Span | None:
    """Find the source lines to resize for output lines [first, last), on one axis with out = scale
    * in + offset.

    None if no start meets the output's grid closely enough.
    """
    least_start = max(
        0,
        min(
            size - 1,
            math.floor((first + 0.5 - offset) / scale - 0.5) - reach + 1,
        ),
    )
    best = 0
    best_shift = math.inf
    for start in range(least_start, max(-1, least_start - _MAX_EXTRA), -1):
        place = scale * start + offset
        shift = abs(place - round(place))
        if shift < best_shift:
            best = start
            best_shift = shift
            if shift < _GOOD_SHIFT_PX:
                break
    if best_shift > _MAX_SHIFT_PX:
        return None
    origin = round(scale * best + offset)
    stop = min(size, best + math.ceil((last - origin) / scale) + reach)
    num_lines = round((stop - best) * scale)  # to even at ties, as OpenCV rounds
    if origin > first or origin + num_lines < last:
        return None
    return Span(
        start=best,
        stop=stop,
        num_lines=num_lines,
        skip=first - origin,
        first_needed=least_start,
    )


class TwoSteps(NamedTuple):
    """Resize the source's ``box`` to ``size_wh``, then transform by ``to_resized``.

    Attributes:
        box: (left, top, right, bottom) in source pixels, edge-origin, within the source; left and
            top are whole.
        size_wh: width and height of the resized picture in pixels.
        to_resized: output to resized picture, edge-origin.
    """

    box: Rectangle
    size_wh: tuple[int, int]
    to_resized: Coefficients


def two_steps(image_map: ImageMap, reach_px: float) -> TwoSteps | None:
    """Split a map; ``reach_px`` is the filters' reach in output pixels.

    None if the output sees nothing.

    The first step shrinks to the output's scale and never magnifies: an affine transform does that
    well.
    """
    a, b, _, c, d, _ = image_map.coefficients
    sx = min(1.0, math.hypot(a, c))
    sy = min(1.0, math.hypot(b, d))
    left, top, right, bottom = image_map.source_roi(reach_px / min(sx, sy))
    if left >= right or top >= bottom:
        return None
    # Whole pixels at the exact scale; the box may end up to one of them beyond the region, never
    # beyond the image.
    width = max(1, math.ceil((right - left) * sx))
    height = max(1, math.ceil((bottom - top) * sy))
    source_width, source_height = image_map.source_wh
    box = (
        left,
        top,
        min(left + width / sx, source_width),
        min(top + height / sy, source_height),
    )
    sx = width / (box[2] - box[0])
    sy = height / (box[3] - box[1])
    inverse = image_map.inverse_coefficients()
    to_resized = (
        inverse[0] * sx,
        inverse[1] * sx,
        (inverse[2] - box[0]) * sx,
        inverse[3] * sy,
        inverse[4] * sy,
        (inverse[5] - box[1]) * sy,
    )
    return TwoSteps(box, (width, height), to_resized)
