"""Shared parts of the harness's commands: a command from structs and a function, the dataset
argument, the flags of the output, a folder for the files.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from fuelrail.pipeline.cli import (
    Command,
    PrintOptions,
    add_flags,
    from_flags,
    given_flags,
    print_json,
)
from fuelrail.pipeline.settings import flag

if TYPE_CHECKING:
    import argparse

    import msgspec

DATASET: Final[dict[str, Any]] = {
    "metavar": "DATASET",
    "help": "folder or URL of a Fuelrail dataset",
}
"""The argument that names a dataset."""


def command(
    help: str,  # noqa: A002 - as argparse names it
    run: Callable[..., int],
    *,
    arguments: Mapping[str, Mapping[str, Any]],
    options: Sequence[type[msgspec.Struct]],
    if_given: Collection[type[msgspec.Struct]] = (),
    names: Mapping[str, str] | None = None,
    description: str | None = None,
) -> Command:
    """Return a command that is told once.

    Args:
        help: one line.
        run: gets the arguments, then the options, all by place; returns the exit code.
        arguments: argparse's keywords for each argument that is no flag.
        options: structs, each field of which is a flag (:func:`fuelrail.pipeline.cli.add_flags`).
        if_given: of these, those that are None where the command line has none of their flags.
        names: fields of the options whose flag has another name.
        description: what the command does, for its own help.
    """

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.description = description
        for name, keywords in arguments.items():
            parser.add_argument(name, **keywords)
        for kind in options:
            add_flags(parser, kind, names=names)

    def run_command(args: argparse.Namespace) -> int:
        values: list[Any] = [getattr(args, name) for name in arguments]
        for kind in options:
            is_left_out = kind in if_given and not given_flags(args, kind)
            values.append(None if is_left_out else from_flags(args, kind))
        return run(*values)

    return Command(help, configure, run_command)


def command_of_words(
    help: str,  # noqa: A002 - as argparse names it
    words: Mapping[str, Command],
) -> Command:
    """Return the command whose next word is one of these commands."""

    def configure(parser: argparse.ArgumentParser) -> None:
        parsers = parser.add_subparsers(dest="word", required=True, metavar="WORD")
        for word, entry in words.items():
            parser_of_word = parsers.add_parser(word, help=entry.help)
            entry.configure(parser_of_word)
            parser_of_word.set_defaults(run_word=entry.run)

    def run_command(args: argparse.Namespace) -> int:
        code: int = args.run_word(args)
        return code

    return Command(help, configure, run_command)


def print_text(report: Any, printing: PrintOptions) -> None:
    """Print a report as its text, or as JSON."""
    if printing.json:
        print_json(report)
    else:
        sys.stdout.write(f"{report.as_text().rstrip()}\n")


class OutputOptions(PrintOptions, frozen=True, kw_only=True):
    """Where a command writes its report, and how it prints it."""

    out: Annotated[
        str | None,
        flag(
            "folder for the report (default: bench- and the command, as bench-train)",
            metavar="FOLDER",
        ),
    ] = None
    html: Annotated[bool, flag("write no report.html; then matplotlib is not needed")] = True

    def folder(self, command: str) -> Path | None:
        """Return the folder for the report of ``fuelrail bench COMMAND``."""
        return Path(f"bench-{command}" if self.out is None else self.out)


class PlanOutput(OutputOptions, frozen=True, kw_only=True):
    """Where ``fuelrail plan`` writes its report, if anywhere."""

    out: Annotated[
        str | None,
        flag("folder for report.json, .md and .html", metavar="FOLDER"),
    ] = None

    def folder(self, command: str) -> Path | None:  # noqa: ARG002 - its base class has it
        """Return the folder; None: nothing is written."""
        return None if self.out is None else Path(self.out)


@contextmanager
def output_folder(out: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Yield the folder ``out``, which need not exist; None: a temporary folder, deleted at the
    end.
    """
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="fuelrail-bench-") as folder:
        yield Path(folder)
