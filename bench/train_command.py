"""``fuelrail bench train``: from the command line to the ranks, and from their records to a report."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from fuelrail.bench.accelerator import DEFAULT_PROFILE, load_profile, profile_names
from fuelrail.bench.cpu_watch import CpuWatch
from fuelrail.bench.dataset_facts import dataset_facts
from fuelrail.bench.files import REPORT_HTML, REPORT_JSON, prepare_folder
from fuelrail.bench.machine import installed_gpus, machine_facts
from fuelrail.bench.records import RankLog, rank_path, read_rank
from fuelrail.bench.train_report import Report, build_report, save_report
from fuelrail.bench.trainer.launch import Outcome, run_ranks
from fuelrail.bench.trainer.settings import MODELS, TrainSettings
from fuelrail.pipeline.dataset import open_dataset
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.remote import is_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from fuelrail.bench.accelerator import AcceleratorProfile
    from fuelrail.bench.dataset_facts import DatasetFacts

HELP = "train a small multi-camera model on all ranks and measure how busy the accelerators were"
DESCRIPTION = (
    "Trains a small multi-camera model with DDP and writes report.json and report.html: occupancy, the time of each "
    "phase of the step, the loader's stages, throughput."
)
_SETTINGS_FILE = "settings.json"
_LOG_FILE = "ranks.log"
_INTERRUPTED = 130
_FAILED = 1


def configure(train: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench train``."""
    add = train.add_argument
    add("dataset", metavar="OUT", help="folder of a Fuelrail dataset")
    add("--split", default="train", help="split to train on (default: %(default)s)")
    add("--ranks", type=int, default=1, help="data-parallel ranks on this host (default: %(default)s)")
    add("--batch-size", type=int, default=4, help="samples of one rank in a batch (default: %(default)s)")
    length = train.add_mutually_exclusive_group()
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
    add("--seed", type=int, default=0, help="seed of order, augmentation and weights (default: %(default)s)")
    add("--price-per-gpu-hour", type=float, help="adds the cost per million samples, in the price's currency")
    add("--out", type=Path, default=Path("bench-train"), help="folder for the report (default: %(default)s)")
    add("--json", action="store_true", help="print the figures as JSON instead of a table")
    add("--no-html", action="store_true", help="write report.json only; needs no matplotlib")


def run(arguments: argparse.Namespace) -> int:
    """Check everything that can be checked at once, run the ranks, gather their records, report."""
    dataset = dataset_facts(open_dataset(arguments.dataset), arguments.split)
    records = arguments.out / "records"
    settings = _settings(arguments, records)
    _check_world(arguments, dataset)
    prepare_folder(arguments.out, html=not arguments.no_html)
    _prepare(records)
    (records / _SETTINGS_FILE).write_bytes(msgspec.json.encode(settings))
    machine = machine_facts()

    watch = CpuWatch()
    outcome = _launch(arguments, settings, records)
    cpu = watch.use()
    logs = [read_rank(rank_path(records, rank)) for rank in range(arguments.ranks)]
    cut_off = why_cut_off(outcome, logs)
    if cut_off is not None and not any(log.steps for log in logs):
        if outcome.interrupted:
            raise KeyboardInterrupt
        raise FuelrailError(f"no step was run: {cut_off}")
    report = build_report(
        settings,
        logs,
        machine=machine,
        dataset=dataset,
        cut_off=cut_off,
        cpu=cpu,
        price_per_gpu_hour=arguments.price_per_gpu_hour,
    )
    _save(report, arguments)
    if cut_off is not None:
        sys.stderr.write(f"fuelrail: error: the report is partial: {cut_off}\n")
    if outcome.interrupted:
        return _INTERRUPTED
    return _FAILED if cut_off else 0


def _settings(arguments: argparse.Namespace, records: Path) -> TrainSettings:
    positive = dict.fromkeys(("ranks", "batch_size", "steps", "epochs", "workers", "accumulation"), 1)
    not_negative = dict.fromkeys(("warmup", "seed", "price_per_gpu_hour", "learning_rate"), 0)
    for name, least in (positive | not_negative).items():
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be {least} or more")
    profile = _profile(arguments.accelerator)
    steps = arguments.steps if arguments.steps is not None or arguments.epochs is not None else 60
    return TrainSettings(
        dataset=arguments.dataset if is_url(arguments.dataset) else str(Path(arguments.dataset).absolute()),
        split=arguments.split,
        batch_size=arguments.batch_size,
        num_steps=steps,
        num_epochs=arguments.epochs,
        num_warmup_steps=arguments.warmup,
        num_workers=arguments.workers,
        decoder=arguments.decoder,
        seed=arguments.seed,
        accumulation=arguments.accumulation,
        precision=arguments.precision or ("fp32" if profile else "bf16"),
        learning_rate=arguments.learning_rate,
        model_name=arguments.model or ("stand-in" if profile else "base"),
        profile=profile,
        records=str(records.absolute()),
    )


def _profile(choice: str) -> AcceleratorProfile | None:
    """The profile to emulate, or None for CUDA."""
    if choice == "auto":
        return None if installed_gpus() else load_profile(DEFAULT_PROFILE)
    if choice == "cuda":
        if not installed_gpus():
            raise ConfigError("--accelerator cuda: the NVIDIA driver shows no GPU here; use emulated:PROFILE")
        return None
    kind, _, name = choice.partition(":")
    if kind != "emulated" or not name:
        raise ConfigError(
            f"--accelerator {choice!r} must be auto, cuda or emulated:PROFILE; profiles: {', '.join(profile_names())}"
        )
    return load_profile(name)


def _check_world(arguments: argparse.Namespace, dataset: DatasetFacts) -> None:
    global_batch = arguments.ranks * arguments.batch_size * arguments.accumulation
    if dataset.num_samples < global_batch:
        raise ConfigError(
            f"split '{dataset.split}' has {dataset.num_samples} samples, one step takes {global_batch} = "
            f"{arguments.ranks} ranks x {arguments.batch_size} samples x {arguments.accumulation} batches: use fewer "
            "ranks or smaller batches"
        )


def _prepare(records: Path) -> None:
    """Make the folder of the ranks' records; those of an earlier run must not be taken for this run's."""
    try:
        if records.exists():
            shutil.rmtree(records)
        records.mkdir()
    except OSError as error:
        raise ConfigError(f"--out '{records.parent}' cannot be written: {error.strerror}") from error


def _launch(arguments: argparse.Namespace, settings: TrainSettings, records: Path) -> Outcome:
    program = ["fuelrail.bench.trainer.worker", str(records / _SETTINGS_FILE)]
    console = Console(stderr=True)
    what = f"{arguments.ranks} rank{'s' if arguments.ranks > 1 else ''}"
    with console.status(f"starting {what}") as status:

        def show_progress() -> None:
            if not console.is_terminal:
                return
            done = len(read_rank(rank_path(records, 0)).steps)
            target = f" of {settings.num_steps}" if settings.num_steps else ""
            status.update(f"training on {what}: step {done}{target}")

        return run_ranks(program, arguments.ranks, records / _LOG_FILE, show_progress)


def why_cut_off(outcome: Outcome, logs: Sequence[RankLog]) -> str | None:
    """One sentence on why a run ended early, or None: the first cause, not what the other ranks died of after it."""
    if outcome.interrupted:
        return "the run was interrupted"
    if outcome.exit_code == 0:
        return None
    log_hint = f"their output is in records/{_LOG_FILE} beside the report"
    # One that a signal took left no word; SIGTERM is how the launcher ends the ranks beside it.
    for exit_ in outcome.failed:
        if exit_.exit_code < 0 and exit_.exit_code != -signal.SIGTERM:
            name = signal.Signals(-exit_.exit_code).name
            hint = "; the system may be out of memory" if name == "SIGKILL" else ""
            num_steps = len(logs[exit_.rank].steps)
            return f"rank {exit_.rank} was ended by {name} after {num_steps} steps{hint}"
    failures = [(log.failure, rank) for rank, log in enumerate(logs) if log.failure is not None]
    if failures:
        failure, rank = min(failures, key=lambda entry: (entry[0].kind != "refused", entry[0].at_ns))
        message = f"rank {rank}: {failure.message}"
        return message if failure.kind == "refused" else f"{message} (the ranks' {log_hint[6:]})"
    ended = ", ".join(str(rank) for rank, log in enumerate(logs) if log.end is None)
    return f"rank {ended or 'unknown'} ended early with exit code {outcome.exit_code}; {log_hint}"


def _save(report: Report, arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    save_report(report, out / REPORT_JSON)
    written = [out / REPORT_JSON]
    if not arguments.no_html:
        from fuelrail.bench.train_page import save_html  # matplotlib, only where a page is wanted

        save_html(report, out / REPORT_HTML)
        written.append(out / REPORT_HTML)
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
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False)
