"""``fuelrail bench loader``: how fast a dataset can be loaded here, where the time goes, and what bounds it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from fuelrail.bench.measure.machine import machine_facts, usable_cpus
from fuelrail.bench.measure.processes import exit_code, report_console
from fuelrail.bench.report.files import prepare_folder
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from fuelrail.bench.measure.rates import Rate
    from fuelrail.bench.studies.loader.report import LoaderFigures, LoaderReport

HELP = "measure how fast a dataset can be loaded, stage by stage, and what bounds it"
DESCRIPTION = (
    "Runs the loader as fast as it goes, each of its stages alone, and this machine's limits on the same bytes, all "
    "from the page cache. Tells rates, CPU time, the time to the first batch, and what bounds the loader."
)


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
    from fuelrail.bench.measure.machine import dataset_facts
    from fuelrail.bench.measure.rates import median_rates
    from fuelrail.bench.report.files import write_report
    from fuelrail.bench.studies.loader.report import build_loader_report
    from fuelrail.bench.studies.loader.run import measure_rounds
    from fuelrail.bench.studies.loader.stages import LoaderChoice
    from fuelrail.loaders import Transforms
    from fuelrail.pipeline.settings import load_yaml
    from fuelrail.pipeline.transforms.image import ImageAugment

    _check(arguments)
    dataset = open_dataset(arguments.dataset)
    facts = dataset_facts(dataset, arguments.split)
    if facts.num_samples < arguments.batch_size:
        raise ConfigError(
            f"split '{arguments.split}' has {facts.num_samples} samples, fewer than a batch of "
            f"{arguments.batch_size}: use a smaller --batch-size"
        )
    prepare_folder(arguments.out, html=not arguments.no_html)
    image = load_yaml(arguments.image, ImageAugment) if arguments.image else Transforms().image
    choice = LoaderChoice(
        split=arguments.split,
        batch_size=arguments.batch_size,
        num_workers=arguments.workers or max(1, int(usable_cpus())),
        decoder=arguments.decoder,
        verify=not arguments.no_verify,
        points=arguments.points,
        seed=arguments.seed,
    )
    with Console(stderr=True).status("") as status:
        measured = measure_rounds(
            dataset, image, choice, num_rounds=arguments.repeats, seconds=arguments.seconds, tell=status.update
        )
    rounds, sizes, peak_rss_bytes, cut_off = measured
    report = build_loader_report(
        machine=machine_facts(),
        dataset=facts,
        options={**msgspec.to_builtins(choice), "image": msgspec.to_builtins(image), "seconds": arguments.seconds},
        sizes=sizes,
        limits=median_rates([each.limits for each in rounds]),
        stages=median_rates([each.stages for each in rounds]),
        stacked=median_rates([each.stacked for each in rounds]),
        runs=[each.run for each in rounds],
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
    return exit_code(cut_off, interrupted=cut_off is not None)


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
        f"CPU time {cpu.median:.2f} ms a sample{f' ({cpu.low:.2f} to {cpu.high:.2f})' if cpu.is_told else ''}, "
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
