"""The folder of a span cache on disk: whose it is, what is in it, who uses it.

::

    CACHE_DIR/spans/FINGERPRINT/
      cache.json     whose cache this is
      lock           held while something is admitted or evicted
      users.lock     held shared by every user; whoever gets it alone takes stock of the folder first
      table          64 bytes of header (bytes in use), then a byte a sample: 1 if it is here; mapped by all
      data/5/14a2    one file a sample: its span, nothing else; names are row numbers in hexadecimal
      tmp/           files being written

A file appears under its name by rename, when it is whole. Nothing is synced: after a power cut a file may be short or
hold zeros, so every read is held against the index's digest, and a damaged file is a miss. Killed processes leave at
most files in ``tmp`` and a wrong count of bytes, until the next one that is alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import re
import shutil
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FORMAT: Final = "fuelrail-span-cache"
_VERSION: Final = 1
_HEADER_BYTES: Final = 64
_FOLDER_BITS: Final = 10


class _Marker(msgspec.Struct, frozen=True):
    format: str
    version: int
    fingerprint: str
    num_samples: int


class CacheFolder:
    """An open cache folder; safe to use from many threads and processes. ``max_bytes`` is what it may hold.

    What changes the table or :attr:`used_bytes` is called under :meth:`locked`.
    """

    def __init__(
        self, path: Path, fingerprint: str, num_samples: int, length_of: Callable[[int], int], max_bytes: int
    ) -> None:
        """Open the cache in ``path``, or begin one; ``length_of`` tells a sample's bytes.

        Raises ConfigError where it is of another dataset or version.
        """
        self.path, self.max_bytes, self._length_of = path, max_bytes, length_of
        self.thread_lock = threading.RLock()
        """Held under :meth:`locked` too; alone it guards what concerns this process only."""
        self._numbers = itertools.count()
        self._files = contextlib.ExitStack()
        weakref.finalize(self, self._files.close)
        try:
            (path / "data").mkdir(parents=True, exist_ok=True)
            (path / "tmp").mkdir(exist_ok=True)
            self._claim(_Marker(_FORMAT, _VERSION, fingerprint, num_samples))
            self._lock_fd = self._open("lock")
            users_fd = self._open("users.lock")
            with self.locked():
                alone = _try_lock(users_fd)
                self._map_table(num_samples)
                if alone:
                    self._take_stock()
                fcntl.flock(users_fd, fcntl.LOCK_SH)
        except OSError as error:
            self._files.close()
            raise ConfigError(f"cache_dir: '{path}' cannot be used as a cache: {error}") from error
        except ConfigError:
            self._files.close()
            raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other threads and processes from changing what is here."""
        with self.thread_lock:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def holds(self, index: int) -> bool:
        """Whether sample ``index`` is here."""
        return bool(self._table[index])

    def held(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """All samples that are here."""
        return np.flatnonzero(self._table)

    def file(self, index: int) -> Path:
        """Where a sample's file lies, if it is here."""
        return self.path / "data" / f"{index >> _FOLDER_BITS:x}" / f"{index:x}"

    def write(self, index: int, span: memoryview) -> None:
        """Put a sample's file in its place, whole; raises OSError, leaving nothing, where the disk is full or fails."""
        temporary = self.path / "tmp" / f"{os.getpid()}-{next(self._numbers)}"
        try:
            with temporary.open("wb", buffering=0) as file:
                written = file.write(span)
                if written != len(span):  # what a nearly full disk does before it refuses
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            place = self.file(index)
            try:
                temporary.rename(place)
            except FileNotFoundError:
                place.parent.mkdir(parents=True, exist_ok=True)
                temporary.rename(place)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def enter(self, index: int) -> None:
        """Say in the table that a sample, whose bytes are counted, is here."""
        if self._table[index]:
            self.used_bytes -= self._length_of(index)  # another process was as quick
        self._table[index] = 1

    def remove(self, index: int) -> None:
        """Take a sample out."""
        self.file(index).unlink(missing_ok=True)
        self._table[index] = 0
        self.used_bytes -= self._length_of(index)

    def close(self) -> None:
        """Let go of the folder."""
        self._files.close()

    @property
    def used_bytes(self) -> int:
        """Bytes of the samples that are here, or on their way, of all processes."""
        return int(self._header[0])

    @used_bytes.setter
    def used_bytes(self, num_bytes: int) -> None:
        self._header[0] = max(0, num_bytes)

    def _claim(self, marker: _Marker) -> None:
        file = self.path / "cache.json"
        if not file.exists():
            temporary = self.path / "tmp" / f"{os.getpid()}-marker"
            temporary.write_bytes(msgspec.json.encode(marker) + b"\n")
            temporary.rename(file)
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_Marker)
        except msgspec.DecodeError as error:
            raise ConfigError(f"cache_dir: '{file}' is damaged ({error}); remove '{self.path}'") from error
        if found != marker:
            raise ConfigError(
                f"cache_dir: '{self.path}' is the cache of dataset {found.fingerprint} (version {found.version}, "
                f"{found.num_samples} samples), not of {marker.fingerprint} (version {marker.version}, "
                f"{marker.num_samples} samples); remove the folder or choose another"
            )

    def _open(self, name: str) -> int:
        fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._files.callback(os.close, fd)
        return fd

    def _map_table(self, num_samples: int) -> None:
        fd = self._open("table")
        size = _HEADER_BYTES + num_samples
        if os.fstat(fd).st_size != size:
            # Blocks are taken now: a page of a map that finds the disk full would kill the process.
            os.posix_fallocate(fd, 0, size)
            os.ftruncate(fd, size)
        mapped = mmap.mmap(fd, size)
        self._header = np.frombuffer(mapped, "<i8", 1)
        self._table = np.frombuffer(mapped, np.uint8, offset=_HEADER_BYTES)

    def _take_stock(self) -> None:
        """Make the table say what is in the folder, and remove what does not belong there."""
        shutil.rmtree(self.path / "tmp", ignore_errors=True)
        (self.path / "tmp").mkdir(exist_ok=True)
        self._table[:] = 0
        used = 0
        for group in (self.path / "data").iterdir():
            for entry in os.scandir(group):
                size = entry.stat().st_size
                index = int(entry.name, 16) if re.fullmatch("[0-9a-f]{1,15}", entry.name) else -1
                is_ours = 0 <= index < len(self._table) and self.file(index) == Path(entry)
                if not is_ours or size != self._length_of(index) or used + size > self.max_bytes:
                    Path(entry).unlink()
                    continue
                self._table[index] = 1
                used += size
        self.used_bytes = used


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
