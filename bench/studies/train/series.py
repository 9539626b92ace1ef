"""The steps of a rank, column by column, as a report holds them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fuelrail.bench.measure.clock import NS_PER_MS, NS_PER_S
from fuelrail.bench.measure.occupancy import rolling_occupancy
from fuelrail.bench.measure.records import PHASES, StepRecord

ROLLING_STEPS = 5


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's steps, warm-up included, column by column. ``end_s`` counts from the first rank's start.

    ``first_step`` is not 0 in a run that continues from a checkpoint.
    """

    rank: int
    first_step: int = 0
    end_s: list[float]
    occupancy: list[float]
    loss: list[float | None]
    wall_ms: list[float]
    phases_ms: dict[str, list[float]]


def series_of(rank: int, steps: Sequence[StepRecord], start_ns: int) -> Series:
    """Make the columns of a rank's steps; ``start_ns``: when the first rank started."""
    return Series(
        rank=rank,
        first_step=steps[0].step if steps else 0,
        end_s=[(step.end_ns - start_ns) / NS_PER_S for step in steps],
        occupancy=rolling_occupancy(steps, ROLLING_STEPS),
        loss=[step.loss for step in steps],
        wall_ms=[step.wall_ns / NS_PER_MS for step in steps],
        phases_ms={phase: [step.phase_ns(phase) / NS_PER_MS for step in steps] for phase in PHASES},
    )
