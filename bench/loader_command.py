"""``fuelrail bench loader``: how fast a dataset can be loaded here, where the time goes, and what bounds it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from fuelrail.bench.console import report_console
from fuelrail.bench.files import prepare_folder
from fuelrail.bench.machine import machine_facts, usable_cpus
from fuelrail.bench.memory import peak_memory_bytes
from fuelrail.pipeline.dataset import open_dataset
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from fuelrail.bench.loader_report import LoaderFigures, LoaderReport
    from fuelrail.bench.loader_run import LoaderRun
    from fuelrail.bench.rates import Rate

HELP = "measure how fast a dataset can be loaded, stage by stage, and what bounds it"
DESCRIPTION = (
    "Runs the loader as fast as it goes, each of its stages alone, and this machine's limits on the same bytes, all "
    "from the page cache. Tells rates, CPU time, the time to the first batch, and what bounds the loader."
)
_INTERRUPTED = 130
_NUM_BATCHES_KEPT = 3
_NUM_SAMPLES_KEPT = 12


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench loader``."""
    add = parser.add_argument
    add("dataset", metavar="OUT", help="folder of a Fuelrail dataset")
    add("--split", default="train", help="split to load (default: %(default)s)")
    add("--batch-size", type=int, default=8, help="samples of a batch (default: %(default)s)")
    add("--workers", type=int, help="decoding threads (default: one for each usable CPU)")
    add("--image", metavar="YAML", help="image settings (default: 704x256 from the bottom)")
    add("--decoder", default="auto", help="decode backend, as the DataLoader takes it (default: %(default)s)")
    add("--points", action="store_true", help="also decode the lidar sweep")
    add("--no-verify", action="store_true", help="don't hold samples against their digests")
    add("--seed", type=int, default=0, help="seed of the order (default: %(default)s)")
    add("--repeats", type=int, default=5, help="rounds of measurement (default: %(default)s)")
    add("--seconds", type=float, default=3.0, help="length of one run of the loader (default: %(default)s)")
    add("--out", type=Path, default=Path("bench-loader"), help="folder for the report (default: %(default)s)")
    add("--json", action="store_true", help="print the figures as JSON instead of a table")
    add("--no-html", action="store_true", help="write no report.html; needs no matplotlib")


def run(arguments: argparse.Namespace) -> int:
    """Measure limits, stages and the whole loader; write the report; print it."""
    # torch, only where something is measured
    from fuelrail.bench.cuda import pinned_copy
    from fuelrail.bench.dataset_facts import dataset_facts
    from fuelrail.bench.limits import measure_limits, sample_sizes
    from fuelrail.bench.loader_report import build_loader_report
    from fuelrail.bench.loader_run import run_loader
    from fuelrail.bench.rates import median_rates
    from fuelrail.bench.report_files import write_report
    from fuelrail.bench.stages import LoaderChoice, measure_stacked, measure_stages, record_stages
    from fuelrail.loaders.loader import DEFAULT_IMAGE
    from fuelrail.pipeline.augment import ImageAugment
    from fuelrail.pipeline.settings import load_yaml

    _check(arguments)
    dataset = open_dataset(arguments.dataset)
    facts = dataset_facts(dataset, arguments.split)
    if facts.num_samples < arguments.batch_size:
        raise ConfigError(
            f"split '{arguments.split}' has {facts.num_samples} samples, fewer than a batch of "
            f"{arguments.batch_size}: use a smaller --batch-size"
        )
    prepare_folder(arguments.out, html=not arguments.no_html)
    image = load_yaml(arguments.image, ImageAugment) if arguments.image else DEFAULT_IMAGE
    batch_size: int = arguments.batch_size
    choice = LoaderChoice(
        split=arguments.split,
        batch_size=batch_size,
        num_workers=arguments.workers or max(1, int(usable_cpus())),
        decoder=arguments.decoder,
        verify=not arguments.no_verify,
        points=arguments.points,
        seed=arguments.seed,
    )
    part_s = min(1.0, arguments.seconds / 8)
    output_bytes = len(facts.cameras) * 3 * image.height * image.width
    lidars = {lidar.channel for lidar in dataset.manifest.lidars if not choice.points}
    to_device = pinned_copy(output_bytes)
    console = Console(stderr=True)
    with console.status("warming up"):
        run_loader(dataset, image, choice, arguments.seconds)
        # Read now: what follows keeps batches that a loader would not.
        peak_rss_bytes = peak_memory_bytes()
        recorded = record_stages(dataset, image, choice, max(_NUM_BATCHES_KEPT, -(-_NUM_SAMPLES_KEPT // batch_size)))
        items = {entry.stage.name: entry.items for entry in recorded}
    names = [entry.stage.name for entry in recorded]
    runs: list[LoaderRun] = []
    stages: list[list[Rate]] = []
    stacked: list[list[Rate]] = []
    limits: list[list[Rate]] = []
    cut_off = None
    # In turns, so that a machine that grows slower or is disturbed for a while favours none of the four.
    try:
        for number in range(arguments.repeats):
            where = f"round {number + 1} of {arguments.repeats}"
            with console.status(f"{where}: the whole loader") as status:
                run = run_loader(dataset, image, choice, arguments.seconds)
                status.update(f"{where}: each stage alone")
                alone = measure_stages(recorded, batch_size, part_s)
                status.update(f"{where}: stage upon stage")
                upon = measure_stacked(dataset, image, choice, names[:-1], part_s)
                status.update(f"{where}: this machine's limits")
                limit = measure_limits(
                    items["parse"],
                    items["decode"],
                    lidars,
                    output_bytes,
                    choice.num_workers,
                    part_s,
                    dataset,
                    to_device,
                )
            runs.append(run)
            stages.append(alone)
            stacked.append(upon)
            limits.append(limit)
    except KeyboardInterrupt:
        if not runs:
            raise
        cut_off = f"it was interrupted after {len(runs)} of {arguments.repeats} rounds"
    report = build_loader_report(
        machine=machine_facts(),
        dataset=facts,
        options={**msgspec.to_builtins(choice), "image": msgspec.to_builtins(image), "seconds": arguments.seconds},
        sizes=sample_sizes(items["parse"], items["decode"], output_bytes),
        limits=median_rates(limits),
        stages=median_rates(stages),
        stacked=median_rates(stacked),
        runs=runs,
        peak_rss_bytes=peak_rss_bytes,
        cut_off=cut_off,
    )
    written = write_report(report, arguments.out, html=not arguments.no_html)
    if arguments.json:
        summary = {
            "cut_off": cut_off,
            "figures": report.figures,
            "too_short": report.too_short,
            "warnings": report.warnings,
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode() + "\n")
    else:
        print_loader_report(report, report_console())
        Console(soft_wrap=True).print("\nwritten: " + ", ".join(map(str, written)), highlight=False)
    if cut_off is not None:
        sys.stderr.write(f"fuelrail: error: the report is partial: {cut_off}\n")
        return _INTERRUPTED
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name in ("batch_size", "workers", "repeats"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be 1 or more")
    if not arguments.seconds > 0:
        raise ConfigError(f"--seconds {arguments.seconds:g} must be more than 0")
    if arguments.decoder != "auto":
        from fuelrail.loaders.decode import make_decoder

        make_decoder(arguments.decoder)  # refuses a name that it does not know, and one that is not installed


def print_loader_report(report: LoaderReport, console: Console) -> None:
    """The figures as text."""
    if report.cut_off is not None:
        console.print(f"[bold]PARTIAL:[/bold] {report.cut_off}", highlight=False)
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
    from fuelrail.bench.loader_report import step_cells

    rate, images, cpu, first = (
        figures.samples_per_s,
        figures.images_per_s,
        figures.cpu_ms_per_sample,
        figures.first_batch_s,
    )
    console.print(
        f"[bold]{rate.median:.1f} samples/s[/bold] ({rate.low:.1f} to {rate.high:.1f} in {rate.num_repeats} runs), "
        f"{images.median:.0f} images/s, {figures.stored_mb_per_s:.0f} MB/s as stored",
        highlight=False,
    )
    console.print(
        f"CPU time {cpu.median:.2f} ms a sample ({cpu.low:.2f} to {cpu.high:.2f}), "
        f"{figures.cpu_s_per_1000_images:.2f} s per 1,000 images; first batch after {first.median:.2f} s; peak memory "
        f"{figures.peak_rss_bytes / 2**30:.2f} GiB",
        highlight=False,
    )
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
