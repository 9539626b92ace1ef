"""Shards at a URL: coalesced ranges, fetched ahead and concurrently on an event loop, checked,
retried.

The requests of a session are planned (:mod:`fuelrail.loaders.storage.ranges`) and requested at once
(:mod:`fuelrail.loaders.storage.requests`); the loader's fetch stage waits for each sample in order.
A range lives until the last of its samples was taken and let go, so memory is bounded by the
look-ahead of who asks.

With a cache (:mod:`fuelrail.loaders.storage.cache.span_cache`) a span is looked for there first and
put there afterwards. Local paths can be read this way too (``file://``), to cache a slow file
system on a fast disk.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from fuelrail.loaders.storage.clients import make_client
from fuelrail.loaders.storage.files import replaced
from fuelrail.loaders.storage.protocol import (
    PendingSpan,
    StorageStats,
    raise_at_its_turn,
)
from fuelrail.loaders.storage.ranges import WantedSpan, plan_ranges
from fuelrail.loaders.storage.requests import FetchFailedError, Requester
from fuelrail.pipeline.errors import (
    ChecksumError,
    DatasetError,
    FuelrailError,
    ShardError,
    StorageError,
    TruncatedShardError,
)
from fuelrail.pipeline.format.dataset import Dataset, check_span
from fuelrail.pipeline.format.fetch import RemoteFolder
from fuelrail.pipeline.format.layers import EITHER
from fuelrail.pipeline.storage.filesystem import shown_url
from fuelrail.pipeline.storage.retry import Fault, RetryPolicy

if TYPE_CHECKING:
    from fuelrail.loaders.storage.cache.future_uses import FutureUses
    from fuelrail.loaders.storage.cache.span_cache import CachedSpan, SpanCache
    from fuelrail.pipeline.format.index.row import IndexRow

_LOG = logging.getLogger(__name__)
_EXPLAIN = RetryPolicy(deadline_s=5.0, attempt_timeout_s=5.0)
"""The patience of looking up what changed, when something is wrong already."""


class RemoteShards:
    """Shards of a dataset that a ``client`` (`make_client`) reads by ranges. Thread-safe.

    ``verify`` holds every span against its digest; a wrong one is fetched once more on its own.
    With a ``cache`` it is always done, for a damaged span must not stay.
    """

    look_ahead_bytes = 256 << 20
    on_bytes: Callable[[int, int, int], None] | None = None
    """Told of each request how many bytes have come: shard, first byte, number so far."""

    def __init__(
        self,
        dataset: Dataset,
        client: str = "auto",
        *,
        verify: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        retry: RetryPolicy | None = None,
        make_cache: Callable[[], SpanCache | None] | None = None,
    ) -> None:
        self.dataset = dataset
        self._make_cache = make_cache
        self._url = dataset.url or f"file://{dataset.root.absolute()}"
        self._options = dataset.storage_options if storage_options is None else storage_options
        self._kind = client
        self._retry = retry or RetryPolicy()
        self.needs_whole_spans = make_cache is not None
        self._verify = verify or make_cache is not None
        self._begin()
        self._spans = self._span_bytes = self._refetched = 0
        self._lock = threading.Lock()

    def _begin(self) -> None:
        """Make what belongs to this process: client, cache, event loop and requester."""
        import fsspec.asyn

        self._pid = os.getpid()
        self.client = make_client(self._url, self._options, kind=self._kind)
        self.cache = self._make_cache() if self._make_cache is not None else None
        self.loop: asyncio.AbstractEventLoop = fsspec.asyn.get_loop()
        place = shown_url(self._url)

        def log_fault(fault: Fault) -> None:
            _LOG.info("'%s': %s; trying again", place, fault.text)

        self.requester = Requester(self._retry, self._options, log_fault)

    def _ensure_process(self) -> None:
        """Start again in a forked process: event loops, connections and locks do not survive a
        fork.
        """
        if os.getpid() != self._pid:
            self._begin()

    def span(self, index: int, row: IndexRow) -> memoryview:
        """Return one sample's bytes, from the cache or fetched now.

        Raise StorageError and the other ShardErrors.
        """
        self._ensure_process()
        return _RemoteSession(self).request([(index, row)])[0]()

    def session(
        self, future_uses: FutureUses | None = None, uses_per_step: int = 0
    ) -> _RemoteSession:
        """Return a stream of requests, whose future the cache may know."""
        self._ensure_process()
        if self.cache is not None:
            self.cache.evict_by(future_uses, uses_per_step)
        return _RemoteSession(self, future_uses)

    def stats(self) -> StorageStats:
        """Return the counters so far."""
        requester = self.requester
        stats = StorageStats(
            backend=self.client.kind,
            spans=self._spans,
            span_bytes=self._span_bytes,
            requests=requester.requests,
            request_bytes=requester.request_bytes,
            retries=requester.retries,
            hedges=requester.hedges,
            hedges_won=requester.hedges_won,
            refetched=self._refetched,
            concurrency=requester.width,
        )
        if self.cache is None:
            return stats
        return self.cache.add_stats(stats)

    def close(self) -> None:
        """Let go of the client's threads and the cache."""
        self.client.close()
        if self.cache is not None:
            self.cache.close()

    def fetch(
        self,
        shard: int,
        start: int,
        end: int,
    ) -> concurrent.futures.Future[memoryview]:
        """Start fetching a range of a shard."""
        name = self.dataset.shards.name(shard)
        get = partial(self.client.get, name, start, end)
        if self.on_bytes is not None:
            get = partial(get, on_bytes=partial(self.on_bytes, shard, start))
        return asyncio.run_coroutine_threadsafe(self.requester.fetch(get, end - start), self.loop)

    def fetched_again(
        self, row: IndexRow, future: concurrent.futures.Future[memoryview]
    ) -> memoryview:
        """Fetch one span on its own, after its first coming failed a check.

        Raise what :meth:`span` raises.
        """
        self._refetched += 1
        try:
            span = future.result()
        except FetchFailedError as error:
            self.fail(row, error)
        if self._verify:
            try:
                check_span(row, span, self.shard_name(row))
            except ChecksumError as error:
                self._explain(row, ChecksumError, f"{error.message}, twice")
        return span

    def is_good(self, row: IndexRow, span: memoryview) -> bool:
        """Return whether a span is what the index says; True where nothing is to be checked."""
        if not self._verify:
            return True
        try:
            check_span(row, span, self.shard_name(row))
        except ShardError as error:
            _LOG.warning("%s; fetching it again", error)
            return False
        return True

    def handed_out(self, span: memoryview) -> memoryview:
        """Count a span."""
        with self._lock:
            self._spans += 1
            self._span_bytes += len(span)
        return span.toreadonly()

    def fail(self, row: IndexRow, error: FetchFailedError) -> NoReturn:
        """Raise the error of a request that failed after all retries, for this sample."""
        fault = error.fault
        if fault.kind == "cut":
            self._explain(
                row,
                TruncatedShardError,
                f"the shard ends before the sample does: {fault.text}",
            )
        if fault.kind == "missing":
            self._explain(
                row,
                StorageError,
                f"'{shown_url(self._url)}': the shard is not there; {fault.text}",
            )
        reason = {
            "refused": f"access is refused: {fault.advice}",
            "invalid": "the request was rejected",
        }.get(
            fault.kind,
            f"no answer after {error.num_attempts} attempts in {error.elapsed_s:.0f} s",
        )
        raise StorageError(
            f"'{shown_url(self._url)}': {reason}; {fault.text}",
            shard=self.shard_name(row),
            offset=row.offset,
            key=row.key,
        ) from None

    def shard_name(self, row: IndexRow) -> str:
        """Return the file that holds a sample."""
        return self.dataset.shards.name_of(row)

    def _explain(
        self,
        row: IndexRow,
        kind: type[ShardError],
        message: str,
    ) -> NoReturn:
        """Raise ``kind``, saying whether the dataset at the URL is another one by now."""
        try:
            fingerprint = (
                RemoteFolder(self._url, self._options, _EXPLAIN).manifest(EITHER)[1].fingerprint
            )
        except (FuelrailError, OSError) as error:
            fingerprint = (
                f"unknown ({type(error).__name__})"
                if isinstance(error, DatasetError)
                else "unknown"
            )
        if fingerprint != self.dataset.manifest.fingerprint:
            message = f"{message}; {replaced(self.dataset, fingerprint)}"
        raise kind(
            message,
            shard=self.shard_name(row),
            offset=row.offset,
            key=row.key,
        )


class _Range:
    """A range that is requested or loaded; while it is referenced, its samples need no other
    request.
    """

    __slots__ = ("__weakref__", "future", "is_single", "start")

    def __init__(
        self,
        future: concurrent.futures.Future[memoryview],
        start: int,
        *,
        is_single: bool,
    ) -> None:
        self.future = future
        self.start = start
        self.is_single = is_single


class _RemoteSession:
    """Ranges asked for and not yet taken."""

    def __init__(self, storage: RemoteShards, future_uses: FutureUses | None = None) -> None:
        self._storage = storage
        self._future_uses = future_uses
        self._asked = 0
        # By part of a sample. In a small dataset, and about an epoch's end, it is asked for again
        # before it was taken.
        self._ranges: weakref.WeakValueDictionary[tuple[int, int, int], _Range] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()
        self._under_way: set[concurrent.futures.Future[memoryview]] = set()
        self._closed = False

    def request(self, rows: Sequence[tuple[int, IndexRow]]) -> list[PendingSpan]:
        """Plan and start the ranges of all spans that are not in the cache."""
        storage = self._storage
        cache = self._storage.cache
        pending: dict[int, PendingSpan] = {}
        first = self._asked
        self._asked = self._asked + len(rows)
        new: dict[
            tuple[int, int, int], list[int]
        ] = {}  # by part of a sample: where in rows, the first time and again
        for number, (index, row) in enumerate(rows):
            try:
                storage.shard_name(row)
            except FuelrailError as error:  # a row that names no shard; reported at its turn
                pending[number] = partial(raise_at_its_turn, error)
                continue
            part = index, row.offset, row.length
            held = self._ranges.get(part)
            if held is not None:
                pending[number] = partial(
                    self._take,
                    held,
                    first + number,
                    index=index,
                    row=row,
                )
                continue
            if part in new:
                new[part].append(number)
                continue
            cached = cache.open(index, row.length) if cache is not None else None
            if cached is not None:
                pending[number] = partial(
                    self._take_cached,
                    cached,
                    first + number,
                    index=index,
                    row=row,
                )
            else:
                new[part] = [number]
        missing = list(new.values())
        spans = [
            WantedSpan(row.shard, row.offset, row.length)
            for row in (rows[places[0]][1] for places in missing)
        ]
        for planned in plan_ranges(spans):
            future = self._start(planned.shard, planned.start, planned.end)
            pending_range = _Range(future, planned.start, is_single=len(planned.members) == 1)
            for member in planned.members:
                for number in missing[member]:
                    index, row = rows[number]
                    self._ranges[index, row.offset, row.length] = pending_range
                    pending[number] = partial(
                        self._take,
                        pending_range,
                        first + number,
                        index=index,
                        row=row,
                    )
        return [pending[number] for number in range(len(rows))]

    def close(self) -> None:
        """Give up all requests."""
        with self._lock:
            self._closed = True
            under_way = list(self._under_way)
        for future in under_way:
            future.cancel()

    def _start(
        self,
        shard: int,
        start: int,
        end: int,
    ) -> concurrent.futures.Future[memoryview]:
        def forget(future: concurrent.futures.Future[memoryview]) -> None:
            with self._lock:
                self._under_way.discard(future)

        future = self._storage.fetch(shard, start, end)
        with self._lock:
            self._under_way.add(future)
            closed = self._closed
        future.add_done_callback(forget)
        if closed:
            future.cancel()
        return future

    def _take(
        self,
        pending_range: _Range,
        number: int,
        index: int,
        row: IndexRow,
    ) -> memoryview:
        storage = self._storage
        try:
            span = self._wait_for_span(pending_range, row)
        except concurrent.futures.CancelledError:
            raise StorageError(
                "the loader was closed before the sample came",
                shard=storage.shard_name(row),
                offset=row.offset,
                key=row.key,
            ) from None
        if storage.cache is not None:
            storage.cache.put(
                index,
                span,
                None if self._future_uses is None else self._future_uses.time_of(number),
            )
        return storage.handed_out(span)

    def _wait_for_span(self, pending_range: _Range, row: IndexRow) -> memoryview:
        """Return a span out of its range once that is here, good, if need be by asking for it
        alone.
        """
        storage = self._storage
        try:
            data = pending_range.future.result()
        except FetchFailedError as error:
            if pending_range.is_single or error.fault.kind != "cut":
                storage.fail(row, error)
        else:
            first = row.offset - pending_range.start
            span = data[first : first + row.length]
            if storage.is_good(row, span):
                return span
        # Wrong bytes, or a shard that was cut, perhaps behind this sample.
        return storage.fetched_again(
            row, self._start(row.shard, row.offset, row.offset + row.length)
        )

    def _take_cached(
        self,
        cached: CachedSpan,
        number: int,
        index: int,
        row: IndexRow,
    ) -> memoryview:
        """Return a cached span if it is good; else drop it from the cache and fetch it."""
        storage = self._storage
        span = cached.read()
        assert storage.cache is not None
        if span is not None:
            if storage.is_good(row, span):
                storage.cache.count_hit(len(span))
                return storage.handed_out(span)
            storage.cache.forget(index)
        future = self._start(row.shard, row.offset, row.offset + row.length)
        return self._take(_Range(future, row.offset, is_single=True), number, index, row)
