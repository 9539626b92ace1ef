"""Shared parts of the harness's commands: options from keywords, flags for the output, a folder for the files."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from fuelrail.pipeline.settings import Settings, convert

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from rich.console import Console

S = TypeVar("S", bound=Settings)


def make_options(kind: type[S], options: S | None, changes: Mapping[str, object]) -> S:
    """Return the options with ``changes``, all checked; None: the defaults. Raises ConfigError naming the field."""
    values = {} if options is None else msgspec.structs.asdict(options)
    for name, value in changes.items():
        values[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return convert(values, kind, kind.__name__)


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Declare the argument that names the dataset."""
    parser.add_argument("dataset", metavar="DATASET", help="folder or URL of a Fuelrail dataset")


def add_output_flags(parser: argparse.ArgumentParser, folder: str, *, as_json: bool = True) -> None:
    """Declare the flags that say where a report is written, and how it is printed."""
    parser.add_argument(
        "--out", type=Path, default=Path(folder), help="folder for the report (default: %(default)s)", metavar="FOLDER"
    )
    if as_json:
        parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    parser.add_argument("--no-html", action="store_true", help="write no report.html; then matplotlib is not needed")


@contextmanager
def output_folder(out: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Yield the folder ``out``, which need not exist; None: a temporary folder, deleted at the end."""
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="fuelrail-bench-") as folder:
        yield Path(folder)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def print_partial(cut_off: str | None, console: Console) -> None:
    """Print why a report is partial, if it is."""
    if cut_off is not None:
        console.print(f"[bold]PARTIAL:[/bold] {cut_off}", highlight=False)
