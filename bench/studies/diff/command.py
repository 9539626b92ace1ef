"""``fuelrail bench diff``: two reports compared, with an exit code for CI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fuelrail.bench.report.console import print_table, report_console
from fuelrail.bench.studies.diff.compare import Comparison, DiffOptions, diff
from fuelrail.pipeline.cli import Command, PrintOptions, add_flags, from_flags, print_json

if TYPE_CHECKING:
    import argparse

    from fuelrail.bench.studies.diff.changes import Change

_HELP = "compare two reports, and fail if the second is worse beyond noise"
_DESCRIPTION = (
    "Compares two reports of `bench train`, `loader`, `compare` or `scale`. Exit code 0: nothing is worse; 1: "
    "something is worse by more than --threshold, and the noise of both does not explain it; 2: no comparison."
)
_WORSE = 1


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("before", metavar="A", type=Path, help="report.json, or its folder")
    parser.add_argument("after", metavar="B", type=Path, help="the report to judge")
    add_flags(parser, DiffOptions)
    add_flags(parser, PrintOptions)


def _run(arguments: argparse.Namespace) -> int:
    options = from_flags(arguments, DiffOptions)
    found = diff(arguments.before, arguments.after, options)
    if from_flags(arguments, PrintOptions).json:
        rows = [change._asdict() | {"ratio": change.ratio, "is_real": change.is_real} for change in found.changes]
        print_json({"changes": rows, "worse": found.worse, "differences": found.differences})
    else:
        _print(found, options.threshold)
    return _WORSE if found.worse else 0


def _print(found: Comparison, threshold: float) -> None:
    others, worse = found.differences, found.worse
    console = report_console()
    for line in (line for line in others if line.startswith(("dataset:", "split:"))):
        console.print(f"warning: the reports are of different data: {line}")
    print_table(console, ("figure", "A", "B", "B / A", "interval", ""), map(_row, found.changes))
    for line in others:
        console.print(f"also differs: {line}")
    if worse:
        console.print(f"worse by more than {threshold:.1%}, beyond noise: {', '.join(worse)}")
    else:
        console.print(f"nothing is worse by more than {threshold:.1%}, beyond noise")


def _row(change: Change) -> list[str]:
    better = (change.ratio > 1) == change.higher_is_better
    if change.ratio_low is None or change.ratio_high is None:
        interval, verdict = "none", "unknown: fewer than 3 repeats"
    else:
        interval = f"{change.ratio_low:.3f} to {change.ratio_high:.3f}"
        verdict = "within noise" if not change.is_real else "better" if better else "worse"
    return [change.name, f"{change.before:,.4g}", f"{change.after:,.4g}", f"{change.ratio:.3f}", interval, verdict]


DIFF = Command(_HELP, _configure, _run)
