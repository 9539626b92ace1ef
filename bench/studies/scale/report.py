"""Options and report of ``fuelrail bench scale``: the runs that were measured."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from fuelrail.bench.measure.display import display
from fuelrail.bench.measure.rates import Interval
from fuelrail.bench.report.files import ReportHeader
from fuelrail.pipeline.settings import CheckedSettings, NotNegative, Positive, flag

SCHEMA = "fuelrail-bench-scale"
VERSION = 4


class ScaleOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.scale`, and the flags of ``fuelrail bench scale``."""

    ranks: Annotated[
        tuple[Positive, ...],
        flag("numbers of ranks to measure (default: 1 2 4)"),
    ] = (1, 2, 4)
    split: Annotated[str, flag("split to train on")] = "train"
    batch_size: Annotated[Positive, flag("samples per rank in weak scaling")] = 2
    steps: Annotated[Positive, flag("steps of each run")] = 50
    warmup: Annotated[NotNegative, flag("warm-up steps, excluded from all results")] = 10
    accelerator: Annotated[str, flag("emulated:PROFILE, as in `bench train`")] = "auto"
    workers: Annotated[
        Positive | None,
        flag("decoding threads per rank (default: the rank's share of the CPUs)"),
    ] = None


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run: ``batch_size`` samples a rank.

    ``step_ms`` is the mean step with a 95 % interval. ``weak`` and ``strong`` are efficiencies:
    samples/s over those of one rank times the ranks, where each rank's batch stays the same, and
    where that of all ranks together does. None: the run is no point of that scaling.
    """

    num_ranks: Annotated[int, display("ranks")]
    batch_size: Annotated[int, display("batch a rank")]
    step_ms: Annotated[Interval, display("step", unit="ms", digits=".1f")]
    step_p99_ms: Annotated[float, display("p99", unit="ms", digits=".1f")]
    samples_per_s: Annotated[float, display("samples/s", digits=".1f")]
    weak: Annotated[float | None, display("weak", digits=".1%")] = None
    strong: Annotated[float | None, display("strong", digits=".1%")] = None
    occupancy: Annotated[float, display("occupancy", digits=".1%")]


class ScaleReport(ReportHeader, frozen=True, kw_only=True):
    """A whole report. ``cut_off`` says why it is partial: which runs are missing."""

    accelerator: dict[str, Any]
    measured: list[MeasuredRun]


def with_efficiencies(
    runs: list[MeasuredRun],
    batch_size: int,
    global_batch: int,
) -> list[MeasuredRun]:
    """Return runs with their efficiencies, against the first run of each scaling.

    Weak scaling has ``batch_size`` samples a rank, strong scaling ``global_batch`` of all ranks.
    """
    weak = [run for run in runs if run.batch_size == batch_size]
    strong = [run for run in runs if run.batch_size * run.num_ranks == global_batch]

    def efficiency(run: MeasuredRun, alike: list[MeasuredRun]) -> float | None:
        if run not in alike:
            return None
        first = alike[0]
        return run.samples_per_s / run.num_ranks * first.num_ranks / first.samples_per_s

    with_efficiency = []
    for run in runs:
        run_with_efficiency = msgspec.structs.replace(
            run,
            weak=efficiency(run, weak),
            strong=efficiency(run, strong),
        )
        with_efficiency.append(run_with_efficiency)
    return with_efficiency
