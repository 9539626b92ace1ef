"""Local shards, memory-mapped: a span is a view of the page cache, nothing is copied.

What the kernel would do page by page, at the moment of decoding, happens here in bulk and ahead of time:

* Spans asked for ahead that are not in the page cache are handed to the kernel's read-ahead
  (``posix_fadvise(WILLNEED)``). A one-byte read that refuses to block (``preadv2(RWF_NOWAIT)``) tells whether they
  are: on a warm cache the advice itself would cost more than reading.
* Pages that are still missing when a span is taken are read and mapped in one call (``MADV_POPULATE_READ``, Linux
  5.14) before anyone touches them. Where one cannot be served (the file was cut, the disk failed) the call returns an
  error: touching the page would kill the process with SIGBUS.
* Where the dataset exceeds the memory there is, each sample's pages are let go once it was used, but for a fixed part
  of the samples that fits. An epoch uses each sample once, so that part is found in memory in every epoch, and the
  kernel has no reason to push out anything else. Left to itself, a page cache smaller than the dataset keeps what was
  used last, which is what will be used latest.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import mmap
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.loaders.storage.files import OpenShards, ShardFile, explained, open_files_limit
from fuelrail.loaders.storage.protocol import StorageStats
from fuelrail.pipeline.dataset import check_span
from fuelrail.pipeline.errors import ChecksumError, ShardError, StorageError, TruncatedShardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.loaders.foresight import Foresight
    from fuelrail.loaders.storage.protocol import PendingSpan
    from fuelrail.pipeline.dataset import Dataset
    from fuelrail.pipeline.index import IndexRow

_MADV_DONTNEED: Final = 4
_MADV_POPULATE_READ: Final = 22
_KEEP_OF_MEMORY: Final = 0.6
"""Part of the available memory that a dataset larger than it may hold in the page cache."""
_USED_SPANS_HELD: Final = 64
"""So many spans later nobody decodes from a span any more; if somebody does, its pages are read again."""

_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL during a call, as mmap.madvise does not
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _MappedFile(ShardFile):
    """A shard and its map. Views of the map keep it alive on their own."""

    def __init__(self, path: Path, expected_bytes: int) -> None:
        try:
            super().__init__(path, expected_bytes)
            mapped = mmap.mmap(self.fd, expected_bytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot be opened: {error}", shard=path.name) from error
        # Samples are read in a seeded random order: reading around each fault, or each probe of `is_cached`, would
        # fetch what is not wanted, in large folios that can only go as a whole.
        mapped.madvise(mmap.MADV_RANDOM)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.view = memoryview(mapped)
        self._byte = [bytearray(1)]
        self._address = int(np.frombuffer(mapped, np.uint8).ctypes.data)

    def advise(self, start: int, length: int, advice: int) -> int:
        """``madvise`` on the pages of a range; 0 or the error number."""
        first = start & -mmap.PAGESIZE
        done: int = _libc.madvise(self._address + first, start + length - first, advice)
        return 0 if done == 0 else ctypes.get_errno()

    def is_cached(self, start: int, length: int) -> bool:
        """Whether the range seems to be in the page cache, by its last byte; False beyond the file's end."""
        try:
            return os.preadv(self.fd, self._byte, start + length - 1, os.RWF_NOWAIT) == 1
        except OSError:  # not there, or a file system without RWF_NOWAIT: say no, and let the kernel find out
            return False


class MappedShards:
    """Local shards, each mapped on first use. Thread-safe.

    A map takes address space, not memory: the page cache holds the bytes and drops them under pressure. ``verify``
    holds every span against its digest. ``memory_bytes`` is what the page cache may take; None: what the machine and
    the control group have available now.
    """

    look_ahead_bytes = 64 << 20

    def __init__(self, dataset: Dataset, *, verify: bool = True, memory_bytes: int | None = None) -> None:
        self._dataset, self._verify = dataset, verify
        self._num_shards = len(dataset.manifest.shards)
        self._files: OpenShards[_MappedFile] = OpenShards(partial(_map, dataset), open_files_limit(2))
        budget = available_memory_bytes() if memory_bytes is None else memory_bytes
        total = sum(shard.bytes for shard in dataset.manifest.shards)
        # Below 1 the part of the samples, by their digest, whose pages stay.
        self._kept_part = 1.0 if total <= budget else _KEEP_OF_MEMORY * budget / total
        self._can_populate = sys.platform == "linux"
        self._spans = self._span_bytes = 0

    def span(self, index: int, row: IndexRow) -> memoryview:  # noqa: ARG002 - part of the protocol
        """A read-only view of a sample's bytes.

        Raises TruncatedShardError where the shard is shorter than the index says, ChecksumError where its bytes differ
        from those written, StorageError where it cannot be read, ShardError where it is not the manifest's file.
        """
        shard = row.shard
        if not 0 <= shard < self._num_shards:
            self._dataset.shard_path(row)  # says what is wrong
        try:
            file = self._files[shard]
        except ShardError as error:
            raise explained(self._dataset, row, error) from error
        try:
            span = self._view(file, row)
        except (ChecksumError, TruncatedShardError) as error:
            raise explained(self._dataset, row, error, file) from error
        self._spans += 1
        self._span_bytes += row.length
        return span

    def session(self, foresight: Foresight | None = None, uses_per_step: int = 0) -> _MappedSession:  # noqa: ARG002
        """A stream of requests, which read ahead and let go behind."""
        return _MappedSession(self, self._files, self._kept_part)

    def stats(self) -> StorageStats:
        """Spans handed out."""
        return StorageStats("mapped", self._spans, self._span_bytes)

    def close(self) -> None:
        """Unmap what nobody looks at."""
        self._files.clear()

    def _view(self, file: _MappedFile, row: IndexRow) -> memoryview:
        end = row.offset + row.length
        if not 0 <= row.offset <= end <= len(file.view):
            raise TruncatedShardError(
                f"sample needs bytes up to {end}, the shard has {len(file.view)}",
                shard=file.path.name, offset=row.offset, key=row.key,
            )  # fmt: skip
        self._populate(file, row)
        span = file.view[row.offset : end]
        if self._verify:
            check_span(row, span, file.path.name)
        return span

    def _populate(self, file: _MappedFile, row: IndexRow) -> None:
        """See that a span's pages can be touched, or raise where that would end in SIGBUS."""
        if file.is_cached(row.offset, row.length):
            return  # faults on pages in memory are served 16 at a time, which is cheaper than the call below
        os.posix_fadvise(file.fd, row.offset, row.length, os.POSIX_FADV_WILLNEED)
        error = file.advise(row.offset, row.length, _MADV_POPULATE_READ) if self._can_populate else errno.EINVAL
        if error == 0:
            return
        if error == errno.EINVAL:  # an older kernel; then a cut is noticed here, but a disk that fails is not
            self._can_populate = False
        size = file.size_now()
        if size < row.offset + row.length:
            raise TruncatedShardError(
                f"sample needs bytes up to {row.offset + row.length}, the shard was cut to {size} while in use",
                shard=file.path.name, offset=row.offset, key=row.key,
            )  # fmt: skip
        if error != errno.EINVAL:
            raise StorageError(
                f"cannot be read: {os.strerror(error)}", shard=file.path.name, offset=row.offset, key=row.key
            )


# No method: the files would refer to the storage that holds them, and stay mapped until the garbage collector comes.
def _map(dataset: Dataset, number: int) -> _MappedFile:
    entry = dataset.manifest.shards[number]
    return _MappedFile(dataset.root / entry.name, entry.bytes)


class _MappedSession:
    """Reads ahead what is not in memory, and lets go what will not be kept."""

    def __init__(self, storage: MappedShards, files: OpenShards[_MappedFile], kept_part: float) -> None:
        self._storage, self._files, self._kept_part = storage, files, kept_part
        self._used: collections.deque[IndexRow] = collections.deque()

    def request(self, rows: Sequence[tuple[int, IndexRow]]) -> list[PendingSpan]:
        """Start read-ahead where it is needed."""
        for _, row in rows:
            try:
                file = self._files[row.shard]
                if not file.is_cached(row.offset, row.length):
                    os.posix_fadvise(file.fd, row.offset, row.length, os.POSIX_FADV_WILLNEED)
            except (OSError, ShardError):
                continue  # advice only; whoever takes the span meets the error with its address
        return [partial(self._take, index, row) for index, row in rows]

    def close(self) -> None:
        """Nothing is under way that would need an end."""

    def _take(self, index: int, row: IndexRow) -> memoryview:
        span = self._storage.span(index, row)
        if self._kept_part < 1.0 and row.xxh3 >= self._kept_part * 2**64:
            self._used.append(row)
            if len(self._used) > _USED_SPANS_HELD:
                self._let_go(self._used.popleft())
        return span

    def _let_go(self, row: IndexRow) -> None:
        """Unmap a span's pages and drop them from the page cache."""
        file = self._files[row.shard]
        file.advise(row.offset, row.length, _MADV_DONTNEED)
        os.posix_fadvise(file.fd, row.offset, row.length, os.POSIX_FADV_DONTNEED)


def available_memory_bytes() -> int:
    """Memory that the page cache may still take: what the kernel calls available, or the control group's limit."""
    available = sys.maxsize
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            available = min(available, int(limit))
    except (OSError, ValueError):
        pass  # not Linux, or no control groups of version 2
    return available
