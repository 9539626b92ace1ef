"""The protocol of a storage backend: spans at once, or requested ahead of time.

A *session* is one iteration's stream of requests. The loader knows the order, so it asks for spans
long before it needs them: ``request`` starts what makes them come (read-ahead, a coalesced
download, nothing) and returns one call for each row, which waits for the bytes, checks them and
hands them over. Bytes that were asked for and not yet taken are bounded by the look-ahead of who
asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeAlias

if TYPE_CHECKING:
    from fuelrail.loaders.storage.cache.future_uses import FutureUses
    from fuelrail.pipeline.format.index.row import IndexRow

PendingSpan: TypeAlias = "Callable[[], memoryview]"
"""Waits for one span's bytes. Raises ShardError; called once."""
PendingSample: TypeAlias = "Callable[[], LayeredSpan]"
"""The same for a sample, which may have rows in layers."""


def raise_at_its_turn(error: Exception) -> NoReturn:
    """Raise the error of a request that failed: with it bound, the wait for the bytes that do
    not come.
    """
    raise error


class StoredRow(NamedTuple):
    """A row of a layer's index, and its span."""

    row: IndexRow
    span: memoryview


class LayeredSpan(NamedTuple):
    """The span of a sample, and its rows in the layers, in their order; None where a layer has
    no row.
    """

    base: memoryview
    layers: tuple[StoredRow | None, ...] = ()

    def copied(self) -> LayeredSpan:
        """Return the same on memory of its own."""
        layers = [
            stored and stored._replace(span=memoryview(bytes(stored.span)))
            for stored in self.layers
        ]
        return LayeredSpan(memoryview(bytes(self.base)), tuple(layers))


class StorageStats(NamedTuple):
    """What a backend did so far; counts are of this process."""

    backend: str
    spans: int = 0
    """Spans handed out, and their bytes."""
    span_bytes: int = 0
    requests: int = 0
    """Requests to remote storage that were answered, and the bytes they brought (gaps and hedges
    included).
    """
    request_bytes: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    refetched: int = 0
    """Spans read again because they came short or with a wrong checksum."""
    concurrency: int = 0
    """Requests that may be in flight at this moment."""
    cache_hits: int = 0
    cache_misses: int = 0
    cache_hit_bytes: int = 0
    cache_bytes: int = 0
    """Bytes in the cache, of all processes that share it."""
    cache_evictions: int = 0
    cache_damaged: int = 0
    """Cache files that were missing, cut or corrupt, and were fetched again."""


def add_stats(stats: Sequence[StorageStats]) -> StorageStats:
    """Return the storages' counts together; their names side by side where they are of different
    kinds.
    """
    if len(stats) == 1:
        return stats[0]
    backend = "+".join(dict.fromkeys(counts.backend for counts in stats))
    _, *columns = zip(*stats, strict=True)
    return StorageStats(backend, *map(sum, columns))


class Session(Protocol):
    """One iteration's requests."""

    def request(self, rows: Sequence[tuple[int, IndexRow]]) -> Sequence[PendingSpan]:
        """Ask for spans, given as (index, row), in the order in which they will be taken; never
        blocks for long.
        """

    def close(self) -> None:
        """Cancel what was requested; a thread that waits gets a StorageError.

        May be called twice, from any thread.
        """


class Storage(Protocol):
    """Where the shards of one dataset lie, and the rows of its layers.

    Safe to use from many threads.
    """

    look_ahead_bytes: int
    """Default look-ahead of a loader."""
    needs_whole_spans: bool
    """Whether rows must be those of whole spans: a cache serves loaders that select other
    channels, too.
    """

    def span(self, index: int, row: IndexRow) -> memoryview:
        """Return one sample's bytes, now, read-only.

        Raise ShardError with shard, offset and key.
        """

    def session(self, future_uses: FutureUses | None = None, uses_per_step: int = 0) -> Session:
        """Start a stream of requests, made in the order of ``future_uses``, by which a cache
        evicts.

        ``uses_per_step`` samples a step are used on this host.
        """

    def stats(self) -> StorageStats:
        """Return the counters so far."""

    def close(self) -> None:
        """Let go of files, connections and threads; views handed out stay valid."""
