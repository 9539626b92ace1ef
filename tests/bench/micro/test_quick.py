"""Each micro-benchmark once on little data: it runs, its candidates do the same work, and its report is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy

from fuelrail.bench.micro import browse, metadata, rate, timing
from fuelrail.bench.micro.chromium import CHROMIUM
from fuelrail.bench.micro.source import CAMERAS, NUM_BOXES
from fuelrail.pipeline.format.index.samples import SampleIndex, write_index
from fuelrail.pipeline.sample.schema import GEOMETRY, META, decode_sample

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def quick(tmp_path, capsys):
    """Run a benchmark; returns its report and what it printed. It leaves nothing else in its folder."""

    def run(main, *words):
        out = tmp_path / "report" / "report.json"
        out.parent.mkdir(exist_ok=True)
        assert not main([*map(str, words), "--out", str(out)])
        assert [path.name for path in out.parent.iterdir()] == ["report.json"]
        return json.loads(out.read_text()), capsys.readouterr().out

    return run


def test_they_run_as_the_pages_print_them(tmp_path):
    """``python -m fuelrail.bench.micro.NAME`` in any folder, without a path of modules."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "fuelrail.bench.micro.metadata", "--help"]
    assert (
        subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=False,
        ).returncode
        == 0
    )


def test_sharding_and_a_case_that_is_measured_again(quick, tmp_path, capsys, monkeypatch):
    _, with_lidar, _, lean = rate.CASES  # the others are these with other lengths and candidates
    monkeypatch.setattr(
        rate,
        "CASES",
        {title: rate.CASES[title] for title in (with_lidar, lean)},
    )
    out = tmp_path / "report"
    out.mkdir()
    words = ["--quick", "--cpus", 1, "--dir", out]
    report, printed = quick(rate.main, *words)
    assert [comparison["title"] for comparison in report["comparisons"]] == list(rate.CASES)
    expected = {
        "webdataset.ShardWriter",
        "fuelrail shard, the whole command",
        "floor: with SHA-256 and XXH3",
    }
    for comparison in report["comparisons"]:
        names = {entry["name"] for entry in comparison["entries"]}
        assert expected <= names
        assert not names & set(rate.CASES[comparison["title"]].leave_out)
        for figures in ("mb_per_s", "cpu_s_per_gb"):
            assert set(report[figures][comparison["title"]]) == names
    assert list(report["num_files"].values()) == [6 * 7, 6 * 6]
    assert set(report["share_of_floor"]) == set(report["commits"]) == set(rate.CASES)
    assert all(0 < low <= middle <= high for low, middle, high in report["share_of_floor"].values())
    assert report["num_cpus"] == 1
    assert "MB/s" in printed

    first, last = rate.CASES
    repeated_report, _ = quick(rate.main, *words, "--case", last)
    assert [comparison["title"] for comparison in repeated_report["comparisons"]] == list(
        rate.CASES
    )
    assert repeated_report["mb_per_s"][first] == report["mb_per_s"][first]
    assert repeated_report["mb_per_s"][last] != report["mb_per_s"][last]
    path = out / "report.json"
    text = path.read_text()
    path.write_text(text.replace('"cpu": "', '"cpu": "no '))
    ours = msgspec.json.decode(text, type=rate.ShardingReport)
    new = msgspec.structs.replace(ours, mb_per_s={last: ours.mb_per_s[last]})
    assert rate._merged(path, new) == new, "figures of another machine are left out"
    with pytest.raises(SystemExit):
        rate.main(["--quick", "--cpus", "100000", "--dir", str(out)])
    assert "--cpus 100000: there are" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.network
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed here")
def test_browse(quick, tmp_path, monkeypatch):
    for name, number in {"NUM_FRAMES": 2, "NUM_STEPS": 1, "NUM_JUMPS": 1}.items():
        monkeypatch.setattr(browse, name, number)
    words = ["--rows", 30, "--rounds", 1, "--dir", tmp_path / "data"]
    report, printed = quick(browse.main, *words)
    folder, s3 = report["cases"]
    assert [(case["place"], case["num_rows"]) for case in (folder, s3)] == [
        ("folder", 30),
        ("s3", 30),
    ]
    assert all(case["first_sample_s"][0] > 0 and case["own_bytes"][0] > 0 for case in (folder, s3))
    assert folder["requests_of_jumps"] == []
    assert s3["requests_of_steps"][0] <= 1
    assert 1 <= s3["requests_of_jumps"][0] <= 4
    assert "| 30 | S3 |" in printed


def test_metadata(quick, monkeypatch):
    monkeypatch.setattr(metadata, "ROWS_PER_BATCH", 40)
    monkeypatch.setattr(metadata, "_NUM_ROWS", 5000)
    report, printed = quick(
        lambda words: timing.main(words, "metadata", metadata.measure),
        "--quick",
    )
    assert [len(comparison["entries"]) for comparison in report["comparisons"]] == [
        3,
        3,
        1,
        2,
        2,
        2,
    ]
    assert all(
        entry["speedup"] > 0
        for comparison in report["comparisons"]
        for entry in comparison["entries"]
    )
    assert "metadata of one sample" in printed


def test_both_readers_of_metadata_find_the_same(tmp_path):
    key, members = metadata.sample_members(tmp_path / "work")
    sample = decode_sample(key, members)
    assert len(sample.boxes.boxes3d) == NUM_BOXES
    assert len(sample.geometry.intrinsics) == len(CAMERAS)
    theirs = safetensors.numpy.load(members[GEOMETRY])
    for f in fields(sample.geometry):
        np.testing.assert_array_equal(theirs[f.name], getattr(sample.geometry, f.name))
    assert (
        json.loads(members[META])["cameras"]["cam_back"]["width"]
        == sample.meta.cameras["cam_back"].width
    )

    rows = list(metadata.index_rows(50))
    write_index(tmp_path / "index.arrow", rows, metadata._FIELDS, ["raw"])
    index = SampleIndex(tmp_path / "index.arrow")
    with pa.memory_map(str(tmp_path / "index.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
        for number in (0, 49):
            row = index.row(number)
            assert row == rows[number]
            stored = {
                **row._asdict(),
                "members": [member._asdict() for member in row.members],
            }
            assert (
                metadata.pyarrow_row(table, number, index.names, index.codecs) | {"is_part": False}
                == stored
            )
