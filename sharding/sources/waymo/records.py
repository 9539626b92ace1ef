"""Records of TFRecord files.

A record is its length (u64), the masked CRC32C of that (u32), its bytes, and their masked CRC32C,
little-endian (tensorflow/core/lib/io/record_writer.h).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.files import LFS_MAGIC

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.windows import FileWindow

_HEAD: Final = struct.Struct("<QI")
_U32: Final = struct.Struct("<I")
_MASK: Final = 0xA282EAD8
_CRC_CHUNK: Final = 1 << 20


class FileRecord(NamedTuple):
    """Where a record's bytes begin and end in the file."""

    number: int
    start: int
    end: int


def records(
    window: FileWindow,
    *,
    read_whole: bool,
    payloads: bool,
) -> Iterator[FileRecord]:
    """Yield the records of a file, in order; check the checksums of lengths, with ``payloads``
    those of bytes too.

    ``read_whole`` reads each record at once. Raises SourceError for a bad checksum and for a file
    that is cut off.
    """
    import google_crc32c

    position = 0
    number = 0
    if not window.num_bytes:
        raise SourceError(f"{window.where} is empty")
    while position < window.num_bytes:
        head = window.read(position, _HEAD.size)
        place = f"{window.where}: record {number} at byte {position}"
        if not number and LFS_MAGIC.startswith(head):
            raise SourceError(
                f"{window.where} is a git-LFS pointer; run `git lfs pull` in the source first"
            )
        if len(head) < _HEAD.size:
            raise SourceError(f"{place} is cut off: the file has {window.num_bytes} bytes")
        length, crc = _HEAD.unpack(head)
        if masked(google_crc32c.value(head[:8])) != crc:
            problem = (
                "is not a TFRecord"
                if not number
                else "does not begin with a length and its checksum"
            )
            raise SourceError(
                f"{place} {problem}: the CRC32C of its length does not agree; the file is damaged"
            )
        start = position + _HEAD.size
        end = position + _HEAD.size + length
        if end + _U32.size > window.num_bytes:
            raise SourceError(
                f"{place} is cut off: it ends at {end + _U32.size}, the file has "
                f"{window.num_bytes} bytes"
            )
        if payloads:
            crc = 0
            for offset in range(start, end, _CRC_CHUNK):
                num_bytes = min(_CRC_CHUNK, end - offset)
                crc = google_crc32c.extend(crc, window.read(offset, num_bytes))
            (stored_crc,) = _U32.unpack(window.read(end, _U32.size))
            if masked(crc) != stored_crc:
                raise SourceError(
                    f"{place}: the CRC32C of its {length} bytes does not agree; the file is damaged"
                )
        if read_whole:
            window.read(start, length)
        yield FileRecord(number, start, end)
        position = end + _U32.size
        number = number + 1


def masked(crc: int) -> int:
    """Mask a CRC32C as TFRecord files do: rotate it by 15 bits and add a constant."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
