"""Options and report of ``fuelrail bench scale``: what was measured, the model and its error,
and what it predicts.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from fuelrail.bench.measure.rates import Interval
from fuelrail.bench.planner.scaling import (
    Cluster,
    Curve,
    HostFit,
    Scaling,
    draw_curves,
    simulate,
)
from fuelrail.bench.report.files import ReportHeader
from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.settings import (
    AtLeast0,
    CheckedSettings,
    NotNegative,
    Positive,
    flag,
)

SCHEMA = "fuelrail-bench-scale"
VERSION = 3
FITTED_RANKS = 2
"""Runs with up to this number of ranks feed the model; those with more are compared with it."""

_MAX_ERROR = 0.1
"""The largest error of the simulated step time of a measured run; beyond it nothing is
simulated.
"""


class ScaleOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.scale`, and the flags of ``fuelrail bench scale``."""

    ranks: Annotated[
        tuple[Positive, ...],
        flag("numbers of ranks to measure (default: 1 2 4)"),
    ] = (
        1,
        2,
        4,
    )
    split: Annotated[str, flag("split to train on")] = "train"
    batch_size: Annotated[Positive, flag("samples per rank in weak scaling")] = 2
    steps: Annotated[Positive, flag("steps of each run")] = 50
    warmup: Annotated[NotNegative, flag("warm-up steps, excluded from all results")] = 10
    accelerator: Annotated[str, flag("emulated:PROFILE, as in `bench train`")] = "auto"
    workers: Annotated[
        Positive | None,
        flag("decoding threads per rank (default: the rank's share of the CPUs)"),
    ] = None
    max_ranks: Annotated[
        Positive,
        flag("largest number of ranks to simulate, each on a host like this one"),
    ] = 4096
    straggler_share: Annotated[
        float, msgspec.Meta(ge=0, le=1), flag("share of ranks that are slow")
    ] = 0.01
    straggler_slowdown: Annotated[
        AtLeast0, flag("extra compute time of slow ranks (0.2 = 20 %)")
    ] = 0.2
    storage_gb_per_s: Annotated[AtLeast0, flag("total storage bandwidth in GB/s")] = 10.0


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run: ``batch_size`` samples a rank; and what the model says of it, if it was
    fitted.

    ``step_ms`` is the mean step with a 95 % interval. ``efficiency``: samples/s over those of one
    rank times the ranks, in each scaling that the run is a point of: ``weak`` (each rank's batch
    stays the same) or ``strong`` (all ranks' batches together do). ``error`` is simulated over
    measured step time, less 1.
    """

    num_ranks: int
    batch_size: int
    step_ms: Interval
    step_p99_ms: float
    samples_per_s: float
    occupancy: float
    efficiency: dict[Scaling, float] = {}
    simulated_ms: float | None = None
    error: float | None = None


class ScaleReport(ReportHeader, frozen=True, kw_only=True):
    """A whole report. ``cut_off`` says why it is partial: which runs are missing; then there may
    be no curves.
    """

    accelerator: dict[str, Any]
    measured: list[MeasuredRun]
    fit: HostFit | None
    curves: list[Curve]


def make_curves(fit: HostFit, options: ScaleOptions) -> list[Curve]:
    """Return weak scaling to ``max_ranks``: as measured, with stragglers, with limited storage."""
    cases: dict[str, dict[str, float]] = {"as measured": {}}
    share = options.straggler_share
    by = options.straggler_slowdown
    storage = options.storage_gb_per_s
    if share > 0 and by > 0:
        cases[f"{share:.1%} of the ranks {by:.0%} slower"] = {
            "slow_share": share,
            "slow_by": by,
        }
    if storage > 0:
        cases[f"storage gives {storage:g} GB/s"] = {"storage_bytes_per_s": storage * 1e9}
    counts = [2**power for power in range(options.max_ranks.bit_length())]
    return draw_curves(
        "weak",
        cases,
        counts,
        lambda case, ranks: simulate(fit, Cluster(ranks, options.batch_size, 1, **case)),
    )


def judged(report: ScaleReport) -> ScaleReport:
    """Return the report with the runs' efficiencies, and the model tried on them: all ranks on one
    host, as they were.

    It has no curves where the model is off by too much.
    """
    size = report.options["batch_size"]
    global_batch = report.options["global_batch"]
    points: dict[Scaling, list[MeasuredRun]] = {
        "weak": [run for run in report.measured if run.batch_size == size],
        "strong": [
            run for run in report.measured if run.batch_size * run.num_ranks == global_batch
        ],
    }
    runs = []
    for run in report.measured:
        efficiency = {
            scaling: run.samples_per_s / run.num_ranks * alike[0].num_ranks / alike[0].samples_per_s
            for scaling, alike in points.items()
            if run in alike
        }
        run = msgspec.structs.replace(run, efficiency=efficiency)
        if report.fit is not None:
            simulated_ms = simulate(
                report.fit,
                Cluster(run.num_ranks, run.batch_size, run.num_ranks),
            ).step_ms
            run = msgspec.structs.replace(
                run,
                simulated_ms=simulated_ms,
                error=simulated_ms / run.step_ms.median - 1,
            )
        runs.append(run)
    curves = report.curves
    warnings = report.warnings
    worst = max(runs, key=lambda run: abs(run.error or 0.0), default=None)
    if worst is not None and worst.error is not None and abs(worst.error) > _MAX_ERROR:
        ranks = counted(worst.num_ranks, "rank")
        off = (
            f"No simulation: it is off by {worst.error:+.0%} for {ranks} of {worst.batch_size}, "
            f"and at most {_MAX_ERROR:.0%} is allowed. Repeat the measurement on an idle machine, "
            "or with more --steps."
        )
        curves = []
        warnings = [*warnings, off]
    return msgspec.structs.replace(report, measured=runs, curves=curves, warnings=warnings)
