"""Spans of remote shards on a local disk, shared by all processes of a host.

The files and who may touch them are :mod:`fuelrail.loaders.storage.cache.folder`'s matter; what
goes when room is needed is
:mod:`fuelrail.loaders.storage.cache.future_uses`'s. Without them (single samples read by hand) the
cache takes what fits and evicts nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from fuelrail.loaders.storage.buffers import Buffers
from fuelrail.loaders.storage.cache.folder import CacheFolder
from fuelrail.loaders.storage.cache.future_uses import (
    NEVER,
    FarthestFirst,
    FutureUses,
)
from fuelrail.loaders.storage.pread import KEEP_BUFFERS_BYTES
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.storage.filesystem import DISK_FULL
from fuelrail.pipeline.storage.private import make_folder, open_file

if TYPE_CHECKING:
    from fuelrail.loaders.storage.protocol import StorageStats
    from fuelrail.pipeline.format.dataset import Dataset

_LOG = logging.getLogger(__name__)

_OPEN_FILES: Final = 128

_NOT_THE_FILE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""Errors of a file that is gone or another.

Of the rest, such as too many open files, a good one can have any.
"""

_PART_OF_FREE_SPACE: Final = 0.8

_PREFIXES: Final = "KMGT"


class CachedSpan:
    """A span that is in the cache; opened at once where descriptors allow it, so that eviction
    cannot take it away.
    """

    __slots__ = ("_cache", "_fd", "_index", "_length")

    def __init__(
        self,
        cache: SpanCache,
        index: int,
        length: int,
        fd: int,
    ) -> None:
        self._cache = cache
        self._index = index
        self._length = length
        self._fd = fd

    def read(self) -> memoryview | None:
        """Return its bytes, unchecked; None where it cannot be read.

        A file that is gone or cut is forgotten.
        """
        try:
            if self._fd < 0:
                self._fd = self._cache.folder.files.open(self._index)
                self._cache.num_open += 1
            array: Any = self._cache.buffers.take(self._length)
            buffer = memoryview(array)
            done = 0
            while done < self._length:
                count = os.preadv(self._fd, [buffer[done:]], done)
                if count == 0:
                    self._cache.forget(self._index)
                    return None
                done += count
        except OSError as error:
            if error.errno in _NOT_THE_FILE:
                self._cache.forget(self._index)
            _LOG.warning(
                "cache file '%s' cannot be read: %s",
                self._cache.folder.files.path_of(self._index),
                error,
            )
            return None
        return buffer

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._cache.num_open -= 1


class SpanCache:
    """A cache of one dataset's spans; safe to use from many threads and processes."""

    def __init__(self, folder: CacheFolder) -> None:
        self.folder = folder
        self.buffers = Buffers(keep_bytes=KEEP_BUFFERS_BYTES)
        self.num_open = 0
        self._counts: Counter[str] = Counter()
        """By the names of `StorageStats`."""
        self._writes = True
        self._policy: FarthestFirst | None = None
        self._has_stock = False

    @classmethod
    def open_for(
        cls,
        dataset: Dataset,
        cache_dir: str | os.PathLike[str],
        cache_size: int | str | None,
    ) -> Self:
        """Open the cache of a dataset in a folder for several datasets; see :func:`parse_size`
        for the size.
        """
        base = Path(cache_dir) / "spans"
        fingerprint = dataset.manifest.fingerprint
        folder = base / fingerprint
        try:
            make_folder(base.parent, restrict=False)
            make_folder(base)
            max_bytes = (
                parse_size(cache_size)
                if cache_size is not None
                else part_of_free_space(base, folder)
            )
        except OSError as error:
            raise ConfigError(
                f"cache_dir: '{cache_dir}' cannot be used as a cache: {error}"
            ) from error
        neighbours = [entry.name for entry in base.iterdir() if entry.name != fingerprint]
        if neighbours:
            _LOG.info(
                "cache '%s' also holds %d other datasets; cache_size is for each",
                cache_dir,
                len(neighbours),
            )
        index = dataset.index
        return cls(
            CacheFolder(
                path=folder,
                fingerprint=fingerprint,
                num_samples=len(index),
                length_of=lambda row: index.row(row).length,
                max_bytes=max_bytes,
            )
        )

    @classmethod
    def open_or_warn(
        cls,
        dataset: Dataset,
        cache_dir: str | os.PathLike[str],
        cache_size: int | str | None,
    ) -> Self | None:
        """Open as :meth:`open_for`; return None, with a warning, where the disk is full already."""
        try:
            return cls.open_for(dataset, cache_dir, cache_size)
        except ConfigError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL:
                _LOG.warning("%s; continuing without a cache", error)
                return None
            raise

    def evict_by(self, future_uses: FutureUses | None, uses_per_step: int = 0) -> None:
        """Evict by these uses (of an iteration that starts) from now on; None: evict nothing."""
        with self.folder.thread_lock:
            if future_uses is None:
                self._policy = None
                return
            # Other ranks' newcomers appear about when they are used; two steps later they are there
            # for sure.
            self._policy = FarthestFirst(future_uses, self.folder.holds, lag=2 * uses_per_step)
            self._has_stock = False

    def open(self, index: int, length: int) -> CachedSpan | None:
        """Return the span of sample ``index`` if it is here; the kernel starts reading it."""
        if not self.folder.holds(index):
            with self.folder.thread_lock:
                self._counts["cache_misses"] += 1
            return None
        if self.num_open >= _OPEN_FILES:
            return CachedSpan(self, index, length, -1)
        try:
            fd = self.folder.files.open(index)
        except OSError as error:
            if error.errno not in _NOT_THE_FILE:
                return CachedSpan(self, index, length, -1)
            self.forget(index)
            return None
        self.num_open += 1
        os.posix_fadvise(fd, 0, length, os.POSIX_FADV_WILLNEED)
        return CachedSpan(self, index, length, fd)

    def put(self, index: int, span: memoryview, time: int | None = None) -> bool:
        """Admit a span that was just fetched, for use at ``time``, if it is worth its room; says if
        it is here now.

        A disk that is full or fails ends admission, with one warning; what is here continues to be
        used. Too many open files end nothing.
        """
        if not self._writes or len(span) > self.folder.max_bytes:
            return False
        try:
            if not self._reserve(index, len(span), time):
                return self.folder.holds(index)
        except OSError as error:
            self._give_up_writing(error)
            return False
        try:
            self.folder.files.write(index, span)
        except OSError as error:
            with self.folder.locked():
                self.folder.used_bytes -= len(span)
            self._give_up_writing(error)
            return False
        with self.folder.locked():
            self.folder.enter(index)
        return True

    def forget(self, index: int) -> None:
        """Drop a file that is gone or damaged."""
        with self.folder.locked():
            if self.folder.holds(index):
                _LOG.warning(
                    "cache file '%s' is missing or damaged; the sample is fetched again",
                    self.folder.files.path_of(index),
                )
                self._counts["cache_damaged"] += 1
                self.folder.remove(index)

    def count_hit(self, num_bytes: int) -> None:
        """Count a span that was read here and found good."""
        with self.folder.thread_lock:
            self._counts["cache_hits"] += 1
            self._counts["cache_hit_bytes"] += num_bytes

    def add_stats(self, stats: StorageStats) -> StorageStats:
        """Return the statistics of a storage with this cache's added."""
        counts: dict[str, Any] = dict(self._counts)
        return stats._replace(cache_bytes=self.folder.used_bytes, **counts)

    def close(self) -> None:
        """Let go of the folder."""
        self.folder.close()

    # Admission and eviction, under the lock

    def _reserve(self, index: int, length: int, time: int | None) -> bool:
        """Make room for a newcomer and count it as here; False where it is here already or not
        worth it.
        """
        with self.folder.locked():
            if self.folder.holds(index):
                return False
            is_full = self.folder.used_bytes + length > self.folder.max_bytes
            policy = self._policy if time is not None and (is_full or self._has_stock) else None
            next_use = NEVER
            if policy is not None and time is not None:
                policy.advance(time)
                # Not before the cache is full: until then nothing is evicted.
                if policy.wants_stock:
                    policy.rebuild(self.folder.held(), time)
                    self._has_stock = True
                next_use = policy.next_use(index)
            if is_full and (policy is None or not self._make_room(policy, length, next_use)):
                return False
            self.folder.used_bytes += length
            if policy is not None:
                policy.add(index, next_use)
            return True

    def _make_room(
        self,
        policy: FarthestFirst,
        length: int,
        next_use: int,
    ) -> bool:
        """Evict samples used later than ``next_use`` until ``length`` bytes fit; all or none."""
        if next_use == NEVER:
            return False
        victims: dict[int, int] = {}
        room = self.folder.max_bytes - self.folder.used_bytes
        restocked = False
        while room < length:
            victim = policy.pop()
            if victim is None and not restocked:
                restocked = True  # what other processes brought
                rows = np.setdiff1d(self.folder.held(), list(victims))
                policy.rebuild(rows, policy.now)
                continue
            if victim is not None and victim[0] in victims:
                continue  # it may come twice, and frees its room but once
            if victim is None or victim[1] <= next_use:
                victims.update([] if victim is None else [victim])
                for row, time in victims.items():
                    policy.add(row, time)
                return False
            victims[victim[0]] = victim[1]
            room += self.folder.length_of(victim[0])
        for row in victims:
            self.folder.remove(row)
        self._counts["cache_evictions"] += len(victims)
        return True

    def _give_up_writing(self, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return
        self._writes = False
        _LOG.warning(
            (
                "cache '%s' disabled for new samples: %s; continuing without it, at the speed "
                "of the remote storage"
            ),
            self.folder.path,
            error,
        )


def parse_size(size: int | str) -> int:
    """Return the bytes from a number or a text such as ``500GB``, ``1.5TiB``.

    Raises ConfigError.
    """
    if isinstance(size, str):
        match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*(?:([{_PREFIXES}])(I?))?B?\s*", size.upper())
        if match is None:
            raise ConfigError(
                f"cache_size={size!r} is not a size; write bytes, or a number with KB, MB, "
                "GB, TB, GiB, TiB"
            )
        power = _PREFIXES.index(match[2]) + 1 if match[2] else 0
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if size < 1:
        raise ConfigError(f"cache_size={size} must be 1 byte or more")
    return size


def part_of_free_space(base: Path, folder: Path) -> int:
    """Return the default size [bytes] of the cache in ``folder``: 80 % of the free disk space
    and its own files.
    """
    free = shutil.disk_usage(base).free
    try:
        with os.fdopen(open_file(folder / "table", os.O_RDONLY), "rb") as table:
            bytes_used = int.from_bytes(table.read(8), "little")
    except FileNotFoundError:
        bytes_used = 0
    return max(1, int((free + bytes_used) * _PART_OF_FREE_SPACE))
