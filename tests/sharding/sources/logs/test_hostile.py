"""Chunks, definitions and databases that are made to take memory or time without end are named."""

from __future__ import annotations

import contextlib
import sqlite3
import struct
import tracemalloc

import lz4.frame
import pytest
import zstandard

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.logs.files.log_file import (
    Locator,
    Message,
    Topic,
)
from fuelrail.sharding.sources.logs.files.mcap_records import (
    SCHEMA_OP,
    Channels,
    chunk_data,
)
from fuelrail.sharding.sources.logs.messages.reader import Reader
from fuelrail.sharding.sources.registry import SourceSpec
from support.log_world import ros_messages, write_rosbag2
from support.source_world import make_world


def chunk_record(compression, data, stated, crc=0):
    name = compression.encode()
    return (
        struct.pack("<QQQII", 0, 0, stated, crc, len(name))
        + name
        + struct.pack("<Q", len(data))
        + data
    )


BOMB = {
    "zstd": zstandard.compress(bytes(64 << 20)),
    "lz4": lz4.frame.compress(bytes(64 << 20)),
}


@pytest.mark.parametrize("compression", BOMB)
@pytest.mark.parametrize(
    ("stated", "says"),
    [
        (100, "100 bytes are stated, and it has more"),
        ((64 << 20) + 1, "67108865 bytes are stated, and it has 67108864"),
        (1 << 40, "1099511627776 bytes, of which at most"),
    ],
)
def test_of_a_chunk_no_more_is_made_than_it_states(compression, stated, says):
    tracemalloc.start()
    with pytest.raises(SourceError, match=f"chunk 5.*{says}"):
        chunk_data(chunk_record(compression, BOMB[compression], stated), "chunk 5")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20 or stated == (64 << 20) + 1
    assert (
        len(
            chunk_data(
                chunk_record(compression, BOMB[compression], 64 << 20),
                "chunk 5",
            )
        )
        == 64 << 20
    )


def test_lengths_of_records_that_are_longer_than_the_file_are_named():
    for record in (
        b"\1\0" + b"\xff" * 4,
        b"",
        b"\1\0\3\0\0\0a\xffb" + bytes(12),
    ):
        with pytest.raises(SourceError, match=r"^x has a damaged schema: "):
            Channels("x").take(SCHEMA_OP, record)
    with pytest.raises(SourceError, match=r"^x is damaged"):
        chunk_data(b"\0" * 5, "x")


STAMP = "builtin_interfaces/Time stamp\n"
DEFINITIONS = {
    "itself": (STAMP + "Thing more\n", "itself as a field"),
    "each other": (
        STAMP + "pkg/A a\n" + "=" * 80 + "\nMSG: pkg/A\nThing b\n",
        "itself as a field",
    ),
    "no such type": (STAMP + "pkg/Gone a\n", "no 'pkg/msg/Gone'"),
    "5,000 digits": (STAMP + f"uint8 X={'9' * 5000}\n", "4300"),
    "infinite": (STAMP + "uint8 X=1e999\n", "inf"),
    "another header": (
        "std_msgs/Header h\n" + "=" * 80 + "\nMSG: std_msgs/Header\nuint8 a\n",
        "different definition",
    ),
    "binary": (b"\x80\xff\0", "utf-8"),
    "no text": ("uint8 a\0\n", "Could not parse"),
    "100,000 fields": (
        STAMP + "".join(f"float64 f{number}\n" for number in range(100_000)),
        "over 10000 lines",
    ),
    "5,000 fields": (
        STAMP + "".join(f"float64 f{number}\n" for number in range(5000)),
        "over 1000 values",
    ),
    "a long list of texts": (STAMP + "string[100000] a\n", "over 1000 values"),
    "lists of lists": (
        STAMP
        + "T0 a\n"
        + "".join(f"{'=' * 80}\nMSG: pkg/T{number}\nT{number + 1}[99] a\n" for number in range(9))
        + "=" * 80
        + "\nMSG: pkg/T9\nuint8 a\n",
        "over 1000 values",
    ),
    "deep": (
        STAMP
        + "T0 a\n"
        + "".join(f"{'=' * 80}\nMSG: pkg/T{number}\nT{number + 1} a\n" for number in range(2000))
        + "=" * 80
        + "\nMSG: pkg/T2000\nuint8 a\n",
        "nested too deeply|over 1000 values",
    ),
}


@pytest.mark.parametrize("case", DEFINITIONS)
@pytest.mark.parametrize("attribute", ["columns", "signals"])
def test_a_definition_that_is_hostile_is_named_with_its_topic(case, attribute):
    text, says = DEFINITIONS[case]
    schema = text if isinstance(text, bytes) else text.encode()
    reader = Reader(Topic("/topic", "pkg/Thing", "cdr", schema))
    message = Message(
        topic="/topic",
        log_ns=0,
        place=Locator("x", -1, 0),
        data=bytes(100),
        length=100,
    )
    with pytest.raises(SourceError, match=f"(?s)topic '/topic'.*is not a pkg/Thing.*({says})"):
        reader.columns if attribute == "columns" else reader.signals([message])


def test_a_definition_with_long_lists_of_numbers_is_read():
    schema = (STAMP + "float64[100000] many\nfloat64 x\nstring[3] names\n").encode()
    assert Reader(Topic("/topic", "pkg/Thing", "cdr", schema)).columns == ["x"]


ENDLESS = "WITH RECURSIVE n(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM n) SELECT"
DATABASES = {
    "endless topics": (
        (
            f"DROP TABLE topics; CREATE VIEW topics AS {ENDLESS} a AS id, 'a' AS name, 'b' AS type, 'cdr' AS "
            "serialization_format FROM n"
        ),
        "'topics' is not a table",
    ),
    "endless messages": (
        (
            f"DROP TABLE messages; CREATE VIEW Messages AS {ENDLESS} a AS id, 1 AS topic_id, a AS timestamp, "
            "x'00' AS data FROM n"
        ),
        "'messages' is not a table",
    ),
    "endless definitions": (
        (
            f"DROP TABLE message_definitions; CREATE VIEW message_definitions AS {ENDLESS} a AS topic_type, 'b' AS "
            "encoded_message_definition FROM n"
        ),
        "'message_definitions' is not a table",
    ),
    "a virtual table": (
        "DROP TABLE topics; CREATE VIRTUAL TABLE topics USING fts5(id, name, type, serialization_format)",
        "'topics' is not a table",
    ),
    "a type that is bytes": (
        "UPDATE topics SET type = x'ff00'",
        "it must be text, not bytes",
    ),
    "a definition that is bytes": (
        "UPDATE message_definitions SET encoded_message_definition = x'ff'",
        "it must be text, not bytes",
    ),
    "a time that is text": (
        "UPDATE messages SET timestamp = 'noon'",
        "it must be a whole number, not text",
    ),
    "a time that is 1e300": (
        "UPDATE messages SET timestamp = 1e300",
        "it must be a whole number",
    ),
    "text that is not UTF-8": (
        "UPDATE topics SET name = CAST(x'ff' AS TEXT)",
        "Could not decode to UTF-8",
    ),
}


@pytest.mark.parametrize("case", DATABASES)
def test_a_database_that_is_hostile_is_named(tmp_path, case):
    change, says = DATABASES[case]
    world = make_world(1, 8)
    write_rosbag2(tmp_path / "bag", ros_messages(world, world.clips[0]))
    (path,) = (tmp_path / "bag").glob("*.db3")
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(change)
    with pytest.raises(SourceError, match=f"(?s)db3'.*{says}"):
        scan_source(SourceSpec("rosbag2", str(tmp_path), {}))
