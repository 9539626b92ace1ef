"""What a folder hands to the command line: one `Command` for each word of ``fuelrail WORD``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


class Command(NamedTuple):
    """One command: its one-line help, the function that declares its arguments, and the one that runs it.

    ``run`` returns the process's exit code. What the user can mend is raised as a
    :class:`fuelrail.pipeline.errors.FuelrailError`; the entry point prints it as one sentence.
    """

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 shard``, ``2,000 shards``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
