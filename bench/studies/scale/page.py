"""The document of a scaling report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

from fuelrail.bench.planner.scaling import Scaling
from fuelrail.bench.report.page import Block, Document, Figure, Hero, Section, Table, Text, document, marked

if TYPE_CHECKING:
    from fuelrail.bench.studies.scale.report import ScaleReport

MEASURED_HEADER = (
    "ranks", "batch a rank", "step ms", "p99 ms", "samples/s", "weak", "strong", "occupancy", "simulated ms",
    "error",
)  # fmt: skip
CURVES_HEADER = ("curve", "ranks", "batch a rank", "step ms", "samples/s", "efficiency", "occupancy")
_METHOD = (
    "Weak scaling keeps each rank's batch, strong scaling shares one batch among the ranks. Efficiency is samples/s "
    "over those of one rank times the ranks. The simulation gives each rank a loader with a bounded queue, an "
    "accelerator, and a step that ends when every rank has computed; it draws the loader's times between batches "
    "and the steps' overhead from those measured with up to two ranks, so that runs with more try it. Exposed "
    "all-reduce grows with the bytes that a rank of a ring sends. Ranks of one host share its CPUs, all ranks share "
    "the storage. Service times are drawn independently: what slows all ranks of a real cluster at once is not in it."
)


def describe(report: ScaleReport, plots: Mapping[str, str]) -> Document:
    """Return the report as a document with these plots."""
    device = str(report.accelerator.get("name", "cuda"))
    scalings: tuple[Scaling, ...] = get_args(Scaling)
    parts: list[Block | Section] = [*_hero(report)]
    for scaling in scalings:
        caption = f"Lines: simulated{_simulated_batch(report, scaling)}. Dots: measured, all ranks on this host."
        parts.append(Section(f"{scaling.title()} scaling", [Figure(plots.get(scaling, ""), caption)]))
    if report.measured:
        parts.append(Section("Measured, and the model's error", [Table(MEASURED_HEADER, measured_rows(report))]))
    if report.curves:
        parts.append(Section("Simulated", [Table(CURVES_HEADER, curve_rows(report))]))
    parts.append(Section("How these figures are made", [Text(_METHOD)]))
    about = marked("Emulated **{device}**, dataset {name}", device=device, name=report.dataset.name)
    return document(report, "Fuelrail scaling report", "How does training scale?", about, parts)


def _hero(report: ScaleReport) -> list[Hero]:
    weak = [run for run in report.measured if "weak" in run.efficiency]
    if not weak:
        return []
    last = max(weak, key=lambda run: run.num_ranks)
    ends = [curve for curve in report.curves if curve.scaling == "weak"]
    error = max((abs(trial.error) for trial in report.trials), default=None)
    model = "" if error is None or not ends else f" The simulation is within {error:.1%} of every measured step time."
    efficiencies = "; ".join(f"{curve.name}: {curve.points[-1].efficiency:.1%}" for curve in ends)
    far = f" At {ends[0].points[-1].num_ranks:,} ranks it gives {efficiencies}." if ends else ""
    return [
        Hero(
            f"{last.efficiency['weak']:.1%}",
            f"weak scaling efficiency at {last.num_ranks} ranks, measured",
            f"{last.num_ranks} ranks make {last.samples_per_s:.0f} samples/s, each {last.occupancy:.1%} "
            f"occupied.{model}{far}",
        )
    ]


def measured_rows(report: ScaleReport) -> list[list[str]]:
    """Return one row for each run, with the model's prediction."""
    trials = {(trial.num_ranks, trial.batch_size): trial for trial in report.trials}
    rows = []
    for run in report.measured:
        trial = trials.get((run.num_ranks, run.batch_size))
        held_out = " (held out)" if trial is not None and trial.held_out else ""
        rows.append(
            [
                str(run.num_ranks),
                str(run.batch_size),
                f"{run.step_ms:.1f}",
                f"{run.step_p99_ms:.1f}",
                f"{run.samples_per_s:.1f}",
                *(f"{run.efficiency[name]:.1%}" if name in run.efficiency else "" for name in ("weak", "strong")),
                f"{run.occupancy:.1%}",
                "" if trial is None else f"{trial.simulated_ms:.1f}",
                "" if trial is None else f"{trial.error:+.1%}{held_out}",
            ]
        )
    return rows


def curve_rows(report: ScaleReport) -> list[list[str]]:
    """Return every second doubling of each curve, and its last point."""
    rows = []
    for curve in report.curves:
        for number, point in enumerate(curve.points):
            if number % 3 and number != len(curve.points) - 1:
                continue
            rows.append(
                [
                    f"{curve.scaling}, {curve.name}",
                    f"{point.num_ranks:,}",
                    f"{point.global_batch // point.num_ranks:,}",
                    f"{point.step_ms:,.1f}",
                    f"{point.samples_per_s:,.0f}",
                    f"{point.efficiency:.1%}",
                    f"{point.occupancy:.1%}",
                ]
            )
    return rows


def _simulated_batch(report: ScaleReport, scaling: Scaling) -> str:
    """Label what the lines of strong scaling share and the dots do not."""
    first = next((curve.points[0] for curve in report.curves if curve.scaling == scaling), None)
    if scaling == "weak" or first is None:
        return ""
    return f", {first.global_batch:,} samples shared among the ranks (the dots: {report.options['global_batch']})"
