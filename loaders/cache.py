"""Spans of remote shards on a local disk, shared by all processes of a host.

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

What goes when room is needed is :mod:`fuelrail.loaders.foresight`'s matter. Without foresight (single samples read by
hand) the cache takes what fits and evicts nothing.
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
import shutil
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec
import numpy as np

from fuelrail.loaders.cache_size import parse_size, part_of_free_space
from fuelrail.loaders.foresight import NEVER, FarthestFirst
from fuelrail.loaders.storage.buffers import SpanBuffers
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fuelrail.loaders.foresight import Foresight
    from fuelrail.loaders.storage.protocol import StorageStats
    from fuelrail.pipeline.dataset import Dataset

_LOG = logging.getLogger(__name__)

_FORMAT: Final = "fuelrail-span-cache"
_VERSION: Final = 1
_HEADER_BYTES: Final = 64
_FOLDER_BITS: Final = 10
_OPEN_FILES: Final = 128
_KEEP_BUFFERS_BYTES: Final = 64 << 20
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Marker(msgspec.Struct, frozen=True):
    format: str
    version: int
    fingerprint: str
    num_samples: int


class CachedSpan:
    """A span that is in the cache; opened at once where descriptors allow it, so that eviction cannot take it away."""

    __slots__ = ("_cache", "_fd", "_length", "_path")

    def __init__(self, cache: SpanCache, path: Path, length: int, fd: int) -> None:
        self._cache, self._path, self._length, self._fd = cache, path, length, fd

    def read(self) -> memoryview | None:
        """Its bytes, unchecked; None where the file is gone or cut."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                self._cache.num_open += 1
            buffer = self._cache.buffers.take(self._length)
            done = 0
            while done < self._length:
                count = os.preadv(self._fd, [buffer[done:]], done)
                if count == 0:
                    return None
                done += count
        except OSError as error:
            _LOG.warning("cache file '%s' cannot be read: %s", self._path, error)
            return None
        return buffer

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._cache.num_open -= 1


class _Counts(NamedTuple):
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    evictions: int = 0
    damaged: int = 0


class SpanCache:
    """A cache of one dataset's spans; safe to use from many threads and processes."""

    def __init__(
        self, folder: Path, fingerprint: str, num_samples: int, length_of: Callable[[int], int], max_bytes: int
    ) -> None:
        """Open the cache in ``folder``, or begin one; ``length_of`` tells a sample's bytes.

        Raises ConfigError where it is of another dataset or version.
        """
        self._folder, self._length_of, self._max_bytes = folder, length_of, max_bytes
        self.buffers = SpanBuffers(_KEEP_BUFFERS_BYTES)
        self.num_open = 0
        self._thread_lock = threading.RLock()
        self._counts = _Counts()
        self._numbers = itertools.count()
        self._writes = True
        self._policy: FarthestFirst | None = None
        self._has_stock = False
        self._files = contextlib.ExitStack()
        weakref.finalize(self, self._files.close)
        try:
            (folder / "data").mkdir(parents=True, exist_ok=True)
            (folder / "tmp").mkdir(exist_ok=True)
            self._claim(_Marker(_FORMAT, _VERSION, fingerprint, num_samples))
            self._lock_fd = self._open("lock")
            users_fd = self._open("users.lock")
            with self._locked():
                alone = _try_lock(users_fd)
                self._map_table(num_samples)
                if alone:
                    self._take_stock()
                fcntl.flock(users_fd, fcntl.LOCK_SH)
        except OSError as error:
            self._files.close()
            raise ConfigError(f"cache_dir: '{folder}' cannot be used as a cache: {error}") from error
        except ConfigError:
            self._files.close()
            raise

    @classmethod
    def open_for(cls, dataset: Dataset, cache_dir: str | os.PathLike[str], cache_size: int | str | None) -> Self:
        """The cache of a dataset in a folder that may hold those of others; see :func:`parse_size` for the size."""
        base = Path(cache_dir) / "spans"
        fingerprint = dataset.manifest.fingerprint
        folder = base / fingerprint
        try:
            base.mkdir(parents=True, exist_ok=True)
            max_bytes = parse_size(cache_size) if cache_size is not None else part_of_free_space(base, folder)
        except OSError as error:
            raise ConfigError(f"cache_dir: '{cache_dir}' cannot be used as a cache: {error}") from error
        others = [entry.name for entry in base.iterdir() if entry.name != fingerprint]
        if others:
            _LOG.info("cache '%s' also holds %d other datasets; cache_size is for each", cache_dir, len(others))
        index = dataset.index
        return cls(folder, fingerprint, len(index), lambda row: index.row(row).length, max_bytes)

    @classmethod
    def open_or_warn(
        cls, dataset: Dataset, cache_dir: str | os.PathLike[str], cache_size: int | str | None
    ) -> Self | None:
        """As :meth:`open_for`; None, with a warning, where the disk is full already."""
        try:
            return cls.open_for(dataset, cache_dir, cache_size)
        except ConfigError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _DISK_FULL:
                _LOG.warning("%s; going on without a cache", error)
                return None
            raise

    def foresee(self, foresight: Foresight | None, uses_per_step: int = 0) -> None:
        """From now on evict by this foresight (of an iteration that begins), or not at all."""
        with self._thread_lock:
            if foresight is None:
                self._policy = None
                return
            # Other ranks' newcomers appear about when they are used; two steps later they are there for sure.
            self._policy = FarthestFirst(foresight, self._is_resident, lag=2 * uses_per_step)
            self._has_stock = False

    def open(self, index: int, length: int) -> CachedSpan | None:
        """The span of sample ``index`` if it is here; the kernel starts reading it."""
        if not self._is_resident(index):
            with self._thread_lock:
                self._counts = self._counts._replace(misses=self._counts.misses + 1)
            return None
        path = self._path(index)
        if self.num_open >= _OPEN_FILES:
            return CachedSpan(self, path, length, -1)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.forget(index)
            return None
        self.num_open += 1
        os.posix_fadvise(fd, 0, length, os.POSIX_FADV_WILLNEED)
        return CachedSpan(self, path, length, fd)

    def put(self, index: int, span: memoryview, time: int | None = None) -> bool:
        """Admit a span that was just fetched, for use at ``time``, if it is worth its room; says if it is here now.

        A disk that is full or fails ends admission, with one warning; what is here goes on being used.
        """
        if not self._writes or len(span) > self._max_bytes:
            return False
        try:
            if not self._reserve(index, len(span), time):
                return self._is_resident(index)
        except OSError as error:
            self._give_up_writing(error)
            return False
        temporary = self._folder / "tmp" / f"{os.getpid()}-{next(self._numbers)}"
        try:
            with temporary.open("wb", buffering=0) as file:
                written = file.write(span)
                if written != len(span):  # what a nearly full disk does before it refuses
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            path = self._path(index)
            try:
                temporary.rename(path)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            with self._locked():
                self._used -= len(span)
            self._give_up_writing(error)
            return False
        with self._locked():
            if self._table[index]:
                self._used -= len(span)  # another process was as quick
            self._table[index] = 1
        return True

    def forget(self, index: int) -> None:
        """Drop a file that is gone or damaged."""
        with self._locked():
            if self._table[index]:
                _LOG.warning("cache file '%s' is missing or damaged; the sample is fetched again", self._path(index))
                self._counts = self._counts._replace(damaged=self._counts.damaged + 1)
                self._remove(index)

    def count_hit(self, num_bytes: int) -> None:
        """Count a span that was read here and found good."""
        with self._thread_lock:
            counts = self._counts
            self._counts = counts._replace(hits=counts.hits + 1, hit_bytes=counts.hit_bytes + num_bytes)

    def add_stats(self, stats: StorageStats) -> StorageStats:
        """The statistics of a storage with this cache's added."""
        counts = self._counts
        return stats._replace(
            cache_hits=counts.hits, cache_misses=counts.misses, cache_hit_bytes=counts.hit_bytes,
            cache_bytes=self._used, cache_evictions=counts.evictions, cache_damaged=counts.damaged,
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the folder."""
        self._files.close()

    # Admission and eviction, under the lock

    def _reserve(self, index: int, length: int, time: int | None) -> bool:
        """Make room for a newcomer and count it as here; False where it is here already or not worth it."""
        with self._locked():
            if self._table[index]:
                return False
            is_full = self._used + length > self._max_bytes
            policy = self._policy if time is not None and (is_full or self._has_stock) else None
            next_use = NEVER
            if policy is not None and time is not None:
                policy.advance(time)
                if policy.wants_stock:  # not before the cache is full: until then nobody asks what should go
                    policy.rebuild(self._residents(), time)
                    self._has_stock = True
                next_use = policy.next_use(index)
            if is_full and (policy is None or not self._make_room(policy, length, next_use)):
                return False
            self._used += length
            if policy is not None:
                policy.add(index, next_use)
            return True

    def _make_room(self, policy: FarthestFirst, length: int, next_use: int) -> bool:
        """Evict samples used later than ``next_use`` until ``length`` bytes fit; all or none."""
        if next_use == NEVER:
            return False
        victims: list[tuple[int, int]] = []
        room = self._max_bytes - self._used
        restocked = False
        while room < length:
            victim = policy.pop()
            if victim is None and not restocked:
                restocked = True  # what other processes brought
                policy.rebuild(np.setdiff1d(self._residents(), [row for row, _ in victims]), policy.now)
                continue
            if victim is None or victim[1] <= next_use:
                for row, time in victims if victim is None else [*victims, victim]:
                    policy.add(row, time)
                return False
            victims.append(victim)
            room += self._length_of(victim[0])
        for row, _ in victims:
            self._remove(row)
        self._counts = self._counts._replace(evictions=self._counts.evictions + len(victims))
        return True

    def _remove(self, index: int) -> None:
        self._path(index).unlink(missing_ok=True)
        self._table[index] = 0
        self._used -= self._length_of(index)

    def _is_resident(self, index: int) -> bool:
        return bool(self._table[index])

    def _residents(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.flatnonzero(self._table)

    # The folder

    def _claim(self, marker: _Marker) -> None:
        file = self._folder / "cache.json"
        if not file.exists():
            temporary = self._folder / "tmp" / f"{os.getpid()}-marker"
            temporary.write_bytes(msgspec.json.encode(marker) + b"\n")
            temporary.rename(file)
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_Marker)
        except msgspec.DecodeError as error:
            raise ConfigError(f"cache_dir: '{file}' is damaged ({error}); remove '{self._folder}'") from error
        if found != marker:
            raise ConfigError(
                f"cache_dir: '{self._folder}' is the cache of dataset {found.fingerprint} (version {found.version}, "
                f"{found.num_samples} samples), not of {marker.fingerprint} (version {marker.version}, "
                f"{marker.num_samples} samples); remove the folder or choose another"
            )

    def _open(self, name: str) -> int:
        fd = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
        shutil.rmtree(self._folder / "tmp", ignore_errors=True)
        (self._folder / "tmp").mkdir(exist_ok=True)
        self._table[:] = 0
        used = 0
        for group in (self._folder / "data").iterdir():
            for entry in os.scandir(group):
                size = entry.stat().st_size
                index = int(entry.name, 16) if re.fullmatch("[0-9a-f]{1,15}", entry.name) else -1
                is_ours = 0 <= index < len(self._table) and self._path(index) == Path(entry)
                if not is_ours or size != self._length_of(index) or used + size > self._max_bytes:
                    Path(entry).unlink()
                    continue
                self._table[index] = 1
                used += size
        self._used = used

    def _path(self, index: int) -> Path:
        return self._folder / "data" / f"{index >> _FOLDER_BITS:x}" / f"{index:x}"

    @property
    def _used(self) -> int:
        return int(self._header[0])

    @_used.setter
    def _used(self, num_bytes: int) -> None:
        self._header[0] = max(0, num_bytes)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _give_up_writing(self, error: OSError) -> None:
        self._writes = False
        _LOG.warning(
            "cache '%s' takes no more samples: %s; going on without, at the speed of the remote storage",
            self._folder, error,
        )  # fmt: skip


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
