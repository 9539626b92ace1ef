"""Shards at local paths, network mounts included, read with ``pread`` into reused buffers.

Files are not mapped: a mapped page that cannot be served ends the process with SIGBUS, or hangs the
thread that touches it. A read returns an error, and is made again with a newly opened file, which a
stale handle or a server that came back needs. A span is a copy that nobody changes between its
check and its decoding. The copy costs 1 % of the decoding or less (``bench/DECISIONS.md``).

Of a dataset that exceeds the memory most samples leave the page cache as soon as they were read
(:class:`Residency`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fuelrail.loaders.storage.buffers import Buffers
from fuelrail.loaders.storage.files import OpenShards, ShardFile, explained
from fuelrail.loaders.storage.protocol import PendingSpan, StorageStats
from fuelrail.pipeline.errors import (
    ChecksumError,
    ShardError,
    StorageError,
    TruncatedShardError,
)
from fuelrail.pipeline.format.dataset import Dataset, check_span
from fuelrail.pipeline.runtime.host import free_memory_bytes, memory_limit_bytes
from fuelrail.pipeline.storage.retry import (
    Fault,
    RetryPolicy,
    call_with_retries,
)

if TYPE_CHECKING:
    from fuelrail.loaders.storage.cache.future_uses import FutureUses
    from fuelrail.pipeline.format.index.row import IndexRow

_LOG = logging.getLogger(__name__)

KEEP_BUFFERS_BYTES: Final = 64 << 20
_KEEP_OF_MEMORY: Final = 0.6
"""Part of the page cache's room that a dataset larger than it may take."""


class PreadShards:
    """Shards at local paths. Thread-safe. ``verify`` checks every span against its digest.

    ``memory_bytes`` is the room of the page cache; None: that of this machine and control group.
    """

    look_ahead_bytes = 64 << 20
    needs_whole_spans = False

    def __init__(
        self,
        dataset: Dataset,
        *,
        verify: bool = True,
        retry: RetryPolicy | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._verify = verify
        self._retry = retry or RetryPolicy()
        self._residency = Residency(dataset, memory_bytes)
        self._files: OpenShards[ShardFile] = OpenShards(partial(_open_shard, dataset))
        self._buffers = Buffers(keep_bytes=KEEP_BUFFERS_BYTES)
        self._spans = self._span_bytes = self._retries = self._refetched = 0

    def span(self, index: int, row: IndexRow) -> memoryview:  # noqa: ARG002 - part of the protocol
        """Return a sample's bytes in a buffer of its own, which is reused when its last view is
        gone.

        A read that fails, comes short or brings wrong bytes is made again on a newly opened file.
        Raises TruncatedShardError, ChecksumError, StorageError (after the retry policy's deadline)
        and ShardError.
        """
        self._dataset.shards.name_of(row)

        def give_up(fault: Fault, pause_s: float | None) -> None:
            name = self._dataset.shards.name(row.shard)
            if pause_s is None:
                raise StorageError(
                    f"cannot be read: {fault.text}",
                    shard=name,
                    offset=row.offset,
                    key=row.key,
                )
            _LOG.warning(
                "shard %s, offset %d: %s; trying again",
                name,
                row.offset,
                fault.text,
            )
            self._retries += 1
            self._files.drop(row.shard)

        try:
            span = call_with_retries(lambda: self._read(row), self._retry, give_up)
        except (TruncatedShardError, ChecksumError) as fault:
            _LOG.warning("%s; reading it again", fault)
            self._refetched += 1
            file = None
            try:
                # Past the page cache, from a newly opened file.
                file = self._files[row.shard]
                os.posix_fadvise(file.fd, row.offset, row.length, os.POSIX_FADV_DONTNEED)
                self._files.drop(row.shard)
                span = self._read(row)
            except (TruncatedShardError, ChecksumError) as error:
                raise explained(self._dataset, row, error, file) from error
            except OSError as error:
                raise StorageError(
                    f"cannot be read: {error}",
                    shard=self._dataset.shards.name(row.shard),
                    offset=row.offset,
                    key=row.key,
                ) from error
        self._spans += 1
        self._span_bytes += row.length
        return span

    def session(
        self,
        future_uses: FutureUses | None = None,  # noqa: ARG002
        uses_per_step: int = 0,  # noqa: ARG002
    ) -> _PreadSession:
        """Return a stream of requests, with the kernel's read-ahead."""
        return _PreadSession(self, self._files, self._residency)

    def stats(self) -> StorageStats:
        """Return the numbers of spans handed out and of spans read again."""
        return StorageStats(
            "pread",
            self._spans,
            self._span_bytes,
            retries=self._retries,
            refetched=self._refetched,
        )

    def close(self) -> None:
        """Close all files."""
        self._files.clear()

    def _read(self, row: IndexRow) -> memoryview:
        file = self._files[row.shard]
        array: Any = self._buffers.take(row.length)
        buffer = memoryview(array)
        done = 0
        while done < row.length:
            count = os.preadv(file.fd, [buffer[done:]], row.offset + done)
            if count == 0:
                raise TruncatedShardError(
                    (
                        f"sample needs bytes up to {row.offset + row.length}, the shard ends at "
                        f"{row.offset + done}"
                    ),
                    shard=file.name,
                    offset=row.offset,
                    key=row.key,
                )
            done += count
        if self._verify:
            check_span(row, buffer, file.name)
        return buffer.toreadonly()


# No method: the files would refer to the storage that holds them, and stay open until the garbage
# collector comes.
def _open_shard(dataset: Dataset, number: int) -> ShardFile:
    entry = dataset.shards[number]
    return ShardFile(dataset.root / entry.name, entry.bytes)


class _PreadSession:
    def __init__(
        self,
        storage: PreadShards,
        files: OpenShards[ShardFile],
        residency: Residency,
    ) -> None:
        self._storage = storage
        self._files = files
        self._residency = residency

    def request(self, rows: Sequence[tuple[int, IndexRow]]) -> list[PendingSpan]:
        """Let the kernel read ahead, unless it has: for what is in memory the advice takes half
        as long as reading.
        """
        for _, row in rows:
            try:
                file = self._files[row.shard]
                # The middle tells best: the pages at a span's ends are its neighbours' too.
                if not file.has_in_memory(row.offset + row.length // 2):
                    file.read_ahead(row.offset, row.length)
            except (OSError, ShardError):
                continue  # advice only; taking the span raises the error with its address
        return [partial(self._take_span, index, row) for index, row in rows]

    def close(self) -> None:
        """Do nothing: no read is under way."""

    def _take_span(self, index: int, row: IndexRow) -> memoryview:
        span = self._storage.span(index, row)
        if not self._residency.keeps(row):
            with contextlib.suppress(OSError, ShardError):  # advice only
                os.posix_fadvise(
                    self._files[row.shard].fd,
                    row.offset,
                    row.length,
                    os.POSIX_FADV_DONTNEED,
                )
        return span


class Residency:
    """Choose the samples whose pages stay in memory: all, or a part by their digests, the same in
    every process.

    ``memory_bytes`` is the room of the page cache; None: what the machine and the control group
    have now.
    """

    def __init__(self, dataset: Dataset, memory_bytes: int | None = None) -> None:
        room = page_cache_room_bytes() if memory_bytes is None else memory_bytes
        total = dataset.manifest.num_bytes
        self._digests_below = (
            1 << 64 if total <= room else int(_KEEP_OF_MEMORY * room / total * 2**64)
        )

    def keeps(self, row: IndexRow) -> bool:
        """Return whether a sample's pages stay."""
        return row.xxh3 < self._digests_below


def page_cache_room_bytes() -> int:
    """Return the memory that the page cache may take: what the kernel calls available, or the
    container's limit.
    """
    return min(free_memory_bytes(), memory_limit_bytes() or sys.maxsize)
