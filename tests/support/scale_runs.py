"""Scaling runs that never happened."""

from __future__ import annotations

from fuelrail.bench.measure.rates import Interval
from fuelrail.bench.studies.scale.report import (
    SCHEMA,
    VERSION,
    MeasuredRun,
    ScaleReport,
    with_efficiencies,
)
from support.bench_runs import DATASET, MACHINE


def measured(num_ranks, batch_size, step_ms) -> MeasuredRun:
    """A run with such a step."""
    spread = Interval(
        median=step_ms,
        low=step_ms * 0.99,
        high=step_ms * 1.01,
        confidence=0.95,
        num_repeats=50,
    )
    return MeasuredRun(
        num_ranks=num_ranks,
        batch_size=batch_size,
        step_ms=spread,
        step_p99_ms=step_ms * 1.1,
        samples_per_s=1e3 * num_ranks * batch_size / step_ms,
        occupancy=0.9,
    )


RUNS = [
    measured(1, 2, 100.0),
    measured(1, 8, 400.0),
    measured(2, 2, 105.0),
    measured(2, 4, 210.0),
    measured(4, 2, 110.0),
]


def scale_report(runs=RUNS, **changes) -> ScaleReport:
    """A report of these runs."""
    values = {
        "schema": SCHEMA,
        "version": VERSION,
        "created": "2026-01-01T00:00:00+00:00",
        "machine": MACHINE,
        "dataset": DATASET,
        "accelerator": {"name": "slow"},
        "options": {"batch_size": 2, "global_batch": 8},
        "measured": with_efficiencies(runs, batch_size=2, global_batch=8),
        "cut_off": None,
        "disturbed": None,
        "warnings": [],
    }
    return ScaleReport(**(values | changes))
