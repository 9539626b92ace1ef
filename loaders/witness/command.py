"""``fuelrail witness check|diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fuelrail.loaders.witness.judge import Tail  # noqa: TC001 - msgspec reads it
from fuelrail.loaders.witness.witness import check_records, compare_records
from fuelrail.pipeline.cli import Command, PrintOptions, add_flags, from_flags, print_json
from fuelrail.pipeline.settings import NotNegative, flag
from fuelrail.pipeline.text import text_of

if TYPE_CHECKING:
    import argparse


class CheckOptions(PrintOptions, frozen=True, kw_only=True):
    """Flags of ``fuelrail witness check``."""

    expected: Annotated[NotNegative | None, flag("rows of an epoch (default: not known)")] = None
    tail: Annotated[
        Tail | None,
        flag("what may happen to rows that fill no batch (default: ranks may fill it up)"),
    ] = None


def _configure(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    check = words.add_parser("check", help="check the records that all ranks wrote")
    check.add_argument("folder", metavar="FOLDER", help="what `fr.witness(folder=...)` wrote")
    add_flags(check, CheckOptions)
    diff = words.add_parser("diff", help="compare the records of two runs: rows and steps")
    diff.add_argument("folder", metavar="FOLDER", help="records of a run, such as a resumed one")
    diff.add_argument("other", metavar="OTHER", help="records of another, such as an unbroken one")
    add_flags(diff, PrintOptions)


def _run(args: argparse.Namespace) -> int:
    if args.word == "diff":
        lines = compare_records(args.folder, args.other)
        text = text_of(lines) or "each epoch has the same rows at the same steps"
        print_json(lines) if from_flags(args, PrintOptions).json else print(text)  # noqa: T201
        return int(bool(lines))
    options = from_flags(args, CheckOptions)
    reports = check_records(args.folder, expected=options.expected, tail=options.tail)
    text = "\n".join(report.as_text() for report in reports)
    print_json(reports) if options.json else print(text)  # noqa: T201
    return int(any(report.faults for report in reports))


COMMANDS = {
    "witness": Command(
        "check which rows all ranks of a run saw, or where two runs part",
        _configure,
        _run,
    )
}
