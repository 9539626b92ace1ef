"""``fuelrail bench loader``: arguments, and the figures as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fuelrail.bench.measure.processes import exit_code, report_console
from fuelrail.bench.report.files import report_files
from fuelrail.bench.report.options import OutputOptions, add_dataset, print_partial
from fuelrail.bench.studies.loader.options import LoaderOptions
from fuelrail.pipeline.cli import add_flags, from_flags, print_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from fuelrail.bench.measure.rates import Rate
    from fuelrail.bench.studies.loader.report import LoaderFigures, LoaderReport

HELP = "measure how fast a dataset can be loaded, stage by stage, and what limits it"
DESCRIPTION = (
    "Runs the loader at full speed, each of its stages alone, and this machine's limits on the same bytes, all from "
    "the page cache. Reports rates, CPU time, the time to the first batch, and the bottleneck of the loader."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench loader``."""
    add_dataset(parser)
    add_flags(parser, LoaderOptions)
    add_flags(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the report's files and print the figures."""
    from fuelrail.bench.studies.loader.measure import bench_loader  # imports torch

    options, output = from_flags(arguments, LoaderOptions), from_flags(arguments, OutputOptions)
    out = output.folder("loader")
    report = bench_loader(arguments.dataset, options, out=out, html=output.html)
    if output.json:
        print_json({name: getattr(report, name) for name in ("cut_off", "figures", "too_short", "warnings")})
    else:
        print_loader_report(report, report_console())
        files = report_files(out, html=output.html)
        Console(soft_wrap=True).print("\nwritten: " + ", ".join(map(str, files)), highlight=False)
    return exit_code(report.cut_off, interrupted=report.cut_off is not None)


def print_loader_report(report: LoaderReport, console: Console) -> None:
    """Print the figures as text."""
    print_partial(report.cut_off, console)
    if report.figures is None:
        console.print(f"No figures: {report.too_short}.", highlight=False)
    else:
        _print_figures(report.figures, console)
    console.print(_rate_table("stage alone", report.stages))
    console.print(_rate_table("stage upon stage", report.stacked))
    console.print(_rate_table("this machine's limits, same bytes", report.limits))
    if report.figures is not None:
        bound = report.figures.bound
        gain = "" if bound.gain is None else f" At best: {bound.gain:.1f} times as fast."
        console.print(f"[bold]bound:[/bold] {bound.finding} {bound.advice}{gain}", highlight=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False)


def _print_figures(figures: LoaderFigures, console: Console) -> None:
    from fuelrail.bench.studies.loader.report import step_cells

    rate, images, cpu, first = (
        figures.samples_per_s,
        figures.images_per_s,
        figures.cpu_ms_per_sample,
        figures.first_batch_s,
    )
    console.print(
        f"[bold]{rate.median:.1f} samples/s[/bold] ({rate.shown('.1f')}), "
        f"{images.median:.0f} images/s, {figures.stored_mb_per_s:.0f} MB/s as stored",
        highlight=False,
    )
    console.print(
        f"CPU time {cpu.median:.2f} ms a sample{f' ({cpu.low:.2f} to {cpu.high:.2f})' if cpu.has_interval else ''}, "
        f"{figures.cpu_s_per_1000_images:.2f} s per 1,000 images; first batch after {first.median:.2f} s; peak memory "
        f"{figures.peak_rss_bytes / 2**30:.2f} GiB",
        highlight=False,
    )
    if figures.waterfall_doubt is not None:
        console.print(f"from the limit to the loader: {figures.waterfall_doubt}", highlight=False)
    if figures.is_waterfall_noise:
        return
    table = Table("from the limit to the loader", "samples/s", "left", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for step in figures.waterfall:
        table.add_row(*step_cells(step))
    console.print(table)


def _rate_table(title: str, rates: Sequence[Rate]) -> Table:
    table = Table(title, "threads", "samples/s", "CPU ms a sample", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for rate in rates:
        table.add_row(rate.name, str(rate.num_threads), f"{rate.samples_per_s:,.1f}", f"{rate.cpu_ms_per_sample:.3f}")
    return table
