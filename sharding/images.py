"""Is this an image that a loader will be able to decode? Looked at before the bytes go into a shard.

A header is parsed and the end is looked for; pixels are not decoded (``fuelrail verify --deep`` does that).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.errors import ImageError

if TYPE_CHECKING:
    from fuelrail.pipeline.buffers import Buffer

LFS_MAGIC: Final = b"version https://git-lfs"
_PNG_START: Final = b"\x89PNG\r\n\x1a\n"
_PNG_END: Final = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_END_OF_IMAGE: Final = b"\xff\xd9"
# Start-of-frame markers (ITU T.81 table B.1): C0 to CF without DHT (C4), JPG (C8) and DAC (CC).
_START_OF_FRAME: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH: Final = frozenset({0x01, *range(0xD0, 0xD9)})


def image_size(data: Buffer, extension: str) -> tuple[int, int]:
    """Width and height [px] of a whole encoded image (``jpg`` or ``png``).

    Raises ImageError for bytes of another kind, a broken header, or an image that is cut short.
    """
    view = memoryview(data)
    if bytes(view[: len(LFS_MAGIC)]) == LFS_MAGIC:
        raise ImageError("a git-LFS pointer, not an image; run `git lfs pull` in the source first")
    return _png_size(view) if extension == "png" else _jpeg_size(view)


def _jpeg_size(view: memoryview) -> tuple[int, int]:
    if bytes(view[:2]) != b"\xff\xd8":
        raise ImageError(f"not a JPEG: it starts with {bytes(view[:4]).hex(' ') or 'nothing'}, not with ff d8")
    size = _frame_size(view)
    if bytes(view[-2:]) != _END_OF_IMAGE:
        # Some cameras pad with zeros; anything else after the end, or no end at all, is a damaged file.
        tail = bytes(view).rstrip(b"\0")
        if not tail.endswith(_END_OF_IMAGE):
            raise ImageError(f"a truncated JPEG: {len(view)} bytes without the end-of-image marker ff d9")
    return size


def _frame_size(view: memoryview) -> tuple[int, int]:
    """Walk the segments up to the frame header: each is ff, marker, length (2 bytes, itself included)."""
    at, end = 2, len(view)
    while at + 4 <= end:
        if view[at] != 0xFF:
            raise ImageError(f"a JPEG with a broken header: no marker at byte {at}")
        marker = view[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        elif marker in _START_OF_FRAME and at + 9 <= end:
            height, width = struct.unpack_from(">HH", view, at + 5)
            if width == 0 or height == 0:
                raise ImageError(f"a JPEG of {width} x {height} pixels")
            return width, height
        elif marker in (0xD9, 0xDA):
            break
        else:
            length = int.from_bytes(view[at + 2 : at + 4], "big")
            if length < 2:
                raise ImageError(f"a JPEG with a broken header: segment of length {length} at byte {at}")
            at += 2 + length
    raise ImageError("a JPEG with a broken or truncated header: no frame header")


def _png_size(view: memoryview) -> tuple[int, int]:
    if bytes(view[:8]) != _PNG_START:
        raise ImageError(f"not a PNG: it starts with {bytes(view[:8]).hex(' ') or 'nothing'}")
    if len(view) < 33 or bytes(view[12:16]) != b"IHDR":
        raise ImageError("a PNG with a broken header")
    if bytes(view[-12:]) != _PNG_END:
        raise ImageError(f"a truncated PNG: {len(view)} bytes without the IEND chunk")
    width, height = struct.unpack_from(">II", view, 16)
    return width, height


def check_pixels(
    data: Buffer, extension: str, size: tuple[int, int] | None, *, key: str | None = None, member: str | None = None
) -> None:
    """Decode a whole image and hold its width and height [px] against ``size``; raises ImageError.

    All of the entropy-coded data is decoded (at an eighth of the size for a JPEG: the rest could not fail), and a
    decoder's warning, such as premature end of data, is an error.
    """
    try:
        found = image_size(data, extension)
        if extension == "png":
            _decode_png(data)
        else:
            _decode_jpeg(data)
    except ImageError as error:
        raise ImageError(error.message, key=key, member=member) from error
    if size is not None and found != size:
        raise ImageError(
            f"{found[0]} x {found[1]} pixels, meta.json says {size[0]} x {size[1]}", key=key, member=member
        )


def _decode_jpeg(data: Buffer) -> None:
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, "GRAY", min_height=1, min_width=1, strict=True)
    except ValueError as error:
        raise ImageError(f"a damaged JPEG: {error}") from error


def _decode_png(data: Buffer) -> None:
    import cv2
    import numpy as np

    if cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED) is None:
        raise ImageError("a damaged PNG: it cannot be decoded")
