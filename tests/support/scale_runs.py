"""Scaling runs that never happened."""

from __future__ import annotations

from fuelrail.bench.measure.rates import Interval
from fuelrail.bench.planner.scaling import HostFit, Overhead
from fuelrail.bench.studies.scale.report import (
    SCHEMA,
    VERSION,
    MeasuredRun,
    ScaleOptions,
    ScaleReport,
    judged,
    make_curves,
)
from support.bench_runs import DATASET, MACHINE

CONDITIONS = ScaleOptions(
    max_ranks=64,
    straggler_share=0.05,
    straggler_slowdown=0.5,
    storage_gb_per_s=0.5,
)


def fit(**changes) -> HostFit:
    """A loader that is a little faster than the accelerator, with some noise."""
    values = {
        "service_ms": [16.0, 20.0, 24.0],
        "service_batch": 2,
        "forward_backward_ms": 50.0,
        "optimiser_ms": 1.0,
        "overheads": [
            Overhead(ranks_on_host=1, ms=[1.0, 2.0]),
            Overhead(ranks_on_host=2, ms=[2.0, 3.0]),
        ],
        "all_reduce_ms": 1.5,
        "trainer_cpus": 0.1,
        "host_cpus": 8.0,
        "queue_batches": 3,
        "sample_bytes": 1e6,
    }
    return HostFit(**(values | changes))


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
    model = fit()
    values = {
        "schema": SCHEMA,
        "version": VERSION,
        "created": "2026-01-01T00:00:00+00:00",
        "machine": MACHINE,
        "dataset": DATASET,
        "accelerator": {"name": "slow"},
        "options": {"batch_size": 2, "global_batch": 8},
        "measured": runs,
        "fit": model,
        "curves": make_curves(model, CONDITIONS),
        "cut_off": None,
        "disturbed": None,
        "warnings": [],
    }
    return judged(ScaleReport(**(values | changes)))
