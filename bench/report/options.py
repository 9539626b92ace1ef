"""Shared parts of the harness's commands: the dataset argument, the flags of the output, a
folder for the files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fuelrail.pipeline.cli import PrintOptions
from fuelrail.pipeline.settings import flag

if TYPE_CHECKING:
    import argparse


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

    out: Annotated[str | None, flag("folder for report.json, .md and .html", metavar="FOLDER")] = (
        None
    )

    def folder(self, command: str) -> Path | None:  # noqa: ARG002 - its base class has it
        """Return the folder; None: nothing is written."""
        return None if self.out is None else Path(self.out)


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Declare the argument that names the dataset."""
    parser.add_argument("dataset", metavar="DATASET", help="folder or URL of a Fuelrail dataset")


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
