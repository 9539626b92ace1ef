"""Records of MCAP (https://mcap.dev/spec) as the library parses them: the summary, indexes, and
chunks.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections import Counter
from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.logs.files.log_file import (
    NOT_DESCRIBED,
    Topic,
    check_compression,
    inflated,
    plain_type,
)
from fuelrail.sharding.sources.shared.foreign import parsing

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.shared.files import SourceFiles

MAGIC: Final = b"\x89MCAP0\r\n"
_ROS1_MAGIC: Final = b"#ROSBAG V2.0"
RECORD: Final = struct.Struct("<BQ")
MESSAGE: Final = struct.Struct("<BQHIQQ")
"""The record's head, then channel, sequence, log time and publish time."""
CHUNK: Final = struct.Struct("<QQQII")
"""The head of a chunk: first and last time, size, checksum, length of the name of its
compression.
"""
_INDEX: Final = struct.Struct("<BQHI")
"""The head of a message index: record's head, channel, bytes of its pairs of log time and
offset.
"""
_PAIR: Final = struct.Struct("<QQ")
_INDEX_OP: Final = 0x07
_FOOTER: Final = struct.Struct("<BQQQI")
FOOTER_OP = 0x02
SCHEMA_OP = 0x03
CHANNEL_OP = 0x04
MESSAGE_OP = 0x05
CHUNK_OP = 0x06
DATA_END_OP: Final = 0x0F
_DAMAGED: Final = "is damaged (the option damaged=skip leaves it out)"


class Chunk(NamedTuple):
    """A chunk: time of its first message, offset and length of its record, and where its message
    index is.
    """

    first_ns: int
    position: int
    length: int
    compression: str
    index_at: int
    index_length: int

    @property
    def is_plain(self) -> bool:
        """Whether it is not compressed."""
        return self.compression in ("", "none")

    @property
    def data_at(self) -> int:
        """The place in the file where its records begin, if it is not compressed."""
        return self.position + RECORD.size + CHUNK.size + len(self.compression) + 8


class Summary(NamedTuple):
    """Channels by number, chunks in the order of their first times, and messages by topic, as
    counted there.
    """

    channels: dict[int, Topic]
    chunks: list[Chunk]
    num_messages: dict[str, int]


class Channels:
    """Schemas and channels, as they come by."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.topics: dict[int, Topic] = {}
        self._schemas: dict[int, Any] = {}

    def take(self, op: int, data: bytes) -> None:
        """Note a schema or a channel."""
        from mcap.data_stream import ReadDataStream
        from mcap.records import Channel, Schema

        kind: Any = {SCHEMA_OP: Schema, CHANNEL_OP: Channel}.get(op)
        if kind is not None:
            with parsing(self._where, f"has a damaged {kind.__name__.lower()}"):
                self.add(kind.read(ReadDataStream(io.BytesIO(data))))

    def add(self, record: Any) -> None:
        """Note a schema or a channel of the library."""
        if not hasattr(record, "topic"):
            self._schemas[record.id] = record
            return
        schema = self._schemas.get(record.schema_id)
        kind = ""
        text = b""
        if schema is not None:
            kind = plain_type(schema.name)
            text = schema.data
        self.topics[record.id] = Topic(
            name=record.topic,
            type=kind,
            encoding=record.message_encoding,
            schema=text,
        )


def read_summary(
    files: SourceFiles,
    name: str,
    size: int,
    where: str,
) -> Summary | None:
    """Read the summary; None where there is none that all messages can be found by."""
    from mcap.records import Channel, ChunkIndex, Schema, Statistics
    from mcap.stream_reader import StreamReader

    head = files.read(name, 0, len(_ROS1_MAGIC))
    if head == _ROS1_MAGIC:
        raise SourceError(f"{where} is a ROS 1 bag: read it by the kind rosbag1")
    if not head.startswith(MAGIC):
        raise SourceError(
            f"{where} is not an MCAP file: it begins with {head[:8]!r}, expected {MAGIC!r}"
        )
    tail = _FOOTER.size + len(MAGIC)
    data = files.read(name, max(size - tail, 0), tail)
    if len(data) < tail or not data.endswith(MAGIC):
        return None
    _, _, start, _, crc = _FOOTER.unpack_from(data)
    if not 0 < start < size - tail:
        return None
    summary = files.read(name, start, size - start)
    if crc and zlib.crc32(summary[: -len(MAGIC) - 4]) != crc:
        return None
    channels = Channels(where)
    chunks = []
    num_messages = -1
    counts_by_channel: dict[int, int] = {}
    with parsing(where, "has a damaged summary"):
        for record in StreamReader(io.BytesIO(summary), skip_magic=True).records:
            if isinstance(record, Schema | Channel):
                channels.add(record)
            elif isinstance(record, ChunkIndex):
                position = record.chunk_start_offset
                length = record.chunk_length
                first_ns = record.message_start_time
                index_bytes = record.message_index_length
                chunks.append(
                    Chunk(
                        first_ns=first_ns,
                        position=position,
                        length=length,
                        compression=record.compression,
                        index_at=position + length,
                        index_length=index_bytes,
                    )
                )
            elif isinstance(record, Statistics):
                num_messages = record.message_count
                counts_by_channel = record.channel_message_counts
    is_whole = chunks and channels.topics and all(chunk.index_length for chunk in chunks)
    if num_messages and not is_whole:
        return None
    counts = Counter[str]()
    for number, count in counts_by_channel.items():
        topic = channels.topics.get(number)
        counts[NOT_DESCRIBED if topic is None else topic.name] += count
    return Summary(channels.topics, sorted(chunks), counts)


def message_offsets(
    index: bytes,
    topics: Mapping[int, Topic],
    names: frozenset[str],
    where: str,
) -> list[tuple[int, int, Topic]]:
    """Time and offset in a chunk of the messages of these topics by its message index, offsets
    ascending.

    Raises SourceError, naming ``where``, for what is not an index.
    """
    offsets: list[tuple[int, int, Topic]] = []
    position = 0
    while position < len(index):
        op, length = (
            RECORD.unpack_from(index, position) if position + _INDEX.size <= len(index) else (0, 0)
        )
        if op != _INDEX_OP or position + RECORD.size + length > len(index):
            raise SourceError(
                f"{where}: its message index is damaged at byte {position} of {len(index)}"
            )
        _, _, channel, size = _INDEX.unpack_from(index, position)
        topic = topics.get(channel)
        if topic is not None and topic.name in names:
            begin = position + _INDEX.size
            end = position + RECORD.size + length
            pairs = index[begin:end][:size]
            offsets += [
                (log_ns, offset, topic)
                for log_ns, offset in _PAIR.iter_unpack(
                    pairs[: len(pairs) // _PAIR.size * _PAIR.size]
                )
            ]
        position += RECORD.size + length
    offsets.sort(key=itemgetter(1))
    return offsets


def chunk_data(record: bytes, where: str) -> Buffer:
    """Decompress the records of a chunk, of which no more are made than it states.

    Raises SourceError, naming ``where``, for another size or a wrong checksum.
    """
    from mcap.data_stream import ReadDataStream
    from mcap.records import Chunk as Record

    with parsing(where, _DAMAGED):
        chunk = Record.read(ReadDataStream(io.BytesIO(record)))
        check_compression(chunk.compression, where)
        data = inflated(
            chunk.data,
            compression=chunk.compression,
            size=chunk.uncompressed_size,
            where=where,
        )
        if chunk.uncompressed_crc and zlib.crc32(data) != chunk.uncompressed_crc:
            raise ValueError("its checksum is wrong")
    return data
