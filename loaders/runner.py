"""What runs behind a loader: the threads of one pipeline after another, tuned while they run, and the times of all.

Nothing here refers to the loader itself: then dropping the loader stops its threads.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fuelrail.pipeline.stages import Pipeline, add_clocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fuelrail.loaders.autotune import Autotuner, Tuning
    from fuelrail.loaders.lookahead import Shelf
    from fuelrail.pipeline.stages import Observer, Stage, StageClock
    from fuelrail.pipeline.world import Cursor


class Runner:
    """Starts, tunes and stops a loader's pipelines, one at a time, and adds up what they all did."""

    def __init__(self, name: str, tuner: Autotuner | None, observer: Observer | None) -> None:
        self._name, self._tuner, self._observer = name, tuner, observer
        self._pipeline: Pipeline | None = None
        self._shelves: Sequence[Shelf] = ()
        self._standing_at: Cursor | None = None
        self._begun_s: float | None = None
        self._past: tuple[StageClock, ...] = ()  # of the pipelines before
        self._past_waited_s = 0.0

    def start(self, tasks: Iterator[Any], stages: Sequence[Stage], shelves: Sequence[Shelf]) -> None:
        """Run the tasks through the stages; ``shelves`` are what they take their bytes from. Nothing may be running."""
        assert self._pipeline is None, "one pipeline at a time"
        self._shelves = shelves
        self._pipeline = Pipeline(tasks, stages, name=self._name, observer=self._observer)
        if self._tuner is not None:
            self._tuner.restart()
        if self._begun_s is None:
            self._begun_s = time.perf_counter()

    def stop(self) -> None:
        """Stop the threads, if there are any, and wait until they are gone."""
        for shelf in self._shelves:
            shelf.session.close()  # a thread that waits for storage must not hold up the others' end
        self._shelves = ()
        # Taken first: an iteration that ends in another thread stops too.
        pipeline, self._pipeline, self._standing_at = self._pipeline, None, None
        if pipeline is not None:
            pipeline.close()
            self._past = add_clocks(self._past, pipeline.clocks())
            self._past_waited_s += pipeline.waited_s

    def rest_at(self, cursor: Cursor) -> None:
        """The epoch's consumer is done; the threads go on, and the next result is the first one behind ``cursor``."""
        self._standing_at = cursor

    def rests_at(self, cursor: Cursor) -> bool:
        """Whether the next result is the first one behind ``cursor``, and nobody is taking results."""
        return self._standing_at == cursor

    def take(self) -> Pipeline:
        """The pipeline, for one who takes its results from now on."""
        assert self._pipeline is not None, "to be started first"
        self._standing_at = None
        return self._pipeline

    def runs(self, pipeline: Pipeline) -> bool:
        """Whether this pipeline has not been stopped, or replaced by another."""
        return self._pipeline is pipeline

    @property
    def is_started(self) -> bool:
        """Whether there is a pipeline, be its results at an end."""
        return self._pipeline is not None

    @property
    def is_running(self) -> bool:
        """Whether there is a pipeline of which results can still come."""
        return self._pipeline is not None and self._pipeline.is_running

    def tuning_due(self) -> Tuning | None:
        """Note that a batch was handed out; the new tuning, if it is time for one: :meth:`adapt` makes it so."""
        if self._tuner is None or self._pipeline is None:
            return None
        now_s = time.perf_counter()
        if not self._tuner.due(now_s):
            return None
        return self._tuner.update(now_s, self._pipeline.waited_s, self._pipeline.clocks())

    def adapt(self, stages: Sequence[Stage]) -> None:
        """Give the running stages these numbers of threads and capacities."""
        if self._pipeline is not None:
            for stage in stages:
                self._pipeline.set_num_threads(stage.name, stage.num_threads)
                self._pipeline.set_capacity(stage.name, stage.capacity)

    def clocks(self) -> tuple[StageClock, ...]:
        """The stages' clocks, over all pipelines; empty before the first."""
        return self._past if self._pipeline is None else add_clocks(self._past, self._pipeline.clocks())

    @property
    def waited_s(self) -> float:
        """Seconds that consumers have waited for results, over all pipelines."""
        return self._past_waited_s + (0.0 if self._pipeline is None else self._pipeline.waited_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first pipeline began."""
        return 0.0 if self._begun_s is None else time.perf_counter() - self._begun_s
