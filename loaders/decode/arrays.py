"""Encoded images to arrays, by the loader's own decoder: for datasets and loaders of other libraries."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from fuelrail.loaders.decode.jpeg import read_pixels
from fuelrail.pipeline.errors import ConfigError, ImageError, needs
from fuelrail.pipeline.native import Scratch
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.pipeline.transforms.image_map import ImageMap

if TYPE_CHECKING:
    import torch

    from fuelrail.loaders.decode.turbo import TurboDecoder
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.arrays import Buffer

Pixels = TypeVar("Pixels", bound="NDArray[np.uint8] | torch.Tensor")

_scratch = Scratch()


class _Output(NamedTuple):
    """Memory for an image of (width, height) ``size``: (height, width, 3), or planes (3, height,
    width).
    """

    pixels: U8
    size: tuple[int, int]
    is_planes: bool


@overload
def decode_jpeg(
    data: Buffer | U8 | torch.Tensor,
    *,
    out: None = None,
    size: tuple[int, int] | None = None,
    crop: tuple[int, int, int, int] | None = None,
    scale: float | None = None,
    order: Literal["rgb", "bgr"] = "rgb",
) -> U8: ...


@overload
def decode_jpeg(
    data: Buffer | U8 | torch.Tensor,
    *,
    out: Pixels,
    size: tuple[int, int] | None = None,
    crop: tuple[int, int, int, int] | None = None,
    scale: float | None = None,
    order: Literal["rgb", "bgr"] = "rgb",
) -> Pixels: ...


def decode_jpeg(
    data: Buffer | U8 | torch.Tensor,
    *,
    out: Any = None,
    size: tuple[int, int] | None = None,
    crop: tuple[int, int, int, int] | None = None,
    scale: float | None = None,
    order: Literal["rgb", "bgr"] = "rgb",
) -> Any:
    """Decode a JPEG, crop it and resize it, without the GIL; return uint8 pixels.

    A whole image, or a crop in its own size, has exactly the pixels of libjpeg-turbo. Where it is
    resized, it is decoded at 1/2, 1/4 or 1/8 if that is no less than what is asked for, and
    interpolated bilinearly: the pixels that a `DataLoader` gives for the same crop and size, for
    JPEGs with and without restart markers. EXIF orientation is not applied. PNG is decoded too.

    The first call sets OpenCV to one thread, for as long as the process lives, as a loader does:
    for more images a second, decode in several threads.

    Args:
        data: the file: bytes, or a uint8 array or CPU tensor of one axis.
        out: uint8 memory to fill, contiguous: an array or CPU tensor (height, width, 3) or (3,
            height, width). None: a new array (height, width, 3).
        size: (width, height) of the result. None: that of ``out``, else of what is cropped.
        crop: (left, top, width, height) to decode, in pixels of the stored image. None: all of it.
        scale: size of the result over the size of what is cropped, in place of ``size``.
        order: of the colours, "rgb" or "bgr".

    Returns:
        ``out``, or the new array.

    Raises:
        ImageError: bytes that are not a whole image; what ``out`` holds has no meaning then.
        ConfigError: another argument is not as described, or OpenCV is not installed.

    """
    if order not in ("rgb", "bgr"):
        raise ConfigError(f"order={order!r} must be 'rgb' or 'bgr'")
    encoded = _bytes_of(data)
    info = probe(encoded)
    identity = image_map = ImageMap.identity((info.width, info.height))
    if crop is not None:
        left, top, width, height = crop
        has_columns = 0 <= left < left + width <= info.width
        has_rows = 0 <= top < top + height <= info.height
        if not (has_columns and has_rows):
            raise ConfigError(
                f"crop={crop} (left, top, width, height) must lie within the image, which has "
                f"{info.width}x{info.height} pixels"
            )
        image_map = image_map.crop(*crop)
    if scale is not None:
        if size is not None:
            raise ConfigError("size and scale both say how large the result is: give one of them")
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"scale={scale!r} must be a number above 0")
        width, height = image_map.out_wh
        scaled_width = max(1, round(width * scale))
        scaled_height = max(1, round(height * scale))
        size = (scaled_width, scaled_height)
    output = None if out is None else _output(out)
    wanted_size = size or (image_map.out_wh if output is None else output.size)
    if wanted_size != image_map.out_wh:
        image_map = image_map.resize(*wanted_size)
    if output is None:
        width, height = wanted_size
        pixels = np.empty((height, width, 3), np.uint8)
        output = _Output(pixels, wanted_size, is_planes=False)
    elif output.size != wanted_size:
        raise ConfigError(
            f"out is for {output.size[0]}x{output.size[1]} pixels (width x height), the result "
            f"has {wanted_size[0]}x{wanted_size[1]}"
        )
    if output.is_planes:
        planes = output.pixels if order == "rgb" else output.pixels[::-1]
        _load_decoder().decode_into(encoded, image_map, planes)
    elif info.format == "jpeg" and not info.is_cmyk and image_map == identity:
        read_pixels(encoded, order.upper(), output.pixels)
    else:
        _decode_interleaved(encoded, image_map, output.pixels, order)
    return output.pixels if out is None else out


def decode_batch(images: Sequence[Buffer | U8 | torch.Tensor], out: Pixels) -> Pixels:
    """Decode each JPEG in the size of ``out``, one after another in one call without the GIL.

    Pixels are those of `decode_jpeg`. Shapes of images may differ; the whole image is resized.

    Args:
        images: N files, each as in `decode_jpeg`.
        out: uint8 memory to fill, contiguous: an array or CPU tensor of RGB, (N, 3, height, width)
            or, slower, (N, height, width, 3).

    Returns:
        ``out``.

    Raises:
        ImageError: an image is not whole; it says which. The others are decoded, and its part of
            ``out`` has no meaning.
        ConfigError: ``out`` is not as described, or OpenCV is not installed.

    """
    pixels = _array_of(out)
    if pixels.ndim != 4 or len(pixels) != len(images):
        raise ConfigError(
            f"out for {len(images)} images must have the shape ({len(images)}, 3, height, width) "
            f"or ({len(images)}, height, width, 3), got {pixels.shape}"
        )
    errors: dict[int, ImageError] = {}
    numbers: list[int] = []
    encoded: list[Buffer] = []
    maps: list[ImageMap] = []
    outputs = [_output(part) for part in pixels]
    for number, (data, output) in enumerate(zip(images, outputs, strict=True)):
        try:
            file = _bytes_of(data)
            info = probe(file)
        except ImageError as error:
            errors[number] = error
            continue
        numbers.append(number)
        encoded.append(file)
        identity = ImageMap.identity((info.width, info.height))
        maps.append(identity.resize(*output.size))
    if all(output.is_planes for output in outputs):
        planes = [outputs[number].pixels for number in numbers]
        faults = _load_decoder().decode_images(encoded, maps, planes)
        pairs = zip(numbers, faults, strict=True)
        errors |= {number: error for number, error in pairs if error is not None}
    else:
        for number, file, image_map in zip(numbers, encoded, maps, strict=True):
            try:
                _decode_interleaved(file, image_map, outputs[number].pixels, "rgb")
            except ImageError as error:
                errors[number] = error
    if errors:
        number = min(errors)
        place = f"image {number}"
        if len(errors) > 1:
            place += f" (and {len(errors) - 1} others)"
        raise ImageError(f"{place}: {errors[number]}") from errors[number]
    return out


@functools.cache
def _load_decoder() -> TurboDecoder:
    with needs("decode_jpeg"):
        from fuelrail.loaders.decode.turbo import TurboDecoder
    return TurboDecoder()


def _decode_interleaved(
    encoded: Buffer,
    image_map: ImageMap,
    pixels: U8,
    order: str,
) -> None:
    width, height = image_map.out_wh
    memory = _scratch.take("planes", 3 * height, width, 1)
    planes = memory.reshape(3, height, width)
    _load_decoder().decode_into(encoded, image_map, planes)
    import cv2  # which the decoder has loaded

    if order == "bgr":
        planes = planes[::-1]
    cv2.merge(list(planes), pixels)


def _bytes_of(data: Buffer | U8 | torch.Tensor) -> Buffer:
    if isinstance(data, bytes | bytearray):
        return data
    array = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else _array_of(data)
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise ConfigError(
            "an encoded image must be bytes, or a contiguous uint8 array of one axis, got "
            f"{array.dtype} {array.shape}"
        )
    return array.data


def _array_of(value: Any) -> NDArray[Any]:
    """Return an array, or that of a tensor's memory."""
    if isinstance(value, np.ndarray):
        return value
    try:
        array = value.numpy()  # torch's: no copy, and refused for other devices
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"expected bytes, a NumPy array or a CPU tensor, got {type(value).__name__}: {error}"
        ) from error
    assert isinstance(array, np.ndarray)
    return array


def _output(out: Any) -> _Output:
    """Return what memory is for; where its shape says both, it is interleaved."""
    pixels = _array_of(out)
    is_planes = pixels.ndim == 3 and pixels.shape[0] == 3 and pixels.shape[2] != 3
    shape = pixels.shape[1:] if is_planes else pixels.shape[:2]
    if (
        pixels.dtype != np.uint8
        or pixels.ndim != 3
        or (not is_planes and pixels.shape[2] != 3)
        or not (pixels.flags.c_contiguous and pixels.flags.writeable)
    ):
        raise ConfigError(
            "out must be writable, contiguous uint8 memory of shape (height, width, 3) or (3, "
            f"height, width), got {pixels.dtype} {pixels.shape} with strides {pixels.strides}"
        )
    height, width = shape
    return _Output(pixels, (width, height), is_planes)
