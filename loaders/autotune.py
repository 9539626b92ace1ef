"""Find the best numbers of decoding threads and of ready batches while the trainer runs, for
``num_workers="auto"``.

The tuner acts only while the trainer waits for data, since more threads gain nothing otherwise: one
change at a time, kept if batches come measurably faster with it, else taken back. What to change,
the stages' clocks say: a stage that is busy all the time gets a thread more; where none is, batches
come in bursts, and more of them in store even those out; where decoding has all the threads it may
have, one fewer is tried, for threads beyond the cores that are really free get into each other's
way, and into the trainer's. When nothing helps it rests, longer each time.

The order of samples and every byte of a batch are the same for any choice. Changes go to the log at
INFO.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.host import (
    default_memory_bytes,
    default_num_workers,
)

if TYPE_CHECKING:
    from fuelrail.loaders.config import Budget
    from fuelrail.pipeline.runtime.stages import StageClock

_LOG = logging.getLogger(__name__)

WINDOW_S: Final = 2.0
WINDOW_BATCHES: Final = 8
_HUNGRY: Final = 0.05
"""Share of a window spent waiting from which on the trainer counts as kept waiting."""
_SATURATED: Final = 0.85
"""Share of a stage's thread time in work from which on more threads are expected to help."""
_GAIN: Final = 1.03
"""A change is kept if the rate grows by this factor: less is noise."""
_PAUSE: Final = 0.5
"""A window of which one step took this share holds a pause (validation, a checkpoint) and says
nothing.
"""
_REST_WINDOWS: Final = 8
_LONGEST_REST: Final = 512
_MOST_READY: Final = 16


class Tuning(NamedTuple):
    """What the tuner sets: decoding threads, and finished batches that may wait for the trainer."""

    num_workers: int
    ready: int


def decode_ahead(num_workers: int, batch_size: int) -> int:
    """Return the number of decoded samples that may wait for their batch."""
    return max(batch_size, 2 * num_workers)


def batches_in_flight(tuning: Tuning, batch_size: int) -> int:
    """Count the batch buffers in use at most: ready, in decoding, in assembly, at the trainer,
    just given up.
    """
    return tuning.ready + 3 + -(-decode_ahead(tuning.num_workers, batch_size) // batch_size)


def make_tuner(
    budget: Budget | None,
    batch_size: int,
    batch_bytes: int,
    ready: int,
    lanes: tuple[int, int] | None = None,
) -> Autotuner | None:
    """Return the tuner of a loader; None without a budget.

    It starts with this rank's CPUs and ``ready`` batches, within the budget.
    ``lanes`` is for a decoder on a GPU: its least and largest number of threads, for any CPUs.
    Raises ConfigError where the memory does not hold the batches that are in flight at the least.
    """
    if budget is None:
        return None
    share = default_num_workers()
    cpus = budget.cpus or share + max(1, share // 2)
    memory_bytes = budget.memory_bytes or default_memory_bytes()
    fewest, cpus = (1, cpus) if lanes is None else lanes
    start = Tuning(min(share, cpus) if lanes is None else fewest, ready)
    spare = memory_bytes // batch_bytes - batches_in_flight(start, batch_size)
    if spare < 0 and budget.memory_bytes is not None:
        bytes_in_flight = batches_in_flight(start, batch_size) * batch_bytes
        raise ConfigError(
            f"budget: memory_bytes={memory_bytes} does not hold the {bytes_in_flight} bytes "
            "of batches in flight; give more, or lower batch_size, prefetch_factor or the "
            "image size"
        )
    fixed = batches_in_flight(Tuning(cpus, 0), batch_size)
    num_ready = memory_bytes // batch_bytes - fixed
    return Autotuner(
        start,
        Tuning(cpus, max(ready, min(num_ready, _MOST_READY))),
        fewest=fewest,
    )


class _Window(NamedTuple):
    """What happened in one window: batches a second, share of the time waited, each stage's
    share of time in work.
    """

    rate: float
    waiting: float
    busy: dict[str, float]


class _Trial(NamedTuple):
    """A change under test: what was before, the rate then, and the windows left until it is
    judged.
    """

    before: Tuning
    rate: float
    windows: int


class Autotuner:
    """Tunes one loader: it receives the time of every batch and sometimes returns a new tuning.

    ``start`` is where it begins, ``most`` what it stays within, ``fewest`` the least number of
    threads. A decision depends only on the values given to it.
    """

    def __init__(
        self,
        start: Tuning,
        limits: Tuning,
        *,
        fewest: int = 1,
        window_s: float = WINDOW_S,
        window_batches: int = WINDOW_BATCHES,
    ) -> None:
        self.tuning = start
        self._fewest = fewest
        self.limits = Tuning(
            max(start.num_workers, limits.num_workers),
            max(start.ready, limits.ready),
        )
        self._window_s = window_s
        self._window_batches = window_batches
        self._trial: _Trial | None = None
        self._ideas: Iterator[Tuning] = iter(())
        self._rest = 0
        self._next_rest = _REST_WINDOWS
        self.restart()

    def restart(self) -> None:
        """Start a new window, after a break: another pipeline, or one whose clocks start again."""
        self._start_s: float | None = None
        self._last_s = 0.0
        self._longest_s = 0.0
        self._batches = 0
        self._waited_s = 0.0
        self._clocks: Sequence[StageClock] = ()

    def due(self, now_s: float) -> bool:
        """Note that a batch was handed out; whether a window is full, and :meth:`update` should
        be called.
        """
        if self._start_s is None:
            return True
        self._longest_s = max(self._longest_s, now_s - self._last_s)
        self._last_s = now_s
        self._batches += 1
        return self._batches >= self._window_batches and now_s - self._start_s >= self._window_s

    def update(
        self,
        now_s: float,
        waited_s: float,
        clocks: Sequence[StageClock],
    ) -> Tuning | None:
        """Judge the window that ends now; the new tuning, if there is one.

        ``waited_s`` and ``clocks`` are the pipeline's, since its start.
        """
        start_s = self._start_s
        batches = self._batches
        longest_s = self._longest_s
        earlier = self._clocks
        waited_before = self._waited_s
        self._start_s = self._last_s = now_s
        self._batches = 0
        self._longest_s = 0.0
        self._waited_s = waited_s
        self._clocks = clocks
        if start_s is None:
            return None
        length_s = now_s - start_s
        waiting = (waited_s - waited_before) / length_s
        if longest_s > _PAUSE * length_s and waiting < _PAUSE:
            return None
        busy = {}
        for old, new in zip(earlier, clocks, strict=True):
            num_threads = max(old.num_threads, new.num_threads)
            busy[new.name] = (new.busy_s - old.busy_s) / (length_s * num_threads)
        window = _Window(batches / length_s, waiting, busy)
        before = self.tuning
        if self._trial is not None:
            self._judge(self._trial, window)
        elif self._rest:
            self._rest -= 1
        elif window.waiting < _HUNGRY:
            self._next_rest = _REST_WINDOWS  # well fed: should that change, react at once
        else:
            num_workers = before.num_workers
            num_more = min(num_workers + max(1, num_workers // 4), self.limits.num_workers)
            num_fewer = max(self._fewest, num_workers - max(1, num_workers // 8))
            more = before._replace(num_workers=num_more)
            fewer = before._replace(num_workers=num_fewer)
            ahead = before._replace(ready=min(before.ready + 1, self.limits.ready))
            working = max(window.busy.get("decode", 0.0), window.busy.get("transform", 0.0))
            # The most promising change first.
            ideas = [more, fewer] if working >= _SATURATED else [ahead, more]
            self._ideas = iter([idea for idea in ideas if idea != before])
            self._try_next(window)
        return self.tuning if self.tuning != before else None

    def _judge(self, trial: _Trial, window: _Window) -> None:
        if trial.windows > 1:  # what was in the queues came from before the change
            self._trial = trial._replace(windows=trial.windows - 1)
            return
        self._trial = None
        change = f"{_say(trial.before)} -> {_say(self.tuning)}"
        if window.rate >= _GAIN * trial.rate or window.waiting < _HUNGRY:
            _LOG.info(
                "autotune: kept %s, %.0f %% faster",
                change,
                100 * (window.rate / trial.rate - 1),
            )
            self._ideas = iter(())
            self._next_rest = _REST_WINDOWS
            return
        _LOG.info(
            "autotune: took back %s, %.0f %% faster only",
            change,
            100 * (window.rate / trial.rate - 1),
        )
        self.tuning = trial.before
        self._try_next(window._replace(rate=trial.rate))

    def _try_next(self, window: _Window) -> None:
        tuning = next(self._ideas, None)
        if tuning is None:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
            return
        busy = ", ".join(f"{name} {100 * share:.0f} %" for name, share in window.busy.items())
        _LOG.info(
            "autotune: trying %s; the trainer waited %.0f %% of the time, busy: %s",
            f"{_say(self.tuning)} -> {_say(tuning)}",
            100 * window.waiting,
            busy,
        )
        self._trial = _Trial(self.tuning, window.rate, 2)
        self.tuning = tuning


def _say(tuning: Tuning) -> str:
    return f"{tuning.num_workers} threads, {tuning.ready} ready batches"
