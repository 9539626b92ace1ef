"""``fuelrail bench WORD``: the harness on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench import train_command
from fuelrail.pipeline.command import Command

if TYPE_CHECKING:
    import argparse


def _configure(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    train = words.add_parser("train", help=train_command.HELP, description=train_command.DESCRIPTION)
    train_command.configure(train)
    train.set_defaults(run_word=train_command.run)


def _run(arguments: argparse.Namespace) -> int:
    code: int = arguments.run_word(arguments)
    return code


COMMANDS = {"bench": Command("measure loaders and training runs", _configure, _run)}
