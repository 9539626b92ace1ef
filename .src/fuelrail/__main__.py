"""The command line: ``fuelrail WORD ...`` and ``python -m fuelrail WORD ...``."""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fuelrail import __version__
from fuelrail.pipeline.errors import FuelrailError, needs

if TYPE_CHECKING:
    from fuelrail.pipeline.cli import Command


class _Entry(NamedTuple):
    module: str
    help: str
    extra: str | None = None
    python: str = ""
    """The functions that do the same, as programs write them."""


# A folder's commands are imported only when used: `fuelrail shard` must not wait for torch.
_COMMANDS: dict[str, _Entry] = {
    "synth": _Entry(
        "fuelrail.sharding.commands",
        "render a synthetic multi-camera world as nuScenes v1.0 tables",
        python="fuelrail.synth",
    ),
    "shard": _Entry(
        "fuelrail.sharding.commands",
        "convert a source (such as nuScenes) into a Fuelrail dataset",
        python="fuelrail.shard, fuelrail.check_source (--check)",
    ),
    "sources": _Entry(
        "fuelrail.sharding.commands",
        "list the kinds of sources, and what to install; of one, what it reads and its options",
        python="fuelrail.sources",
    ),
    "reshard": _Entry(
        "fuelrail.sharding.commands",
        "merge, split, reshuffle or recompress datasets, or append to one",
        python="fuelrail.reshard",
    ),
    "verify": _Entry(
        "fuelrail.sharding.commands",
        "check every byte of a dataset against its checksums",
        python="fuelrail.verify",
    ),
    "forget": _Entry(
        "fuelrail.sharding.commands",
        "delete samples or clips from a dataset, its layers and caches",
        python="fuelrail.forget",
    ),
    "inspect": _Entry(
        "fuelrail.bench.commands",
        "show the contents of a dataset or of one sample",
        "fuelrail[torch]",
        python="fuelrail.inspect",
    ),
    "layer": _Entry(
        "fuelrail.sharding.commands",
        "bind a layer to another version of its base",
        python="fuelrail.rebase_layer",
    ),
    "annotate": _Entry(
        "fuelrail.bench.annotation.command",
        "run a model over a dataset and store a layer",
        "fuelrail[torch]",
        python="fuelrail.bench.annotate",
    ),
    "log": _Entry(
        "fuelrail.sharding.commands",
        "show what a dataset was made of, and its tags",
        python="fuelrail.dataset_log",
    ),
    "diff": _Entry(
        "fuelrail.sharding.commands",
        "show how two datasets differ: samples, clips, channels, options",
        python="fuelrail.dataset_diff",
    ),
    "tag": _Entry(
        "fuelrail.sharding.commands", "add, remove or list tags of a dataset", python="fuelrail.tag"
    ),
    "view": _Entry(
        "fuelrail.loaders.commands",
        "draw a sample's cameras and boxes as a contact sheet",
        "fuelrail[torch]",
        python="fuelrail.view",
    ),
    "browse": _Entry(
        "fuelrail.bench.studies.browse.command",
        "look into a dataset in a browser",
        "fuelrail[opencv]",
        python="fuelrail.bench.browse",
    ),
    "doctor": _Entry(
        "fuelrail.loaders.commands",
        "check which decoders are installed and suggest faster ones",
        python="fuelrail.doctor",
    ),
    "order": _Entry(
        "fuelrail.bench.studies.order.describe",
        "show which samples an order selects, and how well it shuffles",
        "fuelrail[bench]",
        python="fuelrail.bench.describe_order",
    ),
    "runs": _Entry(
        "fuelrail.bench.studies.runs.command",
        "read the ledger of a run: what its weights have seen",
        "fuelrail[torch]",
        python="fuelrail.bench.run_history, replay, seen, run_diff, attest",
    ),
    "witness": _Entry(
        "fuelrail.loaders.witness.command",
        "check which rows all ranks of a run saw, or where two runs part",
    ),
    "watch": _Entry(
        "fuelrail.bench.studies.watch.command",
        "run a training command and say what holds its accelerators up, on which rank",
        python="fuelrail.watch",
    ),
    "plan": _Entry(
        "fuelrail.bench.studies.commands",
        "say what fits, how fast it trains, what it costs, and whether the data keeps up",
        "fuelrail[bench]",
        python="fuelrail.bench.plan",
    ),
    "presets": _Entry(
        "fuelrail.pipeline.cli",
        "list the settings that can be given by name, such as bevdet-704x256",
        python="fuelrail.presets",
    ),
    "top": _Entry(
        "fuelrail.pipeline.cli",
        "watch running loaders: stages, queues, and how well they feed the trainer",
        "fuelrail[bench]",
        python="fuelrail.bench.top, serve_metrics (for Prometheus)",
    ),
    "bench": _Entry(
        "fuelrail.bench.commands",
        "measure loaders and training runs",
        "fuelrail[bench]",
        python="fuelrail.bench.bench_train, bench_loader, scale, diagnose, diff",
    ),
}


_EXIT_CODES = """exit codes:
  0    success
  1    the command found a fault, such as a damaged shard
  2    the command could not run: wrong option, missing data, no access
  130  interrupted
  141  broken pipe: the reader of the output closed it"""


def _load(word: str) -> Command:
    command: Command = importlib.import_module(_COMMANDS[word].module).COMMANDS[word]
    return command


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {word:<{width}}  {entry.help}" for word, entry in _COMMANDS.items()]
    return (
        "commands:\n"
        + "\n".join(lines)
        + "\n\n`fuelrail COMMAND --help` lists its options.\n\n"
        + _EXIT_CODES
    )


class _Parser(argparse.ArgumentParser):
    """Names the option that was probably meant in the place of an unknown one."""

    _words: Sequence[str] = ()
    """The arguments that are parsed."""

    def error(self, message: str) -> NoReturn:
        """Print the message to stderr, without the usage, which would hide it; exit with 2."""
        options = [text for action in self._actions for text in action.option_strings]
        if message.startswith("the following arguments are required"):
            words = [word for word in self._words if word.startswith("--")]
            wrong = [
                word
                for word in words
                if not any(text.startswith(word.partition("=")[0]) for text in options)
            ]
            message = f"unrecognized arguments: {' '.join(wrong)}" if wrong else message
        unknown = re.match(r"unrecognized arguments: --([^\s=]+)", message)
        if unknown is not None:
            names = [text[2:] for text in options if text.startswith("--")]
            close = difflib.get_close_matches(unknown[1], names, n=1, cutoff=0.7)
            message += f"; did you mean --{close[0]}?" if close else ""
        number = re.match(r"argument (\S+): invalid (int|float) value: (.+)", message)
        if number is not None:
            kind = "a whole number" if number[2] == "int" else "a number"
            message = f"{number[1]} must be {kind}; got {number[3]}"
        choice = re.match(r"argument (\S+): invalid choice: (.+) \(choose from (.+)\)", message)
        if choice is not None:
            names = re.findall(r"[^\s,']+", choice[3])
            close = difflib.get_close_matches(choice[2].strip("'"), names, n=1)
            message = f"{choice[1]} must be one of {', '.join(names)}; got {choice[2]}"
            message += f"; did you mean {close[0]}?" if close else ""
        self.exit(2, f"`{self.prog} --help` lists all options\n{self.prog}: error: {message}\n")

    def parse_any_order(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse options between positional arguments too: ``shard SOURCE --seed 7 OUT``, where
        OUT is optional. Where an argument is called ``command``, it is the words after ``--``.
        """
        names = [action.dest for action in self._actions]
        if "command" in names and "--" in arguments:
            border = arguments.index("--")
            parsed = self.parse_any_order(arguments[:border])
            parsed.command = list(arguments[border + 1 :])
            return parsed
        self._words = arguments
        # argparse has no other way
        words = next(
            (action for action in self._actions if isinstance(action, argparse._SubParsersAction)),  # noqa: SLF001
            None,
        )
        if words is None:
            return self.parse_intermixed_args(arguments)
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:  # the error is of the subcommand, which knows its options
            words.choices[getattr(parsed, words.dest)].error(
                f"unrecognized arguments: {' '.join(unknown)}"
            )
        return parsed


class _OutputClosed(BaseException):
    """Broken pipe: the reader of standard output closed it.

    Not an OSError: code that writes files while it prints would report the pipe as a file that
    cannot be written.
    """


class _Output:
    """Standard output that raises _OutputClosed where the real one raises BrokenPipeError."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
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
    """Run one command; return the exit code, which is one of `_EXIT_CODES`."""
    output = sys.stdout
    if isinstance(
        output, io.TextIOWrapper
    ):  # a name that the terminal cannot show must not end the command
        output.reconfigure(errors="backslashreplace")
    sys.stdout = _Output(output)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except (_OutputClosed, BrokenPipeError):
        # As in `fuelrail inspect DATASET | head`. The rest of the buffer must not raise again at
        # the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        return 141
    finally:
        sys.stdout = output


def _complete() -> int:
    """Answer the shell function of argcomplete, which runs ``fuelrail`` with the line so far in
    the environment.
    """
    try:
        import argcomplete
    except ImportError:  # the function was registered by another environment
        return 1
    parser = argparse.ArgumentParser(prog="fuelrail")
    words = parser.add_subparsers()
    given = os.environ.get("COMP_LINE", "").split()
    for word, entry in _COMMANDS.items():
        one = words.add_parser(word, help=entry.help)
        if word in given:
            _load(word).configure(one)
    argcomplete.autocomplete(parser)  # ends the process
    return 1


def _run(argv: Sequence[str] | None) -> int:
    if "_ARGCOMPLETE" in os.environ:
        return _complete()
    arguments = list(sys.argv[1:] if argv is None else argv)
    top = argparse.ArgumentParser(
        prog="fuelrail",
        description="Deterministic multi-camera shards, and a loader that keeps every GPU fed.",
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fuelrail {__version__}")
    top.add_argument("command", metavar="COMMAND")
    if not arguments:
        top.print_help()
        return 0
    first = arguments[0].partition("=")[0]
    options = ("--help", "--version")
    is_option = first.startswith("-") and first != "-h"
    if is_option and not any(option.startswith(first) for option in options):
        close = difflib.get_close_matches(first, options, n=1)
        hint = f"did you mean {close[0]}?" if close else "a command comes before its options"
        top.error(f"unknown option '{first}'; {hint}")
    word = top.parse_args(arguments[:1]).command
    if word not in _COMMANDS:
        close = difflib.get_close_matches(word, _COMMANDS, n=1)
        if f"--{word}" in options:
            close = [f"--{word}"]
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(_COMMANDS)}"
        top.error(f"unknown command '{word}'; {hint}")
    try:
        with needs(f"`fuelrail {word}`", extra=_COMMANDS[word].extra):
            if argv is None:
                gc.disable()  # modules stay to the end of the process
            command = _load(word)
            parser = _Parser(prog=f"fuelrail {word}", description=command.help)
            command.configure(parser)
            if argv is None:
                # No collection need look at them, not even the one at the interpreter's end, which
                # takes a twentieth of a second otherwise.
                gc.freeze()
                gc.enable()
            if _COMMANDS[word].python:
                parser.epilog = f"In Python: {_COMMANDS[word].python}."
            return command.run(parser.parse_any_order(arguments[1:]))
    except FuelrailError as error:
        print(f"fuelrail: error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt as interrupt:
        print(" ".join(["fuelrail: interrupted", *map(str, interrupt.args)]), file=sys.stderr)  # noqa: T201
        return 130


if __name__ == "__main__":
    sys.exit(main())
