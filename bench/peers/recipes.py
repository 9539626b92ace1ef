"""Ways to decode a camera image into a batch by hand, as those do who use the other loaders.

``pil`` and ``cv2`` decode at full size and shrink with antialiasing: what most training code does, here without the
rows that the crop drops. ``pilfast``, ``cv2fast`` and ``sjfast`` let libjpeg-turbo shrink while it decodes (to a half,
a quarter or an eighth, as far as that stays above the final size) and do the rest bilinearly: what an expert writes.
``sjfast`` also decodes into reused memory, which OpenCV's and Pillow's interfaces cannot.
"""

from __future__ import annotations

import io
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import simplejpeg

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from fuelrail.bench.peers.interface import Work
    from fuelrail.pipeline.buffers import Buffer


_REDUCED = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
_SCRATCH = threading.local()


def decode_sample(images: Sequence[Buffer], recipe: str, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Decode a sample's images into ``out``, uint8 [N, 3, H, W], and return it."""
    decode = RECIPES[recipe]
    for encoded, planes in zip(images, out, strict=True):
        decode(encoded, planes)
    return out


def new_sample(images: Sequence[Buffer], recipe: str, work: Work) -> NDArray[np.uint8]:
    """A sample's images, decoded into fresh memory."""
    return decode_sample(images, recipe, np.empty(work.sample_shape, np.uint8))


def prepare_worker() -> None:
    """Let OpenCV start no threads of its own: the workers are the parallelism, and a fork would not take them along."""
    cv2.setNumThreads(0)


@cache
def seen_box(source_wh: tuple[int, int], out_wh: tuple[int, int]) -> tuple[float, float, float, float]:
    """The part of the source that the output shows: left, upper, right, lower, in source pixels."""
    (width, height), (out_width, out_height) = source_wh, out_wh
    scale = max(out_width / width, out_height / height)
    # The resized picture has whole pixels, and the crop begins at one.
    resized_width, resized_height = int(width * scale), int(height * scale)
    left = (resized_width - out_width) // 2 / resized_width * width
    upper = (resized_height - out_height) / resized_height * height
    return left, upper, left + out_width / resized_width * width, float(height)


def shrink_factor(source_wh: tuple[int, int], out_wh: tuple[int, int]) -> int:
    """The largest factor that libjpeg-turbo may shrink by without going below the final size."""
    left, upper, right, lower = seen_box(source_wh, out_wh)
    least = min((right - left) / out_wh[0], (lower - upper) / out_wh[1])
    return max(factor for factor in _REDUCED if factor == 1 or factor <= least)


def _pil(encoded: Buffer, planes: NDArray[np.uint8], *, draft: bool = False) -> None:
    from PIL import Image

    out_wh = planes.shape[2], planes.shape[1]
    picture: Any = Image.open(io.BytesIO(encoded))
    source_wh = picture.size
    factor = shrink_factor(source_wh, out_wh) if draft else 1
    if factor > 1:
        picture.draft("RGB", (source_wh[0] // factor, source_wh[1] // factor))
    box = tuple(edge / factor for edge in seen_box(source_wh, out_wh))
    resized = picture.convert("RGB").resize(out_wh, Image.Resampling.BILINEAR, box=box)
    np.copyto(planes, np.asarray(resized).transpose(2, 0, 1))


def _pil_fast(encoded: Buffer, planes: NDArray[np.uint8]) -> None:
    _pil(encoded, planes, draft=True)


def _cv2(encoded: Buffer, planes: NDArray[np.uint8]) -> None:
    picture: Any = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    _resize(picture, (picture.shape[1], picture.shape[0]), planes, cv2.INTER_AREA, bgr=True)


def _cv2_fast(encoded: Buffer, planes: NDArray[np.uint8]) -> None:
    height, width = _jpeg_size(encoded)
    factor = shrink_factor((width, height), (planes.shape[2], planes.shape[1]))
    picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), _REDUCED[factor])
    _resize(picture, (width, height), planes, cv2.INTER_LINEAR, bgr=True)


def _sj_fast(encoded: Buffer, planes: NDArray[np.uint8]) -> None:
    height, width = _jpeg_size(encoded)
    factor = shrink_factor((width, height), (planes.shape[2], planes.shape[1]))
    shape = -(-height // factor), -(-width // factor), 3
    buffer = getattr(_SCRATCH, "buffer", None)
    if buffer is None or buffer.shape != shape:
        buffer = _SCRATCH.buffer = np.empty(shape, np.uint8)
    picture = simplejpeg.decode_jpeg(encoded, "RGB", min_height=shape[0], min_width=shape[1], buffer=buffer)
    _resize(picture, (width, height), planes, cv2.INTER_LINEAR, bgr=False)


def _resize(picture: Any, source_wh: tuple[int, int], planes: NDArray[np.uint8], method: int, *, bgr: bool) -> None:  # noqa: ANN401
    """Cut out what is seen, to whole pixels of the decoded picture; shrink; split into the planes."""
    height, width = picture.shape[:2]
    left, upper, right, lower = seen_box(source_wh, (planes.shape[2], planes.shape[1]))
    x, y = width / source_wh[0], height / source_wh[1]
    seen = picture[round(upper * y) : round(lower * y), round(left * x) : round(right * x)]
    small = cv2.resize(seen, (planes.shape[2], planes.shape[1]), interpolation=method)
    red, green, blue = planes
    cv2.split(small, [blue, green, red] if bgr else [red, green, blue])


def _jpeg_size(encoded: Buffer) -> tuple[int, int]:
    height, width, _, _ = simplejpeg.decode_jpeg_header(encoded)
    return int(height), int(width)


RECIPES: dict[str, Callable[[Buffer, NDArray[np.uint8]], None]] = {
    "pil": _pil,
    "pilfast": _pil_fast,
    "cv2": _cv2,
    "cv2fast": _cv2_fast,
    "sjfast": _sj_fast,
}
