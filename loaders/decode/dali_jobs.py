"""One image of a DALI run: what to feed the graph for it, worked out on the host before DALI sees a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fuelrail.loaders.decode.resample import two_steps
from fuelrail.loaders.decode.splice import splice_rows
from fuelrail.pipeline.sample.image_header import ImageInfo, check_jpeg_end, unpack_png

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.transforms.image_map import ImageMap

_REACH_PX = 3.0
"""Output pixels about the region of a transform: more than the filters read."""


class Job(NamedTuple):
    """One image of a run: its place in the caller's batch, and the graph's parameters."""

    at: int
    encoded: NDArray[np.uint8]
    window: NDArray[np.int32]
    roi: NDArray[np.float32]
    size: NDArray[np.float32]
    matrix: NDArray[np.float32]
    is_aligned: bool


def make_job(at: int, data: Buffer, info: ImageInfo, image_map: ImageMap) -> Job | None:
    """Return the parameters of one image; None if its map sees nothing of it.

    Of a JPEG with restart markers at its rows only the rows that are needed are decoded. Raises ImageError.
    """
    if info.format == "png":
        data = unpack_png(data)
    else:
        check_jpeg_end(data)
    if info.restart_interval:
        _, top, _, bottom = image_map.source_roi((_REACH_PX + 1.0) / min(1.0, image_map.max_scale))
        spliced = splice_rows(data, info, top, bottom)
        if spliced is not None:
            data, image_map = spliced.encoded, image_map.of_rows(spliced.top, spliced.height)
    width, height = image_map.source_wh
    out_width, out_height = image_map.out_wh
    is_aligned = image_map.is_axis_aligned and image_map.covered_output() == (0, 0, out_width, out_height)
    if is_aligned:
        a, _, tx, _, d, ty = image_map.inverse_coefficients()
        x0, x1, y0, y1 = tx, a * out_width + tx, ty, d * out_height + ty
        # A map may end within half an output pixel outside of the image; a box of DALI's may not.
        is_aligned = min(x0, x1, y0, y1) >= -1e-6 and max(x0, x1) <= width + 1e-6 and max(y0, y1) <= height + 1e-6
    matrix = np.zeros((2, 3), np.float32)
    if is_aligned:
        left, top, right, bottom = image_map.source_roi(_REACH_PX / min(1.0, image_map.max_scale))
        size = (out_height, out_width)
    else:
        steps = two_steps(image_map, _REACH_PX)
        if steps is None:
            return None
        x0, y0, x1, y1 = steps.box
        left, top = int(x0), int(y0)
        right, bottom = min(width, int(np.ceil(x1))), min(height, int(np.ceil(y1)))
        size = steps.size_wh[::-1]
        matrix[:] = np.array(steps.to_resized).reshape(2, 3)
    return Job(
        at,
        np.frombuffer(data, np.uint8),
        np.array((top, left, bottom, right), np.int32),
        np.array((y0 - top, x0 - left, y1 - top, x1 - left), np.float32),
        np.array(size, np.float32),
        matrix,
        is_aligned,
    )
