"""The order benchmark runs, and says what it measured."""

from __future__ import annotations

import json

import pytest

from fuelrail.bench.micro import order

pytestmark = pytest.mark.slow


def test_quick_run_writes_a_whole_report(tmp_path, capsys):
    out = tmp_path / "order.json"
    assert order.main(["--quick", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["num_positions"] == 10_000
    names = [entry["name"] for entry in report["comparisons"][0]["entries"]]
    assert names[0] == "numpy Generator.permutation"
    assert set(report["positions_per_s"]) == set(names)
    assert {(entry["kind"], entry["num_samples"]) for entry in report["memory"]} == {
        (kind, n) for kind in ("shuffled", "windowed") for n in (1_000, 10**9)
    }
    small, large = (entry["peak_rss_bytes"] for entry in report["memory"][:2])
    assert large - small < 50_000_000
    assert "million positions/s" in capsys.readouterr().out


def test_orders_have_the_asked_length():
    assert len(order.make_order("windowed", 10**9)) == 10**9
    assert len(order.make_order("shuffled", 1_000)) == 1_000
