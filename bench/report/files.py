"""The header and the files of a report of any kind."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fuelrail.bench.measure.machine import DatasetFacts, MachineFacts
from fuelrail.pipeline.errors import ConfigError, needs
from fuelrail.pipeline.settings import convert
from fuelrail.pipeline.storage.files import published

REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
REPORT_MARKDOWN = "report.md"

_R = TypeVar("_R", bound=msgspec.Struct)

TRACE_JSON = "trace.json"

_MAX_REPORT_BYTES = 256 << 20


class ReportHead(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a report.

    ``schema`` and ``version`` say its kind (:mod:`fuelrail.bench.studies.diff`); ``disturbed`` says
    by how much other processes used the host meanwhile (None: too little to matter, or unknown),
    ``warnings`` why its figures may be wrong.
    """

    schema: str
    version: int
    created: str
    machine: MachineFacts
    options: Any
    warnings: list[str]
    disturbed: str | None = None


class ReportHeader(ReportHead, frozen=True, kw_only=True):
    """The beginning of a report on a dataset.

    ``cut_off`` says why it is partial, and ``interrupted`` whether Ctrl+C or SIGTERM ended it.
    """

    cut_off: str | None
    dataset: DatasetFacts
    options: dict[str, Any]
    interrupted: bool = False


def exit_code(report: ReportHeader) -> int:
    """Return the exit code of a command with a report; print to standard error why a partial one
    is partial.
    """
    if report.cut_off is not None:
        sys.stderr.write(f"fuelrail: error: the report is partial: {report.cut_off}\n")
    if report.interrupted:
        return 130
    return 0 if report.cut_off is None else 1


def created_now() -> str:
    """Return the value of the field ``created``: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def prepare_folder(out: Path, *, html: bool, modules: Sequence[str] = ()) -> None:
    """Make the folder of a report and take an earlier one out of it.

    ``modules``: those of the extra `bench`.

    Raises ConfigError where that cannot be done, where a page is wanted that cannot be drawn, and
    where a module is not installed: before a measurement that would be lost.
    """
    for name in modules:
        with needs("this command", "fuelrail[bench]"):
            importlib.import_module(name)
    if html:
        with needs("report.html (leave it out by --no-html)", "fuelrail[view]"):
            importlib.import_module("matplotlib")
    if re.match(r"\w[\w+.-]+:/", str(out)):
        raise ConfigError(f"--out must be a folder of this machine, got '{out}'")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (REPORT_JSON, REPORT_HTML, REPORT_MARKDOWN):
            (out / name).unlink(missing_ok=True)
        # A folder can be there and still not be writable.
        probe = out / f".{REPORT_JSON}.part"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out '{out}' cannot be written: {error.strerror}") from error


def publish(path: Path, data: bytes) -> None:
    """Write a file by rename; raises ConfigError where that cannot be done."""
    try:
        with published(path) as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"report '{path}' cannot be written: {error.strerror}") from error


def merge_traces(folder: Path, out: Path) -> int:
    """Make one file of the ranks' traces in a folder, for https://ui.perfetto.dev; returns how
    many there are.
    """
    parts = sorted(folder.glob("trace-*.json"))
    events = [event for part in parts for event in msgspec.json.decode(part.read_bytes())]
    # Viewers take events with a time, and descriptions of tracks.
    tracked = [event for event in events if "ts" in event or event.get("ph") == "M"]
    publish(
        out,
        msgspec.json.encode({"traceEvents": tracked, "displayTimeUnit": "ms"}),
    )
    return len(parts)


def publish_json(path: Path, value: object) -> None:
    """Write a value as indented JSON, by rename; raises ConfigError where that cannot be done."""
    publish(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def read_report(path: Path) -> Any:
    """Read a report, given as file or folder, as JSON.

    Raises ConfigError for what is not a regular file, is too large or is not JSON.
    """
    path = path / REPORT_JSON if path.is_dir() else path
    try:
        if not path.is_file():
            reason = "it is not a regular file" if path.exists() else "there is no such file"
            raise ConfigError(
                f"report '{path}' cannot be read: {reason}; give a report.json or its folder"
            )
        if path.stat().st_size > _MAX_REPORT_BYTES:
            raise ConfigError(
                f"report '{path}' cannot be read: it is larger than {_MAX_REPORT_BYTES >> 20} MiB"
            )
        return msgspec.json.decode(path.read_bytes())
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"report '{path}' cannot be read: {error}") from error


def load_report_of(path: Path, kind: type[_R], schema: str, version: int) -> _R:
    """Read a report of one kind, checked against its schema; raises ConfigError for other files
    and other versions.
    """
    raw = read_report(path)
    form = (raw.get("schema"), raw.get("version")) if isinstance(raw, dict) else (None, None)
    if form != (schema, version):
        raise ConfigError(
            f"report '{path}' has schema {form[0]!r} version {form[1]!r}; known: {schema!r} "
            f"version {version}"
        )
    return convert(raw, kind, str(path))


def report_files(out: Path, *, html: bool) -> list[Path]:
    """Return the files that :func:`fuelrail.bench.report.page.write_report` writes."""
    return [
        out / name
        for name in (
            REPORT_JSON,
            REPORT_MARKDOWN,
            *([REPORT_HTML] if html else []),
        )
    ]
