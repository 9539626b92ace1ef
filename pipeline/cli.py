"""What a folder hands to the command line: one `Command` for each word of ``fuelrail WORD``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


class Command(NamedTuple):
    """One command: its one-line help, the function that declares its arguments, and the one that runs it.

    ``run`` returns the process's exit code. What the user can fix is raised as a
    :class:`fuelrail.pipeline.errors.FuelrailError`; the entry point prints it as one sentence.
    """

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 shard``, ``2,000 shards``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _configure_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "endpoints", nargs="+", metavar="URL", help="metrics endpoint of a loader, HOST:PORT or URL; one for each rank"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default 1)")
    parser.add_argument("--once", action="store_true", help="show one interval and end")


def _run_top(args: argparse.Namespace) -> int:
    from fuelrail.pipeline.runtime import top

    if not 0.05 <= args.interval <= 3600:
        raise ConfigError(f"--interval {args.interval:g} must be 0.05 .. 3600 seconds")
    top.run(args.endpoints, args.interval, once=args.once)
    return 0


COMMANDS = {
    "top": Command(
        "watch loaders while they run: stages, queues, how well the trainer is fed", _configure_top, _run_top
    )
}
