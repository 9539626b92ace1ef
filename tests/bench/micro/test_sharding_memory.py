"""The benchmark of plans and of memory runs, and plans what it says."""

from __future__ import annotations

import json

import pytest

from fuelrail.bench.micro import sharding_memory

pytestmark = pytest.mark.slow


def whole(num_samples):
    more = sharding_memory.MORE_SAMPLES
    return [
        ("run", num_samples),
        ("reshard", num_samples),
        ("append", num_samples + more),
        ("listing", num_samples),
    ]


def test_quick_run_writes_a_whole_report(tmp_path, capsys):
    pytest.importorskip("s3fs")
    out = tmp_path / "memory.json"
    assert sharding_memory.main(["--quick", "--dir", str(tmp_path), "--out", str(out)]) == 0
    measured = json.loads(out.read_text())["measured"]
    found = [(entry["what"], entry["count"]) for entry in measured]
    # 125 clips of 40 frames, every third of them at night.
    assert found == [("plan", 5000), ("plan with --select", 83 * 40), *whole(5), *whole(50)]
    assert all(entry["peak_rss_bytes"] >= entry["rss_before_bytes"] > 0 for entry in measured)
    assert "plan, 5,000 samples" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["memory.json"]
