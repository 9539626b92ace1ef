"""SQLite files of rosbag2 (``.db3``): the tables ``topics`` and ``messages``."""

from __future__ import annotations

import os
import sqlite3
import struct
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.logs.files.log_file import (
    HEAD_BYTES,
    NOT_DESCRIBED,
    Locator,
    LogFile,
    Message,
    Topic,
    plain_type,
)
from fuelrail.sharding.sources.logs.files.sqlite_wal import (
    check_no_journal,
    merge_wal,
    wal_of,
)
from fuelrail.sharding.sources.shared.files import MOST_BYTES
from fuelrail.sharding.sources.shared.foreign import parsing

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.files import SourceFiles

T = TypeVar("T")
_HEAD: Final = struct.Struct(">16xH6xII60xI")
"""Of the head of a database: bytes of a page, changes of the file, pages, and the change that
counted them.
"""
READ_WITH_WAL: Final = "files read with the -wal beside them, as a killed recorder leaves it"


class SqliteFile(LogFile):
    """One ``.db3`` file, with its write-ahead log. Nothing is written beside it."""

    def __init__(
        self,
        files: SourceFiles,
        name: str,
        *,
        is_packed: bool = False,
    ) -> None:
        super().__init__(files, name, is_packed=is_packed)
        path = files.path(name)
        if path is None:
            raise SourceError(
                f"{self._where} is SQLite, which is not read at a URL: copy it here first"
            )
        self._path = Path(path)
        self._lock = threading.Lock()

    @property
    def reads_in_order(self) -> bool:
        """False, but where each message is to be decompressed."""
        return self._is_packed

    @cached_property
    def _database(self) -> sqlite3.Connection:
        path = self._path.resolve()
        check_no_journal(path, self._where)
        wal = wal_of(path)
        if wal is None:
            self._check_end(path)
            database = _connect(path)
        else:
            with tempfile.TemporaryDirectory(prefix="fuelrail-") as folder:
                copy = Path(folder) / "log.db3"
                num_lost = merge_wal(path, wal, copy, self._where)
                database = _connect(copy)  # which is gone where this process is killed
            self.noted[READ_WITH_WAL] = 1
            self.lost["bytes of an unfinished write in a -wal"] += num_lost
        # A database that goes unclosed is a warning from Python 3.13 on.
        weakref.finalize(self, database.close)
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        return database

    def _check_end(self, path: Path) -> None:
        """Note bytes behind the last page that the head of the file counts, or raise SourceError
        if not all are 0.
        """
        with parsing(self._where), path.open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            page_bytes, change, num_pages, valid_for = _HEAD.unpack(head)
            page_bytes = 1 << 16 if page_bytes == 1 else page_bytes
            if not num_pages or change != valid_for:
                return  # as SQLite has it, the size of the file counts then
            end = num_pages * page_bytes
            size = file.seek(0, os.SEEK_END)
            file.seek(end)
            has_more = any(file.read(1 << 16))
        if has_more:
            raise SourceError(
                f"{self._where} has {size - end} bytes behind its end: two files were "
                "joined, or it was written over a longer one"
            )
        if size > end:
            self.noted["bytes of 0 behind the end of a database"] += size - end

    def _rows(self, kind: type[T], query: str, values: Sequence[Any] = ()) -> list[T]:
        with parsing(self._where, "is not a rosbag2 database, or it is damaged"):
            with self._lock:
                rows = self._database.execute(query, values).fetchall()
            return msgspec.convert(rows, list[kind])  # type: ignore[valid-type]

    @cached_property
    def _ids(self) -> dict[int, Topic]:
        kinds = dict(
            self._rows(
                tuple[str, str],
                "SELECT lower(name), sql FROM sqlite_master WHERE sql IS NOT NULL",
            )
        )
        for name in ("topics", "messages", "message_definitions"):
            statement = kinds.get(name, "CREATE TABLE").upper()
            if not statement.startswith("CREATE TABLE"):
                # A view may have no end.
                raise SourceError(
                    f"{self._where} is not a rosbag2 database: '{name}' is not a table"
                )
        rows = self._rows(
            tuple[int, str, str, str],
            "SELECT id, name, type, serialization_format FROM topics ORDER BY id",
        )
        query = "SELECT topic_type, encoded_message_definition FROM message_definitions"
        texts: dict[str, str] = {}
        if "message_definitions" in kinds:
            texts = dict(self._rows(tuple[str, str], query))
        return {
            number: Topic(
                name=name,
                type=plain_type(kind),
                encoding=encoding,
                schema=texts.get(kind, "").encode(),
            )
            for number, name, kind, encoding in rows
        }

    @cached_property
    def topics(self) -> dict[str, Topic]:
        """Topics by name."""
        return {topic.name: topic for topic in self._ids.values()}

    def _walk(self, heads: Collection[str], whole_topics: Collection[str]) -> Iterator[Message]:
        limits = {
            number: None if topic.name in whole_topics else HEAD_BYTES
            for number, topic in self._ids.items()
            if topic.name in whole_topics or topic.name in heads
        }
        if not limits:
            return
        after = -(1 << 63)
        counts = Counter[int]()
        query = (
            "SELECT timestamp, rowid, topic_id FROM messages "
            "WHERE rowid > ? ORDER BY rowid LIMIT 4096"
        )
        while rows := self._rows(tuple[int, int, int], query, (after,)):
            for log_ns, row, topic in rows:
                counts[topic] += 1
                if topic in limits:
                    yield self._message(
                        topic,
                        log_ns=log_ns,
                        row=row,
                        limit=limits[topic],
                    )
            after = rows[-1][1]
        num_unknown = sum(count for topic, count in counts.items() if topic not in self._ids)
        if num_unknown:
            self.noted[f"{NOT_DESCRIBED}: messages"] = num_unknown

    def places(self, topic: str) -> list[Locator]:
        """Return where the messages of a topic are, in the order of their rows."""
        query = "SELECT rowid FROM messages WHERE topic_id = ? ORDER BY rowid"
        numbers = [number for number, topic_entry in self._ids.items() if topic_entry.name == topic]
        return [
            Locator(self._name, 0, row)
            for number in numbers
            for (row,) in self._rows(tuple[int], query, (number,))
        ]

    def _read(self, place: Locator, limit: int | None = None) -> Message:
        rows = self._rows(
            tuple[int, int],
            "SELECT timestamp, topic_id FROM messages WHERE rowid = ?",
            (place.position,),
        )
        if not rows:
            raise SourceError(
                f"{self._where} has no message {place.position}: has it changed since the scan?"
            )
        ((log_ns, topic),) = rows
        return self._message(topic, log_ns, place.position, limit)

    def _message(
        self,
        topic: int,
        log_ns: int,
        row: int,
        limit: int | None,
    ) -> Message:
        """Return a message with its first bytes."""
        name = self._ids[topic].name  # which takes the lock, too
        # substr() would read the rest too.
        with (
            parsing(f"{self._where}: message {row}"),
            self._lock,
            self._database.blobopen("messages", "data", row, readonly=True) as blob,
        ):
            return Message(
                topic=name,
                log_ns=log_ns,
                place=Locator(self._name, 0, row),
                data=blob.read(-1 if limit is None else limit),
                length=len(blob),
            )


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"{path.as_uri()}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, check_same_thread=False)
