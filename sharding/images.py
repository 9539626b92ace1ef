"""Is this an image that a loader will be able to decode? Looked at before the bytes go into a shard.

A header is parsed and the end is looked for; pixels are not decoded (``fuelrail verify --deep`` does that).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.image_header import probe, unpack_png

if TYPE_CHECKING:
    from fuelrail.pipeline.buffers import Buffer

LFS_MAGIC: Final = b"version https://git-lfs"
_STARTS: Final = {"jpg": b"\xff\xd8", "png": b"\x89PNG\r\n\x1a\n"}
_NAMES: Final = {"jpg": "JPEG", "png": "PNG"}
_PNG_END: Final = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_END_OF_IMAGE: Final = b"\xff\xd9"


def image_size(data: Buffer, extension: str) -> tuple[int, int]:
    """Width and height [px] of a whole encoded image (``jpg`` or ``png``).

    Raises ImageError for bytes of another kind, an image that is cut short, and whatever the loader refuses by the
    header (`fuelrail.pipeline.image_header.probe`).
    """
    view = memoryview(data)
    if bytes(view[: len(LFS_MAGIC)]) == LFS_MAGIC:
        raise ImageError("a git-LFS pointer, not an image; run `git lfs pull` in the source first")
    start = _STARTS[extension]
    if bytes(view[: len(start)]) != start:
        raise ImageError(f"not a {_NAMES[extension]}: it starts with {bytes(view[:4]).hex(' ') or 'nothing'}")
    info = probe(view)
    if extension == "png" and bytes(view[-12:]) != _PNG_END:
        raise ImageError(f"a truncated PNG: {len(view)} bytes without the IEND chunk")
    if extension == "jpg" and bytes(view[-2:]) != _END_OF_IMAGE:
        # Some cameras pad with zeros; anything else after the end, or no end at all, is a damaged file.
        tail = bytes(view).rstrip(b"\0")
        if not tail.endswith(_END_OF_IMAGE):
            raise ImageError(f"a truncated JPEG: {len(view)} bytes without the end-of-image marker ff d9")
    return info.width, info.height


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

    try:
        image = cv2.imdecode(np.frombuffer(unpack_png(data), np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise ImageError(f"a damaged PNG: {error}") from error
    if image is None:
        raise ImageError("a damaged PNG: it cannot be decoded")
