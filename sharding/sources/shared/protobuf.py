"""Messages of protobuf by their own descriptor, which an MCAP file carries (protobuf.dev, "Encoding")."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from fuelrail.pipeline.errors import SourceError

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

Names = dict[str, dict[int, tuple[str, str]]]
"""Type to its fields: number to name and type of a nested message ("" for none)."""

_FILE_FIELDS = {number: (f"f{number}", "") for number in range(1, 16)}


class Span(tuple[int, int]):
    """Offset and length of bytes in a message; they may end behind what is here of it."""

    __slots__ = ()


def descriptor(schema: bytes) -> Names:
    """Read the fields of all types of a FileDescriptorSet (descriptor.proto); raises SourceError."""
    found: Names = {}
    for file in _parts(schema, 1):
        package = b"".join(_parts(file, 2)).decode()
        for message in _parts(file, 4):
            _add(found, package, message)
    return found


def fields(
    data: Buffer, names: dict[int, tuple[str, str]], start: int = 0, end: int | None = None
) -> dict[str, list[Any]]:
    """Return the fields of a message by name: integers, raw 4 or 8 bytes, or spans of nested data.

    ``data`` may be cut off: the span of the last field says where it would end.
    """
    found: dict[str, list[Any]] = {}
    view, at = memoryview(data), start
    end = len(view) if end is None else min(end, len(view))
    while at < end:
        key, at = _varint(view, at)
        name = names.get(key >> 3, ("", ""))[0]
        value: int | bytes | Span
        match key & 7:
            case 0:
                value, at = _varint(view, at)
            case 1 | 5:
                size = 8 if key & 7 == 1 else 4
                value, at = bytes(view[at : at + size]), at + size
            case 2:
                length, at = _varint(view, at)
                value, at = Span((at, length)), at + length
            case other:
                raise SourceError(f"protobuf with the wire type {other} at byte {at}; wanted are 0, 1, 2 and 5")
        found.setdefault(name, []).append(value)
    return found


class Proto:
    """A message of protobuf, by names of fields."""

    def __init__(self, data: Buffer, names: Names, kind: str, start: int = 0, end: int | None = None) -> None:
        self._data, self._names, self._types = data, names, names.get(kind, {})
        self._fields = fields(data, self._types, start, end)

    def span(self, name: str) -> tuple[int, int]:
        """Return offset and length of bytes."""
        found = self._fields.get(name)
        return found[-1] if found else (0, 0)

    def raw(self, name: str) -> bytes:
        """Return bytes."""
        start, length = self.span(name)
        return bytes(memoryview(self._data)[start : start + length])

    def text(self, name: str) -> str:
        """Return a string."""
        return self.raw(name).decode("utf-8", "replace")

    def number(self, name: str) -> int:
        """Return an integer, of either encoding; 0 where it is absent, as proto3 has it."""
        value = self._fields.get(name, [0])[-1]
        return int.from_bytes(value, "little") if isinstance(value, bytes) else value

    def double(self, name: str) -> float:
        """Return a double."""
        return float(struct.unpack("<d", self._fields.get(name, [bytes(8)])[-1])[0])

    def doubles(self, name: str) -> list[float]:
        """Return repeated doubles, packed or not."""
        found: list[float] = []
        for value in self._fields.get(name, []):
            data = value if isinstance(value, bytes) else self._bytes(value)
            found += struct.unpack(f"<{len(data) // 8}d", data)
        return found

    def messages(self, name: str) -> list[Proto]:
        """Return nested messages."""
        kind = next((kind for own, kind in self._types.values() if own == name), "")
        spans = self._fields.get(name, [])
        return [Proto(self._data, self._names, kind, start, start + length) for start, length in spans]

    def message(self, name: str) -> Proto:
        """Return a nested message; an empty one where it is absent."""
        found = self.messages(name)
        return found[-1] if found else Proto(b"", self._names, "")

    @property
    def stamp_ns(self) -> int:
        """The field ``timestamp`` (google.protobuf.Timestamp) [ns]."""
        time = self.message("timestamp")
        return time.number("seconds") * 1_000_000_000 + time.number("nanos")

    def _bytes(self, span: tuple[int, int]) -> bytes:
        return bytes(memoryview(self._data)[span[0] : span[0] + span[1]])


def _parts(data: bytes, number: int) -> list[bytes]:
    spans = fields(data, _FILE_FIELDS).get(f"f{number}", [])
    return [data[start : start + length] for start, length in spans]


def _add(found: Names, scope: str, message: bytes) -> None:
    """Note the fields of a DescriptorProto: name 1, field 2 (name 1, number 3, type_name 6), nested_type 3."""
    name = f"{scope}.{_parts(message, 1)[0].decode()}".lstrip(".")
    own = found.setdefault(name, {})
    for field in _parts(message, 2):
        (number,) = fields(field, _FILE_FIELDS)["f3"]
        kind = b"".join(_parts(field, 6)).decode().lstrip(".")
        own[number] = (_parts(field, 1)[0].decode(), kind)
    for nested in _parts(message, 3):
        _add(found, name, nested)


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise SourceError(f"protobuf is cut off at byte {at}")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
