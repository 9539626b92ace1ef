"""``fuelrail bench diagnose``: arguments, and the diagnosis as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fuelrail.bench.measure.processes import exit_code
from fuelrail.bench.report.files import report_files
from fuelrail.bench.report.options import OutputOptions, add_dataset, print_partial
from fuelrail.bench.studies.diagnose.report import RUNS_HEADER, conclusion, headline, run_rows, tried_rows
from fuelrail.bench.studies.diagnose.run import DiagnoseOptions, run_diagnosis
from fuelrail.pipeline.cli import add_flags, from_flags, print_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from fuelrail.bench.studies.diagnose.report import DiagnoseReport, Tried

HELP = "find the bottleneck of a training run by switching off one part at a time, and try settings that may help"
DESCRIPTION = (
    "Repeats `bench train` with one part left out at a time: loading, storage, decompression, decoding, the copy, the "
    "all-reduce. The differences name the bottleneck and the speed-up without it. Writes report.json, report.md and "
    "report.html. Takes the arguments of `bench train`, for each run."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench diagnose``."""
    add_dataset(parser)
    add_flags(parser, DiagnoseOptions)
    add_flags(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Make the runs, write the report's files and print the diagnosis."""
    options, output = from_flags(arguments, DiagnoseOptions), from_flags(arguments, OutputOptions)
    out = output.folder("diagnose")
    report, interrupted = run_diagnosis(arguments.dataset, options, out, html=output.html)
    if output.json:
        print_json(report)
    else:
        _print(report, Console(soft_wrap=True))
        files = ", ".join(map(str, report_files(out, html=output.html)))
        message = f"\nwritten: {files}, and each run's report in a folder beside them"
        Console(soft_wrap=True).print(message, highlight=False)
    return exit_code(report.cut_off, interrupted=interrupted)


def _print(report: DiagnoseReport, console: Console) -> None:
    print_partial(report.cut_off, console)
    diagnosis = report.diagnosis
    if diagnosis is None:
        console.print("No diagnosis: some runs are missing.", highlight=False)
    else:
        console.print(f"[bold]{headline(diagnosis)}[/bold]", highlight=False)
        console.print(f"{diagnosis.finding} {diagnosis.advice}", highlight=False)
        table = Table(*RUNS_HEADER, box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in run_rows(diagnosis):
            table.add_row(*row)
        console.print(table)
    for line in trial_lines(report.tried):
        console.print(line, highlight=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False)


def trial_lines(tried: Sequence[Tried] | None) -> list[str]:
    """Return a line for each setting that was tried, and a conclusion; none if trials were not asked for."""
    if tried is None:
        return []
    lines = [
        f"tried {options}: {verdict}, {rate} samples/s, {gain} ({interval})"
        for options, rate, gain, interval, verdict in tried_rows(tried)
    ]
    return [*lines, conclusion(tried)]
