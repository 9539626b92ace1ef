"""The sharding benchmark runs: every candidate does its work on the same files."""

from __future__ import annotations

import json

import pytest

from fuelrail.bench.micro import sharding

pytestmark = pytest.mark.slow


def test_quick_run_writes_a_whole_report(tmp_path, capsys):
    out = tmp_path / "sharding.json"
    assert sharding.main(["--quick", "--cpus", "1", "--dir", str(tmp_path), "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [comparison["title"] for comparison in report["comparisons"]] == list(sharding.CASES)
    for comparison in report["comparisons"]:
        names = [entry["name"] for entry in comparison["entries"]]
        assert {"webdataset.ShardWriter", "fuelrail shard, the whole command", "floor: with SHA-256 and XXH3"} <= set(
            names
        )
        assert not set(names) & set(sharding.CASES[comparison["title"]].leave_out)
        for figures in ("mb_per_s", "cpu_s_per_gb"):
            assert set(report[figures][comparison["title"]]) == set(names)
    assert list(report["num_files"].values()) == [6 * 6, 6 * 7, 6 * 6, 6 * 6]
    assert set(report["share_of_floor"]) == set(report["commits"]) == set(sharding.CASES)
    assert all(0 < low <= middle <= high for low, middle, high in report["share_of_floor"].values())
    assert report["num_cpus"] == 1
    assert "MB/s" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["sharding.json"]


def test_a_case_measured_again_leaves_the_others_in_the_report(tmp_path):
    first, *_, last = sharding.CASES
    arguments = ["--quick", "--cpus", "1", "--dir", str(tmp_path), "--out", str(tmp_path / "sharding.json")]
    reports = []
    for case in (last, first, first):
        assert sharding.main([*arguments, "--case", case]) == 0
        reports.append(json.loads((tmp_path / "sharding.json").read_text()))
    assert [list(report["mb_per_s"]) for report in reports] == [[last], [last, first], [last, first]]
    assert [comparison["title"] for comparison in reports[2]["comparisons"]] == [first, last]
    assert reports[2]["mb_per_s"][last] == reports[0]["mb_per_s"][last]
    assert reports[2]["mb_per_s"][first] != reports[1]["mb_per_s"][first]

    (tmp_path / "sharding.json").write_text((tmp_path / "sharding.json").read_text().replace('"cpu": "', '"cpu": "no '))
    assert sharding.main([*arguments, "--case", last]) == 0
    assert list(json.loads((tmp_path / "sharding.json").read_text())["mb_per_s"]) == [last]  # another machine's go


def test_more_cpus_than_there_are(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sharding.main(["--quick", "--cpus", "100000", "--dir", str(tmp_path)])
    assert "--cpus 100000: there are" in capsys.readouterr().err
