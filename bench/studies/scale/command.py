"""``fuelrail bench scale``: scaling measured on this host, and simulated to thousands of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from fuelrail.bench.measure.processes import NOTHING_MEASURED, exit_code, report_console
from fuelrail.bench.report.files import prepare_folder
from fuelrail.pipeline.errors import ConfigError, FuelrailError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from fuelrail.bench.planner.scale_model import Fit
    from fuelrail.bench.studies.scale.report import ScaleReport
    from fuelrail.bench.studies.scale.run import ScalePlan
    from fuelrail.bench.studies.train.report import Report

HELP = "measure weak and strong scaling on emulated accelerators, and simulate it to thousands of ranks"
DESCRIPTION = (
    "Trains with 1, 2, 4 ranks of this host on emulated accelerators, with a fixed batch a rank (weak scaling) and "
    "with a fixed batch of all ranks (strong scaling). A simulation draws from what was measured with up to 2 ranks, "
    "is tried against all runs, and goes on to thousands of ranks, with stragglers and with storage that gives so much."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench scale``."""
    add = parser.add_argument
    add("dataset", metavar="OUT", help="folder of a Fuelrail dataset")
    add("--split", default="train", help="split to train on (default: %(default)s)")
    add("--ranks", default="1,2,4", metavar="LIST", help="numbers of ranks to measure (default: %(default)s)")
    add("--batch-size", type=int, default=2, help="samples of a rank in weak scaling (default: %(default)s)")
    add("--steps", type=int, default=50, help="steps of each run (default: %(default)s)")
    add("--warmup", type=int, default=10, help="steps at the start that count nowhere (default: %(default)s)")
    add("--accelerator", default="auto", help="emulated:PROFILE, as `bench train` takes it")
    add("--workers", type=int, help="decoding threads a rank (default: the rank's share of the CPUs)")
    add("--decoder", default="auto", help="decode backend, as the DataLoader takes it (default: %(default)s)")
    add("--seed", type=int, default=0, help="of order, weights and simulation (default: %(default)s)")
    add("--loader-seconds", type=float, default=6.0, help="how long the loader runs alone (default: %(default)s)")
    add("--max-ranks", type=int, default=4096, help="how far the simulation goes (default: %(default)s)")
    add(
        "--strong-batch",
        type=int,
        help="samples that simulated strong scaling shares among all ranks (default: one for each of --max-ranks)",
    )
    add("--ranks-per-host", type=int, default=1, help="ranks that share a host like this one (default: %(default)s)")
    add("--straggler-share", type=float, default=0.01, help="share of ranks that are slow (default: %(default)s)")
    add("--straggler-slowdown", type=float, default=0.2, help="how much longer they compute (default: %(default)s)")
    add("--storage-gb-per-s", type=float, default=10.0, help="what the storage gives to all (default: %(default)s)")
    add("--out", type=Path, default=Path("bench-scale"), help="folder for the report (default: %(default)s)")
    add("--no-html", action="store_true", help="write no report.html; needs no matplotlib")


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, simulate, report; runs that were done before an interruption are reported, as partial."""
    from fuelrail.bench.report.files import write_report
    from fuelrail.bench.studies.scale.run import ScalePlan

    ranks = _check(arguments)
    records: Path = arguments.out / "records"
    plan = ScalePlan(arguments, ranks, records)
    prepare_folder(arguments.out, html=not arguments.no_html)
    records.mkdir(exist_ok=True)
    reports: list[Report] = []
    cut_off, interrupted, fit = None, False, None
    console = Console(stderr=True)
    try:
        for count in ranks:
            made = plan.measure(count)
            reports += made.reports
            interrupted = made.interrupted
            if made.cut_off is not None:
                cut_off = f"{count} ranks: {made.cut_off}"
                break
        if cut_off is None:
            with console.status("the loader alone"):
                fit = plan.fit(reports, arguments.loader_seconds)
    except KeyboardInterrupt:
        if not reports:
            raise KeyboardInterrupt(NOTHING_MEASURED) from None
        cut_off, interrupted = "the run was interrupted", True
    except FuelrailError as error:
        if not reports:
            raise
        cut_off = str(error)
    report = _report(arguments, plan, reports, fit, cut_off)
    write_report(report, arguments.out, html=not arguments.no_html)
    print_scale_report(report, report_console())
    return exit_code(cut_off, interrupted=interrupted)


def _check(arguments: argparse.Namespace) -> list[int]:
    words = arguments.ranks.split(",")
    if not all(word.isdigit() and int(word) for word in words):
        raise ConfigError(f"--ranks {arguments.ranks!r} must be a list of numbers such as 1,2,4")
    ranks = sorted(set(map(int, words)))
    if ranks[0] != 1:
        raise ConfigError(f"--ranks {arguments.ranks}: efficiency is told against one rank; begin with 1")
    for name in ("batch_size", "steps", "max_ranks", "ranks_per_host", "strong_batch"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be 1 or more")
    for name in ("straggler_share", "straggler_slowdown", "storage_gb_per_s"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be 0 or more")
    if arguments.straggler_share > 1:
        raise ConfigError(f"--straggler-share {arguments.straggler_share} must be 1 or less")
    if not arguments.loader_seconds > 0:
        raise ConfigError(f"--loader-seconds {arguments.loader_seconds:g} must be more than 0")
    return ranks


def _report(
    arguments: argparse.Namespace,
    plan: ScalePlan,
    reports: list[Report],
    fit: Fit | None,
    cut_off: str | None,
) -> ScaleReport:
    from fuelrail.bench.studies.scale.report import Conditions, build_scale_report, make_curves

    conditions = Conditions(
        max_ranks=arguments.max_ranks,
        ranks_per_host=arguments.ranks_per_host,
        slow_share=arguments.straggler_share,
        slow_by=arguments.straggler_slowdown,
        storage_gb_per_s=arguments.storage_gb_per_s,
        seed=arguments.seed,
        strong_batch=arguments.strong_batch,
    )
    points = [point for report in reports if (point := plan.point(report)) is not None]
    too_short = next((report.window.too_short for report in reports if report.window.too_short), None)
    usable = fit if fit is not None and too_short is None and fit.service_ms else None
    curves = [] if usable is None else make_curves(usable, plan.batch_size, plan.global_batch, conditions)
    warnings = merged_warnings([report.warnings for report in reports])
    if too_short is not None:
        warnings.insert(0, f"No figures: {too_short}.")
    elif fit is not None and not fit.service_ms:
        warnings.insert(0, "No simulation: the loader alone made too few batches; give it more --loader-seconds.")
    options = {
        "batch_size": plan.batch_size, "global_batch": plan.global_batch, "steps": arguments.steps,
        "warmup": arguments.warmup, "workers": arguments.workers, "decoder": arguments.decoder,
        **msgspec.to_builtins(conditions),
    }  # fmt: skip
    return build_scale_report(
        machine=reports[0].machine,
        dataset=reports[0].dataset,
        accelerator=reports[0].accelerator,
        options=options,
        runs=points,
        fit=usable,
        curves=curves,
        cut_off=cut_off,
        warnings=warnings,
        seed=arguments.seed,
    )


def merged_warnings(warnings: Sequence[Sequence[str]]) -> list[str]:
    """The runs' warnings, each once: those that differ in figures alone are one, in the first run's words."""
    alike: dict[str, list[str]] = {}
    for warning in (warning for run in warnings for warning in run):
        alike.setdefault(re.sub(r"\d[\d.,]*", "#", warning), []).append(warning)
    return sorted(
        found[0]
        if len(set(found)) == 1
        else f"{found[0]} (So in {len(found)} of {len(warnings)} runs, with other figures.)"
        for found in alike.values()
    )


def print_scale_report(report: ScaleReport, console: Console) -> None:
    """The figures as text."""
    from fuelrail.bench.studies.scale.markdown import CURVES_HEADER, MEASURED_HEADER, curve_rows, measured_rows

    if report.cut_off:
        console.print(f"[bold]PARTIAL:[/bold] {report.cut_off}", highlight=False)
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
