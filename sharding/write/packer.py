"""One shard being written: samples in, tar bytes out, with all facts for index, manifest and
DALI.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import xxhash

from fuelrail.pipeline.errors import MemberTooLargeError
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.tar import (
    END_OF_ARCHIVE,
    StoredMember,
    pack_sample,
)
from fuelrail.pipeline.format.zstd_frames import encode_frame, encode_seek_table
from fuelrail.sharding.write.blocks import BlockWriter

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    from fuelrail.pipeline.format.codecs import Dictionary
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.write.read_buffer import ReadBuffer

_stored_name = functools.lru_cache(maxsize=1024)(codecs.stored_name)


class RawMember(NamedTuple):
    """A member to be stored: field name, codec, raw bytes."""

    name: str
    codec: str
    data: Buffer


class Packed(NamedTuple):
    """A closed shard: size, SHA-256, its rows of the index, its DALI index (empty where it has
    none).
    """

    num_bytes: int
    sha256: str
    rows: list[IndexRow]
    listing: bytes


class ShardPacker:
    """Writes samples to ``file`` as shard number ``number``; close it in the end.

    It is a plain tar, or ``framed``: each span as one zstd frame, and a seek table behind them;
    DALI has no index for those.

    A sample's bytes go from where they were read to the file and into the digests, copied once at
    most in between. ``buffer`` is where its files were read. ``threads`` compute the shard's digest
    of a sample while the next one is read, so that the buffer must keep it; None: the caller's
    thread does.
    """

    def __init__(
        self,
        file: BinaryIO,
        number: int,
        level: int,
        dictionary: Dictionary | None,
        buffer: ReadBuffer,
        threads: Executor | None = None,
        *,
        framed: bool = False,
    ) -> None:
        self._file = BlockWriter(file)
        self._threads = threads
        self._digesting: Future[None] | None = None
        self._number = number
        self._level = level
        self._dictionary = dictionary
        self._buffer = buffer
        self._is_framed = framed
        self._frame_sizes: list[tuple[int, int]] = []
        self._rows: list[IndexRow] = []
        self._digest = hashlib.sha256()
        self._offset = 0

    def add(
        self,
        key: str,
        clip_id: str,
        frame: int,
        timestamp_ns: int,
        members: Sequence[RawMember],
    ) -> int:
        """Encode and write the next sample; returns the length of its span [bytes]."""
        encode = functools.partial(codecs.encode, level=self._level, dictionary=self._dictionary)
        stored = [
            StoredMember(_stored_name(name, codec), encode(codec, data))
            for name, codec, data in members
        ]
        packed = pack_sample(key, stored)
        held = [
            codecs.held_bytes(memoryview(data).nbytes, memoryview(raw).nbytes, codec)
            for (_, codec, raw), (_, data) in zip(members, stored, strict=True)
        ]
        largest = max(sum(held), packed.length)
        if largest > codecs.MAX_SAMPLE_BYTES or len(held) > codecs.MAX_MEMBERS:
            raise MemberTooLargeError(
                f"{len(held)} members that take {largest} bytes of memory, over the caps of "
                f"{codecs.MAX_MEMBERS} and {codecs.MAX_SAMPLE_BYTES}",
                key=key,
            )
        pieces = self._buffer.joined(packed.pieces)
        length = packed.length
        if self._is_framed:
            span = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            try:
                compressed = encode_frame(span, self._level)
            except MemberTooLargeError as error:
                raise MemberTooLargeError(error.message, key=key) from error
            length = len(compressed)
            self._frame_sizes.append((length, packed.length))
            pieces = [compressed]
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        self._write(pieces)
        entries = tuple(
            MemberEntry(
                name=name,
                offset=offset,
                stored_bytes=memoryview(data).nbytes,
                raw_bytes=memoryview(raw).nbytes,
                codec=codec,
                xxh3=xxhash.xxh3_64_intdigest(data),
            )
            for (name, codec, raw), (_, data), offset in zip(
                members,
                stored,
                packed.offsets,
                strict=True,
            )
        )
        row = IndexRow(
            key=key,
            clip_id=clip_id,
            frame=frame,
            timestamp_ns=timestamp_ns,
            shard=self._number,
            offset=self._offset,
            length=length,
            xxh3=digest.intdigest(),
            members=entries,
        )
        self._rows.append(row)
        self._offset += length
        return length

    def close(self) -> Packed:
        """Write the end of the archive."""
        end = END_OF_ARCHIVE
        listing = b""
        if self._is_framed:
            end = encode_frame(END_OF_ARCHIVE, self._level)
            self._frame_sizes.append((len(end), len(END_OF_ARCHIVE)))
            end += encode_seek_table(self._frame_sizes)
        else:
            listing = dali_index(self._rows)
        self._write([end])
        self._file.flush()
        if self._digesting is not None:
            self._digesting.result()
        return Packed(
            self._offset + len(end),
            self._digest.hexdigest(),
            self._rows,
            listing,
        )

    def _write(self, pieces: Sequence[Buffer]) -> None:
        if self._threads is None:
            self._update_digest(pieces)
        else:
            if self._digesting is not None:
                self._digesting.result()
            self._digesting = self._threads.submit(self._update_digest, pieces)
        self._file.write(pieces)

    def _update_digest(self, pieces: Sequence[Buffer]) -> None:
        for piece in pieces:
            self._digest.update(piece)


def dali_index(rows: Sequence[IndexRow]) -> bytes:
    """Return the DALI index of a plain shard with these samples: a line for each, of its members
    in the tar.
    """
    lines = []
    for row in rows:
        stored = [
            (
                f"{member.name}{codecs.suffix(member.codec)}",
                row.offset + member.offset,
                member,
            )
            for member in row.members
        ]
        lines.append(
            " ".join(
                f"{field} {offset} {member.stored_bytes} {row.key}.{field}"
                for field, offset, member in stored
            )
        )
    listing = "\n".join([f"v1.2 {len(lines)}", *lines, ""])
    return listing.encode("ascii", "replace")
