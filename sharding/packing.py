"""One shard being written: samples in, tar bytes out, with everything that index, manifest and DALI ask of them."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import xxhash

from fuelrail.pipeline import codecs
from fuelrail.pipeline.index import IndexRow, MemberEntry
from fuelrail.pipeline.shardfile import END_OF_ARCHIVE, StoredMember, pack_sample
from fuelrail.sharding.dali import IndexText

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import BinaryIO

    from fuelrail.pipeline.buffers import Buffer

_SPANS_AHEAD: Final = 2  # that wait for the digest: what bounds memory


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
    """Writes samples to ``file`` as shard number ``number``; use as a context manager, and close it in the end.

    SHA-256 is computed in a thread of its own, behind the writing: with reading and writing in the page cache it takes
    about half of the time.
    """

    def __init__(self, file: BinaryIO, number: int, level: int) -> None:
        self._file, self._number, self._level = file, number, level
        self._rows: list[IndexRow] = []
        self._listing = IndexText()
        self._digest = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1)
        self._behind: deque[Future[None]] = deque()
        self._offset = 0

    def add(self, key: str, clip_id: str, frame: int, timestamp_ns: int, members: Sequence[RawMember]) -> int:
        """Encode and write the next sample; returns the length of its span [bytes]."""
        stored = [
            StoredMember(codecs.stored_name(name, codec), codecs.encode(codec, data, level=self._level))
            for name, codec, data in members
        ]
        packed = pack_sample(key, stored)
        span = b"".join(packed.pieces)
        self._write(span)
        self._listing.add(key, self._offset, stored, packed.offsets)
        entries = tuple(
            MemberEntry(name, at, memoryview(data).nbytes, memoryview(raw).nbytes, codec)
            for (name, codec, raw), (_, data), at in zip(members, stored, packed.offsets, strict=True)
        )
        digest = xxhash.xxh3_64_intdigest(span)
        row = IndexRow(key, clip_id, frame, timestamp_ns, self._number, self._offset, len(span), digest, entries)
        self._rows.append(row)
        self._offset += len(span)
        return len(span)

    def close(self) -> Packed:
        """Write the end of the archive and wait for the digest."""
        self._write(END_OF_ARCHIVE)
        while self._behind:
            self._behind.popleft().result()
        num_bytes = self._offset + len(END_OF_ARCHIVE)
        return Packed(num_bytes, self._digest.hexdigest(), self._rows, self._listing.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hasher.shutdown()

    def _write(self, data: bytes) -> None:
        if len(self._behind) == _SPANS_AHEAD:
            self._behind.popleft().result()
        self._behind.append(self._hasher.submit(self._digest.update, data))
        self._file.write(data)
