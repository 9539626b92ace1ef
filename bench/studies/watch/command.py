"""``fuelrail watch -- COMMAND``: watches every rank that a command starts, without a line in its
script.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fuelrail.bench.measure.records import rank_path
from fuelrail.bench.report.options import print_text
from fuelrail.bench.studies.watch.report import RECORDS, conclude
from fuelrail.pipeline.cli import Argument, Command, PrintOptions, command, from_flags
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import flag

if TYPE_CHECKING:
    import argparse

FOLDER_VARIABLE = "FUELRAIL_WATCH"
"""Names the folder of the watch to the processes that the command starts."""

TRY_VARIABLE = "FUELRAIL_WATCH_TRY"
"""Set where these shall try remedies."""

FLAGS = {"try_remedies": "try"}
COMMANDS: dict[str, Command] = {}


class WatchOptions(PrintOptions, frozen=True, kw_only=True):
    """Flags of ``fuelrail watch``."""

    out: Annotated[str, flag("folder for records and report", metavar="FOLDER")] = "watch"
    try_remedies: Annotated[
        bool, flag("pause after 40 steps and try what other settings of the loader would bring")
    ] = False


@command(
    COMMANDS,
    Argument("command", "-- COMMAND", "what starts the training, with its arguments", nargs="*"),
    options=["bench.studies.watch.command:WatchOptions"],
)
def run_watch(args: argparse.Namespace) -> int:
    """Run a training command and say what holds its accelerators up, on which rank.

    It records each step of each of its ranks, and gives its verdict at the end, or at Ctrl-C, with
    the share of the time. Without a command it judges the records in --out, such as those of
    several hosts. Exit code: that of the command.
    """
    options = from_flags(args, WatchOptions)
    out = Path(options.out).absolute()
    code = run_watched(args.command, out, options) if args.command else 0
    report = conclude(out)
    if report is None:
        reason = "no step of a training loop was seen" if args.command else "there are no records"
        sys.stderr.write(f"fuelrail watch: no verdict: {reason} in '{options.out}'\n")
        return code or 1
    print_text(report, options)
    sys.stderr.write(f"written: {options.out}\n")
    return code


def run_watched(words: list[str], out: Path, options: WatchOptions) -> int:
    """Run a command whose Python processes record their training loops to a folder, and may try
    remedies; return its exit code.

    Ctrl-C is the command's to answer. Raises ConfigError for a command that does not start.
    """
    for earlier in (out / RECORDS).glob(rank_path(Path(), 0).name.replace("0", "?")):
        earlier.unlink()
    startup = str(Path(__file__).parent / "startup")
    paths = [startup, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        FOLDER_VARIABLE: str(out),
        TRY_VARIABLE: "1" if options.try_remedies else "",
    }
    try:
        process = subprocess.Popen(words, env=environment)
    except OSError as error:
        raise ConfigError(f"cannot run '{words[0]}': {error.strerror or error}") from error
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = process.wait()
    signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code
