"""Local shards, memory-mapped: a span is a view of the page cache, nothing is copied.

What the kernel would do page by page, at the moment of decoding, happens here in bulk and ahead of time:

* Spans asked for ahead that are not in the page cache are read then. ``mincore`` reports whether they are: on a warm
  cache the advice itself would cost more than reading.
* They are read in huge pages of 2 MiB (``MADV_HUGEPAGE``), by a few threads. These bring parts of neighbouring
  samples, which an epoch wants too. A span then costs two page faults instead of dozens. Reading from disk takes as
  long either way; the passes after it are faster, by whatever means they read. This is for datasets that fit into
  memory; of others only the samples asked for are read.
* Pages that are still missing when a span is taken are read and mapped in one call (``MADV_POPULATE_READ``, Linux
  5.14) before anyone touches them. Where one cannot be served (the file was cut, the disk failed) the call returns an
  error: touching the page would kill the process with SIGBUS.

A shard that is cut or rewritten in place between that and decoding raises TruncatedShardError, and ends no process
(:mod:`fuelrail.loaders.storage.guard`). A shard whose size or time of change is another when its sample is done is
checked against the digest again, so bytes that were changed in place and stay so are found before a batch is handed
out. Bytes that were other ones for a moment only, between the digest and decoding, are not: each span would have to be
copied first, as ``pread`` does. To replace a shard, write a new file and rename it.

Pages that are in memory and not yet mapped are mapped as they are touched. In huge pages, as our own writer and our
own reading leave them, that is all but free; in pages of 4 KiB it costs what a copy does, 16 being mapped at a time.
``MADV_POPULATE_READ`` would take three times as long for those, and a thread that did so ahead saves no time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fuelrail.loaders.storage.files import OpenShards, ShardFile, explained, middle
from fuelrail.loaders.storage.guard import Faults, GuardedMap, IndexGuard, is_guarding
from fuelrail.loaders.storage.protocol import PendingSpan, StorageStats
from fuelrail.pipeline.errors import ShardError, StorageError, TruncatedShardError
from fuelrail.pipeline.format.dataset import Dataset, check_span
from fuelrail.pipeline.runtime.host import free_memory_bytes, memory_limit_bytes

if TYPE_CHECKING:
    from fuelrail.loaders.storage.cache.future_uses import FutureUses
    from fuelrail.pipeline.format.index.row import IndexRow

_MADV_POPULATE_READ: Final = 22

_SURE_AFTER: Final = 32

_PROBE_EVERY: Final = 8
"""After this number of successive spans in memory only each eighth is looked up ahead, until one is not in memory.
Looking up costs a twentieth of checking a span, and is done again when the span is taken."""

_NUM_READERS: Final = 4
"""Threads that read huge pages ahead: one waits for one page at a time, and disks like several requests at once."""

_mincore = ctypes.PyDLL(None).mincore  # does not release the GIL: takes less than that would

_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte))

_KEEP_OF_MEMORY: Final = 0.6
"""Part of the page cache's room that a dataset larger than it may hold."""


class _MappedFile(ShardFile):
    """A shard and its map. Views of the map keep it alive on their own."""

    def __init__(self, path: Path, expected_bytes: int, *, huge_pages: bool) -> None:
        try:
            super().__init__(path, expected_bytes)
            mapped = GuardedMap(self.fd, expected_bytes)
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot be opened: {error}", shard=path.name) from error
        # Samples are read in a seeded random order: reading around each fault, or each probe of `is_cached`, would
        # fetch what is not wanted, in large folios that can only go as a whole.
        mapped.advise(0, expected_bytes, mmap.MADV_RANDOM)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        # Not 0: a kernel without them.
        self.has_huge_pages = huge_pages and mapped.advise(0, expected_bytes, mmap.MADV_HUGEPAGE) == 0
        self.mapped, self.view = mapped, mapped.view()
        # mincore is right only for users that may write the file. A read that refuses to block is right for all,
        # but where it says no it starts to read that one page, which then is in a huge page's way.
        self._may_ask = os.geteuid() in (0, os.fstat(self.fd).st_uid) or os.access(path, os.W_OK)
        self._address = mapped.address

    def is_cached(self, position: int) -> bool:
        """Return whether a byte seems to be in the page cache; False beyond the file's end."""
        if self._may_ask:
            page = ctypes.c_ubyte()
            address = self._address + (position & -mmap.PAGESIZE)
            return _mincore(address, 1, ctypes.byref(page)) == 0 and page.value & 1 == 1
        return self.has_in_memory(position) is True

    def may_be_touched(self, start: int, length: int) -> bool:
        """Return whether a span's bytes seem to be there, the last one surely."""
        last = start + length - 1
        # Faults on pages in memory are served 16 at a time, which is cheaper than populating. Of the two ways to ask,
        # the first takes a third of the time.
        return (self.has_in_memory(last) or self.is_cached(last)) and (
            self.has_huge_pages or self.is_cached(middle(start, length))
        )

    def populate(self, start: int, length: int) -> int:
        """Read and map the pages of a range; 0 or the error number, ``EINVAL`` on kernels before 5.14."""
        if not self.has_huge_pages:
            self.read_ahead(start, length)
        return self.mapped.advise(start, length, _MADV_POPULATE_READ) if sys.platform == "linux" else errno.EINVAL


class MappedShards:
    """Local shards, each mapped on first use. Thread-safe.

    A map takes address space, not memory: the page cache holds the bytes and drops them under pressure. ``verify``
    holds every span against its digest. Of a dataset beyond ``memory_bytes`` (None: what there is) only the samples
    asked for are read, not what lies around them.
    """

    look_ahead_bytes = 64 << 20
    needs_whole_spans = False

    def __init__(self, dataset: Dataset, *, verify: bool = True, memory_bytes: int | None = None) -> None:
        self._dataset, self._verify = dataset, verify
        self._num_shards = len(dataset.shards)
        is_guarding()
        self._faults, self._index_guard = Faults(), IndexGuard(dataset)
        opened = partial(_map, dataset, self._faults, huge_pages=Residency(dataset, memory_bytes).is_whole)
        self._files: OpenShards[_MappedFile] = OpenShards(opened)
        self._spans = self._span_bytes = 0
        self.num_populated = 0
        """Spans that were not in memory when they were taken."""

    def span(self, index: int, row: IndexRow) -> memoryview:  # noqa: ARG002 - part of the protocol
        """Return a read-only view of a sample's bytes.

        Raises TruncatedShardError where the shard is shorter than the index says, ChecksumError where its bytes differ
        from those written, StorageError where it cannot be read, ShardError where it is not the manifest's file.
        """
        if not 0 <= row.shard < self._num_shards:
            self._dataset.shards.name_of(row)  # says what is wrong
        file = None
        try:
            file = self._files[row.shard]
            span = self._view(file, row)
            if self._faults.are_any:
                self._check_faults(file, row)
        except ShardError as failure:
            error = failure
            if file is not None and self._faults.has_hit(row.shard, row.offset, row.offset + row.length):
                self._files.drop(row.shard)  # its pages stay zeros; the file itself may be whole again
                error = _cut(file, row)
            raise explained(self._dataset, row, error, file) from failure
        self._spans += 1
        self._span_bytes += row.length
        return span

    def recheck(self, indices: Sequence[int]) -> None:
        """See that what was made of spans was made of the bytes that were checked; raises what :meth:`span` does.

        That costs one look at the size and the time of change of each file. Where these are others, the digests are
        computed again.
        """
        files = self._files.opened()
        if 0 < len(files) <= len(indices) and not self._faults.are_any and not any(one.was_written() for one in files):
            return
        for index in indices:
            row, file = self._dataset.index.row(index), None
            try:
                file = self._files[row.shard]
                self._check_faults(file, row)
                if self._verify and file.was_written():
                    check_span(row, self._view(file, row), file.name)
            except ShardError as error:
                raise explained(self._dataset, row, error, file) from error

    def _check_faults(self, file: _MappedFile, row: IndexRow) -> None:
        if self._faults.has_hit(row.shard, row.offset, row.offset + row.length):
            raise _cut(file, row)

    def session(self, future_uses: FutureUses | None = None, uses_per_step: int = 0) -> _MappedSession:  # noqa: ARG002
        """Return a stream of requests, which read ahead."""
        is_guarding()
        return _MappedSession(self, self._files)

    def stats(self) -> StorageStats:
        """Return the number of spans handed out."""
        return StorageStats("mapped", self._spans, self._span_bytes)

    def close(self) -> None:
        """Unmap what has no views."""
        self._files.clear()

    def _view(self, file: _MappedFile, row: IndexRow) -> memoryview:
        start, end = row.offset, row.offset + row.length
        if not 0 <= start <= end <= len(file.view):
            raise TruncatedShardError(
                f"sample needs bytes up to {end}, the shard has {len(file.view)}",
                shard=file.name,
                offset=start,
                key=row.key,
            )
        if not file.may_be_touched(start, row.length):
            self._populate(file, row)
        span = file.view[start:end]
        if self._verify:
            check_span(row, span, file.name)
        return span

    def _populate(self, file: _MappedFile, row: IndexRow) -> None:
        """See that a span's pages can be touched, or raise where that would end in SIGBUS."""
        self.num_populated += 1
        error = file.populate(row.offset, row.length)
        if error == 0:
            return
        size = file.size_now()
        if size < row.offset + row.length:
            raise TruncatedShardError(
                f"sample needs bytes up to {row.offset + row.length}, the shard was cut to {size} while in use",
                shard=file.name,
                offset=row.offset,
                key=row.key,
            )
        if error == errno.EFAULT and file.was_written():  # cut when its pages were asked for, whole again by now
            raise _cut(file, row)
        if error != errno.EINVAL:  # an older kernel: there a cut is noticed, but a disk that fails is not
            raise StorageError(f"cannot be read: {os.strerror(error)}", shard=file.name, offset=row.offset, key=row.key)


# No method: the files would refer to the storage that holds them, and stay mapped until the garbage collector comes.
def _map(dataset: Dataset, faults: Faults, number: int, *, huge_pages: bool) -> _MappedFile:
    entry = dataset.shards[number]
    file = _MappedFile(dataset.root / entry.name, entry.bytes, huge_pages=huge_pages)
    faults.add(file.mapped, number)
    return file


def _cut(file: _MappedFile, row: IndexRow) -> TruncatedShardError:
    return TruncatedShardError(
        f"the shard was cut or rewritten in place while in use (it has {file.size_now()} bytes now)",
        shard=file.name,
        offset=row.offset,
        key=row.key,
    )


class _MappedSession:
    """Reads ahead what is not in memory."""

    def __init__(self, storage: MappedShards, files: OpenShards[_MappedFile]) -> None:
        self._storage, self._files = storage, files
        self._readers = concurrent.futures.ThreadPoolExecutor(_NUM_READERS, "fuelrail-read-ahead")
        self._num_found = 0  # in memory, one after the other
        self._num_populated = 0

    def request(self, rows: Sequence[tuple[int, IndexRow]]) -> list[PendingSpan]:
        """Start reading what is not in memory."""
        storage = self._storage
        if self._num_populated != storage.num_populated:
            self._num_populated, self._num_found = storage.num_populated, 0
        pending: list[PendingSpan] = []
        for index, row in rows:
            self._num_found += 1
            is_looked_up = self._num_found <= _SURE_AFTER or self._num_found % _PROBE_EVERY == 0
            if is_looked_up and self._starts_reading(row):
                self._num_found = 0
                pending.append(partial(self._take, index, row))
            else:
                pending.append(partial(storage.span, index, row))
        return pending

    def close(self) -> None:
        """Read no further ahead."""
        self._readers.shutdown(cancel_futures=True)

    def _starts_reading(self, row: IndexRow) -> bool:
        """Start to read a span, unless it is in memory. Advice only: errors are raised when the span is taken."""
        try:
            file = self._files[row.shard]
            end = row.offset + row.length
            if not 0 <= row.offset <= end <= len(file.view) or file.is_cached(middle(row.offset, row.length)):
                return False
            if file.has_huge_pages:
                self._readers.submit(file.populate, row.offset, row.length)
            else:
                file.read_ahead(row.offset, row.length)
        except (OSError, ShardError, RuntimeError):  # the last: the session was closed in between
            return False
        return True

    def _take(self, index: int, row: IndexRow) -> memoryview:
        # The last page may be here before the others, which are waited for at once better than in turn.
        with contextlib.suppress(OSError, ShardError):
            self._files[row.shard].populate(row.offset, row.length)
        return self._storage.span(index, row)


class Residency:
    """Which samples' pages stay: all, or a part by their digests, the same in every process.

    ``memory_bytes`` is what the page cache may take; None: what the machine and the control group have now.
    """

    def __init__(self, dataset: Dataset, memory_bytes: int | None = None) -> None:
        room = page_cache_room_bytes() if memory_bytes is None else memory_bytes
        total = dataset.manifest.num_bytes
        self.is_whole = total <= room
        self._digests_below = 1 << 64 if self.is_whole else int(_KEEP_OF_MEMORY * room / total * 2**64)

    def keeps(self, row: IndexRow) -> bool:
        """Return whether a sample's pages stay."""
        return row.xxh3 < self._digests_below


def page_cache_room_bytes() -> int:
    """Return the memory that the page cache may take: what the kernel calls available, or the container's limit."""
    return min(free_memory_bytes(), memory_limit_bytes() or sys.maxsize)
