"""The compression benchmark runs, on any dataset, and what it measures adds up."""

from __future__ import annotations

import json

from fuelrail.bench.micro import compression
from support.datasets import build_dataset


def test_it_runs_and_reports(tmp_path, capsys) -> None:
    build_dataset(tmp_path / "tiny", {"train": (8, 8)}, size=(48, 32))
    out = tmp_path / "out.json"
    assert compression.main([str(tmp_path / "tiny"), "--quick", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    lidar, small, whole = report["tables"]
    assert [way["name"] for way in lidar["ways"]] == [
        f"{codec}, level {level}" for codec in ("zstd", "zstd-p20") for level in (1, 3, 9)
    ]
    assert small["ways"][0]["name"] == "zstd, level 3"
    assert [way["name"] for way in whole["ways"]] == ["layout none", "layout member", "layout frame"]
    shares = {way["name"]: way["stored_share"] for way in whole["ways"]}
    assert shares["layout none"] > 1 > shares["layout frame"]  # tar headers and padding, small images
    assert all(way["decode_mb_s"] > 0 for table in report["tables"] for way in table["ways"])
    assert "lidar sweeps: 12, " in capsys.readouterr().out
