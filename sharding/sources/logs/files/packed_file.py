"""Files of rosbag2 whose messages are compressed one by one (``compression_mode: MESSAGE``), by zstd."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import msgspec
import zstandard

from fuelrail.sharding.sources.shared.files import MOST_BYTES, check_most
from fuelrail.sharding.sources.shared.foreign import parsing

if TYPE_CHECKING:
    from collections import Counter

    from fuelrail.sharding.sources.logs.files.log_file import Locator, Message, Topic
    from fuelrail.sharding.sources.logs.files.mcap_file import McapFile
    from fuelrail.sharding.sources.logs.files.sqlite_file import SqliteFile


class PackedFile:
    """A file as :class:`McapFile`, whose messages are decompressed as they are read."""

    reads_in_order = True

    def __init__(self, file: McapFile | SqliteFile, where: str) -> None:
        self._file, self._where = file, where

    @property
    def topics(self) -> dict[str, Topic]:
        """Topics by name."""
        return self._file.topics

    @property
    def lost(self) -> Counter[str]:
        """What could not be read, and was left out."""
        return self._file.lost

    def walk(self, heads: Collection[str], whole: Collection[str]) -> Iterator[Message]:
        """Yield the messages of these topics in the order of their recording."""
        return map(self._plain, self._file.walk((), {*heads, *whole}))

    def places(self, topic: str) -> list[Locator]:
        """Return where the messages of a topic are, in the order of their recording."""
        return self._file.places(topic)

    def read(self, place: Locator, most: int | None = None) -> Message:  # noqa: ARG002 - it is decompressed as a whole
        """Read a whole message."""
        return self._plain(self._file.read(place))

    def _plain(self, message: Message) -> Message:
        where = f"{self._where}: message {message.place}"
        with parsing(where, "is not compressed by zstd, though its metadata says so"):
            size = zstandard.frame_content_size(message.data)
            check_most(max(size, 0), where)
            data = zstandard.ZstdDecompressor().decompress(message.data, max_output_size=MOST_BYTES)
        return msgspec.structs.replace(message, data=data, length=len(data), offset=-1)
