"""`fuelrail top`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.pipeline.command import Command
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import argparse


def _configure_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "endpoints", nargs="+", metavar="URL", help="metrics endpoint of a loader, HOST:PORT or URL; one for each rank"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default 1)")
    parser.add_argument("--once", action="store_true", help="show one interval and end")


def _run_top(args: argparse.Namespace) -> int:
    from fuelrail.pipeline import top

    if not 0.05 <= args.interval <= 3600:
        raise ConfigError(f"--interval {args.interval:g} must be 0.05 .. 3600 seconds")
    top.run(args.endpoints, args.interval, once=args.once)
    return 0


COMMANDS = {
    "top": Command(
        "watch loaders while they run: stages, queues, how well the trainer is fed", _configure_top, _run_top
    )
}
