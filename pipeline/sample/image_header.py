"""Reads image headers: what is it, how large, and is it something that the decoders take? No pixel
is decoded.

The writer, ``verify --deep`` and the loader use these rules, so that a stored image is one that can
be loaded. Strict on purpose. Headers are the cheapest place to refuse hostile or mistaken bytes,
before any decoder allocates. JPEG after ITU-T T.81 annex B; Exif orientation after TIFF 6.0; PNG
after the W3C recommendation.
"""

from __future__ import annotations

import functools
import re
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from fuelrail.pipeline.errors import ImageError

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

MAX_PIXELS = 1 << 26
"""Largest image decoded by default: 67 megapixels, several times the largest automotive
camera's.
"""

MAX_SCANS = 100
"""Progressive JPEGs have about ten scans. Thousands keep a decoder busy for minutes."""

MAX_SCANNED_PIXELS: Final = 16 * MAX_PIXELS
"""Largest product of a JPEG's scans and pixels, because a decoder visits each block in each scan.

It bounds the time to about 1.5 s of a core. It permits 12 scans of the largest image, and 100 scans
of 10 megapixels.
"""

_SOF_REFUSED = {
    3: "lossless",
    5: "hierarchical",
    6: "hierarchical",
    7: "lossless hierarchical",
    9: "arithmetic-coded",
    10: "arithmetic-coded progressive",
    11: "arithmetic-coded lossless",
    13: "arithmetic-coded hierarchical",
    14: "arithmetic-coded hierarchical",
    15: "arithmetic-coded hierarchical",
}
_SUBSAMPLING = {
    (1, 1): "4:4:4",
    (2, 1): "4:2:2",
    (2, 2): "4:2:0",
    (1, 2): "4:4:0",
    (4, 1): "4:1:1",
    (4, 2): "4:1:0",
}
_MOST_BLOCKS_OF_MCU: Final = 10
_COLOR_SPACES = {1: "gray", 3: "color", 4: "cmyk"}
_REENCODE = "re-encode it as 8-bit baseline or progressive JPEG"
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""The passes of an interlaced PNG: first column, first row, and the steps between columns and
between rows.
"""
_FACTORS = frozenset(16 * across + down for across in range(1, 5) for down in range(1, 5))
_MARKER: Final = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
"""A marker but for those that are inside of entropy-coded data: stuffed zeros, restarts and fill
bytes.
"""
_U16 = struct.Struct(">H").unpack_from
_SEGMENT = struct.Struct(">HH").unpack_from
_PASSED_OVER = frozenset({0xFFC4, 0xFFDB, 0xFFFE, *range(0xFFE0, 0xFFF0)} - {0xFFE1})
"""Markers of tables, comments and applications: most of a header's segments, of which the length
alone counts.
"""
_SOF = struct.Struct(">BHHB").unpack_from


class ImageInfo(NamedTuple):
    """The header of an encoded image.

    ``subsampling`` is "4:2:0" and the like, "gray" for one component, "other" for factors without a
    name, and "" for PNG. ``restart_interval`` counts MCUs, 0 for none. ``orientation`` is Exif's 1
    to 8, reported and never applied. ``frame_at`` and ``scan_at`` are the bytes where a JPEG's
    frame header (its marker) and the entropy-coded data of its first scan begin; 0 for PNG.
    """

    width: int
    height: int
    format: Literal["jpeg", "png"]
    num_components: int
    bits: int
    subsampling: str
    progressive: bool
    restart_interval: int
    orientation: int
    frame_at: int = 0
    scan_at: int = 0

    @property
    def is_cmyk(self) -> bool:
        """A JPEG of four components: CMYK or YCCK."""
        return self.num_components == 4 and self.format == "jpeg"


def probe(
    encoded: Buffer,
    max_pixels: int = MAX_PIXELS,
    *,
    bits: tuple[int, ...] = (8,),
) -> ImageInfo:
    """Read the header of a JPEG or PNG; ``bits`` are those that a channel of a PNG may have.

    Raises ImageError for anything else (naming common mistakes such as git-LFS pointers), for
    images over ``max_pixels``, for JPEGs whose scans would take too long, and for coding variants
    that no decoder takes: 12-bit, lossless, arithmetic, hierarchical JPEG; palette PNG, and 16-bit
    PNG unless ``bits`` has it.
    """
    if encoded[:2] == b"\xff\xd8":
        info = _probe_jpeg(encoded)
    elif encoded[:8] == _PNG_SIGNATURE:
        info = _probe_png(encoded, bits)
    else:
        raise ImageError(_describe_stranger(bytes(encoded[:512])))
    if info.width * info.height > max_pixels:
        raise ImageError(
            f"image of {info.width}x{info.height} pixels is over the limit of {max_pixels} pixels"
        )
    return info


def _check_scans(encoded: Buffer, width: int, height: int) -> None:
    """Refuse a JPEG of several scans that would keep a decoder busy for long."""
    num_scans = bytes(encoded).count(b"\xff\xda")
    if num_scans > MAX_SCANS:
        raise ImageError(f"JPEG has {num_scans} scans, more than {MAX_SCANS}: refused as hostile")
    if num_scans * width * height > MAX_SCANNED_PIXELS:
        raise ImageError(
            f"JPEG of {width}x{height} pixels has {num_scans} scans; scans times pixels may "
            f"be at most {MAX_SCANNED_PIXELS}: re-encode it with fewer scans"
        )


def _probe_jpeg(encoded: Buffer) -> ImageInfo:
    end = len(encoded)
    position = 2
    # Marker, precision, height, width, count, factors.
    sof: tuple[int, int, int, int, int, bytes] | None = None
    restart_interval = 0
    orientation = 1
    frame_at = 0
    while True:
        if position + 4 > end:
            raise ImageError(f"JPEG of {end} bytes ends inside its header: the file was cut")
        marker, length = _SEGMENT(encoded, position)
        if marker in _PASSED_OVER and 2 <= length <= end - position - 2:
            position += 2 + length
            continue
        if marker < 0xFF00:
            raise ImageError(
                f"JPEG header is broken: expected a marker at byte {position}, found "
                f"0x{marker >> 8:02x}"
            )
        if marker == 0xFFFF:  # fill byte
            position += 1
            continue
        if not 0xFFC0 <= marker <= 0xFFFE or 0xFFD0 <= marker <= 0xFFD9:
            raise ImageError(
                f"JPEG header is broken: marker 0x{marker:04x} at byte {position} is not "
                "allowed there"
            )
        if length < 2 or position + 2 + length > end:
            raise ImageError(
                f"JPEG header is broken: segment 0x{marker:04x} at byte {position} claims "
                f"{length} bytes"
            )
        if marker == 0xFFDA:
            break
        if marker == 0xFFDD and length == 4:
            (restart_interval,) = _U16(encoded, position + 4)
        elif (
            marker == 0xFFE1
            and length >= 16
            and encoded[position + 4 : position + 10] == b"Exif\0\0"
        ):
            tiff = encoded[position + 10 : position + 2 + length]
            orientation = _exif_orientation(bytes(tiff))
        elif marker <= 0xFFCF and marker not in (0xFFC8, 0xFFCC):
            if sof is not None:
                raise ImageError(f"JPEG header is broken: a second frame header at byte {position}")
            precision, height, width, count = (
                _SOF(encoded, position + 4) if length >= 8 else (0, 0, 0, 0)
            )
            if length != 8 + 3 * count:
                raise ImageError(
                    f"JPEG header is broken: frame header of {length} bytes for {count} components"
                )
            frame_at = position
            components_end = position + 10 + 3 * count
            factors = bytes(encoded[position + 11 : components_end : 3])
            sof = (
                marker - 0xFFC0,
                precision,
                height,
                width,
                count,
                factors,
            )
        position += 2 + length
    if sof is None:
        raise ImageError("JPEG header is broken: pixel data start without a frame header")
    kind, precision, height, width, count, factors = sof
    if kind in _SOF_REFUSED:
        raise ImageError(f"{_SOF_REFUSED[kind]} JPEG is not supported: {_REENCODE}")
    if precision != 8:
        raise ImageError(f"{precision}-bit JPEG is not supported: {_REENCODE}")
    if width == 0 or height == 0:
        raise ImageError(f"JPEG header gives a size of {width}x{height} pixels")
    if count not in _COLOR_SPACES:
        raise ImageError(
            f"JPEG of {count} components is not supported: 1 (gray), 3 (color) or 4 (CMYK) are"
        )
    if not _FACTORS.issuperset(factors):
        raise ImageError(f"JPEG header is broken: sampling factors {factors.hex(' ')}")
    subsampling = _subsampling(factors)
    if subsampling is None:
        raise ImageError(
            f"JPEG with the sampling factors {factors.hex(' ')} is not supported: "
            f"{_REENCODE} of 4:4:4 or 4:2:0"
        )
    if kind == 2 or encoded[position + 4] != count:
        _check_scans(encoded, width, height)
    return ImageInfo(
        width=width,
        height=height,
        format="jpeg",
        num_components=count,
        bits=8,
        subsampling=subsampling,
        progressive=kind == 2,
        restart_interval=restart_interval,
        orientation=orientation,
        frame_at=frame_at,
        scan_at=position + 2 + length,
    )


@functools.lru_cache(256)
def _subsampling(factors: bytes) -> str | None:
    """Name the chroma subsampling of 0xHV sampling factors; None where libjpeg does not decode
    them: it takes whole ratios, and at most ten blocks in an MCU.
    """
    if len(factors) == 1:
        return "gray"
    across = [factor >> 4 for factor in factors]
    down = [factor & 15 for factor in factors]
    num_blocks = sum(a * b for a, b in zip(across, down, strict=True))
    if num_blocks > _MOST_BLOCKS_OF_MCU:
        return None
    for sides in (across, down):
        largest = max(sides)
        if any(largest % side for side in sides):
            return None
    luma_across, chroma_across = across[:2]
    luma_down, chroma_down = down[:2]
    if factors[2] != factors[1] or luma_across % chroma_across or luma_down % chroma_down:
        return "other"
    ratios = (luma_across // chroma_across, luma_down // chroma_down)
    return _SUBSAMPLING.get(ratios, "other")


def _exif_orientation(tiff: bytes) -> int:
    """Return tag 0x0112 of the first directory; 1 where it is absent, malformed or out of range."""
    orders = {b"II*\0": "<", b"MM\0*": ">"}
    order = orders.get(tiff[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (num_entries,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(min(num_entries, 64)):
            place = start + 2 + 12 * entry
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, place)
            if tag == 0x0112:
                if 1 <= value <= 8:
                    return int(value)
                return 1
    except struct.error:
        return 1
    return 1


def _probe_png(encoded: Buffer, allowed: tuple[int, ...] = (8,)) -> ImageInfo:
    if len(encoded) < 33 or encoded[8:16] != b"\0\0\0\rIHDR":
        raise ImageError(f"PNG of {len(encoded)} bytes ends inside its header: the file was cut")
    width, height, bits, color_type = struct.unpack_from(">IIBB", encoded, 16)
    if width == 0 or height == 0:
        raise ImageError(f"PNG header gives a size of {width}x{height} pixels")
    if bits not in allowed or color_type not in _PNG_CHANNELS:
        raise ImageError(
            f"PNG of {bits} bits and colour type {color_type} is not supported: "
            f"{' or '.join(map(str, allowed))}-bit gray and RGB are, with or without alpha"
        )
    if encoded[26] or encoded[27] or encoded[28] > 1:
        raise ImageError(f"PNG header is broken: its methods are {bytes(encoded[26:29]).hex(' ')}")
    return ImageInfo(
        width=width,
        height=height,
        format="png",
        num_components=_PNG_CHANNELS[color_type],
        bits=bits,
        subsampling="",
        progressive=False,
        restart_interval=0,
        orientation=1,
    )


def check_jpeg_end(encoded: Buffer) -> None:
    """Refuse a JPEG without an end-of-image marker: it was cut.

    Anything may follow the marker: a film, a second picture, a line feed. For decoders that read
    only some rows, or fill up what is missing. Raises ImageError.
    """
    if encoded[-2:] != b"\xff\xd9" and jpeg_length(encoded) is None:
        raise ImageError(
            f"JPEG of {len(encoded)} bytes has no end-of-image marker: the file was cut"
        )


def jpeg_length(encoded: Buffer) -> int | None:
    """Return the bytes of a JPEG up to its end-of-image marker, found marker by marker; None where
    there is none.

    ``encoded`` begins with a sound header; what follows the marker counts for nothing.
    """
    data = bytes(encoded)
    position = 2
    while (match := _MARKER.search(data, position)) is not None:
        position = match.end()
        if match[0][1] == 0xD9:
            return position
        if match[0][1] != 0x01:  # of arithmetic coding, without a segment
            if position + 2 > len(data):
                return None
            position += int(_U16(data, position)[0])
    return None


def png_length(encoded: Buffer) -> int | None:
    """Return the bytes of a PNG up to the end of its IEND chunk; None where there is none."""
    position = len(_PNG_SIGNATURE)
    length: int
    while position + 12 <= len(encoded):
        (length,) = struct.unpack_from(">I", encoded, position)
        name = bytes(encoded[position + 4 : position + 8])
        position += 12 + length
        if name == b"IEND":
            if bytes(encoded[position - 8 : position]) == b"IEND\xaeB`\x82":
                return position
            return None
    return None


def unpack_png(encoded: Buffer, *, bits: tuple[int, ...] = (8,)) -> bytes:
    """Check a whole PNG; return it with its pixel data uncompressed and without further chunks.

    Raises ImageError.

    The checksum of every chunk is verified. Pixel data are expanded to the size that the header
    states; more or less is refused. libpng-based decoders give half-decoded pictures of cut or
    damaged files without an error, and expand what follows the pixels without a limit. They read
    uncompressed data in a fourth of the time, which pays for a part of the check.
    """
    info = _probe_png(encoded, bits)
    packed = b"".join(data for name, data in _png_chunks(encoded) if name == b"IDAT")
    # A byte for the filter, then the pixels, of each row.
    num_bytes = 0
    for left, top, step_x, step_y in _ADAM7 if encoded[28] == 1 else ((0, 0, 1, 1),):
        width = -((left - info.width) // step_x)
        height = -((top - info.height) // step_y)
        if width > 0 and height > 0:
            num_bytes += height * (1 + -(-width * info.num_components * info.bits // 8))
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(packed, num_bytes + 1)
    except zlib.error as error:
        raise ImageError(f"PNG cannot be decoded: its pixel data are broken ({error})") from error
    if len(raw) > num_bytes or inflate.unused_data:
        raise ImageError(
            f"PNG has more data than its {info.width}x{info.height} pixels: refused as hostile"
        )
    if len(raw) < num_bytes or not inflate.eof:
        raise ImageError(f"PNG has {len(raw)} of {num_bytes} bytes of pixel data: the file was cut")
    header = bytes(encoded[16:29])
    return b"".join(
        (
            _PNG_SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(raw, 0)),
            _chunk(b"IEND"),
        )
    )


def gray_of_palette(encoded: Buffer) -> bytes:
    """Return a PNG with a palette as a gray one, whose pixels are the indices; raises ImageError
    for a damaged one.

    A gray PNG of as many bits is returned with the same pixels, without further chunks.
    """
    parts = [_PNG_SIGNATURE]
    for name, data in _png_chunks(encoded):
        if name == b"IHDR":
            header = bytearray(data)
            header[9] = 0  # the type of colour: gray
            parts.append(_chunk(name, bytes(header)))
        elif name in (b"IDAT", b"IEND"):
            parts.append(_chunk(name, bytes(data)))
    return b"".join(parts)


def _png_chunks(encoded: Buffer) -> Iterator[tuple[bytes, memoryview]]:
    """Yield name and data of each chunk up to the end chunk; raises ImageError for a damaged or
    missing one.
    """
    end = len(encoded)
    position = 8
    view = memoryview(encoded)
    while position + 12 <= end:
        (length,) = struct.unpack_from(">I", encoded, position)
        if position + 12 + length > end:
            break
        (stored,) = struct.unpack_from(">I", encoded, position + 8 + length)
        if zlib.crc32(view[position + 4 : position + 8 + length]) != stored:
            raise ImageError(
                f"PNG chunk at byte {position} fails its checksum: the file is damaged"
            )
        name = bytes(view[position + 4 : position + 8])
        yield name, view[position + 8 : position + 8 + length]
        if name == b"IEND":
            return
        position += 12 + length
    raise ImageError(f"PNG of {end} bytes has no end chunk: the file was cut")


def _chunk(name: bytes, data: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(data))
        + name
        + data
        + struct.pack(">I", zlib.crc32(data, zlib.crc32(name)))
    )


def _describe_stranger(head: bytes) -> str:
    """Say what bytes that are neither JPEG nor PNG look like, for the user to find the mistake."""
    if not head:
        return "image is empty (0 bytes)"
    if head.startswith(b"version https://git-lfs"):
        return (
            "image is a git-LFS pointer, not the picture itself: run 'git lfs pull' where the "
            "data came from"
        )
    text = head.lstrip()[:64].lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "image is an HTML or XML page: the download that made it has failed"
    if not head.strip(b"\0"):
        return (
            "image starts with zero bytes: the file was not written out (disk full, crash "
            "during a copy?)"
        )
    names = {
        b"RIFF": "WebP",
        b"GIF8": "GIF",
        b"BM": "BMP",
        b"II*\0": "TIFF",
        b"MM\0*": "TIFF",
        b"\x00\x00\x00\x0cjP": "JPEG 2000",
        b"\xff\x4f\xff\x51": "JPEG 2000",
        b"\xff\x0a": "JPEG XL",
    }
    for magic, name in names.items():
        if head.startswith(magic):
            return f"image is {name}; JPEG and PNG are supported"
    return f"image is neither JPEG nor PNG: it starts with bytes {head[:8].hex(' ')}"
