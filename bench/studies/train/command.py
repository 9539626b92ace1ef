"""``fuelrail bench train``: arguments, files and figures as text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fuelrail.bench.measure.processes import exit_code
from fuelrail.bench.report.files import TRACE_JSON, report_files
from fuelrail.bench.report.options import OutputOptions, add_dataset, print_partial
from fuelrail.bench.studies.train.report import learning_sentences
from fuelrail.bench.studies.train.run import run_training
from fuelrail.bench.studies.train.settings import TrainOptions
from fuelrail.pipeline.cli import add_flags, from_flags, print_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from fuelrail.bench.studies.train.report import Report

HELP = "train a model on all ranks and measure how busy the accelerators were"
DESCRIPTION = (
    "Trains a model, divided over the ranks as --strategy or --mesh says, and writes report.json, report.md and "
    "report.html: occupancy, the time of each phase of the step, the loader's stages, throughput."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench train``."""
    add_dataset(parser)
    add_flags(parser, TrainOptions)
    add_flags(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Train, write the report's files and print the figures."""
    options, output = from_flags(arguments, TrainOptions), from_flags(arguments, OutputOptions)
    out = output.folder("train")
    made = run_training(arguments.dataset, options, out, html=output.html)
    (report,) = made.reports
    if output.json:
        names = ("cut_off", "window", "figures", "checkpoints", "against", "target", "warnings")
        print_json({name: getattr(report, name) for name in names})
    else:
        print_report(report, Console(soft_wrap=True))
        files = report_files(out, html=output.html)
        Console(soft_wrap=True).print("\nwritten: " + ", ".join(map(str, files)), highlight=False)
    if options.trace:
        sys.stderr.write(f"written: {out / TRACE_JSON}; open it in ui.perfetto.dev\n")
    return exit_code(report.cut_off, interrupted=made.interrupted)


def print_report(report: Report, console: Console) -> None:
    """Print the figures as text."""
    print_partial(report.cut_off, console)
    figures = report.figures
    if figures is None:
        console.print(f"No figures: {report.window.too_short}.", highlight=False)
    else:
        occupancy, rate = figures.occupancy, figures.throughput
        console.print(
            f"[bold]occupancy {occupancy.mean:.1%}[/bold]  (lowest rank {occupancy.lowest:.1%}, "
            f"{report.num_ranks} ranks, {report.window.num_measured_steps} steps after "
            f"{report.window.num_warmup_steps} warm-up)",
            highlight=False,
        )
        cost = rate.cost_per_million_samples
        console.print(
            f"{rate.samples_per_s:.1f} samples/s, {rate.images_per_s:.0f} images/s, "
            f"{rate.gpu_hours_per_million_samples:.2f} GPU-hours per million samples"
            + ("" if cost is None else f", {cost:,.2f} cost per million samples"),
            highlight=False,
        )
        table = Table("phase", "mean ms", "p50 ms", "p99 ms", "share", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        rows = [(phase.phase.replace("_", " "), phase.time, phase.share) for phase in figures.phases]
        for name, time, share in [*rows, ("whole step", figures.step_time, 1.0)]:
            table.add_row(name, f"{time.mean_ms:.2f}", f"{time.p50_ms:.2f}", f"{time.p99_ms:.2f}", f"{share:.1%}")
        console.print(table)
        for line in _about_devices(report):
            console.print(line, highlight=False)
        if report.source is not None:
            console.print(report.source.sentence(), highlight=False)
    for line in learning_sentences(report):
        console.print(line, highlight=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False)


def _about_devices(report: Report) -> Iterator[str]:
    """Yield a line for each further fact on devices and ranks."""
    figures = report.figures
    assert figures is not None
    if figures.mfu is not None:
        yield f"model FLOP utilisation {figures.mfu:.1%}"
    for gpu in report.gpus or []:
        memory_gib = gpu.peak_memory_bytes / 2**30
        yield (
            f"GPU {gpu.index}: kernels ran {gpu.kernels:.0%} of the time, memory {memory_gib:.1f} GiB, SM clock "
            f"{gpu.mean_sm_clock_mhz:.0f} MHz" + ("" if gpu.jpeg is None else f", JPEG decoder busy {gpu.jpeg:.0%}")
        )
    for rank, line in enumerate(report.memory or []):
        yield f"rank {rank}: peak memory of step {line.step} {line.peak_bytes / 2**20:,.1f} MiB"
    for pace in figures.paces:
        if pace.is_slow:
            yield (
                f"rank {pace.rank} is slow: its compute time is {pace.slower:.0%} longer than that of the others, "
                f"most of it in '{pace.most_in.replace('_', ' ')}'"
            )
