"""What processes that make batches did, as their trainers know it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fuelrail.loaders.storage.protocol import StorageStats, add_stats
from fuelrail.pipeline.runtime.stages import Observer, StageClock, add_clocks

if TYPE_CHECKING:
    from fuelrail.loaders.schedule.bad_samples import BadSamples


class Facts(NamedTuple):
    """What the server did so far, and what happened since the last batch."""

    clocks: tuple[StageClock, ...]
    storage: StorageStats
    refused_images: int
    bad: frozenset[int]
    """Numbers of the bad samples so far."""
    replaced: list[tuple[int, int, str | None, str]]
    """Arguments of `BadSamples.note`."""
    events: list[tuple[str, int, int, float, float]]
    """Arguments of an `Observer`."""


class Counts:
    """What processes that make batches did so far: known as of the newest batch, over all that ended before."""

    def __init__(self, bad: BadSamples, observer: Observer | None) -> None:
        self._bad, self._observer = bad, observer
        self._past: tuple[StageClock, ...] = ()
        self._past_storage: list[StorageStats] = []
        self._past_refused = 0
        self._newest: Facts | None = None

    def note(self, facts: Facts) -> None:
        """Take what came with a batch."""
        self._newest = facts
        self._bad.add(facts.bad, facts.replaced)
        if self._observer is not None:
            for event in facts.events:
                self._observer(*event)

    def keep(self) -> None:
        """Count on from here: the next facts are of another process, which begins at zero."""
        self._past, self._past_storage, self._past_refused = self.clocks(), self.storage(), self.refused_images
        self._newest = None

    def clocks(self) -> tuple[StageClock, ...]:
        """Return the clocks of the stages that ran there."""
        return self._past if self._newest is None else add_clocks(self._past, self._newest.clocks)

    def storage(self) -> list[StorageStats]:
        """Return what storages did there, in one or no record."""
        stats = self._past_storage if self._newest is None else [*self._past_storage, self._newest.storage]
        return [add_stats(stats)] if stats else []

    @property
    def refused_images(self) -> int:
        """Images that were decoded another way than the one chosen."""
        return self._past_refused + (0 if self._newest is None else self._newest.refused_images)
