"""A map that turns rows, in two steps: an antialiased resize of a box of the source, then one affine transform.

What the PIL pipelines of the BEV code bases do, and what backends without an antialiased warp need.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fuelrail.pipeline.geometry import Coefficients, ImageMap, Rectangle


class TwoSteps(NamedTuple):
    """Resize the source's ``box`` to ``size_wh``, then transform by ``to_resized``.

    Attributes:
        box: (left, top, right, bottom) in source pixels, edge-origin, within the source; left and top are whole.
        size_wh: width and height of the resized picture in pixels.
        to_resized: output to resized picture, edge-origin.
    """

    box: Rectangle
    size_wh: tuple[int, int]
    to_resized: Coefficients


def two_steps(image_map: ImageMap, reach_px: float) -> TwoSteps | None:
    """Split a map; ``reach_px`` is the filters' reach in output pixels. None if the output sees nothing.

    The first step shrinks to the output's scale and never magnifies: an affine transform does that well.
    """
    a, b, _, c, d, _ = image_map.coefficients
    sx, sy = min(1.0, math.hypot(a, c)), min(1.0, math.hypot(b, d))
    left, top, right, bottom = image_map.source_roi(reach_px / min(sx, sy))
    if left >= right or top >= bottom:
        return None
    # Whole pixels at the exact scale; the box may end up to one of them beyond the region, never beyond the image.
    width, height = max(1, math.ceil((right - left) * sx)), max(1, math.ceil((bottom - top) * sy))
    source_width, source_height = image_map.source_wh
    box = (left, top, min(left + width / sx, source_width), min(top + height / sy, source_height))
    sx, sy = width / (box[2] - box[0]), height / (box[3] - box[1])
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
