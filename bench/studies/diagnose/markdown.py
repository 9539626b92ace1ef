"""The diagnosis as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.report.markdown import document, table
from fuelrail.bench.studies.diagnose.report import RUNS_HEADER, TRIED_HEADER, conclusion, headline, run_rows, tried_rows

if TYPE_CHECKING:
    from fuelrail.bench.studies.diagnose.report import DiagnoseReport


def render_markdown(report: DiagnoseReport) -> str:
    """Return the whole report as one text."""
    about = f"{report.dataset.name}, {report.num_ranks} rank{'s' if report.num_ranks != 1 else ''}"
    return document(report, "What bounds this training", about, _body(report))


def _body(report: DiagnoseReport) -> list[str]:
    diagnosis = report.diagnosis
    lines: list[str] = []
    if diagnosis is None:
        rows = [[run.name, f"{run.step_ms:.2f}", f"{run.occupancy:.1%}"] for run in report.runs]
        lines += ["No diagnosis: not all runs were made.", "", *table(("run", "step ms", "occupancy"), rows)]
    else:
        lines += [f"**{headline(diagnosis).capitalize()}.** {diagnosis.finding} {diagnosis.advice}", ""]
        if diagnosis.expected_gain:
            lines += [f"Without that bound it would be {diagnosis.expected_gain:.0%} faster.", ""]
        lines += table(RUNS_HEADER, run_rows(diagnosis))
    if report.tried:
        lines += ["", *table(TRIED_HEADER, tried_rows(report.tried))]
    if report.tried is not None:
        lines += ["", f"{conclusion(report.tried).capitalize()}."]
    return lines
