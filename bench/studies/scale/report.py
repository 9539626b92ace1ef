"""The report of ``fuelrail bench scale``: what was measured, the model's fit and its error, and what it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.planner.scaling import Cluster, Curve, HostFit, Point, Scaling, draw_curves, simulate
from fuelrail.bench.report.files import ReportHeader

if TYPE_CHECKING:
    from fuelrail.bench.studies.scale.options import ScaleOptions

SCHEMA = "fuelrail-bench-scale"
VERSION = 2
FITTED_RANKS = 2
"""Runs with up to this number of ranks feed the model; those with more are compared with it."""

_MAX_ERROR = 0.1
"""The largest error of the simulated step time of a measured run; beyond it nothing is simulated."""


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run: ``batch_size`` samples a rank.

    ``scalings`` names what it is a point of: ``weak`` (each rank's batch stays the same) or ``strong`` (all ranks'
    batches together do). ``step_low_ms`` to ``step_high_ms`` is a 95 % interval of the mean step.
    ``efficiency`` of each: samples/s over those of one rank times the ranks.
    """

    num_ranks: int
    batch_size: int
    scalings: list[Scaling]
    step_ms: float
    step_low_ms: float
    step_high_ms: float
    step_p99_ms: float
    samples_per_s: float
    occupancy: float
    efficiency: dict[Scaling, float]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The model against a measured run. ``error`` is simulated over measured step time, less 1."""

    num_ranks: int
    batch_size: int
    measured_ms: float
    simulated_ms: float
    error: float
    held_out: bool


class ScaleReport(ReportHeader, frozen=True, kw_only=True):
    """A whole report. ``cut_off`` says why it is partial: which runs are missing; then there may be no curves."""

    accelerator: dict[str, Any]
    measured: list[MeasuredRun]
    fit: HostFit | None
    trials: list[Trial]
    curves: list[Curve]


def with_efficiencies(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return the runs, each with its efficiency on every curve, against the run there with the fewest ranks."""
    found = []
    for run in runs:
        efficiency: dict[Scaling, float] = {}
        for scaling in run.scalings:
            first = min((one for one in runs if scaling in one.scalings), key=lambda one: one.num_ranks)
            efficiency[scaling] = run.samples_per_s / run.num_ranks * first.num_ranks / first.samples_per_s
        found.append(msgspec.structs.replace(run, efficiency=efficiency))
    return found


def try_model(fit: HostFit, runs: Sequence[MeasuredRun], seed: int) -> list[Trial]:
    """Simulate every measured run: all of its ranks on one host, as they were."""
    trials = []
    for run in runs:
        simulated = simulate(fit, Cluster(run.num_ranks, run.batch_size, run.num_ranks), seed)
        trials.append(
            Trial(
                num_ranks=run.num_ranks,
                batch_size=run.batch_size,
                measured_ms=run.step_ms,
                simulated_ms=simulated.step_ms,
                error=simulated.step_ms / run.step_ms - 1,
                held_out=run.num_ranks > FITTED_RANKS,
            )
        )
    return trials


def make_curves(fit: HostFit, batch_size: int, global_batch: int, options: ScaleOptions) -> list[Curve]:
    """Return weak and strong scaling to ``max_ranks``: as measured, with stragglers, with limited storage.

    Strong scaling shares ``strong_batch`` samples, and ends where each rank has one; without it one for each of
    ``max_ranks``, or ``global_batch``, what was shared as it was measured, if that is more.
    """
    strong_batch = options.strong_batch or max(global_batch, options.max_ranks)
    cases: dict[str, dict[str, float]] = {"as measured": {}}
    share, by, storage = options.straggler_share, options.straggler_slowdown, options.storage_gb_per_s
    if share > 0 and by > 0:
        cases[f"{share:.1%} of the ranks {by:.0%} slower"] = {"slow_share": share, "slow_by": by}
    if storage > 0:
        cases[f"storage gives {storage:g} GB/s"] = {"storage_bytes_per_s": storage * 1e9}

    def point(case: dict[str, float], scaling: Scaling, ranks: int) -> Point | None:
        size = batch_size if scaling == "weak" else strong_batch // ranks
        return simulate(fit, Cluster(ranks, size, options.ranks_per_host, **case), options.seed) if size else None

    return draw_curves(cases, [2**power for power in range(options.max_ranks.bit_length())], point)


def judged(report: ScaleReport) -> ScaleReport:
    """Return the report with the runs' efficiencies and the model tried on them, with the seed of the options.

    It has no curves where the model is off by too much.
    """
    trials = [] if report.fit is None else try_model(report.fit, report.measured, report.options["seed"])
    curves, warnings = report.curves, report.warnings
    worst = max(trials, key=lambda trial: abs(trial.error), default=None)
    if worst is not None and abs(worst.error) > _MAX_ERROR:
        off = (
            f"No simulation: it is off by {worst.error:+.0%} for {worst.num_ranks} ranks of {worst.batch_size}, and at "
            f"most {_MAX_ERROR:.0%} is allowed. Repeat the measurement on an idle machine, or with more --steps."
        )
        curves, warnings = [], [*warnings, off]
    runs = with_efficiencies(report.measured)
    return msgspec.structs.replace(report, measured=runs, trials=trials, curves=curves, warnings=warnings)
