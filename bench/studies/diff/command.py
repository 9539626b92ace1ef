"""``fuelrail bench diff``: two reports compared, with an exit code for CI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from fuelrail.bench.studies.diff.changes import Change

HELP = "compare two reports, and fail if the second is worse beyond noise"
DESCRIPTION = (
    "Compares two reports of `bench train`, `loader`, `compare` or `scale`. Exit code 0: nothing is worse; 1: "
    "something is worse by more than --threshold, and the noise of both does not explain it; 2: no comparison."
)
_WORSE = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench diff``."""
    parser.add_argument("before", metavar="A", type=Path, help="report.json, or the folder that it is in")
    parser.add_argument("after", metavar="B", type=Path, help="the one to be judged")
    parser.add_argument(
        "--threshold", type=float, default=0.02, help="loss that is tolerated, 0.02 for 2%% (default: %(default)s)"
    )
    parser.add_argument(
        "--other-dataset",
        action="store_true",
        help="compare reports of different datasets or splits; refused otherwise",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and judge."""
    from fuelrail.bench.studies.diff.changes import compare, differences, refuse_other_data
    from fuelrail.bench.studies.diff.kinds import load_comparable

    if not 0 <= arguments.threshold < 1:
        raise ConfigError(f"--threshold {arguments.threshold:g} must be 0 or more and below 1")
    before, after = (
        load_comparable(path / "report.json" if path.is_dir() else path) for path in (arguments.before, arguments.after)
    )
    if not arguments.other_dataset:
        refuse_other_data(before, after)
    changes = compare(before, after)
    others = differences(before, after)
    worse = [change.name for change in changes if change.is_worse(arguments.threshold)]
    if arguments.json:
        rows = [change._asdict() | {"ratio": change.ratio, "is_real": change.is_real} for change in changes]
        told = {"changes": rows, "worse": worse, "differences": others}
        text = msgspec.json.format(msgspec.json.encode(told), indent=1)
        sys.stdout.write(text.decode() + "\n")
    else:
        _print(changes, others, worse, arguments.threshold)
    return _WORSE if worse else 0


def _print(changes: Sequence[Change], others: Sequence[str], worse: Sequence[str], threshold: float) -> None:
    console = Console(soft_wrap=True, markup=False)
    for line in (line for line in others if line.startswith(("dataset:", "split:"))):
        console.print(f"warning: the reports are of different data: {line}", highlight=False)
    table = Table("figure", "A", "B", "B / A", "interval", "", box=None, pad_edge=False)
    for column in table.columns[1:5]:
        column.justify = "right"
    for change in changes:
        better = (change.ratio > 1) == change.higher_is_better
        if change.ratio_low is None or change.ratio_high is None:
            interval, said = "none", "not told: fewer than 3 repeats"
        else:
            interval = f"{change.ratio_low:.3f} to {change.ratio_high:.3f}"
            said = "within noise" if not change.is_real else "better" if better else "worse"
        table.add_row(
            change.name,
            f"{change.before:,.4g}",
            f"{change.after:,.4g}",
            f"{change.ratio:.3f}",
            interval,
            said,
        )
    console.print(table)
    for line in others:
        console.print(f"also differs: {line}", highlight=False)
    if worse:
        console.print(f"worse by more than {threshold:.1%}, beyond noise: {', '.join(worse)}", highlight=False)
    else:
        console.print(f"nothing is worse by more than {threshold:.1%}, beyond noise", highlight=False)
