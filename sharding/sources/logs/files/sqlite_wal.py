"""What SQLite leaves beside a file whose writer was killed: a write-ahead log (``-wal``), or a
journal (``-journal``).

The newest messages are in the write-ahead log alone. They are read by a private copy of both files,
into which SQLite moves the log. A journal is refused: by its text SQLite may delete other files
than the copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.storage.files import open_descriptor
from fuelrail.sharding.sources.shared.foreign import parsing

MOST_COPIED: Final = 1 << 30
"""Bytes of a file and its write-ahead log that each process copies at most."""
_MAGICS: Final = (0x377F0682, 0x377F0683)
_HEADER: Final = struct.Struct(">8I")
"""The head of a log: magic, version, page size, sequence, two salts, two checksums."""
_FRAME: Final = struct.Struct(">6I")
"""The head of a page: its number, the file's pages after a whole write or 0, two salts, two
checksums.
"""


def check_no_journal(database: Path, where: str) -> None:
    """Raise SourceError, naming ``where``, for a file with a journal of a write that was not
    finished.
    """
    journal = Path(f"{database}-journal")
    if not os.path.lexists(journal):
        return
    with (
        parsing(f"{where}: its journal '{journal.name}'"),
        _open(journal) as descriptor,
    ):
        is_hot = any(os.pread(descriptor, 8, 0))
    if is_hot:
        raise SourceError(
            f"{where} has the journal '{journal.name}' beside it: its recorder was killed in the "
            "middle of a write, and a part of that may be in the file. SQLite takes it back: run "
            f"`sqlite3 {database.name} 'PRAGMA quick_check'` there, or in a copy of the folder"
        )


def wal_of(database: Path) -> Path | None:
    """Return the write-ahead log of a file; None where there is none, or an empty one."""
    wal = Path(f"{database}-wal")
    if not os.path.lexists(wal):
        return None
    is_empty = wal.is_file() and not wal.stat().st_size
    return None if is_empty else wal


def merge_wal(
    database: Path,
    wal: Path,
    copy: Path,
    where: str,
) -> int:
    """Write a copy of a file with all whole writes of its log in it; return the bytes of the rest.

    Raises SourceError, naming ``where``, for a log of which nothing can be read, and for files
    that are too large to copy.
    """
    place = f"{where}: the write-ahead log '{wal.name}' beside it, as a killed recorder leaves it,"
    with parsing(place), _open(database) as file, _open(wal) as log:
        num_bytes = os.fstat(file).st_size + os.fstat(log).st_size
        if num_bytes > MOST_COPIED:
            raise SourceError(
                f"{place} has the newest messages, and both have {num_bytes} bytes, of which "
                f"{MOST_COPIED} are copied at most. Move them into the file: "
                f"`sqlite3 {database.name} 'PRAGMA wal_checkpoint(TRUNCATE)'`"
            )
        copied_log = Path(f"{copy}-wal")
        for descriptor, path in ((file, copy), (log, copied_log)):
            with (
                open(descriptor, "rb", closefd=False) as source,
                path.open("xb") as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
    with parsing(place, "is not one of SQLite"), copied_log.open("rb") as file:
        head = file.read(_HEADER.size)
        padded = head.ljust(_HEADER.size, b"\0")
        magic, _, page_bytes, _, *salts, _, _ = _HEADER.unpack(padded)
        if magic not in _MAGICS or not 512 <= page_bytes <= 1 << 16:
            raise ValueError(
                f"it begins with {head[:8].hex(' ')}; move it away to read the file without it"
            )
        frame_bytes = _FRAME.size + page_bytes
        size = os.fstat(file.fileno()).st_size
        position = _HEADER.size
        while position + _FRAME.size <= size:
            head = os.pread(file.fileno(), _FRAME.size, position)
            if list(_FRAME.unpack(head)[2:4]) != salts:
                break
            position += frame_bytes
    data_bytes = min(position, size) - _HEADER.size
    with parsing(place), contextlib.closing(sqlite3.connect(copy)) as merged:
        ((_, num_merged, _),) = merged.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    merged_bytes = max(num_merged, 0) * frame_bytes
    if data_bytes and not merged_bytes:
        raise SourceError(
            f"{place} is damaged or not of this file, and none of its {data_bytes} bytes can be "
            "read: move it away to read the file without it"
        )
    num_lost: int = max(data_bytes - merged_bytes, 0)
    return num_lost


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    descriptor = open_descriptor(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
