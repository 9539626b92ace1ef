"""What is checked of a batch of the index before anything is taken for it or decoded by it.

Everything is refused by what the file states: buffers that Arrow would decompress, texts and
samples over the caps. All checks are on whole columns, so that reading a row later costs nothing
more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
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
        header_at = _field(message, table, _MESSAGE_HEADER)
        batch = header_at + struct.unpack_from("<I", message, header_at)[0]
        # Before Arrow 1.0 the compression stood in the message's metadata; we and Arrow write none
        # there.
        if _field(message, batch, _BATCH_COMPRESSION) or _field(message, table, _MESSAGE_METADATA):
            raise IndexFileError(
                "its buffers are compressed, and an index is not: it is meant to be mapped"
            )
        buffers, count = _vector(message, _field(message, batch, _BATCH_BUFFERS))
        for index in range(count):
            offset, length = struct.unpack_from("<qq", message, buffers + _BUFFER_BYTES * index)
            if not 0 <= offset <= offset + length <= min(body_bytes, len(view)):
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
                body = view[body_start : body_start + body_bytes]
                sizes.append(buffer_bytes_of_message(message, body))
    except (struct.error, ValueError, OverflowError) as error:
        raise IndexFileError(f"it is not an Arrow file: {error}") from error
    return sizes


def buffer_bytes_of_message(message: memoryview, body: memoryview) -> BufferBytes:
    """Return what a dictionary or record batch takes.

    Raises struct.error, ValueError or OverflowError for what is not a message of Arrow.
    """
    root = _root(message)
    header_at = _field(message, root, _MESSAGE_HEADER)
    batch = header_at + struct.unpack_from("<I", message, header_at)[0]
    (kind,) = struct.unpack_from("<B", message, _field(message, root, _MESSAGE_HEADER_TYPE))
    if kind == _IS_DICTIONARY:
        data_at = _field(message, batch, _DICTIONARY_BATCH)
        batch = data_at + struct.unpack_from("<I", message, data_at)[0]
    is_compressed = bool(_field(message, batch, _BATCH_COMPRESSION))
    buffers, count = _vector(message, _field(message, batch, _BATCH_BUFFERS))
    decoded = 0
    for index in range(count):
        offset, length = struct.unpack_from("<qq", message, buffers + _BUFFER_BYTES * index)
        num_bytes = max(length, 0)
        if is_compressed and length >= _LENGTH_BYTES:
            (stated,) = struct.unpack_from("<q", body, offset)
            num_bytes = max(num_bytes, stated)  # -1: it is stored as it is
        decoded += num_bytes
    return BufferBytes(decoded, stored=len(body), is_dictionary=kind == _IS_DICTIONARY)


def footer_range(view: memoryview, need: Callable[[int, int], memoryview]) -> tuple[int, int]:
    """Return first byte and end of what follows the record batches; raise IndexFileError for what
    is not an Arrow file.

    ``need`` has bytes of the file read or fetched before they are looked at.
    """
    if len(view) < _TAIL_BYTES:
        raise IndexFileError("it is too short for an Arrow file")
    need(len(view) - _TAIL_BYTES, len(view))
    footer_bytes, end = struct.unpack_from("<i6s", view, len(view) - _TAIL_BYTES)
    if end != ARROW_MAGIC or not 0 < footer_bytes <= len(view) - _TAIL_BYTES:
        raise IndexFileError("it does not end as an Arrow file does")
    return len(view) - _TAIL_BYTES - footer_bytes, len(view)


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


def _block(view: memoryview, number: int, field: int = _FOOTER_BATCHES) -> tuple[int, int, int]:
    """Return where a record batch is: first byte, bytes of its metadata, bytes of its body."""
    first, count = _blocks(view, field)
    if not 0 <= number < count:
        raise IndexFileError(f"it has no record batch {number}")
    block: tuple[int, int, int] = struct.unpack_from("<qi4xq", view, first + _BLOCK_BYTES * number)
    return block


def _message(view: memoryview, number: int, field: int) -> tuple[memoryview, int, int]:
    """Return a batch's metadata, and where its body begins and how long it is."""
    start, metadata_bytes, body_bytes = _block(view, number, field)
    (first,) = struct.unpack_from("<I", view, start)
    body_start = start + metadata_bytes
    return view[start + (8 if first == _CONTINUED else 4) : body_start], body_start, body_bytes


def _blocks(view: memoryview, field: int) -> tuple[int, int]:
    """Return where the footer's list of batches begins, and how many these are."""
    footer_bytes, end = struct.unpack_from("<i6s", view, len(view) - _TAIL_BYTES)
    if end != ARROW_MAGIC:
        raise IndexFileError("it does not end as an Arrow file does")
    footer_at = len(view) - _TAIL_BYTES - footer_bytes
    footer = view[footer_at : len(view) - _TAIL_BYTES]
    first, count = _vector(footer, _field(footer, _root(footer), field))
    return footer_at + first, count


def _root(data: memoryview) -> int:
    return int(struct.unpack_from("<I", data, 0)[0])


def _field(data: memoryview, table: int, number: int) -> int:
    """Return where a table of a flatbuffer has its field; 0 where it has none."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0 or struct.unpack_from("<H", data, vtable)[0] < 6 + 2 * number:
        return 0
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
    return table + offset if offset else 0


def _vector(data: memoryview, field: int) -> tuple[int, int]:
    """Return where the vector that a field refers to has its first element, and their number."""
    if not field:
        return 0, 0
    start = field + struct.unpack_from("<I", data, field)[0]
    return start + 4, int(struct.unpack_from("<I", data, start)[0])


def check_texts(column: pa.StringArray, name: str) -> None:
    """Raise IndexFileError for keys or clip ids that are too long, by their offsets alone."""
    _, starts, _ = column.buffers()
    if starts is None or not len(column):
        return
    ends = np.frombuffer(starts, np.int32, len(column) + 1, column.offset * 4)
    longest = _largest(np.diff(ends))
    if longest > MAX_KEY_BYTES:
        raise IndexFileError(f"a {name} of {longest} bytes, over the limit of {MAX_KEY_BYTES}")


def _largest(values: NDArray[Any]) -> int:
    """Return the largest value, where one below 0 counts as larger than any cap: one pass checks
    both ends.
    """
    return int(values.view(f"u{values.itemsize}").max(initial=0))


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
    if _largest(length) > MAX_SAMPLE_BYTES:
        raise IndexFileError(
            f"a span of {_signed(_largest(length))} bytes; allowed are 0 to {MAX_SAMPLE_BYTES}"
        )
    if _largest(offset) >= 1 << 63:
        raise IndexFileError("a span that begins before its shard")
    if num_shards is not None and _largest(shard) >= num_shards:
        wrong = int(shard.min()) if shard.min() < 0 else int(shard.max())
        raise IndexFileError(f"a sample in shard number {wrong}, but the manifest has {num_shards}")


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
    most_members = _largest(np.diff(starts))
    most_stored = _largest(stored)
    most_raw = _largest(raw)
    if most_members > MAX_MEMBERS:
        raise IndexFileError(f"a sample of {most_members} members, over the cap of {MAX_MEMBERS}")
    if most_raw > MAX_MEMBER_BYTES or most_stored > MAX_SAMPLE_BYTES:
        worst = max(map(_signed, (most_raw, most_stored)), key=abs)
        raise IndexFileError(
            f"a member of {worst} bytes, over the cap of {MAX_MEMBER_BYTES} or under 0"
        )
    for number, text in enumerate(names):
        if member_cap(text) < most_raw and (
            num_bytes := int(raw[name == number].max(initial=0))
        ) > member_cap(text):
            raise IndexFileError(
                f"a member {text} of {num_bytes} bytes, over the cap of {member_cap(text)}"
            )
    if most_members * (most_stored + most_raw) <= MAX_SAMPLE_BYTES:
        return
    plain = codecs.index(RAW) if RAW in codecs else -1
    sums = np.concatenate(([0], np.cumsum(stored + np.where(codec == plain, 0, raw))))
    largest = int((sums[starts[1:]] - sums[starts[:-1]]).max())
    if largest > MAX_SAMPLE_BYTES:
        raise IndexFileError(
            f"a sample would take {largest} bytes of memory, over the cap of {MAX_SAMPLE_BYTES}"
        )
