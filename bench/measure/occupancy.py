"""Occupancy: the share of wall time in which an accelerator computes the training step, after
warm-up.

Definition, per rank r, over the measured steps s (all steps after the first W, the warm-up)::

    occupancy_r = sum_s busy(r, s) / sum_s wall(r, s)
    occupancy   = mean over r of occupancy_r

``busy`` is device time of forward, backward and optimiser; ``wall`` is host time from the end of
the step before to the end of the step, so nothing that happens between steps is left out: waiting
for data, copies, book-keeping, the loader's turn of an epoch. This is MLPerf Storage's accelerator
utilisation, AU = total_compute_time / total_benchmark_running_time, whose figure for a run is
likewise the mean over ranks (mlcommons/storage, Rules.md, "Performance Metrics"), with two
differences, both stricter or equal: MLPerf leaves out the first step only, here W steps are left
out, because a prefetch queue filled before the first step flatters every step it feeds; and exposed
all-reduce does not count as busy, since a rank that waits in it for a straggler starved of data
would look occupied. ``including_all_reduce`` gives the other reading, with the exposed all-reduce
counted as work.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from fuelrail.bench.measure.clock import NS_PER_MS
from fuelrail.bench.measure.records import PHASES, StepRecord

MIN_MEASURED_STEPS = 8

# A rank is called slow if its own part is longer than the others' by this share, and longest in
# most steps.
SLOWER = 0.05
MOSTLY = 0.75

_RANK_PHASES = tuple(phase for phase in PHASES if phase != "all_reduce")


class RankOccupancy(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's occupancy, and its own part of the step against the others'.

    ``slower`` is by how much the mean of its own part, ``own_ms``, is longer than the median of the
    other ranks' (negative: shorter); ``last_in`` the share of steps in which it was the last to
    come to the all-reduce; ``most_in`` the phase in which it loses most, or wins most, against the
    others.
    """

    rank: int
    occupancy: float
    including_all_reduce: float
    own_ms: float
    slower: float
    last_in: float
    most_in: str

    @property
    def is_slow(self) -> bool:
        """Whether the others wait for this rank, by more than chance."""
        return self.slower > SLOWER and self.last_in >= MOSTLY


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """Occupancy of a run (mean over ranks), its lowest rank, and the figures of each rank."""

    mean: float
    lowest: float
    ranks: list[RankOccupancy]


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps count. ``too_short`` says why none do; None when figures may be given."""

    num_warmup_steps: int
    num_measured_steps: int
    too_short: str | None


def window_of(ranks: Sequence[Sequence[StepRecord]], num_warmup_steps: int) -> Window:
    """Return the measured window of a run: the steps after warm-up that every rank has done."""
    num_steps = min((len(steps) for steps in ranks), default=0)
    measured = max(0, num_steps - num_warmup_steps)
    too_short = None
    if measured < MIN_MEASURED_STEPS:
        too_short = (
            f"{num_steps} steps - {num_warmup_steps} warm-up = {measured} measured; at "
            f"least {MIN_MEASURED_STEPS} are needed: run more steps or epochs, or use a "
            "smaller batch"
        )
    return Window(
        num_warmup_steps=num_warmup_steps,
        num_measured_steps=measured,
        too_short=too_short,
    )


def measured_steps(steps: Sequence[StepRecord], window: Window) -> Sequence[StepRecord]:
    """Return the records of one rank that lie in the window."""
    return steps[window.num_warmup_steps : window.num_warmup_steps + window.num_measured_steps]


def occupancy_of(ranks: Sequence[Sequence[StepRecord]], window: Window) -> Occupancy:
    """Return the occupancy over a window that is long enough (``window.too_short`` is None)."""
    assert window.too_short is None, window.too_short
    inside = [measured_steps(steps, window) for steps in ranks]
    phases = np.array(
        [[[step.phase_ns(phase) for phase in _RANK_PHASES] for step in steps] for steps in inside],
        np.float64,
    )
    means = phases.mean(axis=1)
    last = phases.sum(axis=2).argmax(axis=0)
    rows = []
    for rank, steps in enumerate(inside):
        busy_ns = sum(step.device_busy_ns for step in steps)
        all_reduce_ns = sum(step.all_reduce_ns for step in steps)
        # Not from the first start to the last end: a watch may pause between two steps.
        wall_ns = sum(step.end_ns - step.start_ns for step in steps)
        # By how much it is slower than the median of the others, and in which phase.
        rest = np.delete(means, rank, axis=0) if len(means) > 1 else means
        beyond = means[rank] - np.median(rest, axis=0)
        slower = float(means[rank].sum() / np.median(rest.sum(axis=1)) - 1)
        most_in = _RANK_PHASES[int(np.argmax(beyond if slower >= 0 else -beyond))]
        rows.append(
            RankOccupancy(
                rank=rank,
                occupancy=busy_ns / wall_ns,
                including_all_reduce=(busy_ns + all_reduce_ns) / wall_ns,
                own_ms=float(means[rank].sum()) / NS_PER_MS,
                slower=slower,
                last_in=float((last == rank).mean()),
                most_in=most_in,
            )
        )
    return Occupancy(
        mean=sum(row.occupancy for row in rows) / len(rows),
        lowest=min(row.occupancy for row in rows),
        ranks=rows,
    )


def rolling_occupancy(steps: Sequence[StepRecord], num_steps: int) -> list[float]:
    """Return the occupancy over the last ``num_steps`` steps up to each step (fewer at the
    start), for a plot.
    """
    busy = np.cumsum([0, *(step.device_busy_ns for step in steps)])
    wall = np.cumsum([0, *(step.wall_ns for step in steps)])
    last = np.arange(1, len(steps) + 1)
    first = np.maximum(last - num_steps, 0)
    return [float(value) for value in (busy[last] - busy[first]) / (wall[last] - wall[first])]
