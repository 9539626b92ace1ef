"""The sharding benchmark runs: every candidate does its work on the same files."""

from __future__ import annotations

import json

from fuelrail.bench.micro import sharding


def test_quick_run_writes_a_whole_report(tmp_path, capsys):
    out = tmp_path / "sharding.json"
    assert sharding.main(["--quick", "--dir", str(tmp_path), "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [comparison["title"] for comparison in report["comparisons"]] == list(report["mb_per_s"])
    for comparison in report["comparisons"]:
        names = [entry["name"] for entry in comparison["entries"]]
        assert {"tarfile", "fuelrail, in this process", "fuelrail, 2 processes"} <= set(names)
        assert set(report["mb_per_s"][comparison["title"]]) == set(names)
    assert report["num_files"] == 3 * 7
    assert "MB/s" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["sharding.json"]
