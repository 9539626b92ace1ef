"""``fuelrail bench compare``: arguments, and the figures as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from fuelrail.bench.measure.processes import exit_code, report_console
from fuelrail.bench.report.options import OutputOptions, print_partial
from fuelrail.bench.studies.compare.options import CompareOptions
from fuelrail.pipeline.cli import add_flags, from_flags, print_json

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from fuelrail.bench.studies.compare.report import CompareReport

HELP = "compare the speed of all installed loaders on the same images, with confidence intervals"
DESCRIPTION = (
    "Writes the dataset's samples in the format of each loader, checks the images of every loader against the "
    "reference, then times the loaders in turns, each in a process of its own on the same CPUs. A loader that is not "
    "installed, or whose images differ, is left out and listed. Prepare with --rounds 0, and add rounds later with "
    "--continue."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench compare``."""
    parser.add_argument("source", metavar="DATASET_OR_SOURCE", help="a Fuelrail dataset, or a source as in `shard`")
    add_flags(parser, CompareOptions, names={"resume": "continue"})
    add_flags(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Compare, write the report's files and print the figures."""
    from fuelrail.bench.studies.compare.session import compare

    options, output = from_flags(arguments, CompareOptions), from_flags(arguments, OutputOptions)
    report = compare(arguments.source, options, out=output.folder("compare"), html=output.html)
    if output.json:
        print_json(report)
    else:
        print_compare_report(report, report_console())
    return exit_code(report.cut_off, interrupted=report.cut_off is not None)


def print_compare_report(report: CompareReport, console: Console) -> None:
    """Print the figures as text."""
    from fuelrail.bench.studies.compare.report import REFERENCE, ranking

    print_partial(report.cut_off, console)
    timed = ranking(report)
    if timed:
        ratio = f"speed-up of {REFERENCE}"
        table = Table("loader", "images/s", "range", ratio, "CPU-s/1000", "MB", "first s", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for entry in timed:
            figures = entry.figures
            assert figures is not None
            rate, times = figures.images_per_s, figures.ours_times_as_fast
            table.add_row(
                entry.name, f"{rate.median:.0f}", f"{rate.low:.0f} to {rate.high:.0f}" if rate.has_interval else "",
                "" if times is None else f"{times.median:.2f} ({times.shown('.2f')})",
                f"{figures.cpu_s_per_1000_images:.2f}", f"{figures.peak_memory_bytes / 1e6:.0f}",
                f"{figures.first_batch_s:.2f}",
            )  # fmt: skip
        console.print(table)
    for entry in report.contestants:
        if entry.left_out is not None:
            console.print(f"left out: {entry.name}: {entry.left_out}", highlight=False, markup=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
