"""The loader's benchmark runs, and what it reports fits together."""

from __future__ import annotations

import json

import pytest

from fuelrail.bench.micro import loader_overhead

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_overhead(tmp_path, capsys):
    out = tmp_path / "report.json"
    assert loader_overhead.main([str(tmp_path), "--samples", "8", "--rounds", "1", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["share_of_whole"]["whole"] == 1
    assert 0 < report["share_of_whole"]["without decoding"] < 1
    assert report["machine"]["packages"]
    assert "without decoding" in capsys.readouterr().out
