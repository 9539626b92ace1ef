"""``fuelrail bench diagnose``: the same training run as it is and with things left out, and what that says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from fuelrail.bench.diagnosis import Diagnosis, Evidence, diagnose
from fuelrail.bench.files import REPORT_HTML, REPORT_JSON, prepare_folder, publish_json
from fuelrail.bench.occupancy import MIN_MEASURED_STEPS
from fuelrail.bench.remedies import Trial, Tried, best, judge, trials
from fuelrail.bench.shard_probe import shard_scaling
from fuelrail.bench.train_command import configure_run
from fuelrail.bench.train_report import save_report
from fuelrail.bench.train_run import TrainRun, measure_all
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.remote import is_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from fuelrail.bench.train_report import Report
    from fuelrail.bench.trainer.settings import LeaveOut, TrainSettings

HELP = "find out what bounds a training run by leaving things out, and try what may help"
DESCRIPTION = (
    "Runs `bench train` as it is, then with batches from memory, without reading, decompressing, decoding, copying, "
    "without the all-reduce, and once more as it is; the differences say what bounds the run and what lifting it would "
    "gain. Takes the arguments of `bench train`, which hold for each run."
)
_AS_IT_IS, _AGAIN = "as-it-is", "as-it-is-again"


class DiagnosisReport(msgspec.Struct, frozen=True, kw_only=True):
    """The file: the diagnosis and what was tried; each run's own report lies in a folder beside it."""

    schema: str
    version: int
    diagnosis: Diagnosis
    tried: list[Tried] | None
    runs: dict[str, str]
    warnings: list[str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench diagnose``."""
    configure_run(parser)
    parser.add_argument("--apply", action="store_true", help="try the settings that may help, and say what came of it")
    parser.set_defaults(out=Path("bench-diagnose"))


def run(arguments: argparse.Namespace) -> int:
    """Run, compare, tell, try. Raises FuelrailError if a run is cut off or too short: it would show nothing."""
    num_measured = None if arguments.steps is None else arguments.steps - arguments.warmup
    if num_measured is not None and num_measured < MIN_MEASURED_STEPS:
        raise ConfigError(
            f"--steps {arguments.steps} and --warmup {arguments.warmup} leave {num_measured} steps to measure; "
            f"{MIN_MEASURED_STEPS} are needed"
        )
    result = examine(arguments)
    publish_json(arguments.out / REPORT_JSON, result)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n")
    else:
        _print(result, Console(soft_wrap=True))
        told = f"\nwritten: {arguments.out / REPORT_JSON}, and each run's report beside it"
        Console(soft_wrap=True).print(told, highlight=False)
    return 0


def examine(arguments: argparse.Namespace, **changes: Any) -> DiagnosisReport:  # noqa: ANN401
    """Make the runs and judge them; with ``arguments.apply`` try what may help.

    ``changes`` replaces fields of every run's settings.
    """
    out: Path = arguments.out
    first = TrainRun(arguments, out / _AS_IT_IS / "records", **changes)
    left_out = {f"without-{name}": name for name in _what_to_leave_out(first.settings, arguments.ranks)}
    runs = {
        _AS_IT_IS: first,
        **{name: TrainRun(arguments, out / name / "records", (what,), **changes) for name, what in left_out.items()},
        _AGAIN: TrainRun(arguments, out / _AGAIN / "records", **changes),
    }
    prepare_folder(out, html=not arguments.no_html)
    reports = _measure(runs, arguments)
    evidence = Evidence(
        as_it_is=reports[_AS_IT_IS],
        without={what: reports[name] for name, what in left_out.items()},
        again=reports[_AGAIN],
        is_remote=is_url(arguments.dataset),
    )
    diagnosis = diagnose(evidence)
    if diagnosis.bound in ("network", "storage"):
        scaling = shard_scaling(first.settings.dataset, first.settings.split, storage=first.settings.storage)
        diagnosis = diagnose(evidence._replace(shard_scaling=scaling))
    tried = None
    if arguments.apply:
        tried, more = _try(diagnosis, reports[_AS_IT_IS], first.settings, arguments, changes)
        reports |= more
    return DiagnosisReport(
        schema="fuelrail-bench-diagnose",
        version=2,
        diagnosis=diagnosis,
        tried=tried,
        runs={name: f"{name}/{REPORT_JSON}" for name in reports},
        warnings=reports[_AS_IT_IS].warnings,
    )


def _what_to_leave_out(settings: TrainSettings, num_ranks: int) -> list[LeaveOut]:
    """What a run has, it can be run without; on a GPU the copy and the launches show by themselves."""
    found: list[LeaveOut] = ["loading", "storage", "decompression", "decode"]
    if settings.transform is not None:
        found.append("transform")
    if settings.profile is not None and settings.profile.copy_gb_per_s is not None:
        found.append("copy")
    if settings.profile is not None and settings.profile.launch_us:
        found.append("launches")
    if num_ranks > 1:
        found.append("all-reduce")
    return found


def _measure(runs: dict[str, TrainRun], arguments: argparse.Namespace) -> dict[str, Report]:
    for name in runs:
        prepare_folder(arguments.out / name, html=not arguments.no_html)
    reports, outcome = measure_all(list(runs.values()))
    if outcome.interrupted:
        raise KeyboardInterrupt
    for name, report in zip(runs, reports, strict=False):
        if report.cut_off is not None or report.figures is None:
            raise FuelrailError(f"the run '{name}' shows nothing: {report.cut_off or report.window.too_short}")
        save_report(report, arguments.out / name / REPORT_JSON)
        if not arguments.no_html:
            from fuelrail.bench.train_page import save_html  # matplotlib, only where a page is wanted

            save_html(report, arguments.out / name / REPORT_HTML)
    return dict(zip(runs, reports, strict=True))


def _try(
    diagnosis: Diagnosis,
    as_it_is: Report,
    settings: TrainSettings,
    arguments: argparse.Namespace,
    changes: dict[str, Any],
) -> tuple[list[Tried], dict[str, Report]]:
    """Run what may help, behind one more run as it is: the machine may have drifted since the first."""
    facts = as_it_is.dataset
    found = trials(diagnosis.bound, settings, num_shards=facts.num_shards, num_ranks=arguments.ranks, out=arguments.out)
    if not found:
        return [], {}
    out: Path = arguments.out
    plan: list[tuple[str, Trial]] = []
    for number, trial in enumerate(found):
        plan += [
            (f"trial-{number}{'-first-time' if first else ''}", trial) for first in ((1, 0) if trial.twice else (0,))
        ]
    runs = {"before-trials": TrainRun(arguments, out / "before-trials" / "records", **changes)}
    runs |= {name: TrainRun(arguments, out / name / "records", **{**changes, **trial.changes}) for name, trial in plan}
    reports = _measure(runs, arguments)
    # A cold cache is warm by now: there the first run of all is what a trial is held against.
    base = as_it_is if diagnosis.bound == "cold cache" else reports["before-trials"]
    return [judge(trial, base, reports[f"trial-{number}"]) for number, trial in enumerate(found)], reports


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
            "as it is, again" if entry.left_out == "again" else f"without {entry.left_out}",
            f"{entry.step_ms:.2f}",
            f"{entry.gain:+.1%}",
            f"{entry.gain_low:+.1%} to {entry.gain_high:+.1%}",
        )
    console.print(table)
    for line in told(result.tried):
        console.print(line, highlight=False)
    for warning in result.warnings:
        console.print(f"warning: {warning}", highlight=False)


def told(tried: Sequence[Tried] | None) -> list[str]:
    """What came of the trials, a line each; None: nothing was to be tried."""
    if tried is None:
        return []
    if not tried:
        return ["tried nothing: no setting of this command lifts that bound; see the advice"]
    lines = []
    for entry in tried:
        verdict = "helps" if entry.helps else "makes no difference" if entry.gain_high > 0 else "is slower"
        lines.append(
            f"tried {entry.options}: {verdict}, {entry.samples_per_s:.1f} samples/s, {entry.gain:+.1%} "
            f"({entry.gain_low:+.1%} to {entry.gain_high:+.1%})"
        )
    winner = best(list(tried))
    lines.append("nothing tried helps; see the advice" if winner is None else f"use: {winner.options}")
    return lines
