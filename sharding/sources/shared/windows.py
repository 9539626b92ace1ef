"""Parts of a source's file: a window on it, or a file object."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.files import FolderFiles, check_most

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.files import SourceFiles

_MIN_BYTES: Final = 64


class FileWindow:
    """Bytes of a file, a few at a time: what was read last is kept."""

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        num_bytes: int,
        where: str,
    ) -> None:
        """Take a function ``read(offset, length)`` of a file of ``num_bytes``; ``where`` names
        it in errors.
        """
        self._read = read
        self.num_bytes = num_bytes
        self.where = where
        self._start = 0
        self._data = b""

    def read(self, offset: int, length: int, ahead: int = 0) -> bytes:
        """Return ``length`` bytes from ``offset`` on, fewer where the file ends; read ``ahead``
        bytes beyond them.
        """
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._data):
            check_most(length, f"{self.where}: the part at byte {offset}")
            self._data = self._read(offset, max(length + ahead, _MIN_BYTES))
            self._start = offset
            begin = 0
        return self._data[begin : begin + length]


@contextlib.contextmanager
def opened(files: SourceFiles, name: str) -> Iterator[FileWindow]:
    """Yield a window on a file, which is kept open; at a URL, each read is a request."""
    facts = files.facts_of([name])[0]
    where = f"file '{files.shown}/{name}'"
    if facts is None:
        raise SourceError(f"{where} is not there")
    if not isinstance(files, FolderFiles):
        yield FileWindow(
            lambda offset, length: files.read(name, offset, length),
            facts.num_bytes,
            where,
        )
        return
    descriptor = files.descriptor(name)
    try:
        yield FileWindow(
            lambda offset, length: os.pread(descriptor, length, offset),
            facts.num_bytes,
            where,
        )
    except OSError as error:
        raise SourceError(f"{where} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def open_file(files: SourceFiles, name: str, ahead: int = 0) -> BinaryIO:
    """Open a file without a buffer; at a URL it is read by ranges of at least ``ahead`` bytes."""
    if isinstance(files, FolderFiles):
        return open(files.descriptor(name), "rb", buffering=0)  # noqa: PTH123 - for the caller
    facts = files.facts_of([name])[0]
    if facts is None:
        raise SourceError(f"file '{files.shown}/{name}' is not there")
    ranges = _Ranges(files, name, facts.num_bytes)
    if ahead:
        return io.BufferedReader(ranges, ahead)
    return cast("BinaryIO", ranges)


class _Ranges(io.RawIOBase):
    """A file of a source, read by ranges."""

    def __init__(self, files: SourceFiles, name: str, num_bytes: int) -> None:
        self._files = files
        self._name = name
        self._num_bytes = num_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset
            + {
                io.SEEK_SET: 0,
                io.SEEK_CUR: self._at,
                io.SEEK_END: self._num_bytes,
            }[whence]
        )
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        remaining = max(self._num_bytes - self._at, 0)
        length = remaining if size < 0 else min(size, remaining)
        data = self._files.read(self._name, self._at, length) if length else b""
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
