"""Protocol buffers: fields by number and by name, and what is not a message is refused."""

from __future__ import annotations

import struct

import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.protobuf import Proto, fields
from support.waymo_files import field, varint

NAMES = {"it": {1: ("number", ""), 2: ("inner", "it"), 3: ("fixed", "")}}
LARGE = (1 << 64) - 1


def test_fields_are_read_by_number_and_by_name() -> None:
    data = (
        field(1, 5)
        + field(2, field(1, LARGE))
        + field(3, 0.5)
        + field(1, 300)
        + field(9, b"unknown")
    )
    expected = [
        (1, 0, 5),
        (2, 2, field(1, LARGE)),
        (3, 1, struct.pack("<d", 0.5)),
        (1, 0, 300),
        (9, 2, b"unknown"),
    ]
    assert list(fields(data)) == expected
    for buffer in (data, memoryview(data), bytearray(data)):
        message = Proto(buffer, NAMES, "it")
        assert message.number("number") == 300  # the last one of those that are repeated
        assert message.message("inner").number("number") == LARGE
        assert message.double("fixed") == 0.5


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        (b"\xff" * 40, "a number that does not end"),
        (field(1, 5) + b"\x08", "a number that does not end"),
        (varint(1 << 3 | 3), "a field of wire type 3"),
        (varint(1 << 3 | 7) + bytes(8), "a field of wire type 7"),
    ],
)
def test_what_is_not_a_message_is_refused(data: bytes, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        list(fields(data))
    with pytest.raises(SourceError, match=f"protobuf has {refusal}"):
        Proto(data, NAMES, "it")


def test_the_head_of_a_message_says_where_its_last_value_would_end() -> None:
    head = field(1, 7) + field(2, bytes(1000))[:20]
    message = Proto(head, NAMES, "it")
    assert (message.number("number"), message.span("inner")) == (7, (5, 1000))
    with pytest.raises(ValueError, match="field 2 has 1000 bytes, 17 are left"):
        list(fields(head))
