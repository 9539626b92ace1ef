"""Measure how training scales on this host, and the inputs of the simulation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.accelerator import DEFAULT_PROFILE
from fuelrail.bench.measure.processes import NOTHING_MEASURED, WAS_INTERRUPTED
from fuelrail.bench.measure.rates import Interval, bootstrap_means
from fuelrail.bench.planner.scaling import HostFit, Overhead
from fuelrail.bench.report.files import created_now, prepare_folder
from fuelrail.bench.report.options import output_folder
from fuelrail.bench.report.page import write_report
from fuelrail.bench.studies.loader.report import LoaderOptions
from fuelrail.bench.studies.scale.report import (
    FITTED_RANKS,
    SCHEMA,
    VERSION,
    MeasuredRun,
    ScaleOptions,
    ScaleReport,
    judged,
    make_curves,
)
from fuelrail.bench.studies.train.run import measure_all
from fuelrail.bench.studies.train.settings import RunPlan, TrainOptions, ask
from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.runtime.host import usable_cpus
from fuelrail.pipeline.runtime.progress import Progress
from fuelrail.pipeline.settings import make_options

if TYPE_CHECKING:
    from fuelrail.bench.measure.accelerator import AcceleratorProfile
    from fuelrail.bench.studies.train.report import Report


_REPORTED_ELSEWHERE = ("accelerator", "split", "ranks")
_LOADER_SECONDS = 6.0


def scale(
    dataset: str | os.PathLike[str],
    options: ScaleOptions | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    html: bool = True,
    **changes: Any,  # fields of ScaleOptions
) -> ScaleReport:
    """Measure weak and strong scaling on this host with emulated accelerators, and simulate more
    ranks.

    ``fuelrail.bench.scale("DATASET", ranks=(1, 2))`` takes the fields of :class:`ScaleOptions` as
    keywords. ``out`` is a folder for the report; None: nothing is written. Runs that end early make
    the report partial (``cut_off``), also after Ctrl+C. Raises ConfigError, DatasetErrors, and
    FuelrailError where no step was made.
    """
    html = html and out is not None
    options = make_options(ScaleOptions, options, changes)
    with output_folder(out) as folder:
        runs = _runs(dataset, options, folder / "records")
        prepare_folder(folder, html=html)
        (folder / "records").mkdir(exist_ok=True)
        report = judged(_measured(dataset, options, runs))
        write_report(report, folder, html=html)
    return report


def _runs(
    dataset: str | os.PathLike[str], options: ScaleOptions, records: Path
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
    global_batch = _global_batch(options)
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


def _global_batch(options: ScaleOptions) -> int:
    return max(options.ranks) * options.batch_size


def _measured(
    dataset: str | os.PathLike[str],
    options: ScaleOptions,
    runs: Sequence[Sequence[RunPlan]],
) -> ScaleReport:
    """Make all runs and what the simulation needs; after an interruption of those that were
    whole, with ``cut_off``.
    """
    reports: list[Report] = []
    cut_off = None
    interrupted = False
    fit = None
    try:
        for alike in runs:
            outcome = measure_all(alike)
            reports += outcome.reports
            interrupted = outcome.reports[0].interrupted
            if outcome.cut_off is not None:
                cut_off = f"{counted(alike[0].settings.ranks, 'rank')}: {outcome.cut_off}"
                break
        if cut_off is None:
            with Progress("the loader alone"):
                fit = _fit(dataset, options, runs[0][0], reports)
    except KeyboardInterrupt:
        if not reports:
            raise KeyboardInterrupt(NOTHING_MEASURED) from None
        cut_off = WAS_INTERRUPTED
        interrupted = True
    except FuelrailError as error:
        if not reports:
            raise
        cut_off = str(error)
    too_short = next(
        (report.window.too_short for report in reports if report.window.too_short),
        None,
    )
    disturbed = next(
        (report.disturbed for report in reports if report.disturbed is not None),
        None,
    )
    usable = (
        fit
        if fit is not None and too_short is None and disturbed is None and fit.service_ms
        else None
    )
    warnings = sorted({warning for report in reports for warning in report.warnings})
    if too_short is not None:
        warnings.insert(0, f"No figures: {too_short}.")
    elif disturbed is not None:
        warnings.insert(
            0,
            "No simulation: it would be of runs that other processes slowed down.",
        )
    elif fit is not None and not fit.service_ms:
        warnings.insert(
            0,
            "No simulation: the loader alone made too few batches; use a smaller --batch-size.",
        )
    said = {
        name: value
        for name, value in msgspec.to_builtins(options).items()
        if name not in _REPORTED_ELSEWHERE
    }
    return ScaleReport(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        cut_off=cut_off,
        interrupted=interrupted,
        machine=reports[0].machine,
        dataset=reports[0].dataset,
        accelerator=reports[0].accelerator,
        options={**said, "global_batch": _global_batch(options)},
        measured=[_point(report) for report in reports if report.figures is not None],
        fit=usable,
        curves=[] if usable is None else make_curves(usable, options),
        disturbed=disturbed,
        warnings=warnings,
    )


def _point(report: Report) -> MeasuredRun:
    """Return a report with figures as a point."""
    assert report.figures is not None
    steps_ms = _column(report, "wall").mean(axis=0)
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


def _fit(
    dataset: str | os.PathLike[str],
    options: ScaleOptions,
    run: RunPlan,
    reports: Sequence[Report],
) -> HostFit:
    """Measure the loader alone, as a run's, and put together what the simulation draws from.

    Only runs of up to ``FITTED_RANKS`` ranks are used: the others test the model.
    """
    opened = open_dataset(dataset)
    settings = run.settings
    profile = run.settings.profile
    assert profile is not None
    from fuelrail.bench.studies.loader.run import run_loader  # needs torch

    alone = LoaderOptions(
        split=options.split,
        batch_size=options.batch_size,
        workers=settings.workers,
        seconds=_LOADER_SECONDS,
    )
    loaded = run_loader(opened, alone)
    num_cameras = len(opened.manifest.cameras)
    small = [
        report
        for report in reports
        if report.num_ranks <= FITTED_RANKS
        and report.options["batch_size"] == options.batch_size
        and report.figures
    ]
    # Of the rank that came last in each step, which does not wait.
    exposed_ms = [
        _column(report, "all_reduce").min(axis=0).mean() for report in small if report.num_ranks > 1
    ]
    return HostFit(
        service_ms=[1e3 * value for value in loaded.batch_s[loaded.num_warm_up_batches :]],
        service_batch=options.batch_size,
        forward_backward_ms=(1 if profile.per == "sample" else num_cameras)
        * (profile.forward_ms + profile.backward_ms),
        optimiser_ms=profile.optimiser_ms,
        overheads=[
            Overhead(
                ranks_on_host=report.num_ranks,
                ms=_overhead_ms(report, profile, num_cameras),
            )
            for report in small
        ],
        all_reduce_ms=float(np.mean(exposed_ms)) if exposed_ms else 0.0,
        trainer_cpus=min(
            (report.figures.stand_in_share for report in small if report.figures),
            default=0.0,
        ),
        host_cpus=usable_cpus(),
        queue_batches=settings.prefetch_factor + 1,
        sample_bytes=float(np.mean(opened.index.column("length"))),
    )


def _overhead_ms(report: Report, profile: AcceleratorProfile, num_cameras: int) -> list[float]:
    """Return the rest of each step after data wait, device time and exposed all-reduce; all
    ranks.
    """
    size = report.options["batch_size"]
    device_ms = profile.step_ms(size, size * num_cameras)
    rest = (
        _column(report, "wall")
        - _column(report, "data_wait")
        - _column(report, "all_reduce")
        - device_ms
    )
    values: list[float] = np.maximum(rest, 0.0).ravel().tolist()
    return values


def _column(report: Report, name: str) -> NDArray[np.float64]:
    """Return the measured window of one column [ranks, steps], in ms."""
    first = report.window.num_warmup_steps
    count = report.window.num_measured_steps
    columns = [
        series.wall_ms if name == "wall" else series.phases_ms[name] for series in report.series
    ]
    return np.array([column[first : first + count] for column in columns], dtype=np.float64)
