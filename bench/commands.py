"""``fuelrail bench WORD``: the harness on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench import compare_command, diagnose_command, diff_command, loader_command, scale_command, train_command
from fuelrail.bench.interrupts import sigterm_interrupts
from fuelrail.pipeline.command import Command

if TYPE_CHECKING:
    import argparse


_WORDS = {
    "train": train_command,
    "loader": loader_command,
    "compare": compare_command,
    "scale": scale_command,
    "diagnose": diagnose_command,
    "diff": diff_command,
}


def _configure(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    for word, module in _WORDS.items():
        parser_of_word = words.add_parser(word, help=module.HELP, description=module.DESCRIPTION)
        module.configure(parser_of_word)
        parser_of_word.set_defaults(run_word=module.run)


def _run(arguments: argparse.Namespace) -> int:
    with sigterm_interrupts():
        code: int = arguments.run_word(arguments)
    return code


COMMANDS = {"bench": Command("measure loaders and training runs", _configure, _run)}
