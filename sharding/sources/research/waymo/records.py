"""TFRecord files, read in small pieces, and the wire format of the protocol buffers in them.

A record is its length (u64), the masked CRC32C of that (u32), its bytes, and their masked CRC32C, little-endian
(tensorflow/core/lib/io/record_writer.h). Messages are walked after protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.files import LFS_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fuelrail.sharding.sources.files import SourceFiles

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

MAX_HEAD: Final = 20
"""Bytes of the longest key with the longest length."""
_HEAD: Final = struct.Struct("<QI")
_U32: Final = struct.Struct("<I")
_MASK: Final = 0xA282EAD8
_LEAST: Final = 64
_CRC_CHUNK: Final = 1 << 20


class Window:
    """Bytes of a file, a few at a time: what was read last is kept."""

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int, where: str) -> None:
        """``read(offset, length)`` reads; the file has ``num_bytes``; ``where`` names it in errors."""
        self._read, self.num_bytes, self.where = read, num_bytes, where
        self._start, self._data = 0, b""

    def at(self, offset: int, length: int, ahead: int = 0) -> bytes:
        """``length`` bytes from ``offset`` on, fewer where the file ends; reads ``ahead`` bytes beyond them."""
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._data):
            self._data = self._read(offset, max(length + ahead, _LEAST))
            self._start, begin = offset, 0
        return self._data[begin : begin + length]


class Record(NamedTuple):
    """Where a record's bytes begin and end in the file."""

    number: int
    start: int
    end: int


@contextlib.contextmanager
def opened(files: SourceFiles, name: str) -> Iterator[Window]:
    """A window on a file; at a URL, each read is a request, so :func:`records` reads records whole."""
    facts = files.facts_of([name])[0]
    where = f"file '{files.shown}/{name}'"
    if facts is None:
        raise SourceError(f"{where} is not there")
    path = files.path(name)
    if path is None:
        yield Window(lambda offset, length: files.read(name, offset, length), facts.num_bytes, where)
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield Window(lambda offset, length: os.pread(descriptor, length, offset), facts.num_bytes, where)
    except OSError as error:
        raise SourceError(f"{where} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def records(window: Window, *, whole: bool, payloads: bool) -> Iterator[Record]:
    """The records of a file, in order; the checksums of lengths are checked, with ``payloads`` those of bytes too.

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
        yield Record(number, start, end)
        at, number = end + _U32.size, number + 1


def masked(crc: int) -> int:
    """A CRC32C as TFRecord files have it: rotated by 15 bits, and a constant added."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next byte is; raises ValueError where it does not end."""
    value = shift = 0
    for at in range(at, min(at + 10, len(data))):  # noqa: B020 - the end is wanted
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise ValueError("a number that does not end")


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field of a message; raises ValueError where it is not one."""
    at, end = 0, len(data)
    while at < end:
        key = data[at]
        key, at = (key, at + 1) if key < 0x80 else varint(data, at)
        wire = key & 7
        if wire == FIXED64:
            length = 8
        elif wire in (BYTES, VARINT):
            length = data[at] if at < end else 0x80
            length, at = (length, at + 1) if length < 0x80 else varint(data, at)
            if wire == VARINT:
                yield key >> 3, wire, length
                continue
        else:
            length = _fixed(wire)
        if at + length > end:
            raise ValueError(f"field {key >> 3} has {length} bytes, {end - at} are left")
        yield key >> 3, wire, data[at : at + length]
        at += length


class FieldPlace(NamedTuple):
    """A field of a message in a file: ``value`` is that of a number, else its bytes begin at ``start``."""

    number: int
    wire: int
    value: int
    start: int
    end: int


def field_places(window: Window, start: int, end: int, ahead: int = 0) -> Iterator[FieldPlace]:
    """The fields of the message from ``start`` to ``end`` in a file, of which only their heads are read.

    ``ahead`` bytes are read beyond each head that is not in memory. Raises ValueError where it is no message.
    """
    at = start
    while at < end:
        head = window.at(at, min(end - at, MAX_HEAD), ahead)
        if not head:
            raise ValueError("the file ends")
        key = head[0]
        key, used = (key, 1) if key < 0x80 else varint(head, 0)
        wire = key & 7
        value = length = 0
        if wire == VARINT:
            value, used = varint(head, used)
        elif wire == BYTES:
            length, used = varint(head, used)
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
    """The values of a repeated field of doubles, packed or not; raises ValueError for another type."""
    found: list[float] = []
    for field, wire, value in fields(data):
        if field == number:
            if wire not in (FIXED64, BYTES) or isinstance(value, int) or len(value) % 8:
                raise ValueError(f"field {number} is not of doubles")
            found += struct.unpack(f"<{len(value) // 8}d", value)
    return found
