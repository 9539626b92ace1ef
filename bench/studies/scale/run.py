"""Measure how training scales over the ranks of this host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fuelrail.bench.measure.accelerator import DEFAULT_PROFILE
from fuelrail.bench.measure.processes import NOTHING_MEASURED, WAS_INTERRUPTED
from fuelrail.bench.measure.rates import Interval, bootstrap_means
from fuelrail.bench.report.files import created_now, prepare_folder
from fuelrail.bench.report.options import output_folder
from fuelrail.bench.report.page import write_report
from fuelrail.bench.studies.scale.report import (
    SCHEMA,
    VERSION,
    MeasuredRun,
    ScaleOptions,
    ScaleReport,
    with_efficiencies,
)
from fuelrail.bench.studies.train.run import measure_all
from fuelrail.bench.studies.train.settings import RunPlan, TrainOptions, ask
from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.settings import make_options

if TYPE_CHECKING:
    from fuelrail.bench.studies.train.report import Report

_REPORTED_ELSEWHERE = ("accelerator", "split", "ranks")


def scale(
    dataset: str | os.PathLike[str],
    options: ScaleOptions | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    html: bool = True,
    **changes: Any,  # fields of ScaleOptions
) -> ScaleReport:
    """Measure weak and strong scaling on this host with emulated accelerators.

    ``fuelrail.bench.scale("DATASET", ranks=(1, 2))`` takes the fields of :class:`ScaleOptions` as
    keywords. ``out`` is a folder for the report; None: nothing is written. Runs that end early make
    the report partial (``cut_off``), also after Ctrl+C. Raises ConfigError, DatasetErrors, and
    FuelrailError where no step was made.
    """
    html = html and out is not None
    options = make_options(ScaleOptions, options, changes)
    with output_folder(out) as folder:
        global_batch = max(options.ranks, default=1) * options.batch_size
        runs = plan_runs(dataset, options, global_batch, folder / "records")
        prepare_folder(folder, html=html)
        (folder / "records").mkdir(exist_ok=True)
        reports: list[Report] = []
        cut_off = None
        interrupted = False
        try:
            for alike in runs:
                outcome = measure_all(alike)
                reports += outcome.reports
                interrupted = outcome.reports[0].interrupted
                if outcome.cut_off is not None:
                    cut_off = f"{counted(alike[0].settings.ranks, 'rank')}: {outcome.cut_off}"
                    break
        except KeyboardInterrupt:
            if not reports:
                raise KeyboardInterrupt(NOTHING_MEASURED) from None
            cut_off = WAS_INTERRUPTED
            interrupted = True
        except FuelrailError as error:
            if not reports:
                raise
            cut_off = str(error)
        warnings = sorted({warning for report in reports for warning in report.warnings})
        too_short = [report.window.too_short for report in reports if report.window.too_short]
        if too_short:
            warnings.insert(0, f"No figures: {too_short[0]}.")
        disturbed = [report.disturbed for report in reports if report.disturbed is not None]
        said = {
            name: value
            for name, value in msgspec.to_builtins(options).items()
            if name not in _REPORTED_ELSEWHERE
        }
        measured = [measured_run(report) for report in reports if report.figures is not None]
        report = ScaleReport(
            schema=SCHEMA,
            version=VERSION,
            created=created_now(),
            cut_off=cut_off,
            interrupted=interrupted,
            machine=reports[0].machine,
            dataset=reports[0].dataset,
            accelerator=reports[0].accelerator,
            options={**said, "global_batch": global_batch},
            measured=with_efficiencies(measured, options.batch_size, global_batch),
            disturbed=disturbed[0] if disturbed else None,
            warnings=warnings,
        )
        if out is not None:
            write_report(report, folder, html=html)
    return report


def plan_runs(
    dataset: str | os.PathLike[str],
    options: ScaleOptions,
    global_batch: int,
    records: Path,
) -> list[list[RunPlan]]:
    """Return the checked runs of each number of ranks, which it makes one after another in the same
    processes.

    They are those of the fixed batch per rank (weak scaling), and of its part of the largest
    number's global batch (strong scaling), which for the largest is the same run. Raises
    ConfigError and DatasetErrors.
    """
    counts = sorted(set(options.ranks))
    if not counts or counts[0] != 1:
        raise ConfigError(
            f"ranks {counts} must contain 1: efficiency is relative to one rank; begin with 1"
        )
    uneven = [count for count in counts if global_batch % count]
    if uneven:
        raise ConfigError(
            f"ranks {counts}: strong scaling divides {global_batch} samples among the "
            f"ranks, which is not even for {uneven[0]} ranks; use powers of two"
        )

    def run(count: int, size: int) -> RunPlan:
        training = TrainOptions(
            ranks=count,
            batch_size=size,
            steps=options.steps,
            warmup=options.warmup,
            split=options.split,
            accelerator=f"emulated:{DEFAULT_PROFILE}"
            if options.accelerator == "auto"
            else options.accelerator,
            workers=options.workers,
        )
        return ask(dataset, training, records / f"ranks-{count}-batch-{size}")

    runs = [
        [run(count, size) for size in sorted({options.batch_size, global_batch // count})]
        for count in counts
    ]
    if runs[0][0].settings.accelerator != "emulated":
        raise ConfigError(
            "bench scale runs on emulated accelerators: use --accelerator emulated:PROFILE"
        )
    return runs


def measured_run(report: Report) -> MeasuredRun:
    """Return a report with figures as a point of the scaling."""
    assert report.figures is not None
    first = report.window.num_warmup_steps
    count = report.window.num_measured_steps
    wall_ms = np.array(
        [series.wall_ms[first : first + count] for series in report.series], dtype=np.float64
    )
    steps_ms = wall_ms.mean(axis=0)
    low, high = np.quantile(bootstrap_means(steps_ms, 0), (0.025, 0.975)).tolist()
    mean_ms = report.figures.step_time.mean_ms
    return MeasuredRun(
        num_ranks=report.num_ranks,
        batch_size=report.options["batch_size"],
        step_ms=Interval(
            median=mean_ms,
            low=low,
            high=high,
            confidence=0.95,
            num_repeats=len(steps_ms),
        ),
        step_p99_ms=report.figures.step_time.p99_ms,
        samples_per_s=report.figures.throughput.samples_per_s,
        occupancy=report.figures.occupancy.mean,
    )
