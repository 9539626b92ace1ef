"""Measure how training scales on this host, and the inputs of the simulation."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.accelerator import DEFAULT_PROFILE, AcceleratorProfile
from fuelrail.bench.measure.processes import NOTHING_MEASURED, WAS_INTERRUPTED
from fuelrail.bench.measure.rates import bootstrap_means
from fuelrail.bench.planner.scaling import HostFit, Overhead, Scaling
from fuelrail.bench.report.files import created_now, prepare_folder
from fuelrail.bench.report.options import output_folder
from fuelrail.bench.report.page import write_report
from fuelrail.bench.report.progress import Progress
from fuelrail.bench.studies.loader.options import LoaderOptions
from fuelrail.bench.studies.scale.options import ScaleOptions
from fuelrail.bench.studies.scale.report import (
    FITTED_RANKS,
    SCHEMA,
    VERSION,
    MeasuredRun,
    ScaleReport,
    judged,
    make_curves,
)
from fuelrail.bench.studies.train.run import Made, measure_all
from fuelrail.bench.studies.train.settings import Asked, TrainOptions, ask
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.runtime.host import usable_cpus
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
    """Measure weak and strong scaling on this host with emulated accelerators, and simulate more ranks.

    ``fuelrail.scale("DATASET", ranks=(1, 2))`` takes the fields of :class:`ScaleOptions` as keywords. ``out`` is a
    folder for the report; None: nothing is written. Runs that end early make the report partial (``cut_off``), also
    after Ctrl+C. Raises ConfigError, DatasetErrors, and FuelrailError where no step was made.
    """
    html = html and out is not None
    with output_folder(out) as folder:
        plan = ScalePlan(dataset, make_options(ScaleOptions, options, changes), folder / "records")
        prepare_folder(folder, html=html)
        (folder / "records").mkdir(exist_ok=True)
        report = _report(plan, _measure(plan))
        write_report(report, folder, html=html)
    return report


class _Measurement(NamedTuple):
    """The runs that were made, and what the simulation needs; None if it was cut off before."""

    reports: list[Report]
    fit: HostFit | None
    cut_off: str | None
    interrupted: bool


def _measure(plan: ScalePlan) -> _Measurement:
    """Make all runs; those before an interruption are returned, with ``cut_off``."""
    reports: list[Report] = []
    cut_off, interrupted, fit = None, False, None
    try:
        for count in plan.ranks:
            made = plan.measure(count)
            reports += made.reports
            interrupted = made.reports[0].interrupted
            if made.cut_off is not None:
                cut_off = f"{count} ranks: {made.cut_off}"
                break
        if cut_off is None:
            with Progress("the loader alone"):
                fit = plan.fit(reports)
    except KeyboardInterrupt:
        if not reports:
            raise KeyboardInterrupt(NOTHING_MEASURED) from None
        cut_off, interrupted = WAS_INTERRUPTED, True
    except FuelrailError as error:
        if not reports:
            raise
        cut_off = str(error)
    return _Measurement(reports, fit, cut_off, interrupted)


class ScalePlan:
    """The runs of one measurement, checked.

    Each number of ranks makes its runs one after another in the same processes: the fixed batch per rank (weak
    scaling), and its part of the largest number's global batch (strong scaling), which for the largest is the same run.
    Raises ConfigError and DatasetErrors.
    """

    def __init__(self, dataset: str | os.PathLike[str], options: ScaleOptions, records: Path) -> None:
        self._dataset, self.options = dataset, options
        self.ranks, self.batch_size = sorted(set(options.ranks)), options.batch_size
        if not self.ranks or self.ranks[0] != 1:
            raise ConfigError(f"ranks {self.ranks} must contain 1: efficiency is relative to one rank; begin with 1")
        self.global_batch = self.ranks[-1] * options.batch_size
        uneven = [count for count in self.ranks if self.global_batch % count]
        if uneven:
            raise ConfigError(
                f"ranks {self.ranks}: strong scaling divides {self.global_batch} samples among the ranks, which is not "
                f"even for {uneven[0]} ranks; use powers of two"
            )
        self.runs = {count: self._runs(count, records) for count in self.ranks}
        profile = self.runs[self.ranks[0]][0].settings.profile
        if profile is None:
            raise ConfigError("bench scale runs on emulated accelerators: use --accelerator emulated:PROFILE")
        self.profile: AcceleratorProfile = profile

    def _runs(self, count: int, records: Path) -> list[Asked]:
        sizes = sorted({self.batch_size, self.global_batch // count})
        return [
            ask(self._dataset, self._training(count, size), records / f"ranks-{count}-batch-{size}") for size in sizes
        ]

    def _training(self, count: int, batch_size: int) -> TrainOptions:
        given = self.options
        return TrainOptions(
            ranks=count,
            batch_size=batch_size,
            steps=given.steps,
            warmup=given.warmup,
            accelerator=f"emulated:{DEFAULT_PROFILE}" if given.accelerator == "auto" else given.accelerator,
            split=given.split,
            decoder=given.decoder,
            seed=given.seed,
            workers=given.workers,
        )

    def measure(self, count: int) -> Made:
        """Run all points of a number of ranks."""
        return measure_all(self.runs[count])

    def point(self, report: Report) -> MeasuredRun | None:
        """Return a report as a point; None where its window was too short for figures."""
        if report.figures is None:
            return None
        count, size = report.num_ranks, report.options["batch_size"]
        scalings: list[Scaling] = []
        if size == self.batch_size:
            scalings.append("weak")
        if size * count == self.global_batch:
            scalings.append("strong")
        low, high = np.quantile(bootstrap_means(_column(report, "wall").mean(axis=0), 0), (0.025, 0.975))
        return MeasuredRun(
            num_ranks=count,
            batch_size=size,
            scalings=scalings,
            step_ms=report.figures.step_time.mean_ms,
            step_low_ms=float(low),
            step_high_ms=float(high),
            step_p99_ms=report.figures.step_time.p99_ms,
            samples_per_s=report.figures.throughput.samples_per_s,
            occupancy=report.figures.occupancy.mean,
            efficiency={},
        )

    def fit(self, reports: Sequence[Report]) -> HostFit:
        """Measure the loader alone and put together what the simulation draws from.

        Only runs of up to ``FITTED_RANKS`` ranks are used: the others test the model.
        """
        dataset, settings = open_dataset(self._dataset), self.runs[self.ranks[0]][0].settings
        from fuelrail.bench.studies.loader.run import run_loader  # needs torch

        alone = LoaderOptions(
            split=settings.split,
            batch_size=self.batch_size,
            workers=settings.workers,
            decoder=settings.decoder,
            seed=settings.seed,
            seconds=self.options.loader_seconds,
        )
        run = run_loader(dataset, alone)
        num_cameras = len(dataset.manifest.cameras)
        per_sample = 1 if self.profile.per == "sample" else num_cameras
        seen = [report for report in reports if report.num_ranks <= FITTED_RANKS and report.figures is not None]
        small = [report for report in seen if report.options["batch_size"] == self.batch_size]
        two = [report for report in small if report.num_ranks > 1]
        # Of the rank that came last in each step, which does not wait.
        exposed_ms = [_column(report, "all_reduce").min(axis=0).mean() for report in two]
        sizes = dataset.index.column("length")
        return HostFit(
            service_ms=[1e3 * value for value in run.batch_s[run.num_warm_up_batches :]],
            service_batch=self.batch_size,
            forward_backward_ms=per_sample * (self.profile.forward_ms + self.profile.backward_ms),
            optimiser_ms=self.profile.optimiser_ms,
            overheads=[
                Overhead(ranks_on_host=report.num_ranks, ms=self._overhead_ms(report, num_cameras)) for report in small
            ],
            all_reduce_ms=float(np.mean(exposed_ms)) if two else 0.0,
            trainer_cpus=min((report.figures.stand_in_share for report in small if report.figures), default=0.0),
            host_cpus=usable_cpus(),
            queue_batches=settings.prefetch_factor + 1,
            sample_bytes=float(np.mean(sizes)),
        )

    def _overhead_ms(self, report: Report, num_cameras: int) -> list[float]:
        """Return the rest of each step after data wait, device time and exposed all-reduce; all ranks."""
        device_ms = self.profile.step_ms(self.batch_size, self.batch_size * num_cameras)
        rest = _column(report, "wall") - _column(report, "data_wait") - _column(report, "all_reduce") - device_ms
        values: list[float] = np.maximum(rest, 0.0).ravel().tolist()
        return values


def _column(report: Report, name: str) -> NDArray[np.float64]:
    """Return the measured window of one column [ranks, steps], in ms."""
    first, count = report.window.num_warmup_steps, report.window.num_measured_steps
    columns = [series.wall_ms if name == "wall" else series.phases_ms[name] for series in report.series]
    return np.array([column[first : first + count] for column in columns], dtype=np.float64)


def _report(plan: ScalePlan, measured: _Measurement) -> ScaleReport:
    reports, fit, given = measured.reports, measured.fit, plan.options
    points = [point for report in reports if (point := plan.point(report)) is not None]
    too_short = next((report.window.too_short for report in reports if report.window.too_short), None)
    disturbed = next((report.disturbed for report in reports if report.disturbed is not None), None)
    usable = fit if fit is not None and too_short is None and disturbed is None and fit.service_ms else None
    curves = [] if usable is None else make_curves(usable, plan.batch_size, plan.global_batch, given)
    warnings = merged_warnings([report.warnings for report in reports])
    if too_short is not None:
        warnings.insert(0, f"No figures: {too_short}.")
    elif disturbed is not None:
        warnings.insert(0, "No simulation: it would be of runs that other processes slowed down.")
    elif fit is not None and not fit.service_ms:
        warnings.insert(0, "No simulation: the loader alone made too few batches; give it more --loader-seconds.")
    said = {name: value for name, value in msgspec.to_builtins(given).items() if name not in _REPORTED_ELSEWHERE}
    return judged(
        ScaleReport(
            schema=SCHEMA,
            version=VERSION,
            created=created_now(),
            cut_off=measured.cut_off,
            interrupted=measured.interrupted,
            machine=reports[0].machine,
            dataset=reports[0].dataset,
            accelerator=reports[0].accelerator,
            options={**said, "global_batch": plan.global_batch},
            measured=points,
            fit=usable,
            trials=[],
            curves=curves,
            disturbed=disturbed,
            warnings=warnings,
        )
    )


def merged_warnings(warnings: Sequence[Sequence[str]]) -> list[str]:
    """Return the runs' warnings, each once: those that differ in figures alone are one, in the first run's words."""
    alike: dict[str, list[str]] = {}
    for warning in (warning for run in warnings for warning in run):
        alike.setdefault(re.sub(r"\d[\d.,]*", "#", warning), []).append(warning)
    return sorted(
        found[0]
        if len(set(found)) == 1
        else f"{found[0]} (So in {len(found)} of {len(warnings)} runs, with other figures.)"
        for found in alike.values()
    )
