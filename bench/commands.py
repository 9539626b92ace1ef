"""``fuelrail bench WORD``: the harness on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.studies.comm import command as comm_command
from fuelrail.bench.studies.compare import command as compare_command
from fuelrail.bench.studies.diagnose import command as diagnose_command
from fuelrail.bench.studies.diff import command as diff_command
from fuelrail.bench.studies.loader import command as loader_command
from fuelrail.bench.studies.scale import command as scale_command
from fuelrail.bench.studies.train import command as train_command
from fuelrail.pipeline.cli import Command
from fuelrail.pipeline.runtime.workers import sigterm_interrupts

if TYPE_CHECKING:
    import argparse


_WORDS = {
    "train": train_command,
    "loader": loader_command,
    "compare": compare_command,
    "scale": scale_command,
    "diagnose": diagnose_command,
    "diff": diff_command,
    "comm": comm_command,
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
