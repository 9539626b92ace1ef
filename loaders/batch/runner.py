"""The running of a loader's stages, and what they did so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fuelrail.pipeline.runtime.stages import (
    Observer,
    Pipeline,
    Stage,
    StageClock,
    add_clocks,
)

if TYPE_CHECKING:
    from fuelrail.loaders.autotune import Autotuner, Tuning
    from fuelrail.loaders.storage.protocol import StorageStats
    from fuelrail.pipeline.order.batching import Cursor


class Closing(Protocol):
    """What a pipeline's tasks come from."""

    def close(self) -> None:
        """End every wait for it."""


class Runner:
    """Starts, tunes and stops a loader's pipelines, one at a time, and adds up what they all
    did.
    """

    def __init__(
        self,
        name: str,
        tuner: Autotuner | None,
        observer: Observer | None,
        clocks_before: Callable[[], tuple[StageClock, ...]] = tuple,
    ) -> None:
        """``clocks_before`` returns the clocks of the stages that run elsewhere."""
        self._name = name
        self._tuner = tuner
        self._observer = observer
        self._clocks_before = clocks_before
        self._pipeline: Pipeline | None = None
        self._sources: Sequence[Closing] = ()
        self._idle_at: Cursor | None = None
        self._start_s: float | None = None
        self._past: tuple[StageClock, ...] = ()  # of the pipelines before
        self._past_waited_s = 0.0

    def start(
        self,
        tasks: Iterator[Any],
        stages: Sequence[Stage],
        sources: Sequence[Closing],
    ) -> None:
        """Run the tasks through the stages; ``sources`` are what they wait for.

        Nothing may be running.
        """
        assert self._pipeline is None, "one pipeline at a time"
        self._sources = sources
        self._pipeline = Pipeline(
            tasks,
            stages,
            name=self._name,
            observer=self._observer,
        )
        if self._tuner is not None:
            self._tuner.restart()
        if self._start_s is None:
            self._start_s = time.perf_counter()

    def stop(self) -> None:
        """Stop the threads, if there are any, and wait until they are gone."""
        for source in self._sources:
            source.close()  # a thread that waits for storage must not hold up the others' end
        self._sources = ()
        # Taken first: an iteration that ends in another thread stops too.
        pipeline = self._pipeline
        self._pipeline = None
        self._idle_at = None
        if pipeline is not None:
            pipeline.close()
            self._past = add_clocks(self._past, pipeline.clocks())
            self._past_waited_s += pipeline.waited_s

    def park_at(self, cursor: Cursor) -> None:
        """Record that an epoch is consumed; the threads continue, and the next result is the
        first after ``cursor``.
        """
        self._idle_at = cursor

    def idle_at(self, cursor: Cursor) -> bool:
        """Return whether the next result is the first after ``cursor``, and no iteration takes
        results.
        """
        return self._idle_at == cursor

    def take(self) -> Pipeline:
        """Return the pipeline to a caller who takes its results from now on."""
        assert self._pipeline is not None, "to be started first"
        self._idle_at = None
        return self._pipeline

    def runs(self, pipeline: Pipeline) -> bool:
        """Return whether this pipeline has not been stopped, or replaced by another."""
        return self._pipeline is pipeline

    @property
    def is_running(self) -> bool:
        """Whether there is a pipeline of which results can still come."""
        return self._pipeline is not None and self._pipeline.is_running

    def tuning_due(self) -> Tuning | None:
        """Note that a batch was handed out; the new tuning, if it is time for one: :meth:`adapt`
        makes it so.
        """
        if self._tuner is None or self._pipeline is None:
            return None
        now_s = time.perf_counter()
        if not self._tuner.due(now_s):
            return None
        return self._tuner.update(
            now_s,
            self._pipeline.waited_s,
            (*self._clocks_before(), *self._pipeline.clocks()),
        )

    def adapt(self, stages: Sequence[Stage]) -> None:
        """Give the running stages these numbers of threads and capacities."""
        if self._pipeline is not None:
            for stage in stages:
                self._pipeline.set_num_threads(stage.name, stage.num_threads)
                self._pipeline.set_capacity(stage.name, stage.capacity)

    def clocks(self) -> tuple[StageClock, ...]:
        """Return the stages' clocks, over all pipelines; empty before the first."""
        stage_clocks = (
            self._past
            if self._pipeline is None
            else add_clocks(self._past, self._pipeline.clocks())
        )
        return (*self._clocks_before(), *stage_clocks)

    @property
    def waited_s(self) -> float:
        """Seconds that consumers have waited for results, over all pipelines."""
        return self._past_waited_s + (0.0 if self._pipeline is None else self._pipeline.waited_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first pipeline began."""
        if self._start_s is None:
            return 0.0
        return time.perf_counter() - self._start_s


class LoaderStats(NamedTuple):
    """What the loader did since it was made: its stages' clocks, and the batches handed out."""

    stages: tuple[StageClock, ...]
    batches: int
    samples: int
    images: int
    waited_s: float
    """Time that the trainer waited for batches."""
    elapsed_s: float
    """Time since the start of the first iteration."""
    storage: StorageStats
    """What was read, fetched, found in the cache."""
    bad_samples: int
    """Distinct bad samples that were substituted."""
    refused_images: int
    """Images that DALI failed on and libjpeg-turbo decoded on the CPU; if they are many, the GPU
    decodes nothing.
    """
