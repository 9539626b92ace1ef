"""The default CPU backend: libjpeg-turbo with DCT-scaled decoding, then one interpolation into the batch.

A JPEG is decoded at 1/1, 1/2, 1/4 or 1/8, the smallest that is not below the resolution that the map asks for (the
other eighths that libjpeg-turbo knows have no SIMD code and are slower than the full size). The rest of the map is one
`cv2.resize` of the region that is seen, where rows stay rows, else one `cv2.warpAffine`. Every large array is scratch
memory of the calling thread, reused from image to image: fresh megabytes would cost as much in page faults as the
decoding itself. simplejpeg and OpenCV release the GIL, so threads scale.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import cv2
import numpy as np
import simplejpeg

from fuelrail.loaders.decode.probe import check_png, probe
from fuelrail.loaders.decode.protocol import Interpolation, black_out_unseen, check_output, check_source
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.geometry import ImageMap, scaled_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.loaders.decode.probe import ImageInfo
    from fuelrail.pipeline.buffers import Buffer

Picture: TypeAlias = "NDArray[Any]"
"""uint8 (height, width, channels), channels interleaved. OpenCV's stubs know no dtype."""

_FILTERS = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_REACH = {"bilinear": 1, "bicubic": 2}
"""Source pixels on each side of a sampled place that the filter reads."""

_MAX_SHIFT_PX = 0.02
"""Largest displacement, in output pixels, that the fast path may have against the exact map."""

_GOOD_SHIFT_PX = 0.01
_MAX_EXTRA = 128
"""Source rows or columns searched for a place where the output's grid meets the source's."""

_MIN_SCALABLE_PX = 16
"""Smallest image side for DCT-scaled decoding. Below 8 pixels, different scales give the same size."""

_KEEP_BYTES = 64 << 20
"""Scratch arrays up to this size are kept by each thread."""


class TurboDecoder:
    """Decodes with libjpeg-turbo (simplejpeg) and OpenCV; see `fuelrail.loaders.decode.protocol.ImageDecoder`.

    OpenCV would split each resize over its own pool of threads, against ours. Its thread count is a setting of the
    process: it is 1 while a `TurboDecoder` exists, and what it was before when the last one is gone.
    """

    name = "turbo"

    def __init__(self) -> None:
        self._scratch = _Scratch()
        _hold_opencv_threads()
        weakref.finalize(self, _release_opencv_threads).atexit = False

    def decode_into(
        self,
        encoded: Buffer,
        image_map: ImageMap,
        out: NDArray[np.uint8],
        interpolation: Interpolation = "bilinear",
    ) -> None:
        """Decode into ``out``; see the protocol."""
        check_output(image_map, out, interpolation)
        info = probe(encoded)
        check_source(info, image_map)
        if info.format == "jpeg":
            image, factor = self._decode_jpeg(encoded, info, image_map.max_scale)
        else:
            image, factor = _decode_png(encoded, info), 1
            out = out[::-1]  # OpenCV decodes to BGR
        if factor > 1:
            image_map = _from_scaled(image_map, image, factor)
        try:
            if image_map.max_scale <= 0.5:
                image, image_map = _shrink(image, image_map)
            if not (image_map.is_axis_aligned and self._resize(image, image_map, out, interpolation)):
                self._warp(image, image_map, out, interpolation)
        except cv2.error as error:
            raise ImageError(f"image of {info.width}x{info.height} pixels cannot be resampled: {error}") from error

    def _decode_jpeg(self, encoded: Buffer, info: ImageInfo, max_scale: float) -> tuple[Picture, int]:
        """Return the picture (h, w, 3) RGB, decoded at 1/factor, and the factor."""
        factor = 1
        if min(info.width, info.height) >= _MIN_SCALABLE_PX:
            while factor < 8 and max_scale * factor * 2 <= 1.0 + 1e-9:
                factor *= 2
        width, height = scaled_size(info.width, 1, factor), scaled_size(info.height, 1, factor)
        colorspace, channels = ("CMYK", 4) if info.is_cmyk else ("RGB", 3)
        try:
            image = simplejpeg.decode_jpeg(
                encoded,
                colorspace,
                min_height=height,
                min_width=width,
                buffer=self._scratch.take("decoded", height, width, channels),
            )
        except ValueError as error:
            if "subsampling" in str(error):
                raise ImageError(
                    "JPEG of unusual sampling factors is not supported by decoder='turbo': "
                    "decoder='pillow' takes it, or re-encode it as 4:2:0, 4:2:2 or 4:4:4"
                ) from error
            raise ImageError(f"JPEG cannot be decoded: {error}") from error
        if image.shape != (height, width, channels):
            raise ImageError(f"JPEG decoded to {image.shape[1]}x{image.shape[0]}, expected {width}x{height}")
        if info.is_cmyk:
            # Ink values are stored inverted (Adobe's convention, which Pillow assumes too): 255 is no ink.
            image = ((image[..., :3].astype(np.uint16) * image[..., 3:] + 127) // 255).astype(np.uint8)
        return image, factor

    def _resize(self, image: Picture, image_map: ImageMap, out: NDArray[np.uint8], interpolation: str) -> bool:
        """Sample an axis-aligned map by `cv2.resize`. False, and nothing done, where its grid does not fit.

        `cv2.resize` with explicit factors scales about the top-left edge of the region that it gets. So the region
        starts at a source row and column whose place in the output is a whole number: a few lines before the first
        one needed, and then dropped from the result.
        """
        (flip_x, flip_y), (out_width, out_height) = image_map.flips, image_map.out_wh
        a, _, tx, _, d, ty = image_map.coefficients
        left, top, right, bottom = image_map.covered_output()
        x0, x1, y0, y1 = left, right, top, bottom
        if flip_x:
            a, tx, x0, x1 = -a, out_width - tx, out_width - right, out_width - left
        if flip_y:
            d, ty, y0, y1 = -d, out_height - ty, out_height - bottom, out_height - top
        if left < right:
            reach = _REACH[interpolation]
            columns = _aligned_span(a, tx, x0, x1, image.shape[1], reach)
            rows = _aligned_span(d, ty, y0, y1, image.shape[0], reach)
            if columns is None or rows is None:
                return False
            region = image[rows[0] : rows[1], columns[0] : columns[1]]
            if region.shape[:2] == (rows[3], columns[3]) and (a, d) != (1.0, 1.0):
                return False  # where the rounded size is the same, OpenCV copies, whatever the factors are
            resized: Picture = self._scratch.take("resized", rows[3], columns[3], 3)
            resized = cv2.resize(region, None, resized, a, d, _FILTERS[interpolation])
            resized = resized[y0 - rows[2] : y1 - rows[2], x0 - columns[2] : x1 - columns[2]]
            if flip_x or flip_y:
                code = -1 if flip_x and flip_y else int(flip_x)
                resized = cv2.flip(resized, code, self._scratch.take("flipped", *resized.shape))
        if (left, top, right, bottom) != (0, 0, out_width, out_height):
            out[:] = 0
            out = out[:, top:bottom, left:right]
        if left < right:
            cv2.split(resized, list(out))
        return True

    def _warp(self, image: Picture, image_map: ImageMap, out: NDArray[np.uint8], interpolation: str) -> None:
        """Sample any map by `cv2.warpAffine`."""
        reach = _REACH[interpolation] + 1
        left, top, right, bottom = image_map.source_roi(reach)
        if left >= right or top >= bottom:
            out[:] = 0
            return
        a, b, tx, c, d, ty = image_map.inverse_coefficients()
        to_region = np.array(
            ((a, b, (a + b) / 2 + tx - 0.5 - left), (c, d, (c + d) / 2 + ty - 0.5 - top)), dtype=np.float64
        )
        width, height = image_map.out_wh
        warped = cv2.warpAffine(
            image[top:bottom, left:right],
            to_region,
            (width, height),
            self._scratch.take("resized", height, width, 3),
            _FILTERS[interpolation] | cv2.WARP_INVERSE_MAP,
            cv2.BORDER_REPLICATE,
        )
        cv2.split(warped, list(out))
        black_out_unseen(image_map, out)


def _aligned_span(
    scale: float, offset: float, first: int, last: int, size: int, reach: int
) -> tuple[int, int, int, int] | None:
    """Find the source lines to resize for output lines [first, last), on one axis with out = scale * in + offset.

    Returns (start, stop) in the source, the output line where ``start`` lies, and the number of output lines that
    `cv2.resize` makes of the span; None if no start meets the output's grid closely enough.
    """
    needed = max(0, min(size - 1, math.floor((first + 0.5 - offset) / scale - 0.5) - reach + 1))
    best, best_shift = 0, math.inf
    for start in range(needed, max(-1, needed - _MAX_EXTRA), -1):
        place = scale * start + offset
        shift = abs(place - round(place))
        if shift < best_shift:
            best, best_shift = start, shift
            if shift < _GOOD_SHIFT_PX:
                break
    if best_shift > _MAX_SHIFT_PX:
        return None
    origin = round(scale * best + offset)
    stop = min(size, best + math.ceil((last - origin) / scale) + reach)
    num_lines = round((stop - best) * scale)  # to even at ties, as OpenCV rounds
    return (best, stop, origin, num_lines) if origin <= first and origin + num_lines >= last else None


def _from_scaled(image_map: ImageMap, image: Picture, factor: int) -> ImageMap:
    """Return the map from a picture decoded at 1/factor: coordinates are scaled by exactly 1/factor."""
    a, b, tx, c, d, ty = image_map.coefficients
    left, top, right, bottom = image_map.visible
    return ImageMap(
        (a * factor, b * factor, tx, c * factor, d * factor, ty),
        (image.shape[1], image.shape[0]),
        image_map.out_wh,
        (left / factor, top / factor, right / factor, bottom / factor),
    )


def _shrink(image: Picture, image_map: ImageMap) -> tuple[Picture, ImageMap]:
    """Average blocks of whole pixels, for maps that shrink more than the decoder could: interpolation would alias."""
    factor = math.floor(1.0 / image_map.max_scale + 1e-9)
    left, top, right, bottom = image_map.source_roi(2.0 * factor)
    left, top = left // factor * factor, top // factor * factor
    region = image[top : max(bottom, top + 1), left : max(right, left + 1)]
    pad_y, pad_x = -region.shape[0] % factor, -region.shape[1] % factor
    if pad_y or pad_x:
        region = cv2.copyMakeBorder(region, 0, pad_y, 0, pad_x, cv2.BORDER_REPLICATE)
    small = cv2.resize(region, (region.shape[1] // factor, region.shape[0] // factor), interpolation=cv2.INTER_AREA)
    a, b, tx, c, d, ty = image_map.coefficients
    tx, ty = tx + a * left + b * top, ty + c * left + d * top
    v = image_map.visible
    visible = ((v[0] - left) / factor, (v[1] - top) / factor, (v[2] - left) / factor, (v[3] - top) / factor)
    coefficients = (a * factor, b * factor, tx, c * factor, d * factor, ty)
    return small, ImageMap(coefficients, (small.shape[1], small.shape[0]), image_map.out_wh, visible)


def _decode_png(encoded: Buffer, info: ImageInfo) -> Picture:
    """Return the picture (h, w, 3) BGR; an alpha channel is dropped."""
    check_png(encoded)
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        image: Picture | None = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
    except cv2.error as error:
        raise ImageError(f"PNG cannot be decoded: {error}") from error
    if image is None or image.shape != (info.height, info.width, 3):
        raise ImageError("PNG cannot be decoded: its pixel data are broken")
    return image


class _Scratch(threading.local):
    """Named arrays of the calling thread that only grow; contents are whatever was there."""

    def __init__(self) -> None:
        self.arrays: dict[str, Picture] = {}

    def take(self, name: str, height: int, width: int, channels: int) -> Picture:
        """Return an uninitialised uint8 (height, width, channels)."""
        num_bytes = height * width * channels
        array = self.arrays.get(name)
        if array is None or array.size < num_bytes:
            array = np.empty(num_bytes, np.uint8)
            if num_bytes <= _KEEP_BYTES:
                self.arrays[name] = array
        return array[:num_bytes].reshape(height, width, channels)


# Re-entrant: a finalizer may run on any allocation, also inside the other function in the same thread.
_opencv_lock = threading.RLock()
_opencv_holds: list[int] = []
"""OpenCV's thread count before each hold."""


def _hold_opencv_threads() -> None:
    with _opencv_lock:
        _opencv_holds.append(cv2.getNumThreads() if not _opencv_holds else _opencv_holds[0])
        cv2.setNumThreads(1)


def _release_opencv_threads() -> None:
    with _opencv_lock:
        before = _opencv_holds.pop()
        if not _opencv_holds:
            cv2.setNumThreads(before)
