"""ROS 1 bags (format 2.0), read by rosbags. Their messages become CDR, as those of ROS 2."""

from __future__ import annotations

import heapq
import io
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.logs.files.log_file import (
    NOT_DESCRIBED,
    Locator,
    LogFile,
    Message,
    Topic,
    inflated,
    plain_type,
)
from fuelrail.sharding.sources.logs.messages.ros import type_store
from fuelrail.sharding.sources.shared.foreign import parsing

if TYPE_CHECKING:
    from rosbags.rosbag1 import Reader

    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.shared.files import SourceFiles

_RENAMED: Final = {"tf/tfMessage": "tf2_msgs/TFMessage"}


class BagFile(LogFile):
    """One ``.bag`` file. A chunk is read as a whole, and the last one is kept."""

    def __init__(self, files: SourceFiles, name: str) -> None:
        super().__init__(files, name)
        path = files.path(name)
        if path is None:
            raise SourceError(
                f"{self._where} is a bag, which is not read at a URL: copy it here first"
            )
        self._path = path
        self._lock = threading.Lock()
        self._chunk: tuple[int, Buffer] = (-1, b"")

    @cached_property
    def _bag(self) -> Reader:
        from rosbags.rosbag1 import Reader
        from rosbags.rosbag1.reader import Header, RecordType, read_uint32

        bag = Reader(str(self._path))
        with parsing(
            self._where,
            "is not a ROS 1 bag, or it is damaged (`rosbag reindex` makes its index again)",
        ):
            bag.open()
            file: Any = bag.bio
            file.seek(0)
            file.readline()
            head = Header.read(file, RecordType.BAGHEADER)
            num_records = head.get_uint32("conn_count") + head.get_uint32("chunk_count")
            file.seek(head.get_uint64("index_pos"))
            for _ in range(num_records):
                file.seek(read_uint32(file), io.SEEK_CUR)  # the head of a record, then its data
                file.seek(read_uint32(file), io.SEEK_CUR)
            end: int = file.tell()
            size: int = file.seek(0, io.SEEK_END)
            num_after = size - end
        weakref.finalize(self, bag.close)
        if num_after:
            raise SourceError(
                f"{self._where} has {num_after} bytes behind its end: two files were "
                "joined, or it was written over a longer one"
            )
        return bag

    @cached_property
    def _topics(self) -> dict[int, Topic]:
        """Topics by the number of a connection."""
        topics = {}
        for connection in self._bag.connections:
            kind = plain_type(connection.msgtype)
            topics[connection.id] = Topic(
                connection.topic,
                _RENAMED.get(kind, kind),
                "cdr",
                connection.msgdef.data.encode(),
            )
        return topics

    @property
    def topics(self) -> dict[str, Topic]:
        """Topics by name."""
        return {topic.name: topic for topic in self._topics.values()}

    @property
    def num_stated(self) -> dict[str, int]:
        """Messages by topic, as the chunks' summaries at the end count them."""
        counts = Counter[str]()
        for chunk in self._bag.chunk_infos:
            for number, count in chunk.connection_counts.items():
                topic = self._topics.get(number)
                counts[NOT_DESCRIBED if topic is None else topic.name] += count
        return counts

    def _walk(self, heads: Collection[str], whole_topics: Collection[str]) -> Iterator[Message]:
        for place in self._places({*heads, *whole_topics}):
            yield self.read(place)

    def places(self, topic: str) -> list[Locator]:
        """Return where the messages of a topic are, by the time of their recording."""
        return list(self._places([topic]))

    def _places(self, topics: Collection[str]) -> Iterator[Locator]:
        numbers = [number for number, topic in self._topics.items() if topic.name in topics]
        entries: Iterable[Any] = heapq.merge(*(self._bag.indexes[number] for number in numbers))
        return (Locator(self._name, entry.chunk_pos, entry.offset) for entry in entries)

    def _read(
        self,
        place: Locator,
        limit: int | None = None,  # noqa: ARG002 - it is made as a whole
    ) -> Message:
        from rosbags.rosbag1.reader import (
            Header,
            RecordType,
            read_bytes,
            read_uint32,
        )

        with (
            self._lock,
            parsing(f"{self._where}: message {place.chunk}:{place.position}"),
        ):
            if self._chunk[0] != place.chunk:  # read and decompress it
                file: Any = self._bag.bio
                file.seek(place.chunk)
                chunk_head = Header.read(file, RecordType.CHUNK)
                data = inflated(
                    read_bytes(file, read_uint32(file)),
                    chunk_head.get_string("compression"),
                    chunk_head.get_uint32("size"),
                    self._where,
                )
                self._chunk = (place.chunk, data)
            record = io.BytesIO(self._chunk[1])
            record.seek(place.position)
            head = Header.read(record)
            while head.get_uint8("op") == RecordType.CONNECTION:
                record.seek(read_uint32(record), io.SEEK_CUR)
                head = Header.read(record)
            topic = self._topics[head.get_uint32("conn")]
            log_ns = head.get_time("time")
            name = topic.type.replace("/", "/msg/")
            store = type_store(name, topic.schema)
            payload = read_bytes(record, read_uint32(record))
            message = bytes(store.ros1_to_cdr(payload, name))
        return Message(
            topic=topic.name,
            log_ns=log_ns,
            place=place,
            data=message,
            length=len(message),
        )
