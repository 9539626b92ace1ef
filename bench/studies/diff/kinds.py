"""The kinds of reports: which schema and version each has, how one is read, and the schemas as documents.

A report says ``schema`` and ``version``. Reading checks both, and every field's presence and type. The version goes up
with any change of a field's name, type or meaning. ``python -m fuelrail.bench.studies.diff.kinds FOLDER`` writes the
JSON Schemas; ``make docs`` puts them on the site.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from fuelrail.bench.report.files import load_report_of, read_report
from fuelrail.bench.studies.compare import report as compare_report
from fuelrail.bench.studies.compare.report import CompareReport
from fuelrail.bench.studies.diagnose import report as diagnose_report
from fuelrail.bench.studies.diagnose.report import DiagnoseReport
from fuelrail.bench.studies.diff.changes import Comparable
from fuelrail.bench.studies.loader import report as loader_report
from fuelrail.bench.studies.loader.report import LoaderReport
from fuelrail.bench.studies.scale import report as scale_report
from fuelrail.bench.studies.scale.report import ScaleReport
from fuelrail.bench.studies.train import report as train_report
from fuelrail.bench.studies.train.report import Report
from fuelrail.pipeline.errors import ConfigError

AnyReport = Comparable | DiagnoseReport


class Kind(NamedTuple):
    """One kind of report."""

    schema: str
    version: int
    type: type[AnyReport]


KINDS = {
    kind.schema: kind
    for kind in (
        Kind(train_report.SCHEMA, train_report.VERSION, Report),
        Kind(loader_report.SCHEMA, loader_report.VERSION, LoaderReport),
        Kind(compare_report.SCHEMA, compare_report.VERSION, CompareReport),
        Kind(scale_report.SCHEMA, scale_report.VERSION, ScaleReport),
        Kind(diagnose_report.SCHEMA, diagnose_report.VERSION, DiagnoseReport),
    )
}


def load_comparable(path: Path) -> Comparable:
    """Read a report that can be compared with another of its kind.

    Raises ConfigError for other files, other versions, reports without figures, and diagnoses.
    """
    raw = read_report(path)
    schema = raw.get("schema") if isinstance(raw, dict) else None
    kind = KINDS.get(schema) if isinstance(schema, str) else None
    if kind is None:
        raise ConfigError(f"'{path}' has schema {schema!r}; known are {', '.join(KINDS)}")
    report = load_report_of(path, kind.type, kind.schema, kind.version)
    if isinstance(report, DiagnoseReport):
        raise ConfigError(f"'{path}' is a diagnosis: compare the reports of its runs, in the folders beside it")
    if isinstance(report, (Report, LoaderReport)) and report.figures is None:
        raise ConfigError(f"report '{path}' has no figures to compare: its run was too short")
    return report


def json_schema(kind: Kind) -> bytes:
    """Return the JSON Schema of a kind as a document."""
    document = msgspec.json.schema(kind.type)
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.schema, **document}
    return msgspec.json.format(msgspec.json.encode(document, order="deterministic"), indent=1) + b"\n"


def main(arguments: Sequence[str]) -> int:
    """Write the schemas of all kinds into a folder, as ``SCHEMA-vVERSION.json``."""
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS.values():
        (folder / f"{kind.schema}-v{kind.version}.json").write_bytes(json_schema(kind))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
