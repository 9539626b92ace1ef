"""The folder of a span cache on disk: its owner, its files, its users.

::

    CACHE_DIR/spans/FINGERPRINT/
      cache.json     whose cache this is
      lock           held while something is admitted or evicted
      users.lock     held shared by every user; a process that holds it alone takes stock first
      table          64 bytes of header (bytes in use), then a byte a sample: 1 if it is here
      data/5/14a2    one file a sample: its span, nothing else; names are row numbers in hexadecimal
      tmp/           files being written

The folder and all in it belong to one user and are closed to all others: mode 0700, no links, other
owners refused (:mod:`fuelrail.pipeline.storage.private`). What the loader did not make is never
removed.

A file appears under its name by rename, when it is whole. Nothing is synced: after a power cut a
file may be short or hold zeros, so every read is checked against the index's digest, and a damaged
file is a miss. A damaged ``cache.json`` is written again where the files beside it are a cache's.
Killed processes leave at most files in ``tmp`` and a wrong count of bytes, until the next one that
is alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import explain
from fuelrail.pipeline.storage.private import (
    make_folder,
    open_file,
    open_folder,
)

_LOG = logging.getLogger(__name__)

_FORMAT: Final = "fuelrail-span-cache"
_VERSION: Final = 1
_HEADER_BYTES: Final = 64
_FOLDER_BITS: Final = 10
_MARKER_BYTES: Final = 1 << 16
_NUMBER: Final = re.compile("[0-9a-f]{1,15}")
_TEMPORARY: Final = re.compile("[0-9]+-[0-9a-f-]+|[0-9]+-marker")


class _Marker(msgspec.Struct, frozen=True):
    format: str
    version: int
    fingerprint: str
    num_samples: int


class SampleFiles:
    """The files of samples in ``data``, and new ones in ``tmp``: a file appears under its name
    by rename, whole.
    """

    def __init__(self, path: Path, folders: contextlib.ExitStack) -> None:
        """Open the folders below ``path``, or make them; ``folders`` closes them."""
        make_folder(path)
        self.path = path
        self.fd = _close_with(folders, open_folder(path))
        self.data_fd = _close_with(folders, open_folder(path / "data", self.fd))
        self._tmp_fd = _close_with(folders, open_folder(path / "tmp", self.fd))
        self._numbers = itertools.count()
        self._token = secrets.token_hex(4)

    def path_of(self, index: int) -> Path:
        """Return the path of a sample's file, if it exists."""
        return self.path / "data" / _name(index)

    def open(self, index: int) -> int:
        """Return a descriptor of a sample's file, to read; raises OSError where it is not here."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(_name(index), flags, dir_fd=self.data_fd)

    def write(self, index: int, span: memoryview) -> None:
        """Put a sample's file in its place, whole; raises OSError, leaving nothing, where the
        disk is full or fails.
        """
        temporary = self._write_temporary(span)
        try:
            try:
                self._rename(temporary, _name(index), self.data_fd)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(f"{index >> _FOLDER_BITS:x}", 0o700, dir_fd=self.data_fd)
                self._rename(temporary, _name(index), self.data_fd)
        except OSError:
            self._discard(temporary)
            raise

    def _write_temporary(self, data: memoryview | bytes) -> str:
        """Write a new file in ``tmp``; returns its name."""
        name = f"{os.getpid()}-{self._token}-{next(self._numbers)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._tmp_fd)
        try:
            try:
                # A short write is what a nearly full disk does before it refuses.
                if os.write(fd, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(fd)
        except OSError:
            self._discard(name)
            raise
        return name

    def _rename(self, temporary: str, name: str, folder_fd: int) -> None:
        os.rename(temporary, name, src_dir_fd=self._tmp_fd, dst_dir_fd=folder_fd)

    def _discard(self, temporary: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=self._tmp_fd)

    def replace(self, name: str, data: bytes) -> None:
        """Put a file beside ``data`` in its place, whole."""
        self._rename(self._write_temporary(data), name, self.fd)

    def remove(self, index: int) -> None:
        """Remove a sample's file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_name(index), dir_fd=self.data_fd)

    def remove_temporary(self) -> None:
        """Remove the new files of processes that were killed."""
        for name in _names_in(self._tmp_fd):
            if _TEMPORARY.fullmatch(name):
                self._discard(name)

    def stored(self, num_samples: int) -> Iterator[tuple[int, int]]:
        """Yield samples and the sizes of their files, whole or not.

        Links and files with other names are no samples.
        """
        for group, fd in self.groups():
            for entry in os.scandir(fd):
                index = int(entry.name, 16) if _NUMBER.fullmatch(entry.name) else -1
                is_sample = 0 <= index < num_samples and _name(index) == f"{group}/{entry.name}"
                if is_sample and entry.is_file(follow_symlinks=False):
                    yield index, entry.stat(follow_symlinks=False).st_size

    def groups(self) -> Iterator[tuple[str, int]]:
        """Yield the folders in ``data``, each with its descriptor.

        Raises ConfigError for a link or another owner.
        """
        for group in filter(_NUMBER.fullmatch, _names_in(self.data_fd)):
            fd = open_folder(self.path / "data" / group, self.data_fd)
            try:
                yield group, fd
            finally:
                os.close(fd)


class CacheFolder:
    """An open cache folder; safe to use from many threads and processes.

    ``max_bytes`` is what it may hold.

    What changes the table or :attr:`used_bytes` is called under :meth:`locked`.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        num_samples: int,
        length_of: Callable[[int], int],
        max_bytes: int,
    ) -> None:
        """Open the cache in ``path``, or create one; ``length_of`` returns a sample's number of
        bytes.

        Raises ConfigError where it is of another dataset or version.
        """
        self.path = path
        self.max_bytes = max_bytes
        self.length_of = length_of
        self.thread_lock = threading.RLock()
        """Held under :meth:`locked` too; alone it guards what concerns this process only."""
        self._locks = contextlib.ExitStack()
        folders = contextlib.ExitStack()
        weakref.finalize(self, self._locks.close)
        # Not before: spans are opened by these after `close` too.
        weakref.finalize(self, folders.close)
        try:
            self.files = SampleFiles(path, folders)
            self._claim(_Marker(_FORMAT, _VERSION, fingerprint, num_samples))
            self._lock_fd = self._open("lock")
            users_fd = self._open("users.lock")
            with self.locked():
                try:
                    fcntl.flock(users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_alone = True
                except OSError:
                    is_alone = False
                fd = self._open("table")
                size = _HEADER_BYTES + num_samples
                if os.fstat(fd).st_size != size:
                    # Blocks are taken now: a page of a map that finds the disk full would kill the
                    # process.
                    os.posix_fallocate(fd, 0, size)
                    os.ftruncate(fd, size)
                mapped = mmap.mmap(fd, size)
                self._header = np.frombuffer(mapped, "<i8", 1)
                self._table = np.frombuffer(mapped, np.uint8, offset=_HEADER_BYTES)
                for _ in self.files.groups():
                    pass  # refuses links and folders of others
                if is_alone:
                    # Make the table say what is in the folder; remove our own damaged files and
                    # those of killed processes.
                    self.files.remove_temporary()
                    self._table[:] = 0
                    used_bytes = 0
                    for index, num_bytes in self.files.stored(num_samples):
                        is_whole = num_bytes == length_of(index)
                        if not is_whole or used_bytes + num_bytes > max_bytes:
                            self.files.remove(index)
                            continue
                        self._table[index] = 1
                        used_bytes += num_bytes
                    self.used_bytes = used_bytes
                fcntl.flock(users_fd, fcntl.LOCK_SH)
        except OSError as error:
            self._locks.close()
            raise ConfigError(f"cache_dir: '{path}' cannot be used as a cache: {error}") from error
        except ConfigError:
            self._locks.close()
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
        """Return whether sample ``index`` is here."""
        return bool(self._table[index])

    def held(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return all samples that are here."""
        return np.flatnonzero(self._table)

    def enter(self, index: int) -> None:
        """Say in the table that a sample, whose bytes are counted, is here."""
        if self._table[index]:
            self.used_bytes -= self.length_of(index)  # another process was as quick
        self._table[index] = 1

    def remove(self, index: int) -> None:
        """Take a sample out."""
        self.files.remove(index)
        self._table[index] = 0
        self.used_bytes -= self.length_of(index)

    def close(self) -> None:
        """Let go of the folder."""
        self._locks.close()

    @property
    def used_bytes(self) -> int:
        """Bytes of the samples that are stored or on their way, of all processes."""
        return int(self._header[0])

    @used_bytes.setter
    def used_bytes(self, num_bytes: int) -> None:
        self._header[0] = max(0, num_bytes)

    def _claim(self, marker: _Marker) -> None:
        file = self.path / "cache.json"
        encoded = msgspec.json.encode(marker) + b"\n"
        # Looked up first: another process may fill it as soon as cache.json is here.
        is_empty = not _names_in(self.files.data_fd)
        try:
            fd = open_file(file, os.O_RDONLY, self.files.fd)
        except FileNotFoundError:
            if not is_empty:
                raise ConfigError(
                    f"cache_dir: '{self.path}' has files in 'data' but no cache.json, so "
                    "fuelrail did not make it; choose another folder"
                ) from None
            self.files.replace(file.name, encoded)
            fd = open_file(file, os.O_RDONLY, self.files.fd)
        with os.fdopen(fd, "rb") as stream:
            data = stream.read(_MARKER_BYTES)
        try:
            stored = msgspec.json.decode(data, type=_Marker)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ) as error:
            is_json = isinstance(error, msgspec.ValidationError)  # of another version, or program
            fault = explain(error, data, _Marker)
            if not is_json and {
                "lock",
                "users.lock",
                "table",
                "data",
                "tmp",
            } <= set(_names_in(self.files.fd)):
                _LOG.warning(
                    "cache_dir: '%s' is damaged (%s); it is written again",
                    file,
                    fault,
                )
                self.files.replace(file.name, encoded)
                return
            raise ConfigError(
                f"cache_dir: '{file}' is damaged ({fault}); remove '{self.path}'"
            ) from error
        if stored != marker:
            raise ConfigError(
                f"cache_dir: '{self.path}' is the cache of dataset {stored.fingerprint} "
                f"(version {stored.version}, {stored.num_samples} samples), not of "
                f"{marker.fingerprint} (version {marker.version}, {marker.num_samples} "
                "samples); remove the folder or choose another"
            )

    def _open(self, name: str) -> int:
        return _close_with(
            self._locks,
            open_file(self.path / name, os.O_RDWR | os.O_CREAT, self.files.fd),
        )


def _names_in(folder_fd: int) -> list[str]:
    with os.scandir(folder_fd) as entries:
        return [entry.name for entry in entries]


def _name(index: int) -> str:
    """Return the file of a sample in ``data``."""
    return f"{index >> _FOLDER_BITS:x}/{index:x}"


def _close_with(stack: contextlib.ExitStack, fd: int) -> int:
    """Return a descriptor, closed with the stack."""
    stack.callback(os.close, fd)
    return fd
