"""What is checked of a batch of the index before anything is taken for it or decoded by it.

Everything is refused by what the file states: buffers that Arrow would decompress, texts and
samples over the caps. All checks are on whole columns, so that reading a row later costs nothing
more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import IndexFileError
from fuelrail.pipeline.format.codecs import (
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    MAX_SAMPLE_BYTES,
    RAW,
    member_cap,
)
from fuelrail.pipeline.format.tar import MAX_KEY_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

    from fuelrail.pipeline.dtypes import I32

ARROW_MAGIC: Final = b"ARROW1"
"""What an Arrow file begins and ends with."""
_TAIL_BYTES: Final = 10
"""The bytes at the end of an Arrow file: the footer's size, and ``_END``."""
_CONTINUED: Final = 0xFFFFFFFF
_BLOCK_BYTES: Final = 24
_NONE: Final = np.zeros(0, np.int64)
_BUFFER_BYTES: Final = 16
_LENGTH_BYTES: Final = 8
"""What a compressed buffer begins with: its bytes when it is decompressed."""
# Numbers of fields in Arrow's flatbuffers (File.fbs, Message.fbs).
_FOOTER_DICTIONARIES: Final = 2
_FOOTER_BATCHES: Final = 3
_MESSAGE_HEADER_TYPE = 1
_MESSAGE_HEADER = 2
_MESSAGE_METADATA = 4
_BATCH_BUFFERS = 2
_BATCH_COMPRESSION = 3
_DICTIONARY_BATCH = 1
_IS_DICTIONARY = 2
"""What a message says that its header is."""


def check_plain(view: memoryview, number: int) -> None:
    """Raise IndexFileError where record batch ``number`` has buffers that are compressed or lie
    outside the file.

    Arrow decompresses a buffer to the size that it states as soon as the batch is read, so this
    looks first.
    """
    try:
        message, _, body_bytes = _message(view, number, _FOOTER_BATCHES)
        table = _root(message)
        header_field = _field(message, table, _MESSAGE_HEADER)
        batch = _target(message, header_field)
        # Before Arrow 1.0 the compression stood in the message's metadata; we and Arrow write none
        # there.
        compression = _field(message, batch, _BATCH_COMPRESSION)
        metadata = _field(message, table, _MESSAGE_METADATA)
        if compression or metadata:
            raise IndexFileError(
                "its buffers are compressed, and an index is not: it is meant to be mapped"
            )
        num_bytes = min(body_bytes, len(view))
        for offset, length in _buffers(message, batch):
            if not 0 <= offset <= offset + length <= num_bytes:
                raise IndexFileError(
                    f"a buffer of {length} bytes at {offset} lies outside the file"
                )
    except (struct.error, ValueError, OverflowError) as error:
        raise IndexFileError(f"it is not an Arrow file: {error}") from error


class BufferBytes(NamedTuple):
    """What the buffers of a dictionary or record batch of Arrow take: decompressed, as they state
    it, and as they are stored.
    """

    decoded: int
    stored: int
    is_dictionary: bool


def decoded_bytes(view: memoryview) -> int:
    """Return the bytes of all buffers of an Arrow file when they are decompressed, as the file
    states them.

    Raises IndexFileError for what is not an Arrow file.
    """
    return sum(buffers.decoded for buffers in list_buffer_bytes(view))


def list_buffer_bytes(view: memoryview) -> list[BufferBytes]:
    """Return what each dictionary and record batch of an Arrow file takes.

    Raises IndexFileError for what is not an Arrow file.
    """
    sizes = []
    try:
        for field in (_FOOTER_DICTIONARIES, _FOOTER_BATCHES):
            _, count = _blocks(view, field)
            for number in range(count):
                message, body_start, body_bytes = _message(view, number, field)
                body_end = body_start + body_bytes
                body = view[body_start:body_end]
                sizes.append(buffer_bytes_of_message(message, body))
    except (struct.error, ValueError, OverflowError) as error:
        raise IndexFileError(f"it is not an Arrow file: {error}") from error
    return sizes


def buffer_bytes_of_message(message: memoryview, body: memoryview) -> BufferBytes:
    """Return what a dictionary or record batch takes.

    Raises struct.error, ValueError or OverflowError for what is not a message of Arrow.
    """
    root = _root(message)
    header_field = _field(message, root, _MESSAGE_HEADER)
    batch = _target(message, header_field)
    type_field = _field(message, root, _MESSAGE_HEADER_TYPE)
    (header_type,) = struct.unpack_from("<B", message, type_field)
    is_dictionary = header_type == _IS_DICTIONARY
    if is_dictionary:
        data_field = _field(message, batch, _DICTIONARY_BATCH)
        batch = _target(message, data_field)
    is_compressed = bool(_field(message, batch, _BATCH_COMPRESSION))
    decoded = 0
    for offset, length in _buffers(message, batch):
        num_bytes = max(length, 0)
        if is_compressed and length >= _LENGTH_BYTES:
            (stated_bytes,) = struct.unpack_from("<q", body, offset)
            num_bytes = max(num_bytes, stated_bytes)  # -1: it is stored as it is
        decoded += num_bytes
    return BufferBytes(
        decoded,
        stored=len(body),
        is_dictionary=is_dictionary,
    )


def footer_range(view: memoryview, need: Callable[[int, int], memoryview]) -> tuple[int, int]:
    """Return first byte and end of what follows the record batches; raise IndexFileError for what
    is not an Arrow file.

    ``need`` has bytes of the file read or fetched before they are looked at.
    """
    footer_end = len(view) - _TAIL_BYTES
    if footer_end < 0:
        raise IndexFileError("it is too short for an Arrow file")
    need(footer_end, len(view))
    footer_bytes, magic = struct.unpack_from("<i6s", view, footer_end)
    if magic != ARROW_MAGIC or not 0 < footer_bytes <= footer_end:
        raise IndexFileError("it does not end as an Arrow file does")
    return footer_end - footer_bytes, len(view)


def batch_range(view: memoryview, number: int) -> tuple[int, int]:
    """Return first byte and end of a record batch, as the footer states them; raise
    IndexFileError outside the file.
    """
    try:
        start, metadata_bytes, body_bytes = _block(view, number)
    except (struct.error, ValueError, OverflowError) as error:
        raise IndexFileError(f"it is not an Arrow file: {error}") from error
    end = start + metadata_bytes + body_bytes
    if min(start, metadata_bytes, body_bytes) < 0 or end > len(view):
        raise IndexFileError(f"record batch {number} lies outside the file")
    return start, end


def _block(
    view: memoryview,
    number: int,
    field: int = _FOOTER_BATCHES,
) -> tuple[int, int, int]:
    """Return where a record batch is: first byte, bytes of its metadata, bytes of its body."""
    first, count = _blocks(view, field)
    if not 0 <= number < count:
        raise IndexFileError(f"it has no record batch {number}")
    place = first + _BLOCK_BYTES * number
    block: tuple[int, int, int] = struct.unpack_from("<qi4xq", view, place)
    return block


def _message(view: memoryview, number: int, field: int) -> tuple[memoryview, int, int]:
    """Return a batch's metadata, and where its body begins and how long it is."""
    start, metadata_bytes, body_bytes = _block(view, number, field)
    (first_word,) = struct.unpack_from("<I", view, start)
    prefix_bytes = 8 if first_word == _CONTINUED else 4
    body_start = start + metadata_bytes
    metadata = view[start + prefix_bytes : body_start]
    return metadata, body_start, body_bytes


def _blocks(view: memoryview, field: int) -> tuple[int, int]:
    """Return where the footer's list of batches begins, and how many these are."""
    footer_end = len(view) - _TAIL_BYTES
    footer_bytes, magic = struct.unpack_from("<i6s", view, footer_end)
    if magic != ARROW_MAGIC:
        raise IndexFileError("it does not end as an Arrow file does")
    footer_start = footer_end - footer_bytes
    footer = view[footer_start:footer_end]
    blocks_field = _field(footer, _root(footer), field)
    first, count = _vector(footer, blocks_field)
    return footer_start + first, count


def _root(data: memoryview) -> int:
    """Return where a flatbuffer has its root table."""
    return _target(data, 0)


def _target(data: memoryview, place: int) -> int:
    """Return what a flatbuffer's offset at a place refers to: it counts from that place."""
    (offset,) = struct.unpack_from("<I", data, place)
    return place + int(offset)


def _buffers(message: memoryview, batch: int) -> Iterator[tuple[int, int]]:
    """Yield where a record batch's body has each of its buffers, and its length."""
    buffers_field = _field(message, batch, _BATCH_BUFFERS)
    first, count = _vector(message, buffers_field)
    for number in range(count):
        place = first + _BUFFER_BYTES * number
        offset, length = struct.unpack_from("<qq", message, place)
        yield offset, length


def _field(data: memoryview, table: int, number: int) -> int:
    """Return where a table of a flatbuffer has its field; 0 where it has none."""
    (distance,) = struct.unpack_from("<i", data, table)
    vtable = table - distance
    if vtable < 0:
        return 0
    (vtable_bytes,) = struct.unpack_from("<H", data, vtable)
    entry = 4 + 2 * number
    if vtable_bytes < entry + 2:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + entry)
    return table + int(offset) if offset else 0


def _vector(data: memoryview, field: int) -> tuple[int, int]:
    """Return where the vector that a field refers to has its first element, and their number."""
    if not field:
        return 0, 0
    start = _target(data, field)
    (count,) = struct.unpack_from("<I", data, start)
    return start + 4, int(count)


def check_texts(column: pa.StringArray, name: str) -> None:
    """Raise IndexFileError for keys or clip ids that are too long, by their offsets alone."""
    _, offsets, _ = column.buffers()
    if offsets is None or not len(column):
        return
    bounds = np.frombuffer(
        offsets,
        np.int32,
        count=len(column) + 1,
        offset=column.offset * 4,
    )
    longest = _largest(np.diff(bounds))
    if longest > MAX_KEY_BYTES:
        raise IndexFileError(f"a {name} of {longest} bytes, over the limit of {MAX_KEY_BYTES}")


def _largest(values: NDArray[Any]) -> int:
    """Return the largest value, where one below 0 counts as larger than any cap: one pass checks
    both ends.
    """
    unsigned = values.view(f"u{values.itemsize}")
    return int(unsigned.max(initial=0))


def check_spans(
    *,
    num_shards: int | None,
    offset: NDArray[Any] = _NONE,
    length: NDArray[Any] = _NONE,
    shard: NDArray[Any] = _NONE,
    **_rest: NDArray[Any],
) -> None:
    """Raise IndexFileError for a span that is too long or begins before its shard, or for a
    shard that is not there.
    """
    max_length = _largest(length)
    if max_length > MAX_SAMPLE_BYTES:
        raise IndexFileError(
            f"a span of {_signed(max_length)} bytes; allowed are 0 to {MAX_SAMPLE_BYTES}"
        )
    if _largest(offset) >= 1 << 63:
        raise IndexFileError("a span that begins before its shard")
    if num_shards is not None and _largest(shard) >= num_shards:
        smallest = int(shard.min())
        number = smallest if smallest < 0 else int(shard.max())
        raise IndexFileError(
            f"a sample in shard number {number}, but the manifest has {num_shards}"
        )


def _signed(number: int) -> int:
    if number >= 1 << 63:
        return number - (1 << 64)
    return number


def check_caps(
    starts: I32,
    members: Sequence[NDArray[Any]],
    names: Sequence[str],
    codecs: Sequence[str],
) -> None:
    """Raise IndexFileError where a sample would take more memory than the caps allow.

    ``starts`` are the rows' first entries in the members' columns name, codec, offset, stored and
    raw bytes, digest.
    """
    name, codec, _, stored, raw, _ = members
    if not len(stored):
        return
    max_members = _largest(np.diff(starts))
    max_stored = _largest(stored)
    max_raw = _largest(raw)
    if max_members > MAX_MEMBERS:
        raise IndexFileError(f"a sample of {max_members} members, over the cap of {MAX_MEMBERS}")
    if max_raw > MAX_MEMBER_BYTES or max_stored > MAX_SAMPLE_BYTES:
        sizes = (_signed(max_raw), _signed(max_stored))
        raise IndexFileError(
            f"a member of {max(sizes, key=abs)} bytes, over the cap of {MAX_MEMBER_BYTES} or "
            "under 0"
        )
    for number, text in enumerate(names):
        cap = member_cap(text)
        if max_raw <= cap:
            continue
        num_bytes = int(raw[name == number].max(initial=0))
        if num_bytes > cap:
            raise IndexFileError(f"a member {text} of {num_bytes} bytes, over the cap of {cap}")
    if max_members * (max_stored + max_raw) <= MAX_SAMPLE_BYTES:
        return
    raw_codec = codecs.index(RAW) if RAW in codecs else -1
    extra_bytes = np.where(codec == raw_codec, 0, raw)
    sums = np.concatenate(([0], np.cumsum(stored + extra_bytes)))
    sample_bytes = sums[starts[1:]] - sums[starts[:-1]]
    largest = int(sample_bytes.max())
    if largest > MAX_SAMPLE_BYTES:
        raise IndexFileError(
            f"a sample would take {largest} bytes of memory, over the cap of {MAX_SAMPLE_BYTES}"
        )
