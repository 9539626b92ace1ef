"""Records of TFRecord files, and the wire format of the protocol buffers in them.

A record is its length (u64), the masked CRC32C of that (u32), its bytes, and their masked CRC32C, little-endian
(tensorflow/core/lib/io/record_writer.h). Messages are walked after protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.files import LFS_MAGIC

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.windows import FileWindow

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

Fail: TypeAlias = "Callable[[int, str], NoReturn]"
"""Raises an error for what has this number."""
MAX_HEAD: Final = 20
"""Bytes of the longest key with the longest length."""
_HEAD: Final = struct.Struct("<QI")
_U32: Final = struct.Struct("<I")
_MASK: Final = 0xA282EAD8
_CRC_CHUNK: Final = 1 << 20


class FileRecord(NamedTuple):
    """Where a record's bytes begin and end in the file."""

    number: int
    start: int
    end: int


def records(window: FileWindow, *, whole: bool, payloads: bool) -> Iterator[FileRecord]:
    """Yield the records of a file, in order; check the checksums of lengths, with ``payloads`` those of bytes too.

    ``whole`` reads each record at once. Raises SourceError for a bad checksum and for a file that is cut off.
    """
    import google_crc32c

    at, number = 0, 0
    if not window.num_bytes:
        raise SourceError(f"{window.where} is empty")
    while at < window.num_bytes:
        head = window.at(at, _HEAD.size)
        place = f"{window.where}: record {number} at byte {at}"
        if not number and LFS_MAGIC.startswith(head):
            raise SourceError(f"{window.where} is a git-LFS pointer; run `git lfs pull` in the source first")
        if len(head) < _HEAD.size:
            raise SourceError(f"{place} is cut off: the file has {window.num_bytes} bytes")
        length, crc = _HEAD.unpack(head)
        if masked(google_crc32c.value(head[:8])) != crc:
            what = "is no TFRecord" if not number else "does not begin with a length and its checksum"
            raise SourceError(f"{place} {what}: the CRC32C of its length does not agree; the file is damaged")
        start, end = at + _HEAD.size, at + _HEAD.size + length
        if end + _U32.size > window.num_bytes:
            raise SourceError(
                f"{place} is cut off: it ends at {end + _U32.size}, the file has {window.num_bytes} bytes"
            )
        if payloads:
            crc = 0
            for offset in range(start, end, _CRC_CHUNK):
                crc = google_crc32c.extend(crc, window.at(offset, min(_CRC_CHUNK, end - offset)))
            if masked(crc) != _U32.unpack(window.at(end, _U32.size))[0]:
                raise SourceError(f"{place}: the CRC32C of its {length} bytes does not agree; the file is damaged")
        if whole:
            window.at(start, length)
        yield FileRecord(number, start, end)
        at, number = end + _U32.size, number + 1


def masked(crc: int) -> int:
    """Mask a CRC32C as TFRecord files do: rotate it by 15 bits and add a constant."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where the next byte is; raise ValueError where it does not end."""
    value = 0
    for number, byte in enumerate(data[at : at + 10]):
        if byte < 0x80:
            return value | byte << 7 * number, at + number + 1
        value |= (byte & 0x7F) << 7 * number
    raise ValueError("a number that does not end")


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield number, wire type and value of each field of a message; raise ValueError where it is not one."""
    for number, wire, start, end in spans(data):
        yield number, wire, varint(data, start)[0] if wire == VARINT else data[start:end]


def alike(
    messages: Sequence[bytes], fail: Fail
) -> Iterator[tuple[NDArray[np.intp], NDArray[np.uint8], dict[int, slice]]]:
    """Yield the messages that have the same fields of the same lengths together, so that they are read as columns.

    Of each such group of N: their numbers (N,), their bytes (N, L), and where in these the value of each field is, the
    last one of those that are repeated. ``fail`` takes the number of what is no message, and why.
    """
    by_length: dict[int, list[int]] = {}
    for row, data in enumerate(messages):
        by_length.setdefault(len(data), []).append(row)
    for own in by_length.values():
        rows = np.array(own)
        table = np.frombuffer(b"".join([messages[row] for row in own]), np.uint8).reshape(len(own), -1)
        while len(rows):
            fixed, places = np.full(table.shape[1], 0xFF, np.uint8), dict[int, slice]()
            try:
                for number, wire, start, end in spans(messages[rows[0]]):
                    fixed[start:end] = 0x80 if wire == VARINT else 0  # whether a number continues
                    places[number] = slice(start, end)
            except ValueError as error:
                fail(int(rows[0]), str(error))
            same = ((table ^ table[0]) & fixed == 0).all(1)
            yield rows[same], table[same], places
            rows, table = rows[~same], table[~same]


def numbers(columns: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the varints (N,) whose bytes are the rows of (N, B)."""
    return (columns & 0x7F).astype(np.int64) @ (1 << 7 * np.arange(columns.shape[1]))


def spans(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield number and wire type of each field of a message, and where its value begins and ends."""
    at, end = 0, len(data)
    while at < end:
        key = data[at]
        key, at = (key, at + 1) if key < 0x80 else varint(data, at)
        wire = key & 7
        if wire == FIXED64:
            length = 8
        elif wire in (BYTES, VARINT):
            length = data[at] if at < end else 0x80
            start, (length, at) = at, (length, at + 1) if length < 0x80 else varint(data, at)
            if wire == VARINT:
                yield key >> 3, wire, start, at
                continue
        else:
            length = _fixed(wire)
        if at + length > end:
            raise ValueError(f"field {key >> 3} has {length} bytes, {end - at} are left")
        yield key >> 3, wire, at, at + length
        at += length


class FieldPlace(msgspec.Struct, frozen=True, gc=False):
    """A field of a message in a file: ``value`` is that of a number, else its bytes begin at ``start``."""

    number: int
    wire: int
    value: int
    start: int
    end: int


def field_places(window: FileWindow, start: int, end: int, ahead: int = 0) -> Iterator[FieldPlace]:
    """Yield the fields of the message from ``start`` to ``end`` in a file, of which only their heads are read.

    ``ahead`` bytes are read beyond each head that is not in memory. Raises ValueError where it is no message.
    """
    at = start
    while at < end:
        head = window.at(at, MAX_HEAD, ahead)
        if not head:
            raise ValueError("the file ends")
        key, used = (head[0], 1) if head[0] < 0x80 else varint(head, 0)
        wire = key & 7
        value = length = 0
        if wire == BYTES:
            length, used = (head[1], 2) if used == 1 < len(head) and head[1] < 0x80 else varint(head, used)
        elif wire == VARINT:
            value, used = varint(head, used)
        else:
            length = _fixed(wire)
        begin = at + used
        at = begin + length
        if at > end:
            raise ValueError(f"field {key >> 3} has {length} bytes, {end - begin} are left")
        yield FieldPlace(key >> 3, wire, value, begin, at)


def _fixed(wire: int) -> int:
    if wire == FIXED64:
        return 8
    if wire == FIXED32:
        return 4
    raise ValueError(f"a field of wire type {wire}")


def doubles(data: bytes, number: int) -> list[float]:
    """Return the values of a repeated field of doubles, packed or not; raise ValueError for another type."""
    found: list[float] = []
    for field, wire, value in fields(data):
        if field == number:
            if wire not in (FIXED64, BYTES) or isinstance(value, int) or len(value) % 8:
                raise ValueError(f"field {number} is not of doubles")
            found += struct.unpack(f"<{len(value) // 8}d", value)
    return found
