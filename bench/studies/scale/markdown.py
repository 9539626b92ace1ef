"""The scaling report as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.report.markdown import document, table

if TYPE_CHECKING:
    from fuelrail.bench.studies.scale.report import ScaleReport

MEASURED_HEADER = (
    "measured: ranks", "batch a rank", "step ms", "p99 ms", "samples/s", "weak", "strong", "occupancy", "simulated ms",
    "error",
)  # fmt: skip


CURVES_HEADER = ("simulated", "ranks", "batch a rank", "step ms", "samples/s", "efficiency", "occupancy")


def measured_rows(report: ScaleReport) -> list[list[str]]:
    """One row a run, with what the model made of it."""
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
            result = point.result
            rows.append(
                [
                    f"{curve.scaling}, {curve.name}",
                    f"{result.num_ranks:,}",
                    f"{result.batch_size:,}",
                    f"{result.step_ms:,.1f}",
                    f"{result.samples_per_s:,.0f}",
                    f"{point.efficiency:.1%}",
                    f"{result.occupancy:.1%}",
                ]
            )
    return rows


def render_markdown(report: ScaleReport) -> str:
    """Return the whole report as one text."""
    lines = table(MEASURED_HEADER, measured_rows(report))
    if report.curves:
        lines += ["", *table(CURVES_HEADER, curve_rows(report))]
    return document(report, "Scaling", str(report.accelerator.get("name", "cuda")), lines)
