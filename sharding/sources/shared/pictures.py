"""Encoded images of a source: what they are by their heads, whether they are whole, and whether their pixels decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

from msgspec import Meta

from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.sample.image_header import probe, unpack_png
from fuelrail.sharding.sources.shared.files import LFS_MAGIC

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.image_header import ImageInfo

JPEG_QUALITY: Final = 90
"""The quality of images that a source makes, where none is stated."""
HEAD_BYTES: Final = (4 << 10, 64 << 10)
"""How much of an image is read for its size; the second where the first does not reach the frame header."""
EXTENSION_OF: Final = {"jpg": "jpg", "jpeg": "jpg", "png": "png"}
Depth = Literal["head", "ends", "pixels"]
"""How much of an image a scan looks at."""

MaxDamaged = Annotated[float, Meta(ge=0, le=1)]
CHECK_IMAGES: Final = (
    "what the scan reads of images: head (where the size is not stated), ends (head and end of each, as `--check` and "
    "damaged_image do at least), pixels (each whole, and decodes it)"
)
_OF_DAMAGED: Final = ("damaged_image", "max_damaged", "check_images")
MAX_DAMAGED: Final = "largest share of damaged images that are left out; more are an error"
_STARTS: Final = {"jpg": b"\xff\xd8", "png": b"\x89PNG\r\n\x1a\n"}
_NAMES: Final = {"jpg": "JPEG", "png": "PNG"}
_PNG_END: Final = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_END_OF_IMAGE: Final = b"\xff\xd9"


class JpegForm(NamedTuple):
    """How frames become JPEGs: their quality, and the size of the JPEG for a frame's, (w, h) [px]; None: the same.

    A `StoredJpeg` comes of a stated size: it is scaled and encoded as it is to be stored.
    """

    quality: int = JPEG_QUALITY
    size: Callable[[tuple[int, int]], tuple[int, int]] | None = None


class StoredJpeg(bytes):
    """An image that is as it is to be stored: no step of the writer scales and encodes it again."""


class ImagePolicy(NamedTuple):
    """Options on images: what becomes of missing and of damaged ones, and how much of each the scan looks at.

    ``looks_at_made``: also at those that a source makes, for which it reads all of each.
    """

    missing: str
    damaged: str
    depth: Depth
    looks_at_made: bool


def recorded(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a source for its recipe: those of damaged images change no byte where these are errors."""
    if options["damaged_image"] == "error":
        return {name: value for name, value in options.items() if name not in _OF_DAMAGED}
    return options


def image_size(data: Buffer, extension: str) -> tuple[int, int]:
    """Return width and height [px] of a whole encoded image (``jpg`` or ``png``).

    Raises ImageError for bytes of another kind, an image that is cut short, and all that the loader refuses by the
    header (`fuelrail.pipeline.sample.image_header.probe`).
    """
    view = memoryview(data)
    if bytes(view[: len(LFS_MAGIC)]) == LFS_MAGIC:
        raise ImageError("a git-LFS pointer, not an image; run `git lfs pull` in the source first")
    start = _STARTS[extension]
    if bytes(view[: len(start)]) != start:
        other = next(
            (one for one, begin in _STARTS.items() if bytes(view[: len(begin)]) == begin), None
        )
        if other is not None:
            raise ImageError(
                f"a {_NAMES[other]}, not a {_NAMES[extension]} as its name says; name it .{other}"
            )
        raise ImageError(
            f"not a {_NAMES[extension]}: it starts with {bytes(view[:4]).hex(' ') or 'nothing'}"
        )
    info = probe(view)
    _check_end(view, extension, len(view))
    return info.width, info.height


def _check_end(tail: memoryview, extension: str, num_bytes: int) -> None:
    """Raise ImageError where the last bytes of an image are not its end."""
    if extension == "png" and bytes(tail[-12:]) != _PNG_END:
        raise ImageError(f"a truncated PNG: {num_bytes} bytes without the IEND chunk")
    # Some cameras pad with zeros; anything else after the end, or no end, is a damaged file.
    is_cut = extension == "jpg" and bytes(tail[-2:]) != _END_OF_IMAGE
    if is_cut and not bytes(tail).rstrip(b"\0").endswith(_END_OF_IMAGE):
        raise ImageError(
            f"a truncated JPEG: {num_bytes} bytes without the end-of-image marker ff d9"
        )


def examined(read: Callable[[int, int], Buffer], num_bytes: int, depth: Depth) -> ImageInfo:
    """Return what an image of ``num_bytes`` is by its head, after a look at as much of it as ``depth`` says.

    ``read(offset, length)`` reads. Raises ImageError for one that is damaged, SourceError where it cannot be read.
    """
    fault = ImageError("image is empty (0 bytes)")
    for most in (*HEAD_BYTES, *([] if depth == "head" else [num_bytes])):
        head = read(0, min(most, num_bytes))
        try:
            info = probe(head)
            if depth == "ends":
                tail = head if len(head) >= num_bytes else read(num_bytes - len(head), len(head))
                _check_end(memoryview(tail), EXTENSION_OF[info.format], num_bytes)
        except ImageError as error:
            fault = error
            if most >= num_bytes:
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
            f"{found[0]} x {found[1]} pixels, meta.json says {size[0]} x {size[1]}",
            key=key,
            member=member,
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
