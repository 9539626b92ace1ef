"""``fuelrail bench comm``: arguments, and the report as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from fuelrail.bench.measure.processes import report_console
from fuelrail.bench.report.options import OutputOptions
from fuelrail.bench.studies.comm.page import HEADER, rows
from fuelrail.bench.studies.comm.report import CommOptions
from fuelrail.pipeline.cli import add_flags, from_flags, print_json

if TYPE_CHECKING:
    import argparse

HELP = "measure collectives by size and axis of the mesh, and write a cluster file for `fuelrail plan`"
DESCRIPTION = (
    "Times all-reduce, all-gather, reduce-scatter and send/receive between ranks of this host; inside torchrun "
    "(torchrun ... --no-python fuelrail bench comm) between the ranks of its job. Bus bandwidths are nccl-tests'."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench comm``."""
    add_flags(parser, CommOptions)
    add_flags(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the report's files and print the figures."""
    from fuelrail.bench.studies.comm.run import run_comm

    output = from_flags(arguments, OutputOptions)
    report = run_comm(from_flags(arguments, CommOptions), output.folder("comm"), html=output.html)
    if report is None:
        return 0
    if output.json:
        print_json(report)
        return 0
    shown = Table(*HEADER, box=None, pad_edge=False)
    for row in rows(report):
        shown.add_row(*row)
    console = report_console()
    console.print(shown)
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
    return 0
