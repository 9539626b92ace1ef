"""Pictures of messages: which format they have, and raw ones as JPEG."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import simplejpeg

from fuelrail.pipeline.errors import ImageError, SourceError, needs
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.sharding.sources.shared.pictures import convertible_png

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.logs.messages.records import Picture

RAW_QUALITY: Final = 95
FULL: Final = (0, (1 << 16) - 1)
_PLAIN: Final = {
    "rgb8": ("RGB", 3),
    "bgr8": ("BGR", 3),
    "rgba8": ("RGBA", 4),
    "bgra8": ("BGRA", 4),
    "mono8": ("GRAY", 1),
}
_ORDERS: Final = ("rggb", "bggr", "gbrg", "grbg")
# OpenCV names a Bayer pattern by the second row's second and third pixel, ROS by the first row's
# first two.
_CONVERTED: Final = {
    "bayer_rggb8": ("COLOR_BayerBG2RGB", 1),
    "bayer_bggr8": ("COLOR_BayerRG2RGB", 1),
    "bayer_gbrg8": ("COLOR_BayerGR2RGB", 1),
    "bayer_grbg8": ("COLOR_BayerGB2RGB", 1),
    "yuv422": ("COLOR_YUV2RGB_UYVY", 2),
    "uyvy": ("COLOR_YUV2RGB_UYVY", 2),
    "yuv422_yuy2": ("COLOR_YUV2RGB_YUY2", 2),
    "yuyv": ("COLOR_YUV2RGB_YUY2", 2),
}
_DEEP: Final = {"mono16": "mono8", "16UC1": "mono8"} | {
    f"bayer_{order}16": f"bayer_{order}8" for order in _ORDERS
}
"""Encodings of 16 bits, and what they are with 8."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_DEPTH_HEAD_BYTES: Final = 12
"""What compressedDepth has before its PNG."""
ENCODINGS: Final = (*_PLAIN, *_CONVERTED, *_DEEP)


class EncodedHead(NamedTuple):
    """``text`` are the first bytes of a JPEG, which say its size [px] and are mostly those of
    the next one too. ``is_converted``: it is stored as a plain PNG.
    """

    text: bytes
    extension: str
    width: int
    height: int
    is_converted: bool = False


def encoded_head(read: Callable[[int], Buffer], length: int) -> EncodedHead:
    """Read the head of an encoded picture; ``read`` gives its first bytes.

    Raises ImageError for what is no JPEG or PNG that can be read.
    """
    for limit in (896, 4 << 10, 64 << 10, 1 << 20):
        head = read(min(limit, length))
        odd = convertible_png(head)
        if odd is not None:
            return EncodedHead(
                text=b"",
                extension="png",
                width=odd.width,
                height=odd.height,
                is_converted=True,
            )
        try:
            info = probe(head)
        except ImageError:
            if limit >= min(length, 1 << 20):
                raise
        else:
            extension = "png" if info.format == "png" else "jpg"
            return EncodedHead(
                text=bytes(head[: info.scan_at]),
                extension=extension,
                width=info.width,
                height=info.height,
            )
    raise AssertionError("the last part is the whole picture or the longest")


def check_no_depth(topic: str, form: str, head: Buffer) -> None:
    """Raise SourceError for a picture that is compressed depth, by its format or its bytes."""
    has_png = bytes(head[_DEPTH_HEAD_BYTES:][: len(_PNG)]) == _PNG
    if has_png or any(name in form for name in ("compressedDepth", "16UC1", "32FC1")):
        raise SourceError(
            f"topic '{topic}' has compressed depth ('{form}'), which is no image of a "
            "camera: name the topics of cameras without it, by the option cameras={CHANNEL: "
            "TOPIC, ...}; depth is written as a layer of the dataset (docs/layers.md)"
        )


def check_encoding(encoding: str, where: str, *, has_levels: bool) -> None:
    """Raise SourceError, naming ``where``, for a raw encoding that has no JPEG of 8 bits, or
    only by levels.
    """
    if encoding in _DEEP and not has_levels:
        raise SourceError(
            f"{where} has the encoding '{encoding}' of 16 bits, and images have 8: the "
            "option levels says which values become black and white, as levels={CHANNEL: "
            "[0, 4095]}; the option cameras leaves a topic out, as of depth"
        )
    if encoding not in ENCODINGS:
        raise SourceError(
            f"{where} has the encoding '{encoding}'; raw pictures are read of "
            f"{', '.join(ENCODINGS)}; the option cameras={{CHANNEL: TOPIC, ...}} leaves a topic "
            "out, as of depth"
        )


def raw_fault(picture: Picture) -> str:
    """Return why the pixels of a raw picture are not as many as it states; "" where they are."""
    encoding = _DEEP.get(picture.encoding, picture.encoding)
    _, channels = _PLAIN.get(encoding, ("RGB", 0))
    _, in_channels = _CONVERTED.get(encoding, ("", channels))
    row_bytes = picture.width * in_channels * (1 + (encoding != picture.encoding))
    if not picture.width or not picture.height:
        return f"a picture of {picture.width}x{picture.height} pixels"
    if picture.step >= row_bytes and picture.length >= picture.step * picture.height:
        return ""
    return (
        f"{picture.width}x{picture.height} pixels of {picture.encoding} in rows of "
        f"{picture.step} bytes do not fit into {picture.length} bytes"
    )


def raw_jpeg(
    data: Buffer,
    picture: Picture,
    where: str,
    levels: tuple[int, int] = FULL,
) -> bytes:
    """Encode a raw picture as JPEG of quality 95 without subsampled chroma; raises SourceError.

    ``levels`` are the values of 16 bits that become 0 and 255.
    """
    height = picture.height
    width = picture.width
    step = picture.step
    encoding = _DEEP.get(picture.encoding, picture.encoding)
    colour, channels = _PLAIN.get(encoding, ("RGB", 0))
    code, in_channels = _CONVERTED.get(encoding, ("", channels))
    row_bytes = width * in_channels * (1 + (encoding != picture.encoding))
    pixels = memoryview(data)[picture.offset : picture.offset + picture.length]
    fault = raw_fault(picture)
    if fault:
        raise SourceError(f"{where}: {fault}")
    table = np.frombuffer(pixels, np.uint8, step * height)
    rows = table.reshape(height, step)[:, :row_bytes]
    if encoding != picture.encoding:
        black, white = levels
        values = (
            np.ascontiguousarray(rows)
            .view(">u2" if picture.big_endian else "<u2")
            .astype(np.float32)
        )
        scale = 255 / (white - black)
        grey = np.rint((values - black) * scale)
        rows = np.clip(grey, 0, 255).astype(np.uint8)
    image = np.ascontiguousarray(rows.reshape(height, width, in_channels))
    if not channels:
        with needs("a raw picture of a camera's Bayer pattern or YUV"):
            import cv2

        converted = cv2.cvtColor(image, getattr(cv2, code))
        image = np.asarray(converted, np.uint8)
    encoded: bytes = simplejpeg.encode_jpeg(
        image, RAW_QUALITY, colour, "444" if colour != "GRAY" else "Gray"
    )
    return encoded
