"""``fuelrail bench diagnose``: the same training run as it is and with things left out, and what that says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from fuelrail.bench.diagnosis import Diagnosis, diagnose
from fuelrail.bench.files import REPORT_HTML, REPORT_JSON, prepare_folder, publish_json
from fuelrail.bench.occupancy import MIN_MEASURED_STEPS
from fuelrail.bench.train_command import configure_run
from fuelrail.bench.train_report import save_report
from fuelrail.bench.train_run import TrainRun
from fuelrail.pipeline.errors import ConfigError, FuelrailError

if TYPE_CHECKING:
    import argparse

    from fuelrail.bench.train_report import Report
    from fuelrail.bench.trainer.settings import LeaveOut

HELP = "find out what bounds a training run by leaving things out"
DESCRIPTION = (
    "Runs `bench train` as it is, with batches from memory, and without the all-reduce; the difference says what "
    "bounds the run and what lifting it would gain. Takes the arguments of `bench train`, which hold for each run."
)
_AS_IT_IS = "as-it-is"


class DiagnosisReport(msgspec.Struct, frozen=True, kw_only=True):
    """The file: the diagnosis; each run's own report lies in a folder beside it."""

    schema: str
    version: int
    diagnosis: Diagnosis
    runs: dict[str, str]
    warnings: list[str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench diagnose``."""
    configure_run(parser)
    parser.set_defaults(out=Path("bench-diagnose"))


def run(arguments: argparse.Namespace) -> int:
    """Run, compare, tell. Raises FuelrailError if a run is cut off or too short: it would show nothing."""
    num_measured = None if arguments.steps is None else arguments.steps - arguments.warmup
    if num_measured is not None and num_measured < MIN_MEASURED_STEPS:
        raise ConfigError(
            f"--steps {arguments.steps} and --warmup {arguments.warmup} leave {num_measured} steps to measure; "
            f"{MIN_MEASURED_STEPS} are needed"
        )
    plan: dict[str, tuple[LeaveOut, ...]] = {_AS_IT_IS: (), "without-loading": ("loading",)}
    if arguments.ranks > 1:
        plan["without-all-reduce"] = ("all-reduce",)
    out: Path = arguments.out
    runs = {name: TrainRun(arguments, out / name / "records", left_out) for name, left_out in plan.items()}
    prepare_folder(out, html=not arguments.no_html)
    reports: dict[str, Report] = {}
    for name, training in runs.items():
        prepare_folder(out / name, html=not arguments.no_html)
        report, outcome = training.measure()
        if outcome.interrupted:
            raise KeyboardInterrupt
        if report.cut_off is not None or report.figures is None:
            raise FuelrailError(f"the run '{name}' shows nothing: {report.cut_off or report.window.too_short}")
        save_report(report, out / name / REPORT_JSON)
        if not arguments.no_html:
            from fuelrail.bench.train_page import save_html  # matplotlib, only where a page is wanted

            save_html(report, out / name / REPORT_HTML)
        reports[name] = report
    without = {plan[name][0]: report for name, report in reports.items() if plan[name]}
    result = DiagnosisReport(
        schema="fuelrail-bench-diagnose",
        version=1,
        diagnosis=diagnose(reports[_AS_IT_IS], without),
        runs={name: f"{name}/{REPORT_JSON}" for name in reports},
        warnings=reports[_AS_IT_IS].warnings,
    )
    publish_json(out / REPORT_JSON, result)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n")
    else:
        _print(result, Console(soft_wrap=True))
        told = f"\nwritten: {out / REPORT_JSON}, and each run's report beside it"
        Console(soft_wrap=True).print(told, highlight=False)
    return 0


def _print(result: DiagnosisReport, console: Console) -> None:
    diagnosis = result.diagnosis
    console.print(f"[bold]bound by: {diagnosis.bound}[/bold]", highlight=False)
    console.print(f"{diagnosis.finding} {diagnosis.advice}", highlight=False)
    table = Table("run", "step ms", "faster by", "interval", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("as it is", f"{diagnosis.step_ms:.2f}", "", "")
    for entry in diagnosis.counterfactuals:
        table.add_row(
            f"without {entry.left_out}",
            f"{entry.step_ms:.2f}",
            f"{entry.gain:+.1%}",
            f"{entry.gain_low:+.1%} to {entry.gain_high:+.1%}",
        )
    console.print(table)
    for warning in result.warnings:
        console.print(f"warning: {warning}", highlight=False)
