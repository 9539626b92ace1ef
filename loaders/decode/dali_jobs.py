"""One image of a DALI run: what to feed the graph for it, computed on the host; and what is done to its output."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np
import simplejpeg
import torch

from fuelrail.loaders.decode.resample import two_steps
from fuelrail.loaders.decode.splice import splice_rows
from fuelrail.pipeline.sample.image_header import ImageInfo, check_jpeg_end, unpack_png

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    Of a JPEG with restart markers at its rows only the rows that are needed are kept. Raises ImageError.
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


@functools.lru_cache(maxsize=8)
def known_good_job(largest_wh: tuple[int, int], out_wh: tuple[int, int], is_aligned: bool) -> Job:
    """Return a baseline 4:2:0 JPEG of that size (of any if it is 0 x 0), resized to the output."""
    width, height = largest_wh if all(largest_wh) else (640, 384)
    black = np.zeros((height, width, 3), np.uint8)
    return Job(
        0,
        np.frombuffer(simplejpeg.encode_jpeg(black, colorsubsampling="420"), np.uint8),
        np.array((0, 0, height, width), np.int32),
        np.array((0, 0, height, width), np.float32),
        np.array(out_wh[::-1], np.float32),
        np.array(((1, 0, 0), (0, 1, 0)), np.float32),
        is_aligned,
    )


def psnr_of_means(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the PSNR in dB of two uint8 images (3, height, width), each averaged over 4 x 4 pixels."""
    width, height = -(-first.shape[2] // 4), -(-first.shape[1] // 4)
    differences = [
        cv2.absdiff(*(cv2.resize(plane, (width, height), interpolation=cv2.INTER_AREA) for plane in planes))
        for planes in zip(first.numpy(), second.numpy(), strict=True)
    ]
    error = float(np.mean(np.square(differences, dtype=np.float64)))
    return 10.0 * math.log10(255.0**2 / error) if error else math.inf


def places(jobs: Sequence[Job]) -> slice | list[int]:
    """Where the jobs stand in the caller's batch; consecutive ones as a slice, which needs no index on the device."""
    first, last = jobs[0].at, jobs[-1].at
    return slice(first, last + 1) if last - first == len(jobs) - 1 else [job.at for job in jobs]


def black_out_unseen(places: Sequence[int], image_maps: Sequence[ImageMap], out: torch.Tensor) -> None:
    """Set the pixels black that the maps let see nothing: one small copy to the device for all images."""
    limited = [(at, np.stack(pair)) for at in places if (pair := image_maps[at].visible_columns()) is not None]
    if not limited:
        return
    columns = torch.from_numpy(np.stack([pair for _, pair in limited])).to(out.device)  # [n, 2, height]
    x = torch.arange(out.shape[3], device=out.device)
    seen = (x >= columns[:, 0, :, None]) & (x < columns[:, 1, :, None])
    at = [place for place, _ in limited]
    out[at] = out[at] * seen[:, None]
