"""What both storages of logs have: topics, messages in the order of their recording, and where a
message is.
"""

from __future__ import annotations

import bz2
import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import zstandard

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.arrays import Buffer
from fuelrail.sharding.sources.shared.files import MOST_BYTES, check_most
from fuelrail.sharding.sources.shared.foreign import parsing

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.files import SourceFiles

HEAD_BYTES: Final = 1024
"""How much of a message is read for its stamp and its layout; the headers of most JPEGs are in
it too.
"""
NOT_DESCRIBED: Final = "(a topic that the file does not describe)"
"""Stands for the topic of messages whose number of a topic the file does not explain."""
_MOST_PENDING: Final = 256 << 20


class Topic(NamedTuple):
    """A topic. ``type`` has ROS 2's spelling without ``msg/``: ``sensor_msgs/Image``; foxglove's is
    ``foxglove.Log``.

    ``encoding`` is of the messages, such as ``cdr``; ``schema`` is the text or the descriptor of
    the type.
    """

    name: str
    type: str
    encoding: str
    schema: bytes = b""


class Locator(msgspec.Struct, frozen=True, order=True, gc=False):
    """A message: of an MCAP file the offset of its chunk, -1 for none, and of its record; of
    SQLite 0 and its row.
    """

    file: str
    chunk: int
    position: int

    def __str__(self) -> str:
        return f"{self.file}@{self.chunk}:{self.position}"

    @classmethod
    def parse(cls, text: str) -> Locator:
        """Parse what ``str`` makes."""
        file, _, numbers = text.rpartition("@")
        chunk, _, position = numbers.partition(":")
        return cls(file, int(chunk), int(position))


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of ``length`` bytes, of which ``data`` are all or the first.

    ``offset`` is where it begins in its file; -1 where its bytes are not in the file as they are.
    """

    topic: str
    log_ns: int
    place: Locator
    data: Buffer
    length: int
    offset: int = -1


class LogFile:
    """A file of a log.

    ``lost`` is what could not be read, and was left out: kind to bytes or messages.

    ``noted`` is what else is odd about the file, for the report.

    The messages of one that ``is_packed`` are compressed one by one, by zstd, as rosbag2 does it
    (``compression_mode: MESSAGE``); they are decompressed as they are read. Errors are SourceError
    naming the file.
    """

    def __init__(
        self,
        files: SourceFiles,
        name: str,
        *,
        is_packed: bool = False,
    ) -> None:
        self._files = files
        self._name = name
        self._where = f"file '{files.shown}/{name}'"
        self._is_packed = is_packed
        self.lost = Counter[str]()
        self.noted = Counter[str]()

    @property
    def topics(self) -> dict[str, Topic]:
        """Topics by name."""
        raise NotImplementedError

    @property
    def num_stated(self) -> Mapping[str, int]:
        """Messages by topic, as the file counts them; empty where it does not."""
        return {}

    @property
    def reads_in_order(self) -> bool:
        """Whether another order than that of the recording is much slower to read."""
        return True

    def places(self, topic: str) -> list[Locator]:
        """Return where the messages of a topic are, in the order of their recording."""
        raise NotImplementedError

    def walk(self, heads: Collection[str], whole_topics: Collection[str]) -> Iterator[Message]:
        """Yield the messages of these topics in the order of their recording; of ``heads`` the
        first bytes may do.
        """
        if self._is_packed:
            topics = {*heads, *whole_topics}
            return map(self._unpack, self._walk((), topics))
        return self._walk(heads, whole_topics)

    def read(self, place: Locator, limit: int | None = None) -> Message:
        """Read a whole message, or its first bytes."""
        if self._is_packed:
            return self._unpack(self._read(place))
        return self._read(place, limit)

    def _walk(self, heads: Collection[str], whole_topics: Collection[str]) -> Iterator[Message]:
        raise NotImplementedError

    def _read(self, place: Locator, limit: int | None = None) -> Message:
        raise NotImplementedError

    def _unpack(self, message: Message) -> Message:
        where = f"{self._where}: message {message.place}"
        with parsing(where, "is not compressed by zstd, though its metadata says so"):
            size = zstandard.frame_content_size(message.data)
            check_most(max(size, 0), where)
            data = zstandard.ZstdDecompressor().decompress(message.data, max_output_size=MOST_BYTES)
        return msgspec.structs.replace(
            message,
            data=data,
            length=len(data),
            offset=-1,
        )


def by_time(parts: Iterable[tuple[int, Iterable[Message]]], where: str) -> Iterator[Message]:
    """Yield messages by the time of their recording; those of one time in the order in which they
    come.

    ``parts`` have a time each, ascending, before which no message of it or of a later part is.
    Raises SourceError, naming ``where``, for parts that overlap by more than the memory for it.
    """
    pending: list[tuple[int, int, Message]] = []
    num_bytes = number = 0
    for first_ns, messages in parts:
        while pending and pending[0][0] <= first_ns:
            message = heapq.heappop(pending)[2]
            num_bytes -= len(message.data)
            yield message
        for message in messages:
            number += 1
            heapq.heappush(pending, (message.log_ns, number, message))
            num_bytes += len(message.data)
            if num_bytes > _MOST_PENDING:
                raise SourceError(
                    f"{where} has messages so far out of the order of time that over "
                    f"{_MOST_PENDING >> 20} MiB of them would wait for earlier ones: sort "
                    "it first, as by `mcap sort`"
                )
    while pending:
        yield heapq.heappop(pending)[2]


def plain_type(name: str) -> str:
    """Return the name of a type in one spelling: ``sensor_msgs/msg/Image`` and
    ``sensor_msgs/Image`` are the same.
    """
    return name.replace("/msg/", "/")


def check_compression(compression: str, where: str) -> None:
    """Raise SourceError, naming ``where``, for a compression that is not read here."""
    if compression not in ("", "none", "zstd", "lz4"):
        raise SourceError(
            f"{where} has the compression '{compression}'; zstd and lz4 are read: write the "
            "log again"
        )


def inflated(
    data: bytes,
    compression: str,
    size: int,
    where: str,
) -> bytes:
    """Decompress zstd, lz4 or bz2 to the stated size, of which no more is made; anything else is
    not compressed.

    Raises SourceError, naming ``where``, for a size over the limit, ValueError for another size
    than the stated one.
    """
    check_most(size, where)
    if compression == "lz4":
        import lz4.frame  # type: ignore[import-untyped]

        data = lz4.frame.LZ4FrameDecompressor().decompress(data, size + 1)
    elif compression == "zstd":
        data = (
            zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read(size + 1)
        )
    elif compression == "bz2":
        data = bz2.BZ2Decompressor().decompress(data, size + 1)
    if len(data) != size:
        raise ValueError(
            f"{size} bytes are stated, and it has {'more' if len(data) > size else len(data)}"
        )
    return data
