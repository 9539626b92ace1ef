"""``fuelrail bench scale``: arguments, and the report as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from fuelrail.bench.measure.processes import exit_code, report_console
from fuelrail.bench.report.options import OutputOptions, add_dataset, print_partial
from fuelrail.bench.studies.scale.options import ScaleOptions
from fuelrail.pipeline.cli import add_flags, from_flags, print_json

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from fuelrail.bench.studies.scale.report import ScaleReport

HELP = "measure weak and strong scaling on emulated accelerators, and simulate it to thousands of ranks"
DESCRIPTION = (
    "Trains with 1, 2, 4 ranks of this host on emulated accelerators: with a fixed batch per rank (weak scaling) and "
    "with a fixed global batch (strong scaling). A simulation draws from the runs with up to 2 ranks and is compared "
    "with all runs. It then continues to thousands of ranks, with stragglers and with a limited storage bandwidth."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench scale``."""
    add_dataset(parser)
    add_flags(parser, ScaleOptions)
    add_flags(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Measure and simulate, write the report's files and print the figures."""
    from fuelrail.bench.studies.scale.run import run_scaling

    options, output = from_flags(arguments, ScaleOptions), from_flags(arguments, OutputOptions)
    report, interrupted = run_scaling(arguments.dataset, options, output.folder("scale"), html=output.html)
    if output.json:
        print_json(report)
    else:
        print_scale_report(report, report_console())
    return exit_code(report.cut_off, interrupted=interrupted)


def print_scale_report(report: ScaleReport, console: Console) -> None:
    """Print the figures as text."""
    from fuelrail.bench.studies.scale.page import CURVES_HEADER, MEASURED_HEADER, curve_rows, measured_rows

    print_partial(report.cut_off, console)
    for header, rows in ((MEASURED_HEADER, measured_rows(report)), (CURVES_HEADER, curve_rows(report))):
        if not rows:
            continue
        table = Table(*header, box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
