"""The command line: ``fuelrail WORD ...`` and ``python -m fuelrail WORD ...``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from fuelrail import __version__
from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.pipeline.cli import Command


class _Entry(NamedTuple):
    module: str
    help: str


# A folder's commands are imported only when used: `fuelrail shard` must not wait for torch.
_COMMANDS: dict[str, _Entry] = {
    "synth": _Entry("fuelrail.sharding.commands", "render a synthetic multi-camera world as nuScenes v1.0 tables"),
    "shard": _Entry("fuelrail.sharding.commands", "make a Fuelrail dataset of a source"),
    "reshard": _Entry("fuelrail.sharding.commands", "merge, split, shuffle or recompress datasets, or append to one"),
    "verify": _Entry("fuelrail.sharding.commands", "check every byte of a dataset"),
    "inspect": _Entry("fuelrail.sharding.commands", "show a dataset's manifest or one sample's members"),
    "view": _Entry("fuelrail.loaders.commands", "draw a sample's cameras and boxes as a contact sheet"),
    "doctor": _Entry("fuelrail.loaders.commands", "say what is installed to decode with, and what would be better"),
    "order": _Entry(
        "fuelrail.bench.studies.order.command", "show what an order does to a dataset, and how well it shuffles"
    ),
    "top": _Entry("fuelrail.pipeline.cli", "watch loaders while they run: stages, queues, how well they feed"),
    "bench": _Entry("fuelrail.bench.commands", "measure loaders and training runs"),
}


def _load(word: str) -> Command:
    command: Command = importlib.import_module(_COMMANDS[word].module).COMMANDS[word]
    return command


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {word:<{width}}  {entry.help}" for word, entry in _COMMANDS.items()]
    return "commands:\n" + "\n".join(lines) + "\n\n`fuelrail COMMAND --help` tells more."


class _OutputClosed(BaseException):
    """The reader of standard output has gone.

    Not an OSError: code that writes files while it prints would report the pipe as a file that cannot be written.
    """


class _Output:
    """Standard output that raises _OutputClosed where the real one raises BrokenPipeError."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - a text stream, or what a test puts in its place
        self._inner = inner

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._inner, name)

    def write(self, text: str) -> int:
        """Write text."""
        try:
            return int(self._inner.write(text))
        except BrokenPipeError:
            raise _OutputClosed from None

    def flush(self) -> None:
        """Flush."""
        try:
            self._inner.flush()
        except BrokenPipeError:
            raise _OutputClosed from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    0 done, 1 found something wrong, 2 could not be done, 130 interrupted, 141 the reader of the output has gone.
    """
    output = sys.stdout
    sys.stdout = _Output(output)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except (_OutputClosed, BrokenPipeError):
        # The reader has seen enough, as in `fuelrail inspect OUT | head`. What is still in the buffer must not raise
        # once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        return 141
    finally:
        sys.stdout = output


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    top = argparse.ArgumentParser(
        prog="fuelrail",
        description="Deterministic multi-camera shards, and a loader that keeps every GPU fed.",
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fuelrail {__version__}")
    top.add_argument("command", choices=list(_COMMANDS), metavar="COMMAND")
    word = top.parse_args(arguments[:1]).command
    try:
        command = _load(word)
        parser = argparse.ArgumentParser(prog=f"fuelrail {word}", description=command.help)
        command.configure(parser)
        return command.run(parser.parse_args(arguments[1:]))
    except FuelrailError as error:
        print(f"fuelrail: error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt as interrupt:
        print(" ".join(["fuelrail: interrupted", *map(str, interrupt.args)]), file=sys.stderr)  # noqa: T201
        return 130


if __name__ == "__main__":
    sys.exit(main())
