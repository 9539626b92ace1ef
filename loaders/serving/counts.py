"""What processes that make batches did, as their trainers know it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from fuelrail.loaders.storage.protocol import StorageStats, add_stats
from fuelrail.pipeline.runtime.stages import Observer, StageClock, add_clocks

if TYPE_CHECKING:
    from fuelrail.loaders.schedule.bad_samples import BadSamples


class Facts(NamedTuple):
    """What the server did so far, and what happened since the last batch."""

    process: str
    """A name of its own."""
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
    """What processes that make batches did so far, as of the newest batch of each."""

    def __init__(self, bad: BadSamples, observer: Observer | None) -> None:
        self._bad = bad
        self._observer = observer
        self._newest: dict[str, Facts] = {}

    def note(self, facts: Facts) -> None:
        """Take what came with a batch."""
        self._newest[facts.process] = facts
        self._bad.add(facts.bad, facts.replaced)
        if self._observer is not None:
            for event in facts.events:
                self._observer(*event)

    def clocks(self) -> tuple[StageClock, ...]:
        """Return the clocks of the stages that ran there."""
        nothing: tuple[StageClock, ...] = ()
        return functools.reduce(
            add_clocks, [facts.clocks for facts in self._newest.values()], nothing
        )

    def storage(self) -> list[StorageStats]:
        """Return what storages did there, in one or no record."""
        stats = [facts.storage for facts in self._newest.values()]
        return [add_stats(stats)] if stats else []

    @property
    def refused_images(self) -> int:
        """Images that were decoded another way than the one chosen."""
        return sum(facts.refused_images for facts in self._newest.values())
