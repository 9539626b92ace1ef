"""One shard being written: samples in, tar bytes out, with everything that index, manifest and DALI ask of them."""

from __future__ import annotations

import functools
import hashlib
import io
import os
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from fuelrail.pipeline import codecs
from fuelrail.pipeline.index import IndexRow, MemberEntry
from fuelrail.pipeline.shardfile import END_OF_ARCHIVE, StoredMember, pack_sample
from fuelrail.sharding.dali import IndexText

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    from fuelrail.pipeline.buffers import Buffer

_MOST_PIECES: Final = os.sysconf("SC_IOV_MAX")

_stored_name = functools.lru_cache(maxsize=1024)(codecs.stored_name)


class RawMember(NamedTuple):
    """A member to be stored: field name, codec, raw bytes."""

    name: str
    codec: str
    data: Buffer


class Packed(NamedTuple):
    """A closed shard: size, SHA-256, its rows of the index, its DALI index."""

    num_bytes: int
    sha256: str
    rows: list[IndexRow]
    listing: bytes


class ShardPacker:
    """Writes samples to ``file`` as shard number ``number``; close it in the end.

    A sample's bytes go from where they were read to the file and into the digests, and are not copied in between.
    """

    def __init__(self, file: BinaryIO, number: int, level: int) -> None:
        self._file, self._number, self._level = file, number, level
        self._rows: list[IndexRow] = []
        self._listing = IndexText()
        self._digest = hashlib.sha256()
        self._offset = 0

    def add(self, key: str, clip_id: str, frame: int, timestamp_ns: int, members: Sequence[RawMember]) -> int:
        """Encode and write the next sample; returns the length of its span [bytes]."""
        stored = [
            StoredMember(_stored_name(name, codec), codecs.encode(codec, data, level=self._level))
            for name, codec, data in members
        ]
        packed = pack_sample(key, stored)
        digest = xxhash.xxh3_64()
        for piece in packed.pieces:
            digest.update(piece)
        self._write(packed.pieces, packed.length)
        self._listing.add(key, self._offset, stored, packed.offsets)
        entries = tuple(
            MemberEntry(name, at, memoryview(data).nbytes, memoryview(raw).nbytes, codec)
            for (name, codec, raw), (_, data), at in zip(members, stored, packed.offsets, strict=True)
        )
        row = IndexRow(
            key, clip_id, frame, timestamp_ns, self._number, self._offset, packed.length, digest.intdigest(), entries
        )
        self._rows.append(row)
        self._offset += packed.length
        return packed.length

    def close(self) -> Packed:
        """Write the end of the archive."""
        self._write([END_OF_ARCHIVE], len(END_OF_ARCHIVE))
        num_bytes = self._offset + len(END_OF_ARCHIVE)
        return Packed(num_bytes, self._digest.hexdigest(), self._rows, self._listing.encode())

    def _write(self, pieces: Sequence[Buffer], num_bytes: int) -> None:
        for piece in pieces:
            self._digest.update(piece)
        write_pieces(self._file, pieces, num_bytes)


def write_pieces(file: BinaryIO, pieces: Sequence[Buffer], num_bytes: int) -> None:
    """Write all pieces, of ``num_bytes`` together; where ``file`` is one of this machine's, in one system call."""
    # A buffered file would copy what is small and cut what is large; nothing is in its buffer, all writes are these.
    if not isinstance(file, io.BufferedWriter) or not isinstance(file.raw, io.FileIO) or len(pieces) > _MOST_PIECES:
        file.writelines(pieces)
        return
    written = os.writev(file.fileno(), pieces)
    if written < num_bytes:  # a signal came, or the disk is full: the next call says so
        rest = memoryview(b"".join(pieces))[written:]
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]
