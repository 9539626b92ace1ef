"""Shards in the frame layout, ``*.tar.zst``: one zstd frame a sample, and a seek table at the end.

Decompressed as a whole (``zstd -d``, ``tar --zstd``) such a shard is the plain tar of the other
layouts. Each sample's span is one frame of its own, so a sample is read without the others. The
seek table is that of zstd's seekable format (a skippable frame), for tools that know it; Fuelrail
finds its frames by the index. FORMAT.md has the rules.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import add
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

import zstandard

from fuelrail.pipeline.errors import (
    FrameError,
    MemberTooLargeError,
    TruncatedShardError,
)
from fuelrail.pipeline.format.codecs import MAX_SAMPLE_BYTES, Zstd
from fuelrail.pipeline.format.tar import BLOCK_BYTES

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.sample.arrays import Buffer

SHARD_SUFFIX: Final = ".tar"
FRAMED_SUFFIX: Final = ".tar.zst"
MAX_FRAME_BYTES: Final = MAX_SAMPLE_BYTES
"""Cap on one decoded frame."""

_SKIPPABLE_MAGIC: Final = 0x184D2A5E
_SEEKABLE_MAGIC: Final = 0x8F92EAB1
_HEADER: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<II")
_FOOTER: Final = struct.Struct("<IBI")
_READ_BYTES: Final = 16 << 10
_FRAMES: Final = Zstd(checksum=True)


class Frame(NamedTuple):
    """One frame of a shard: its offset in the file, and its sizes [bytes] there and decoded."""

    offset: int
    stored_bytes: int
    raw_bytes: int


def is_framed(shard: str) -> bool:
    """Return whether a shard of this name is in the frame layout."""
    return shard.endswith(FRAMED_SUFFIX)


def shard_stem(shard: str) -> str:
    """Return a shard's name without ``.tar`` or ``.tar.zst``."""
    return shard.removesuffix(".zst").removesuffix(SHARD_SUFFIX)


def encode_frame(span: Buffer, level: int) -> bytes:
    """Encode one zstd frame with content size and checksum.

    The same span, level and zstd version give the same bytes.

    Raises MemberTooLargeError over the cap.
    """
    size = memoryview(span).nbytes
    if size > MAX_FRAME_BYTES:
        raise MemberTooLargeError(
            f"{size} bytes of one sample are over the frame layout's cap of {MAX_FRAME_BYTES}"
        )
    return _FRAMES.compressor(level).compress(span)


def span_bytes(row: IndexRow) -> int:
    """Return length of a sample's span in the decoded tar, from its members in the index, the
    last padding included.
    """
    _, offsets, stored_bytes, _ = row.columns()
    end = max(map(add, offsets, stored_bytes), default=0)
    return end + -end % BLOCK_BYTES


def decode_frame(
    stored: Buffer,
    raw_bytes: int,
    *,
    shard: str,
    offset: int,
    key: str | None = None,
) -> bytes:
    """Decode a frame's span, which must have ``raw_bytes`` bytes; ``shard``, ``offset`` and ``key``
    name it in errors.

    Raises FrameError where it does not, or where that is over the cap: then no memory was taken.
    """
    if not 0 <= raw_bytes <= MAX_FRAME_BYTES:
        raise FrameError(
            f"a frame of {raw_bytes} bytes, over the cap of {MAX_FRAME_BYTES}",
            shard=shard,
            offset=offset,
            key=key,
        )
    try:
        stated = zstandard.frame_content_size(stored)
        if stated != raw_bytes:
            text = "does not state its size" if stated < 0 else f"states {stated} bytes"
            raise FrameError(
                f"the zstd frame {text}, wanted are {raw_bytes}",
                shard=shard,
                offset=offset,
                key=key,
            )
        raw: bytes = _FRAMES.decompressor.decompress(
            stored,
            max_output_size=raw_bytes,
            allow_extra_data=False,
        )
    except zstandard.ZstdError as error:
        raise FrameError(
            f"damaged zstd frame: {error}",
            shard=shard,
            offset=offset,
            key=key,
        ) from error
    if len(raw) != raw_bytes:
        raise FrameError(
            f"the zstd frame decoded to {len(raw)} bytes instead of {raw_bytes}",
            shard=shard,
            offset=offset,
            key=key,
        )
    return raw


def open_span(row: IndexRow, stored: Buffer, shard: str) -> bytes:
    """Decode the span of an index row from its frame; raise FrameError."""
    return decode_frame(
        stored,
        span_bytes(row),
        shard=shard,
        offset=row.offset,
        key=row.key,
    )


def read_head(
    file: BinaryIO,
    num_bytes: int,
    *,
    shard: str,
    offset: int,
    key: str | None = None,
) -> bytes:
    """Return the first ``num_bytes`` of the content of the frame at a file's position; read little
    more than they need.

    Raises FrameError.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(
            file,
            read_size=_READ_BYTES,
            closefd=False,
        ) as reader:
            head: bytes = reader.read(num_bytes)
    except zstandard.ZstdError as error:
        raise FrameError(
            f"damaged zstd frame: {error}",
            shard=shard,
            offset=offset,
            key=key,
        ) from error
    if len(head) != num_bytes:
        raise FrameError(
            f"the zstd frame holds {len(head)} bytes, wanted are {num_bytes}",
            shard=shard,
            offset=offset,
            key=key,
        )
    return head


def encode_seek_table(sizes: Sequence[tuple[int, int]]) -> bytes:
    """Encode the skippable frame that closes a shard; ``sizes`` are each frame's stored and
    decoded bytes, in order.
    """
    entries = b"".join(_ENTRY.pack(stored, raw) for stored, raw in sizes)
    footer = _FOOTER.pack(len(sizes), 0, _SEEKABLE_MAGIC)
    return _HEADER.pack(_SKIPPABLE_MAGIC, len(entries) + len(footer)) + entries + footer


def read_seek_table(data: Buffer, *, shard: str) -> list[Frame]:
    """Return the frames of a whole shard by its seek table, strictly: they must fill the file up to
    the table.

    Raises TruncatedShardError where there is no table at the end, FrameError where it does not fit
    the file.
    """
    view = memoryview(data)
    footer_at = len(view) - _FOOTER.size
    if footer_at < _HEADER.size:
        raise TruncatedShardError(
            "no seek table: the shard is shorter than an empty one",
            shard=shard,
            offset=0,
        )
    count, descriptor, magic = _FOOTER.unpack(view[footer_at:])
    if magic != _SEEKABLE_MAGIC:
        raise TruncatedShardError("no seek table at the end", shard=shard, offset=footer_at)
    table_at = footer_at - count * _ENTRY.size - _HEADER.size
    if descriptor != 0 or table_at < 0:
        raise FrameError(
            f"the seek table's footer states {count} frames, descriptor {descriptor}",
            shard=shard,
            offset=footer_at,
        )
    if _HEADER.unpack(view[table_at : table_at + _HEADER.size]) != (
        _SKIPPABLE_MAGIC,
        len(view) - table_at - 8,
    ):
        raise FrameError(
            "the seek table does not begin where its footer says",
            shard=shard,
            offset=table_at,
        )
    frames = list[Frame]()
    offset = 0
    for stored, raw in _ENTRY.iter_unpack(view[table_at + _HEADER.size : footer_at]):
        frames.append(Frame(offset, stored, raw))
        offset += stored
    if offset != table_at:
        raise FrameError(
            f"the seek table's frames end at {offset}, not at {table_at}",
            shard=shard,
            offset=table_at,
        )
    return frames
