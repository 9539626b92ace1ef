"""``fuelrail bench train``: arguments, files and figures as text."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec
from rich.console import Console
from rich.table import Table

from fuelrail.bench.measure.accelerator import DEFAULT_PROFILE, profile_names
from fuelrail.bench.measure.processes import exit_code
from fuelrail.bench.report.files import TRACE_JSON, merge_traces, prepare_folder, write_report
from fuelrail.bench.studies.train.run import TrainRun, measure_all
from fuelrail.bench.trainer.settings import MODELS, LeaveOut

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from fuelrail.bench.studies.train.report import Report

HELP = "train a small multi-camera model on all ranks and measure how busy the accelerators were"
DESCRIPTION = (
    "Trains a small multi-camera model with DDP and writes report.json, report.md and report.html: occupancy, the time "
    "of each phase of the step, the loader's stages, throughput."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench train``."""
    configure_run(parser)
    parser.add_argument(
        "--leave-out",
        action="append",
        default=[],
        choices=get_args(LeaveOut),
        help="run without it, to see what it costs: loading (batches come from memory) or all-reduce (each rank trains "
        "alone), or the work of a stage; may be given several times",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="write trace.json for ui.perfetto.dev: the loader's stages, the trainer's phases and, of a few steps, "
        "what torch's profiler saw, on one clock",
    )


def configure_run(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of any command that trains."""
    add = parser.add_argument
    add("dataset", metavar="OUT", help="folder of a Fuelrail dataset")
    add("--split", default="train", help="split to train on (default: %(default)s)")
    add("--ranks", type=int, default=1, help="data-parallel ranks on this host (default: %(default)s)")
    add("--batch-size", type=int, default=4, help="samples of one rank in a batch (default: %(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="optimiser steps, over as many epochs as it takes (default: 60)")
    length.add_argument("--epochs", type=int, help="whole epochs instead of a number of steps")
    add("--warmup", type=int, default=10, help="steps at the start that count nowhere (default: %(default)s)")
    add(
        "--accelerator",
        default="auto",
        help=f"cuda, emulated:PROFILE, or auto: cuda where there is a GPU, else emulated:{DEFAULT_PROFILE}; profiles: "
        f"{', '.join(profile_names())}, or a .yaml file (default: %(default)s)",
    )
    add(
        "--model", choices=list(MODELS), help="model that really trains (default: stand-in when emulated, base on cuda)"
    )
    add(
        "--precision",
        choices=("fp32", "bf16"),
        help="bf16 autocast or fp32 (default: bf16 on cuda, fp32 when emulated)",
    )
    add(
        "--accumulation", type=int, default=1, help="batches accumulated into one optimiser step (default: %(default)s)"
    )
    add("--learning-rate", type=float, default=2e-3, help="AdamW's learning rate (default: %(default)s)")
    add("--workers", type=int, help="decoding threads a rank (default: the rank's share of the CPUs)")
    add("--decoder", default="auto", help="decode backend, as the DataLoader takes it (default: %(default)s)")
    add("--prefetch-factor", type=int, default=2, help="batches loaded ahead, beyond what threads hold (default: 2)")
    add("--storage", default="auto", help="how shards are read, as the DataLoader takes it (default: %(default)s)")
    add("--cache-dir", type=Path, help="folder on a local disk that keeps what was read")
    add("--window", type=int, help="order `windowed` over so many shards, in place of `shuffled`")
    add("--no-verify", action="store_true", help="don't hold the samples' bytes against their digests")
    add("--transform", metavar="MODULE:FUNCTION", help="function of each sample, as the DataLoader takes it")
    add("--seed", type=int, default=0, help="seed of order, augmentation and weights (default: %(default)s)")
    add(
        *("--price", "--price-per-gpu-hour"),
        dest="price_per_gpu_hour",
        type=float,
        metavar="PER_GPU_HOUR",
        help="adds the cost per million samples, in the price's currency",
    )
    add("--out", type=Path, default=Path("bench-train"), help="folder for the report (default: %(default)s)")
    add("--json", action="store_true", help="print the figures as JSON instead of a table")
    add("--no-html", action="store_true", help="write no report.html; needs no matplotlib")


def run(arguments: argparse.Namespace) -> int:
    """Check everything that can be checked at once, run the ranks, gather their records, report."""
    training = TrainRun(arguments, arguments.out / "records", arguments.leave_out)
    prepare_folder(arguments.out, html=not arguments.no_html)
    made = measure_all([training])
    (report,) = made.reports
    _save(report, arguments)
    if arguments.trace:
        num_traces = merge_traces(arguments.out / "trace", arguments.out / TRACE_JSON)
        shutil.rmtree(arguments.out / "trace", ignore_errors=True)
        sys.stderr.write(f"written: {arguments.out / TRACE_JSON}, of {num_traces} ranks; open it in ui.perfetto.dev\n")
    return exit_code(report.cut_off, interrupted=made.interrupted)


def _save(report: Report, arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    written = write_report(report, out, html=not arguments.no_html)
    if arguments.json:
        summary = {
            "cut_off": report.cut_off,
            "window": report.window,
            "figures": report.figures,
            "warnings": report.warnings,
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode() + "\n")
    else:
        print_report(report, Console(soft_wrap=True))
        Console(soft_wrap=True).print("\nwritten: " + ", ".join(str(path) for path in written), highlight=False)


def print_report(report: Report, console: Console) -> None:
    """The figures as text."""
    if report.cut_off:
        console.print(f"[bold]PARTIAL:[/bold] {report.cut_off}", highlight=False)
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
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False)


def _about_devices(report: Report) -> Iterator[str]:
    """What else is known of the devices and ranks, a line each."""
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
    for pace in figures.paces:
        if pace.is_slow:
            yield (
                f"rank {pace.rank} is slow: its own part of the step is {pace.slower:.0%} longer than the others', "
                f"most of it in '{pace.most_in.replace('_', ' ')}'"
            )
