"""The kinds of reports, and what reading refuses."""

from __future__ import annotations

import msgspec
import pytest

from fuelrail.bench.report.files import publish_json
from fuelrail.bench.studies.diff import load_comparable
from fuelrail.pipeline.errors import ConfigError
from support.compare_runs import compare_report_of, contestant
from support.loader_runs import loader_report_of, loader_run
from support.scale_runs import scale_report
from support.watch_records import rank, report_on

REPORTS = {
    "fuelrail-bench-loader": lambda: loader_report_of([loader_run()]),
    "fuelrail-bench-compare": lambda: compare_report_of([contestant("fuelrail:turbo", [900.0])]),
    "fuelrail-bench-scale": scale_report,
    "fuelrail-watch": lambda: report_on(rank(), rank({"forward": 35})),
}


@pytest.mark.parametrize("schema", REPORTS)
def test_what_was_written_is_read(tmp_path, schema):
    report = REPORTS[schema]()
    publish_json(tmp_path / "report.json", report)
    assert load_comparable(tmp_path / "report.json") == report


@pytest.mark.parametrize("schema", REPORTS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 99}, "version 99"),
        ({"schema": "other"}, "schema 'other'"),
        ({"machine": 7}, "machine"),
    ],
    ids=["version", "schema", "field"],
)
def test_what_is_not_the_schemas_is_refused(tmp_path, schema, change, said):
    path = tmp_path / "report.json"
    publish_json(path, {**msgspec.to_builtins(REPORTS[schema]()), **change})
    with pytest.raises(ConfigError, match=said):
        load_comparable(path)


def test_what_is_not_a_report_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("[1, 2]")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ConfigError, match="schema None"):
        load_comparable(tmp_path / "a.json")
    for name in ("b.json", "c.json"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_comparable(tmp_path / name)
