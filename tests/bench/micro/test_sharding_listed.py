"""The measurement of manifests and tars runs, and writes its result."""

from __future__ import annotations

import json

import pytest

from fuelrail.bench.micro import sharding_listed

pytestmark = pytest.mark.process


def test_it_measures_each_form(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sharding_listed, "ROUNDS", 1)
    out = tmp_path / "result.json"
    sharding_listed.main(["--rows", "450", "--samples", "3", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["scan"]["rows"] == 450
    assert [rate["form"] for rate in found["rates"]] == list(sharding_listed.FORMS)
    assert capsys.readouterr().out
