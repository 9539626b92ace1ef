"""The diagnosis as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.diagnose_report import RUNS_HEADER, TRIED_HEADER, conclusion, run_rows, tried_rows
from fuelrail.bench.markdown import facts, table

if TYPE_CHECKING:
    from fuelrail.bench.diagnose_report import DiagnoseReport


def render_diagnose_markdown(report: DiagnoseReport) -> str:
    """The whole report as one text."""
    what = f"{report.dataset.name}, {report.num_ranks} ranks, {report.created}."
    lines = ["# What bounds this training", "", what, ""]
    if report.cut_off is not None:
        lines += [f"**Partial: {report.cut_off}.**", ""]
    diagnosis = report.diagnosis
    if diagnosis is None:
        rows = [[run.name, f"{run.step_ms:.2f}", f"{run.occupancy:.1%}"] for run in report.runs]
        lines += ["No diagnosis: not all runs were made.", "", *table(("run", "step ms", "occupancy"), rows)]
    else:
        lines += [f"**Bound by: {diagnosis.bound}.** {diagnosis.finding} {diagnosis.advice}", ""]
        if diagnosis.expected_gain:
            lines += [f"Without that bound it would be {diagnosis.expected_gain:.0%} faster.", ""]
        lines += table(RUNS_HEADER, run_rows(diagnosis))
    if report.tried:
        lines += ["", *table(TRIED_HEADER, tried_rows(report.tried))]
    if report.tried is not None:
        lines += ["", f"{conclusion(report.tried).capitalize()}."]
    lines += ["", *(f"> {warning}" for warning in report.warnings), ""]
    lines += facts(report.machine, report.dataset, report.options)
    return "\n".join(lines) + "\n"
