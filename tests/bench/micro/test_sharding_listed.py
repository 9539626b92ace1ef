"""The measurement of manifests and tars runs, and writes its result."""

from __future__ import annotations

import json

import pytest

from fuelrail.bench.micro import sharding_listed
from support.manifest_world import write_wide
from support.source_world import make_world

pytestmark = pytest.mark.process


def test_it_measures_each_form(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sharding_listed, "ROUNDS", 1)
    out = tmp_path / "result.json"
    sharding_listed.main(["--rows", "450", "--samples", "3", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["scan"]["rows"] == 450
    assert [rate["form"] for rate in found["rates"]] == list(sharding_listed.FORMS)
    assert capsys.readouterr().out


def test_it_measures_scans_of_given_sources(tmp_path):
    root, out = tmp_path / "source", tmp_path / "result.json"
    root.mkdir()
    write_wide(make_world(num_frames=3), root, "parquet")
    sharding_listed.main(["--sources", f"manifest:{root}", "--out", str(out)])
    (found,) = json.loads(out.read_text())["scans"]
    assert (found["kind"], found["frames"], found["cameras"]) == ("manifest", 6, 3)
    assert found["cpu_us_per_frame"] > 0
