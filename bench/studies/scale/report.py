"""The report of ``fuelrail bench scale``: what was measured, the model's fit and its error, and what it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fuelrail.bench.planner.scale_model import Cluster, Fit, Simulated, simulate
from fuelrail.bench.report.files import ReportHeader, created_now, load_report_of

if TYPE_CHECKING:
    from fuelrail.bench.measure.machine import DatasetFacts, MachineFacts

SCHEMA = "fuelrail-bench-scale"
VERSION = 1
FITTED_RANKS = 2
"""Runs with up to this number of ranks feed the model; those with more are compared with it."""

_MAX_ERROR = 0.1
"""Of the simulated step time of a measured run; beyond it nothing is simulated."""

Scaling = Literal["weak", "strong"]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
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


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated number of ranks on a curve."""

    result: Simulated
    efficiency: float


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks from one to thousands under one condition."""

    name: str
    scaling: Scaling
    points: list[Point]


class ScaleReport(ReportHeader, frozen=True, kw_only=True):
    """A whole report. ``cut_off`` says why it is partial: which runs are missing; then there may be no curves."""

    accelerator: dict[str, Any]
    measured: list[Measured]
    fit: Fit | None
    trials: list[Trial]
    curves: list[Curve]


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of the simulation besides the measured cluster.

    ``strong_batch``: samples that strong scaling shares among all ranks; None for one on each of ``max_ranks``, or as
    many as were measured if that is more.
    """

    max_ranks: int
    ranks_per_host: int
    slow_share: float
    slow_by: float
    storage_gb_per_s: float
    seed: int
    strong_batch: int | None = None


def efficiencies(points: Sequence[tuple[int, float]]) -> list[float]:
    """Of (ranks, samples/s), the one with the fewest ranks first: rate over ranks times the first one's a rank."""
    first_ranks, first_rate = points[0]
    return [rate / (ranks * first_rate / first_ranks) for ranks, rate in points]


def with_efficiencies(runs: Sequence[Measured]) -> list[Measured]:
    """Return the runs, each with its efficiency on every curve that has a run with fewer ranks."""
    found: dict[int, dict[Scaling, float]] = {number: {} for number in range(len(runs))}
    for scaling in ("weak", "strong"):
        numbers = sorted((n for n, run in enumerate(runs) if scaling in run.scalings), key=lambda n: runs[n].num_ranks)
        if numbers:
            values = efficiencies([(runs[number].num_ranks, runs[number].samples_per_s) for number in numbers])
            for number, value in zip(numbers, values, strict=True):
                found[number][scaling] = value
    return [msgspec.structs.replace(run, efficiency=found[number]) for number, run in enumerate(runs)]


def try_model(fit: Fit, runs: Sequence[Measured], seed: int) -> list[Trial]:
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


def make_curves(fit: Fit, batch_size: int, global_batch: int, conditions: Conditions) -> list[Curve]:
    """Weak and strong scaling to ``max_ranks``: as measured, with stragglers, and with a limited storage bandwidth.

    Strong scaling shares ``conditions.strong_batch`` samples, and ends where each rank has one. ``global_batch`` is
    what it shared as it was measured.
    """
    strong_batch = conditions.strong_batch or max(global_batch, conditions.max_ranks)
    ranks = [1]
    while ranks[-1] * 2 <= conditions.max_ranks:
        ranks.append(ranks[-1] * 2)
    cases: list[tuple[str, dict[str, float]]] = [("as measured", {})]
    if conditions.slow_share > 0 and conditions.slow_by > 0:
        name = f"{conditions.slow_share:.1%} of the ranks {conditions.slow_by:.0%} slower"
        cases.append((name, {"slow_share": conditions.slow_share, "slow_by": conditions.slow_by}))
    if conditions.storage_gb_per_s > 0:
        limit = {"storage_bytes_per_s": conditions.storage_gb_per_s * 1e9}
        cases.append((f"storage gives {conditions.storage_gb_per_s:g} GB/s", limit))
    curves = []
    for scaling in ("weak", "strong"):
        for name, case in cases:
            results = []
            for count in ranks:
                size = batch_size if scaling == "weak" else strong_batch // count
                if size < 1:
                    break
                cluster = Cluster(count, size, conditions.ranks_per_host, **case)
                results.append(simulate(fit, cluster, conditions.seed))
            # Against one rank that nothing holds up, so that a straggler's cost shows from two ranks on.
            base = simulate(fit, Cluster(1, results[0].batch_size, 1), conditions.seed)
            points = [
                Point(result=result, efficiency=result.samples_per_s / (result.num_ranks * base.samples_per_s))
                for result in results
            ]
            curves.append(Curve(name=name, scaling=scaling, points=points))
    return curves


def build_scale_report(
    *,
    machine: MachineFacts,
    dataset: DatasetFacts,
    accelerator: dict[str, Any],
    options: dict[str, Any],
    runs: Sequence[Measured],
    fit: Fit | None,
    curves: Sequence[Curve],
    cut_off: str | None,
    disturbed: str | None,
    warnings: Sequence[str],
) -> ScaleReport:
    """Put the parts together and try the model, with the seed of the options."""
    trials = [] if fit is None else try_model(fit, runs, options["seed"])
    found = list(warnings)
    worst = max(trials, key=lambda trial: abs(trial.error), default=None)
    if worst is not None and abs(worst.error) > _MAX_ERROR:
        curves = []
        found.append(
            f"No simulation: it is off by {worst.error:+.0%} for {worst.num_ranks} ranks of {worst.batch_size}, and at "
            f"most {_MAX_ERROR:.0%} is allowed. Repeat the measurement on an idle machine, or with more --steps."
        )
    return ScaleReport(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        cut_off=cut_off,
        machine=machine,
        dataset=dataset,
        accelerator=accelerator,
        options=options,
        measured=with_efficiencies(runs),
        fit=fit,
        trials=trials,
        curves=list(curves),
        disturbed=disturbed,
        warnings=found,
    )


def load_scale_report(path: Path) -> ScaleReport:
    """Read a report; raises ConfigError for other files and other versions."""
    return load_report_of(path, ScaleReport, SCHEMA, VERSION)
