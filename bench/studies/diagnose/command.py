"""``fuelrail bench diagnose``: the same training run as it is and with things left out, and what that says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from fuelrail.bench.measure.limits import shard_scaling
from fuelrail.bench.measure.occupancy import MIN_MEASURED_STEPS
from fuelrail.bench.measure.processes import NOTHING_MEASURED, exit_code
from fuelrail.bench.report.files import REPORT_JSON, created_now, prepare_folder, write_report
from fuelrail.bench.studies.diagnose.judge import Diagnosis, Evidence, Round, diagnose
from fuelrail.bench.studies.diagnose.report import (
    RUNS_HEADER,
    SCHEMA,
    VERSION,
    DiagnoseReport,
    RunMade,
    Trial,
    Tried,
    conclusion,
    headline,
    judge,
    run_rows,
    trials,
    tried_rows,
)
from fuelrail.bench.studies.train.command import configure_run
from fuelrail.bench.studies.train.run import TrainRun, measure_all
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.storage.filesystem import is_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from fuelrail.bench.studies.train.report import Report
    from fuelrail.bench.trainer.settings import LeaveOut, TrainSettings

HELP = "find out what bounds a training run by leaving things out, and try what may help"
DESCRIPTION = (
    "Runs `bench train` as it is, then with batches from memory, without reading, decompressing, decoding, copying, "
    "without the all-reduce, and once more as it is; the differences say what bounds the run and what lifting it would "
    "gain. Writes report.json, report.md and report.html. Takes the arguments of `bench train`, for each run."
)
_AS_IT_IS, _AGAIN = "as-it-is", "as-it-is-again"


class _CutOff(Exception):  # noqa: N818 - a reason to stop, no error of the program
    """Not all runs could be made."""

    def __init__(self, reason: str, *, interrupted: bool) -> None:
        super().__init__(reason)
        self.interrupted = interrupted


class Examined(NamedTuple):
    """What came of an examination; ``interrupted``: somebody asked for its end."""

    report: DiagnoseReport
    interrupted: bool


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench diagnose``."""
    configure_run(parser)
    parser.add_argument("--apply", action="store_true", help="try the settings that may help, and say what came of it")
    parser.add_argument(
        "--max-rounds",
        type=int,
        default=5,
        metavar="N",
        help="make all runs again, up to this number of rounds, while their differences are not told apart from the "
        "noise of a repeat (default: %(default)s; 1: never)",
    )
    parser.set_defaults(out=Path("bench-diagnose"))


def run(arguments: argparse.Namespace) -> int:
    """Run, compare, tell, try. Raises FuelrailError if a run is too short: it would show nothing."""
    if arguments.max_rounds < 1:
        raise ConfigError(f"--max-rounds {arguments.max_rounds} must be 1 or more")
    num_measured = None if arguments.steps is None else arguments.steps - arguments.warmup
    if num_measured is not None and num_measured < MIN_MEASURED_STEPS:
        raise ConfigError(
            f"--steps {arguments.steps} and --warmup {arguments.warmup} leave {num_measured} steps to measure; "
            f"{MIN_MEASURED_STEPS} are needed"
        )
    report, interrupted = examine(arguments)
    written = write_report(report, arguments.out, html=not arguments.no_html)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    else:
        _print(report, Console(soft_wrap=True))
        told = f"\nwritten: {', '.join(map(str, written))}, and each run's report in a folder beside them"
        Console(soft_wrap=True).print(told, highlight=False)
    return exit_code(report.cut_off, interrupted=interrupted)


def examine(arguments: argparse.Namespace, **changes: Any) -> Examined:  # noqa: ANN401
    """Make the runs and judge them; with ``arguments.apply`` try what may help.

    ``changes`` replaces fields of every run's settings. Where not all runs could be made, the report says so and
    holds those that were; raises FuelrailError or KeyboardInterrupt if there are none.
    """
    out: Path = arguments.out
    first = TrainRun(arguments, out / _AS_IT_IS / "records", **changes)
    left_out = {f"without-{name}": name for name in _what_to_leave_out(first.settings, arguments.ranks)}

    def round_(prefix: str) -> dict[str, TrainRun]:
        plan: dict[str, tuple[LeaveOut, ...]] = {_AS_IT_IS: (), **{n: (w,) for n, w in left_out.items()}, _AGAIN: ()}
        return {
            prefix + name: TrainRun(arguments, out / (prefix + name) / "records", what, **changes)
            for name, what in plan.items()
        }

    runs = round_("")
    prepare_folder(out, html=not arguments.no_html)
    made: dict[str, Report] = {}
    diagnosis, tried, cut_off, interrupted = None, None, None, False
    try:
        _measure(runs, arguments, made)
        num_rounds = 1
        diagnosis = _judge(made, left_out, first.settings, num_rounds, is_remote=is_url(arguments.dataset))
        while diagnosis.bound == "not told apart" and num_rounds < arguments.max_rounds:
            num_rounds += 1
            _measure(round_(_prefix(num_rounds)), arguments, made)
            diagnosis = _judge(made, left_out, first.settings, num_rounds, is_remote=is_url(arguments.dataset))
        if arguments.apply:
            tried = _try(diagnosis, made, first.settings, arguments, changes)
    except _CutOff as error:
        if not made:
            if error.interrupted:
                raise KeyboardInterrupt(NOTHING_MEASURED) from error
            raise FuelrailError(f"no run was made whole: {error}") from error
        cut_off, interrupted = str(error), error.interrupted
    except KeyboardInterrupt:
        if not made:
            raise KeyboardInterrupt(NOTHING_MEASURED) from None
        cut_off, interrupted = "the run was interrupted", True
    return Examined(_report(made, diagnosis, tried, cut_off), interrupted)


def _prefix(number: int) -> str:
    """What the folders of a round's runs begin with; the first round's with nothing."""
    return "" if number == 1 else f"round-{number}-"


def _judge(
    made: Mapping[str, Report],
    left_out: Mapping[str, LeaveOut],
    settings: TrainSettings,
    num_rounds: int,
    *,
    is_remote: bool,
) -> Diagnosis:
    more = [
        Round(
            made[prefix + _AS_IT_IS],
            {what: made[prefix + name] for name, what in left_out.items()},
            made[prefix + _AGAIN],
        )
        for prefix in map(_prefix, range(2, num_rounds + 1))
    ]
    evidence = Evidence(
        as_it_is=made[_AS_IT_IS],
        without={what: made[name] for name, what in left_out.items()},
        again=made[_AGAIN],
        is_remote=is_remote,
        more=more,
    )
    diagnosis = diagnose(evidence)
    if diagnosis.bound in ("network", "storage"):
        scaling = shard_scaling(settings.dataset, settings.split, storage=settings.storage)
        diagnosis = diagnose(evidence._replace(shard_scaling=scaling))
    return diagnosis


def _report(
    made: Mapping[str, Report], diagnosis: Diagnosis | None, tried: list[Tried] | None, cut_off: str | None
) -> DiagnoseReport:
    base = made[_AS_IT_IS]
    runs = []
    for name, report in made.items():
        figures = report.figures
        assert figures is not None, "runs without figures are refused"
        runs.append(
            RunMade(
                name=name,
                report=f"{name}/{REPORT_JSON}",
                step_ms=figures.step_time.mean_ms,
                occupancy=figures.occupancy.mean,
                samples_per_s=figures.throughput.samples_per_s,
            )
        )
    return DiagnoseReport(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        cut_off=cut_off,
        machine=base.machine,
        dataset=base.dataset,
        accelerator=base.accelerator,
        options=base.options,
        num_ranks=base.num_ranks,
        diagnosis=diagnosis,
        tried=tried,
        runs=runs,
        warnings=base.warnings,
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


def _measure(runs: dict[str, TrainRun], arguments: argparse.Namespace, made: dict[str, Report]) -> None:
    """Make the runs and add their reports to ``made``, each written into its folder; raises _CutOff."""
    for name in runs:
        prepare_folder(arguments.out / name, html=not arguments.no_html)
    reports, cut_off, interrupted = measure_all(list(runs.values()))
    for name, report in zip(runs, reports, strict=False):
        write_report(report, arguments.out / name, html=not arguments.no_html)
        if report.cut_off is not None:
            raise _CutOff(f"the run '{name}': {report.cut_off}", interrupted=interrupted)
        if report.figures is None:
            raise FuelrailError(f"the run '{name}' shows nothing: {report.window.too_short}")
        made[name] = report
    if cut_off is not None:
        raise _CutOff(f"the runs after '{list(runs)[len(reports) - 1]}': {cut_off}", interrupted=interrupted)


def _try(
    diagnosis: Diagnosis,
    made: dict[str, Report],
    settings: TrainSettings,
    arguments: argparse.Namespace,
    changes: dict[str, Any],
) -> list[Tried]:
    """Run what may help, behind one more run as it is: the machine may have drifted since the first."""
    facts, out = made[_AS_IT_IS].dataset, arguments.out
    found = trials(diagnosis.bound, settings, num_shards=facts.num_shards, num_ranks=arguments.ranks, out=out)
    if not found:
        return []
    plan: list[tuple[str, Trial]] = []
    for number, trial in enumerate(found):
        plan += [
            (f"trial-{number}{'-first-time' if first else ''}", trial) for first in ((1, 0) if trial.twice else (0,))
        ]
    runs = {"before-trials": TrainRun(arguments, out / "before-trials" / "records", **changes)}
    runs |= {name: TrainRun(arguments, out / name / "records", **{**changes, **trial.changes}) for name, trial in plan}
    _measure(runs, arguments, made)
    # A cold cache is warm by now: there the first run of all is what a trial is held against.
    base = made[_AS_IT_IS if diagnosis.bound == "cold cache" else "before-trials"]
    noise = 0.0 if diagnosis.bound == "cold cache" or diagnosis.noise is None else diagnosis.noise
    return [judge(trial, base, made[f"trial-{number}"], noise) for number, trial in enumerate(found)]


def _print(report: DiagnoseReport, console: Console) -> None:
    if report.cut_off is not None:
        console.print(f"[bold]PARTIAL:[/bold] {report.cut_off}", highlight=False)
    diagnosis = report.diagnosis
    if diagnosis is None:
        console.print("No diagnosis: not all runs were made.", highlight=False)
    else:
        console.print(f"[bold]{headline(diagnosis)}[/bold]", highlight=False)
        console.print(f"{diagnosis.finding} {diagnosis.advice}", highlight=False)
        table = Table(*RUNS_HEADER, box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in run_rows(diagnosis):
            table.add_row(*row)
        console.print(table)
    for line in told(report.tried):
        console.print(line, highlight=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False)


def told(tried: Sequence[Tried] | None) -> list[str]:
    """What came of the trials, a line each; None: nothing was to be tried."""
    if tried is None:
        return []
    lines = [
        f"tried {options}: {verdict}, {rate} samples/s, {gain} ({interval})"
        for options, rate, gain, interval, verdict in tried_rows(tried)
    ]
    return [*lines, conclusion(tried)]
