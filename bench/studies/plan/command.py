"""``fuelrail plan [SCENARIO.yaml]``: arguments, and the plan as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from fuelrail.bench.planner.scenario import PlanOptions
from fuelrail.bench.report.files import prepare_folder
from fuelrail.bench.report.page import as_text, write_report
from fuelrail.bench.studies.plan.page import SWEEP_HEADER, figures, sweep_rows
from fuelrail.bench.studies.plan.run import plan
from fuelrail.pipeline.cli import Command, PrintOptions, add_flags, from_flags, print_json
from fuelrail.pipeline.settings import flag

if TYPE_CHECKING:
    import argparse

    from fuelrail.bench.studies.plan.report import PlanReport

HELP = "say what fits, how fast it trains, what it costs, and whether the data keeps up"


class PlanOutput(PrintOptions, frozen=True, kw_only=True):
    """Where ``fuelrail plan`` writes its report, and how it prints it."""

    out: Annotated[str | None, flag("folder for report.json, .md and .html", metavar="FOLDER")] = None
    html: Annotated[bool, flag("write no report.html; then matplotlib is not needed")] = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail plan``."""
    parser.add_argument(
        "scenario",
        metavar="SCENARIO.yaml",
        nargs="?",
        help="model, cluster and batch: see configs/scenarios; without it --model, --cluster and --global-batch say it",
    )
    for kind in (PlanOptions, PlanOutput):
        add_flags(parser, kind)


def run(arguments: argparse.Namespace) -> int:
    """Plan, write the report's files and print."""
    options, output = from_flags(arguments, PlanOptions), from_flags(arguments, PlanOutput)
    if output.out is not None:
        prepare_folder(Path(output.out), html=output.html)
    found = plan(arguments.scenario, options)
    if output.out is not None:
        write_report(found, Path(output.out), html=output.html)
    if output.json:
        print_json(found)
    else:
        _print(found, Console())
    return 0


def _print(found: PlanReport, console: Console) -> None:
    asked = found.scenario
    console.print(f"{asked.name}: {asked.model} on {found.devices} devices ({found.cluster})", highlight=False)
    rows = Table("strategy", "peak GiB", "samples/s", "why not", box=None, pad_edge=False)
    for one in found.tried:
        fits = one.fails is None and one.peak_gib is not None and one.samples_per_s is not None
        shown = (f"{one.peak_gib:.1f}", f"{one.samples_per_s:,.1f}") if fits else ("", "")
        rows.add_row(one.strategy, *shown, one.fails or "")
    console.print(rows)
    for name, text in figures(found):
        console.print(f"{name}: {text}", highlight=False, soft_wrap=True)
    for curve in found.scaling:
        if curve.points:
            ends = ", ".join(f"{point.devices:,}: {point.efficiency:.0%}" for point in curve.points[-3:])
            console.print(f"{curve.scaling} scaling, {curve.name}: {ends}", highlight=False, soft_wrap=True)
    if found.sweep:
        swept = Table(*SWEEP_HEADER, box=None, pad_edge=False)
        for row in sweep_rows(found):
            swept.add_row(*row)
        console.print(swept)
    for name, why in found.explained.items():
        console.print(f"{name} = {why.formula}; {as_text(why.inputs)}; {why.source}", highlight=False, soft_wrap=True)
    for text in found.assumed:
        console.print(f"assumed: {text}", style="dim", highlight=False, soft_wrap=True)
    for text in found.questions:
        console.print(f"not said: {text}", style="dim", highlight=False, soft_wrap=True)


COMMANDS = {"plan": Command(HELP, configure, run)}
