"""Encoded images of a source: what they are by their heads, whether they are whole, and whether
their pixels decode.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

from msgspec import Meta

from fuelrail.pipeline.errors import ImageError, needs
from fuelrail.pipeline.sample.image_header import (
    MAX_PIXELS,
    ImageInfo,
    gray_of_palette,
    jpeg_length,
    png_length,
    probe,
    unpack_png,
)
from fuelrail.sharding.sources.shared.files import LFS_MAGIC

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

JPEG_QUALITY: Final = 90
"""The quality of images that a source makes, where none is stated."""
HEAD_BYTES: Final = (4 << 10, 64 << 10)
"""How much of an image is read for its size; the second where the first does not reach the frame
header.
"""
EXTENSION_OF: Final = {"jpg": "jpg", "jpeg": "jpg", "png": "png"}
Depth = Literal["head", "ends", "pixels"]
"""How much of an image a scan looks at."""

MaxDamaged = Annotated[float, Meta(ge=0, le=1)]
CHECK_IMAGES: Final = (
    "what the scan reads of images: head (where the size is not stated), ends (head and end "
    "of each, as `--check` and damaged_image do at least), pixels (each whole, and decodes it)"
)
CONVERTED: Final = "PNGs with a palette or of fewer than 8 bits, stored as PNGs of 8 bits"
"""Names such images in the report of a scan."""
_OF_DAMAGED: Final = ("damaged_image", "max_damaged", "check_images")
_LATER: Final = {"ignore_zeros": False, "gather": False}
MAX_DAMAGED: Final = "largest share of damaged images that are left out; more are an error"
_STARTS: Final = {"jpg": b"\xff\xd8", "png": b"\x89PNG\r\n\x1a\n"}
_NAMES: Final = {"jpg": "JPEG", "png": "PNG"}
_PNG_HEADER_BYTES: Final = 33
_GRAY = 0
_PALETTE = 3
_PNG_END: Final = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_END_OF_IMAGE: Final = b"\xff\xd9"


class JpegForm(NamedTuple):
    """How frames become JPEGs: their quality, and the size of the JPEG for a frame's, (w, h) [px];
    None: the same.

    A `StoredJpeg` comes of a stated size: it is scaled and encoded as it is to be stored.
    """

    quality: int = JPEG_QUALITY
    size: Callable[[tuple[int, int]], tuple[int, int]] | None = None


class StoredJpeg(bytes):
    """An image that is as it is to be stored: no step of the writer scales and encodes it again."""


class ImagePolicy(NamedTuple):
    """Options on images: what becomes of missing and of damaged ones, and how much of each the scan
    looks at.

    ``looks_at_made``: also at those that a source makes, for which it reads all of each.
    """

    missing: str
    damaged: str
    depth: Depth
    looks_at_made: bool


def recorded(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a source for its recipe: those of damaged images change no byte where
    these are errors.

    Options that came later are in a recipe where they are not the default, so that older recipes
    are the same.
    """
    omitted = [name for name, default in _LATER.items() if options.get(name) == default]
    if options["damaged_image"] == "error":
        omitted += _OF_DAMAGED
    return {name: value for name, value in options.items() if name not in omitted}


def image_size(data: Buffer, extension: str) -> tuple[int, int]:
    """Return width and height [px] of a whole encoded image (``jpg`` or ``png``).

    Raises ImageError for bytes of another kind, an image that is cut short, and all that the loader
    refuses by the header (`fuelrail.pipeline.sample.image_header.probe`).
    """
    view = memoryview(data)
    if bytes(view[: len(LFS_MAGIC)]) == LFS_MAGIC:
        raise ImageError("a git-LFS pointer, not an image; run `git lfs pull` in the source first")
    start = _STARTS[extension]
    if bytes(view[: len(start)]) != start:
        actual = next(
            (name for name, begin in _STARTS.items() if bytes(view[: len(begin)]) == begin),
            None,
        )
        if actual is not None:
            raise ImageError(
                f"a {_NAMES[actual]}, not a {_NAMES[extension]} as its name says; name it .{actual}"
            )
        raise ImageError(
            f"not a {_NAMES[extension]}: it starts with {bytes(view[:4]).hex(' ') or 'nothing'}"
        )
    info = probe(view)
    if not _is_end(view, extension):
        _check_end(view, extension)
    return info.width, info.height


class ConvertiblePng(ImageInfo):
    """The header of a PNG with a palette, or of fewer than 8 bits, which :func:`plain_png` makes
    one that is stored.
    """


def convertible_png(head: Buffer) -> ConvertiblePng | None:
    """Return the header of a PNG that can be converted without a change of its colours; None for
    other images.
    """
    is_png = bytes(head[: len(_STARTS["png"])]) == _STARTS["png"]
    if not is_png or len(head) < _PNG_HEADER_BYTES:
        return None
    width, height, bits, colour = struct.unpack_from(">IIBB", head, 16)
    is_odd = colour == _PALETTE or (colour == _GRAY and bits < 8)
    has_size = 0 < width * height <= MAX_PIXELS
    if not is_odd or bits not in (1, 2, 4, 8) or not has_size:
        return None
    components = 3 if colour == _PALETTE else 1
    return ConvertiblePng(
        width,
        height,
        "png",
        num_components=components,
        bits=8,
        subsampling="",
        progressive=False,
        restart_interval=0,
        orientation=1,
    )


def plain_png(data: Buffer) -> Buffer:
    """Return a PNG with a palette, or of fewer than 8 bits, as one of 8 bits, and other images as
    they are.

    Colours stay what they are. Raises ImageError for one that is damaged.
    """
    if convertible_png(data) is None:
        return data

    import numpy as np

    with needs("a PNG with a palette, or of fewer than 8 bits,"):
        import cv2

    unpack_png(gray_of_palette(data), bits=(1, 2, 4, 8))
    encoded = np.frombuffer(data, np.uint8)
    pixels = cv2.imdecode(encoded, cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise ImageError("a damaged PNG: it cannot be decoded")
    return bytes(cv2.imencode(".png", pixels)[1])


def plain_or_damaged(data: Buffer) -> Buffer:
    """Return what :func:`plain_png` makes of an image that a source makes; a damaged one as it is,
    which the scan's look at images, or the writer, finds.
    """
    try:
        return plain_png(data)
    except ImageError:
        return data


def _is_end(tail: Buffer, extension: str) -> bool:
    """Return whether these last bytes of an image are its end."""
    if extension == "png":
        return bytes(tail[-len(_PNG_END) :]) == _PNG_END
    return bytes(tail[-len(_END_OF_IMAGE) :]) == _END_OF_IMAGE


def _check_end(data: Buffer, extension: str) -> None:
    """Raise ImageError for an image without an end, which other bytes may follow: zeros, a line
    feed, a film.
    """
    if extension == "png" and png_length(data) is None:
        raise ImageError(f"a truncated PNG: {len(data)} bytes without the IEND chunk")
    if extension == "jpg" and jpeg_length(data) is None:
        raise ImageError(
            f"a truncated JPEG: {len(data)} bytes without the end-of-image marker ff d9"
        )


def examined(
    read: Callable[[int, int], Buffer],
    num_bytes: int,
    depth: Depth,
) -> ImageInfo:
    """Return what an image of ``num_bytes`` is by its head, after a look at as much of it as
    ``depth`` says.

    ``read(offset, length)`` reads. Raises ImageError for one that is damaged, SourceError where it
    cannot be read.
    """
    fault = ImageError("image is empty (0 bytes)")
    limits = HEAD_BYTES if depth == "head" else (*HEAD_BYTES, num_bytes)
    for limit in limits:
        head = read(0, min(limit, num_bytes))
        convertible = convertible_png(head)
        if convertible is not None:
            if depth != "head":
                plain_png(read(0, num_bytes))
            return convertible
        try:
            info = probe(head)
            if depth == "ends":
                tail = head
                if len(head) < num_bytes:
                    tail = read(num_bytes - len(head), len(head))
                extension = EXTENSION_OF[info.format]
                if not _is_end(tail, extension):
                    _check_end(read(0, num_bytes), extension)
        except ImageError as error:
            fault = error
            if limit >= num_bytes:
                break
            continue
        if depth == "pixels":
            check_pixels(read(0, num_bytes), EXTENSION_OF[info.format], None)
        return info
    raise fault


def check_pixels(
    data: Buffer,
    extension: str,
    size: tuple[int, int] | None,
    *,
    key: str | None = None,
    member: str | None = None,
) -> None:
    """Decode a whole image and check its width and height [px] against ``size``; raises ImageError.

    All of the entropy-coded data is decoded (at an eighth of the size for a JPEG: the rest could
    not fail), and a decoder's warning, such as premature end of data, is an error.
    """
    try:
        actual_size = image_size(data, extension)
        if extension == "png":
            _decode_png(data)
        else:
            _decode_jpeg(data)
    except ImageError as error:
        raise ImageError(error.message, key=key, member=member) from error
    if size is not None and actual_size != size:
        raise ImageError(
            f"{actual_size[0]} x {actual_size[1]} pixels, meta.json says {size[0]} x {size[1]}",
            key=key,
            member=member,
        )


def _decode_jpeg(data: Buffer) -> None:
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, "GRAY", min_height=1, min_width=1, strict=True)
    except ValueError as error:
        # TurboJPEG knows the usual sampling factors alone; others decode, without its warnings.
        if "subsampling" in str(error):
            import numpy as np

            with needs("a JPEG with unusual sampling factors"):
                import cv2

            encoded = np.frombuffer(data, np.uint8)
            if cv2.imdecode(encoded, cv2.IMREAD_GRAYSCALE) is not None:
                return
        raise ImageError(f"a damaged JPEG: {error}") from error


def _decode_png(data: Buffer) -> None:
    import numpy as np

    with needs("the check of a PNG's pixels"):
        import cv2

    try:
        encoded = np.frombuffer(unpack_png(data), np.uint8)
        image = cv2.imdecode(encoded, cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise ImageError(f"a damaged PNG: {error}") from error
    if image is None:
        raise ImageError("a damaged PNG: it cannot be decoded")
