"""MCAP files: by their summary and indexes, or record by record where they have none.

A summary, its chunk indexes and the message indexes say where each message is. Of uncompressed
chunks only the heads of messages are read. A compressed chunk is decompressed once, with its
checksum. A file without a summary, as a recorder leaves it that was killed, is walked from its
beginning, and its whole chunks are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.logs.files.log_file import (
    HEAD_BYTES,
    NOT_DESCRIBED,
    Locator,
    LogFile,
    Message,
    Topic,
    by_time,
    check_compression,
)
from fuelrail.sharding.sources.logs.files.mcap_records import (
    CHANNEL_OP,
    CHUNK,
    CHUNK_OP,
    DATA_END_OP,
    FOOTER_OP,
    MAGIC,
    MESSAGE,
    MESSAGE_OP,
    RECORD,
    SCHEMA_OP,
    Channels,
    Chunk,
    Summary,
    chunk_data,
    message_offsets,
    read_summary,
)
from fuelrail.sharding.sources.shared.foreign import parsing
from fuelrail.sharding.sources.shared.windows import opened

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.shared.files import SourceFiles
    from fuelrail.sharding.sources.shared.windows import FileWindow

_HEAD: Final = MESSAGE.size - RECORD.size
_MOST_AHEAD: Final = 1 << 20
"""Bytes of short records that are read at once."""
_MOST_EMPTY: Final = 1 << 16
"""Records of 0 bytes, which no kind of the format has."""


class McapFile(LogFile):
    """One MCAP file.

    ``skip_damaged`` leaves out a chunk whose checksum is wrong, counted in ``lost``, where else it
    is an error. ``check_all`` checks uncompressed chunks also, which reads the whole file.
    """

    def __init__(
        self,
        files: SourceFiles,
        name: str,
        *,
        is_packed: bool = False,
        skip_damaged: bool = False,
        check_all: bool = False,
    ) -> None:
        super().__init__(files, name, is_packed=is_packed)
        self._skip_damaged = skip_damaged
        self._check_all = check_all
        self._channels = Channels(self._where)
        self._chunk: tuple[int, Buffer] = (-1, b"")
        self._lengths: dict[str, int] = {}
        self.num_decompressed = 0

    @cached_property
    def _size(self) -> int:
        facts = self._files.facts(self._name)
        if facts is None or not facts.num_bytes:
            raise SourceError(f"{self._where} {'is not there' if facts is None else 'is empty'}")
        return facts.num_bytes

    @cached_property
    def _summary(self) -> Summary | None:
        return read_summary(self._files, self._name, self._size, self._where)

    @cached_property
    def topics(self) -> dict[str, Topic]:
        """Topics by name."""
        if self._summary is not None:
            return {topic.name: topic for topic in self._summary.channels.values()}
        for _ in self._walk_records(frozenset(), frozenset()):
            pass
        return {topic.name: topic for topic in self._channels.topics.values()}

    @property
    def num_stated(self) -> dict[str, int]:
        """Messages by topic, as the statistics of the file have them."""
        if self._summary is None:
            return {}
        return self._summary.num_messages

    @cached_property
    def reads_in_order(self) -> bool:
        """Whether chunks or messages are compressed."""
        if self._is_packed:
            return True
        if self._summary is not None:
            return any(not chunk.is_plain for chunk in self._summary.chunks)
        records = self._records(RECORD.size + CHUNK.size + 8)
        return any(
            op == CHUNK_OP and not self._chunk_at(position, head).is_plain
            for position, op, _, head in records
        )

    def _walk(self, heads: Collection[str], whole_topics: Collection[str]) -> Iterator[Message]:
        summary = self._summary
        topics = frozenset(heads) | frozenset(whole_topics)
        self.lost.clear()
        self.noted.clear()
        if summary is None:
            yield from self._walk_records(topics, frozenset(whole_topics))
            return
        self._channels.topics = summary.channels
        with opened(self._files, self._name) as window:

            def messages(chunk: Chunk) -> Iterator[Message]:
                check_compression(chunk.compression, self._chunk_name(chunk))
                if chunk.is_plain and not self._check_all:
                    return self._walk_index(
                        window,
                        chunk=chunk,
                        topics=topics,
                        whole_topics=frozenset(whole_topics),
                    )
                return self._walk_chunk(chunk, topics, frozenset(whole_topics))

            yield from by_time(
                ((chunk.first_ns, messages(chunk)) for chunk in summary.chunks),
                self._where,
            )

    def places(self, topic: str) -> list[Locator]:
        """Return where the messages of a topic are, in the order of recording; an index saves
        decompression.
        """
        summary = self._summary
        entries = []
        if summary is None:
            messages = self._walk_records(frozenset([topic]), frozenset())
            return [message.place for message in messages]
        for chunk in summary.chunks:
            index = self._files.read(self._name, chunk.index_at, chunk.index_length)
            offsets = message_offsets(
                index,
                summary.channels,
                frozenset([topic]),
                self._chunk_name(chunk),
            )
            entries += [(log_ns, self._place(chunk, offset)) for log_ns, offset, _ in offsets]
        return [place for _, place in sorted(entries, key=itemgetter(0))]

    def _read(self, place: Locator, limit: int | None = None) -> Message:
        with parsing(f"{self._where}: the message at {place.chunk}:{place.position}"):
            if place.chunk < 0:
                head = self._files.read(self._name, place.position, MESSAGE.size)
                length = RECORD.unpack_from(head)[1] - _HEAD
                start = place.position + MESSAGE.size
                data = self._files.read(
                    self._name,
                    start,
                    length if limit is None else min(limit, length),
                )
                return Message(
                    topic="",
                    log_ns=0,
                    place=place,
                    data=data,
                    length=length,
                    offset=start,
                )
            if self._chunk[0] != place.chunk:
                num_bytes = RECORD.size + CHUNK.size + 8
                head = self._files.read(self._name, place.chunk, num_bytes)
                self._chunk_records(self._chunk_at(place.chunk, head))
            chunk = self._chunk[1]
            length = RECORD.unpack_from(chunk, place.position)[1] - _HEAD
            start = place.position + MESSAGE.size
            return Message(
                topic="",
                log_ns=0,
                place=place,
                data=memoryview(chunk)[start : start + length],
                length=length,
            )

    def _chunk_name(self, chunk: Chunk) -> str:
        return f"{self._where}: the chunk at byte {chunk.position}"

    def _place(self, chunk: Chunk, offset: int) -> Locator:
        if chunk.is_plain:
            return Locator(self._name, -1, chunk.data_at + offset)
        return Locator(self._name, chunk.position, offset)

    def _walk_index(
        self,
        window: FileWindow,
        chunk: Chunk,
        topics: frozenset[str],
        whole_topics: frozenset[str],
    ) -> Iterator[Message]:
        """Yield the messages of an uncompressed chunk by its message index."""
        end = chunk.position + chunk.length
        data_at = chunk.data_at
        index = self._files.read(self._name, chunk.index_at, chunk.index_length)
        for _, offset, topic in message_offsets(
            index,
            topics=self._channels.topics,
            names=topics,
            where=self._chunk_name(chunk),
        ):
            position = data_at + offset
            name = topic.name
            num_bytes = MESSAGE.size + self._lengths.get(name, 0)
            head = window.read(position, num_bytes, HEAD_BYTES)
            if len(head) < MESSAGE.size or head[0] != MESSAGE_OP:
                raise SourceError(
                    f"{self._where}: the index names a message at byte {position}, where "
                    "there is none"
                )
            _, size, _, _, log_ns, _ = MESSAGE.unpack_from(head)
            length = size - _HEAD
            start = position + MESSAGE.size
            if start + length > end:
                raise SourceError(
                    f"{self._where}: the message at byte {position} has {length} bytes, "
                    "more than its chunk"
                )
            num_bytes = length if length <= HEAD_BYTES or name in whole_topics else HEAD_BYTES
            data = head[MESSAGE.size : MESSAGE.size + num_bytes]
            if len(data) < num_bytes:
                data = window.read(start, num_bytes)
                # Messages of a topic are about as long: the next one takes one look.
                self._lengths[name] = min(num_bytes, HEAD_BYTES)
            yield Message(
                topic=name,
                log_ns=log_ns,
                place=Locator(self._name, -1, position),
                data=data,
                length=length,
                offset=start,
            )

    def _walk_chunk(
        self,
        chunk: Chunk,
        topics: frozenset[str],
        whole_topics: frozenset[str],
    ) -> Iterator[Message]:
        """Yield the messages of a chunk, which is read whole; note its schemas and channels."""
        try:
            data = bytes(self._chunk_records(chunk))
        except SourceError:
            if not self._skip_damaged:
                raise
            self.lost["bytes in damaged chunks"] += chunk.length
            return
        position = num_empty = 0
        while position + RECORD.size <= len(data):
            op, size = RECORD.unpack_from(data, position)
            start = position + MESSAGE.size
            end = position + RECORD.size + size
            if end > len(data):
                break
            if op == MESSAGE_OP:
                self._check_message(chunk.position, size)
                _, _, channel, _, log_ns, _ = MESSAGE.unpack_from(data, position)
                topic = self._channels.topics.get(channel)
                if topic is None:
                    self.noted[f"{NOT_DESCRIBED}: messages"] += 1
                elif topic.name in topics:
                    offset = chunk.data_at + start if chunk.is_plain else -1
                    data_end = end if topic.name in whole_topics else min(end, start + HEAD_BYTES)
                    yield Message(
                        topic=topic.name,
                        log_ns=log_ns,
                        place=self._place(chunk, position),
                        data=data[start:data_end],
                        length=end - start,
                        offset=offset,
                    )
            elif op in (SCHEMA_OP, CHANNEL_OP):
                payload = bytes(data[position + RECORD.size : end])
                self._channels.take(op, payload)
            elif not size:
                num_empty += 1
                self._check_empty(num_empty)
            position = end
        if position < len(data):
            self.lost["bytes of chunks that are no whole records"] += len(data) - position

    def _walk_records(
        self, topics: frozenset[str], whole_topics: frozenset[str]
    ) -> Iterator[Message]:
        """Yield the messages of a file without a summary, perhaps cut off; note its schemas and
        channels.
        """
        end = len(MAGIC)
        num_empty = 0
        has_data_end = False
        for position, op, length, head in self._records(MESSAGE.size + HEAD_BYTES):
            if op == CHUNK_OP and not CHUNK.unpack_from(head, RECORD.size)[2]:
                num_empty += 1
                self._check_empty(num_empty)
            elif op == CHUNK_OP:
                yield from sorted(
                    self._walk_chunk(self._chunk_at(position, head), topics, whole_topics),
                    key=attrgetter("log_ns"),
                )
            elif op == MESSAGE_OP:
                self._check_message(position, length)
                _, _, channel, _, log_ns, _ = MESSAGE.unpack_from(head)
                topic = self._channels.topics.get(channel)
                start = position + MESSAGE.size
                if topic is None:
                    self.noted[f"{NOT_DESCRIBED}: messages"] += 1
                elif topic.name in topics:
                    data = self._files.read(self._name, start, length - _HEAD)
                    yield Message(
                        topic=topic.name,
                        log_ns=log_ns,
                        place=Locator(self._name, -1, position),
                        data=data,
                        length=length - _HEAD,
                        offset=start,
                    )
            elif op in (SCHEMA_OP, CHANNEL_OP):
                self._channels.take(
                    op,
                    self._files.read(self._name, position + RECORD.size, length),
                )
            elif op == DATA_END_OP:
                has_data_end = True
            elif op == FOOTER_OP and has_data_end:
                end = position + RECORD.size + length
                num_after = self._size - (end + len(MAGIC))
                if num_after > 0:
                    raise SourceError(
                        f"{self._where} has {num_after} bytes behind its end: two files were "
                        "joined, or it was written over a longer one. `mcap merge` joins files"
                    )
                return
            end = position + RECORD.size + length
        if has_data_end:
            return
        self.noted["files without an end, as a killed recorder leaves them"] = 1
        if end < self._size:
            self.lost["bytes after a cut"] = self._size - end

    def _records(self, num_bytes: int) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield place, kind and length of each whole record, with the first bytes from there on."""
        position = len(MAGIC)
        num_ahead = num_bytes
        num_empty = 0
        start = 0
        block = b""
        while position < self._size:
            offset = position - start
            is_beyond = offset + num_bytes > len(block)
            if is_beyond and start + len(block) < self._size:
                # Short records are read many at once, long ones by their heads.
                is_near = offset <= len(block)
                num_ahead = min(num_ahead * 4, _MOST_AHEAD) if is_near else num_bytes
                start = position
                offset = 0
                num_read = max(num_ahead, num_bytes)
                block = self._files.read(self._name, position, num_read)
            if offset + RECORD.size > len(block):
                return
            op, length = RECORD.unpack_from(block, offset)
            end = position + RECORD.size + length
            if not op or end > self._size:
                return
            if not length:
                num_empty += 1
                self._check_empty(num_empty)
            yield position, op, length, block[offset : offset + num_bytes]
            position = end

    def _check_message(self, position: int, length: int) -> None:
        if length < _HEAD:
            raise SourceError(
                f"{self._where}: the message at byte {position} has {length} bytes, and its head "
                f"alone has {_HEAD}"
            )

    def _check_empty(self, number: int) -> None:
        """Raise SourceError for so many records of 0 bytes that the file is not one of messages."""
        if number > _MOST_EMPTY:
            raise SourceError(
                f"{self._where} has over {_MOST_EMPTY} records without content: is it damaged?"
            )

    @staticmethod
    def _chunk_at(position: int, head: bytes) -> Chunk:
        """Return a chunk by the first bytes of its record."""
        size = CHUNK.unpack_from(head, RECORD.size)[4]
        begin = RECORD.size + CHUNK.size
        name = head[begin:][:size].decode("utf-8", "replace")
        return Chunk(
            first_ns=0,
            position=position,
            length=RECORD.size + RECORD.unpack_from(head)[1],
            compression=name,
            index_at=0,
            index_length=0,
        )

    def _chunk_records(self, chunk: Chunk) -> Buffer:
        """Return the records of a chunk, decompressed, with the right checksum; keep the last
        chunk.
        """
        if self._chunk[0] != chunk.position:
            record = self._files.read(
                self._name,
                chunk.position + RECORD.size,
                chunk.length - RECORD.size,
            )
            self._chunk = (
                chunk.position,
                chunk_data(record, self._chunk_name(chunk)),
            )
            self.num_decompressed += 1
        return self._chunk[1]
