"""The document of a scaling report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fuelrail.bench.report.page import (
    Block,
    Document,
    Hero,
    Section,
    Table,
    Text,
    document,
    format_number,
    marked,
)
from fuelrail.bench.studies.scale.report import FITTED_RANKS
from fuelrail.pipeline.cli import counted

if TYPE_CHECKING:
    from fuelrail.bench.studies.scale.report import ScaleReport

MEASURED_HEADER = (
    "ranks",
    "batch a rank",
    "step ms",
    "p99 ms",
    "samples/s",
    "weak",
    "strong",
    "occupancy",
    "simulated ms",
    "error",
)
CURVES_HEADER = (
    "weak scaling",
    "ranks",
    "step ms",
    "samples/s",
    "efficiency",
    "occupancy",
)
_METHOD = (
    "Weak scaling keeps each rank's batch, strong scaling shares one batch among the ranks. "
    "Efficiency is samples/s over those of one rank times the ranks. The simulation gives "
    "each rank a loader with a bounded queue, an accelerator, and a step that ends when "
    "every rank has computed; it draws the loader's times between batches and the steps' "
    "overhead from those measured with up to two ranks, so that runs with more try it. "
    "Exposed all-reduce grows with the bytes that a rank of a ring sends. Ranks of one host "
    "share its CPUs, all ranks share the storage. Service times are drawn independently: "
    "what slows all ranks of a real cluster at once is not in it."
)


def describe(report: ScaleReport, _: Mapping[str, str]) -> Document:
    """Return the report as a document, without plots."""
    device = str(report.accelerator.get("name", "cuda"))
    parts: list[Block | Section] = [*_hero(report)]
    if report.measured:
        parts.append(
            Section(
                "Measured, and the model's error",
                [Table(MEASURED_HEADER, measured_rows(report))],
            )
        )
    if report.curves:
        parts.append(Section("Simulated", [Table(CURVES_HEADER, curve_rows(report))]))
    parts.append(Section("How these figures are made", [Text(_METHOD)]))
    subtitle = marked(
        "Emulated **{device}**, dataset {name}",
        device=device,
        name=report.dataset.name,
    )
    return document(
        report,
        brand="Fuelrail scaling report",
        title="How does training scale?",
        subtitle=subtitle,
        parts=parts,
    )


def _hero(report: ScaleReport) -> list[Hero]:
    weak = [run for run in report.measured if "weak" in run.efficiency]
    if not weak:
        return []
    last = max(weak, key=lambda run: run.num_ranks)
    ranks = counted(last.num_ranks, "rank")
    text = (
        f"{ranks} {'makes' if last.num_ranks == 1 else 'make'} {format_number(last.samples_per_s)} "
        f"samples/s, each {last.occupancy:.1%} occupied."
    )
    if report.curves:
        error = max(abs(run.error or 0.0) for run in report.measured)
        ends = {curve.name: curve.points[-1] for curve in report.curves}
        text += (
            f" The simulation is within {error:.1%} of every measured step time. At "
            f"{max(end.num_ranks for end in ends.values()):,} ranks it gives "
            + "; ".join(f"{name}: {end.efficiency:.1%}" for name, end in ends.items())
            + "."
        )
    meaning = f"weak scaling efficiency at {ranks}, measured"
    return [Hero(f"{last.efficiency['weak']:.1%}", meaning, text)]


def measured_rows(report: ScaleReport) -> list[list[str]]:
    """Return one row for each run, with the model's prediction."""
    rows = []
    for run in report.measured:
        held_out = " (held out)" if run.num_ranks > FITTED_RANKS else ""
        rows.append(
            [
                str(run.num_ranks),
                str(run.batch_size),
                f"{run.step_ms.median:.1f}",
                f"{run.step_p99_ms:.1f}",
                f"{run.samples_per_s:.1f}",
                *(
                    f"{run.efficiency[name]:.1%}" if name in run.efficiency else ""
                    for name in ("weak", "strong")
                ),
                f"{run.occupancy:.1%}",
                "" if run.simulated_ms is None else f"{run.simulated_ms:.1f}",
                "" if run.error is None else f"{run.error:+.1%}{held_out}",
            ]
        )
    return rows


def curve_rows(report: ScaleReport) -> list[list[str]]:
    """Return every third doubling of each curve, and its last point."""
    return [
        [
            curve.name,
            f"{point.num_ranks:,}",
            f"{point.step_ms:,.1f}",
            f"{point.samples_per_s:,.0f}",
            f"{point.efficiency:.1%}",
            f"{point.occupancy:.1%}",
        ]
        for curve in report.curves
        for number, point in enumerate(curve.points)
        if number % 3 == 0 or point is curve.points[-1]
    ]
