"""Messages of protocol buffers: their wire format, and fields by the descriptor that an MCAP file
carries.

After protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.schema import I64
    from fuelrail.sharding.sources.shared.windows import FileWindow

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

Fail: TypeAlias = "Callable[[int, str], NoReturn]"
"""Raises an error for what has this number."""
MAX_HEAD: Final = 20
"""Bytes of the longest key with the longest length."""

Names = dict[str, dict[int, tuple[str, str]]]
"""Type to its fields: number to name and type of a nested message ("" for none)."""

_FILE_FIELDS = {number: (f"f{number}", "") for number in range(1, 16)}


class Span(tuple[int, int]):
    """Offset and length of bytes in a message; they may end behind what is here of it."""

    __slots__ = ()


def varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return a number, and where the next byte is; raise ValueError where it does not end."""
    value = 0
    for number, byte in enumerate(data[position : position + 10]):
        if byte < 0x80:
            return value | byte << 7 * number, position + number + 1
        value |= (byte & 0x7F) << 7 * number
    raise ValueError("a number that does not end")


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield number, wire type and value of each field of a message; raise ValueError where it is
    not one.
    """
    for number, wire, start, end, value in spans(data):
        yield number, wire, value if wire == VARINT else data[start:end]


def alike(
    messages: Sequence[bytes], fail: Fail
) -> Iterator[tuple[NDArray[np.intp], U8, dict[int, slice]]]:
    """Yield the messages that have the same fields of the same lengths together, so that they are
    read as columns.

    Of each such group of N: their numbers (N,), their bytes (N, L), and where in these the value of
    each field is, the last one of those that are repeated. ``fail`` takes the number of what is not
    a message, and why.
    """
    by_length: dict[int, list[int]] = {}
    for row, data in enumerate(messages):
        by_length.setdefault(len(data), []).append(row)
    for numbers in by_length.values():
        rows = np.array(numbers)
        joined = b"".join([messages[row] for row in numbers])
        table = np.frombuffer(joined, np.uint8).reshape(len(numbers), -1)
        while len(rows):
            fixed = np.full(table.shape[1], 0xFF, np.uint8)
            places = dict[int, slice]()
            try:
                for number, wire, start, end, _ in spans(messages[rows[0]]):
                    fixed[start:end] = 0x80 if wire == VARINT else 0  # whether a number continues
                    places[number] = slice(start, end)
            except ValueError as error:
                fail(int(rows[0]), str(error))
            difference = (table ^ table[0]) & fixed
            same = (difference == 0).all(1)
            yield rows[same], table[same], places
            rows = rows[~same]
            table = table[~same]


def numbers(columns: U8) -> I64:
    """Return the varints (N,) whose bytes are the rows of (N, B)."""
    digits = (columns & 0x7F).astype(np.int64)
    weights = 1 << 7 * np.arange(columns.shape[1])
    return digits @ weights


def spans(
    data: bytes | memoryview,
    position: int = 0,
    end: int | None = None,
    *,
    is_complete: bool = True,
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield number, wire type, start and end of each field of a message, and the value of a number.

    The message is from ``position`` to ``end``, by default all of ``data``. Unless it
    ``is_complete``, the last value may end behind it. Raises ValueError for what is not a message.
    """
    end = len(data) if end is None else end
    while position < end:
        key = data[position]
        if key < 0x80:
            position += 1
        else:
            key, position = varint(data, position)
        wire = key & 7
        if wire == FIXED64:
            length = 8
        elif wire in (BYTES, VARINT):
            length = data[position] if position < end else 0x80
            start = position
            if length < 0x80:
                position += 1
            else:
                length, position = varint(data, position)
            if wire == VARINT:
                yield key >> 3, wire, start, position, length
                continue
        else:
            length = _find_fixed_length(wire)
        if position + length > end and is_complete:
            raise ValueError(f"field {key >> 3} has {length} bytes, {end - position} are left")
        yield key >> 3, wire, position, position + length, 0
        position += length


class FieldPlace(msgspec.Struct, frozen=True, gc=False):
    """A field of a message in a file: ``value`` is that of a number, else its bytes begin at
    ``start``.
    """

    number: int
    wire: int
    value: int
    start: int
    end: int


def field_places(window: FileWindow, start: int, end: int) -> Iterator[FieldPlace]:
    """Yield the fields of the message from ``start`` to ``end`` in a file, of which only their
    heads are read.

    Raises ValueError where it is not a message.
    """
    position = start
    while position < end:
        head = window.read(position, MAX_HEAD)
        if not head:
            raise ValueError("the file ends")
        key, used = (head[0], 1) if head[0] < 0x80 else varint(head, 0)
        wire = key & 7
        value = length = 0
        if wire == BYTES:
            if used == 1 < len(head) and head[1] < 0x80:
                length = head[1]
                used = 2
            else:
                length, used = varint(head, used)
        elif wire == VARINT:
            value, used = varint(head, used)
        else:
            length = _find_fixed_length(wire)
        begin = position + used
        position = begin + length
        if position > end:
            raise ValueError(f"field {key >> 3} has {length} bytes, {end - begin} are left")
        yield FieldPlace(
            number=key >> 3,
            wire=wire,
            value=value,
            start=begin,
            end=position,
        )


def _find_fixed_length(wire: int) -> int:
    if wire == FIXED64:
        return 8
    if wire == FIXED32:
        return 4
    raise ValueError(f"a field of wire type {wire}")


def doubles(data: bytes, number: int) -> list[float]:
    """Return the values of a repeated field of doubles, packed or not; raise ValueError for
    another type.
    """
    values: list[float] = []
    for field, wire, value in fields(data):
        if field == number:
            if wire not in (FIXED64, BYTES) or isinstance(value, int) or len(value) % 8:
                raise ValueError(f"field {number} is not of doubles")
            values += struct.unpack(f"<{len(value) // 8}d", value)
    return values


def descriptor(schema: bytes) -> Names:
    """Read the fields of all types of a FileDescriptorSet (descriptor.proto); raises
    SourceError.
    """
    names: Names = {}
    for file in _parts(schema, 1):
        package = b"".join(_parts(file, 2)).decode()
        for message in _parts(file, 4):
            _add_message_type(names, package, message)
    return names


def _read_named_fields(
    data: Buffer,
    names: dict[int, tuple[str, str]],
    start: int = 0,
    end: int | None = None,
) -> dict[str, list[Any]]:
    """Return the fields of a message by name: integers, raw 4 or 8 bytes, or spans of nested data.

    ``data`` may be cut off: the span of the last field says where it would end.
    """
    values: dict[str, list[Any]] = {}
    view = data if isinstance(data, bytes) else memoryview(data)
    end = len(view) if end is None else min(end, len(view))
    try:
        for number, wire, begin, stop, value in spans(view, start, end, is_complete=False):
            field_values = values.setdefault(names[number][0] if number in names else "", [])
            if wire == BYTES:
                field_values.append(Span((begin, stop - begin)))
            else:
                field_values.append(value if wire == VARINT else bytes(view[begin:stop]))
    except ValueError as error:
        raise SourceError(f"protobuf has {error}") from error
    return values


class Proto:
    """A message of protobuf, by names of fields."""

    def __init__(
        self,
        data: Buffer,
        names: Names,
        kind: str,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        self._data = data
        self._names = names
        self._types = names.get(kind, {})
        self._fields = _read_named_fields(data, self._types, start, end)

    def span(self, name: str) -> tuple[int, int]:
        """Return offset and length of bytes."""
        spans: Sequence[tuple[int, int]] = self._fields.get(name, ())
        if spans:
            return spans[-1]
        return 0, 0

    def raw(self, name: str) -> bytes:
        """Return bytes."""
        start, length = self.span(name)
        return bytes(memoryview(self._data)[start : start + length])

    def text(self, name: str) -> str:
        """Return a string."""
        return self.raw(name).decode("utf-8", "replace")

    def number(self, name: str) -> int:
        """Return an integer, of either encoding; 0 where it is absent, as proto3 has it."""
        value: int | bytes = self._fields.get(name, [0])[-1]
        if isinstance(value, bytes):
            return int.from_bytes(value, "little")
        return value

    def double(self, name: str) -> float:
        """Return a double."""
        encoded = self._fields.get(name, [bytes(8)])[-1]
        return float(struct.unpack("<d", encoded)[0])

    def doubles(self, name: str) -> list[float]:
        """Return repeated doubles, packed or not."""
        values: list[float] = []
        for value in self._fields.get(name, []):
            data = value
            if not isinstance(data, bytes):
                begin, length = data
                data = bytes(memoryview(self._data)[begin : begin + length])
            values += struct.unpack(f"<{len(data) // 8}d", data)
        return values

    def messages(self, name: str) -> list[Proto]:
        """Return nested messages."""
        kind = next(
            (kind for field_name, kind in self._types.values() if field_name == name),
            "",
        )
        spans = self._fields.get(name, [])
        return [
            Proto(
                data=self._data,
                names=self._names,
                kind=kind,
                start=start,
                end=start + length,
            )
            for start, length in spans
        ]

    def message(self, name: str) -> Proto:
        """Return a nested message; an empty one where it is absent."""
        messages = self.messages(name)
        if messages:
            return messages[-1]
        return Proto(b"", self._names, "")

    @property
    def stamp_ns(self) -> int:
        """The field ``timestamp`` (google.protobuf.Timestamp) [ns]."""
        time = self.message("timestamp")
        return time.number("seconds") * 1_000_000_000 + time.number("nanos")


def _parts(data: bytes, number: int) -> list[bytes]:
    spans = _read_named_fields(data, _FILE_FIELDS).get(f"f{number}", [])
    return [data[start : start + length] for start, length in spans]


def _add_message_type(names: Names, scope: str, message: bytes) -> None:
    """Note the fields of a DescriptorProto: name 1, field 2 (name 1, number 3, type_name 6),
    nested_type 3.
    """
    name = f"{scope}.{_parts(message, 1)[0].decode()}".lstrip(".")
    type_fields = names.setdefault(name, {})
    for field in _parts(message, 2):
        (number,) = _read_named_fields(field, _FILE_FIELDS)["f3"]
        parent_type = b"".join(_parts(field, 6)).decode()
        field_name = _parts(field, 1)[0].decode()
        type_fields[number] = (field_name, parent_type.lstrip("."))
    for nested in _parts(message, 3):
        _add_message_type(names, name, nested)
