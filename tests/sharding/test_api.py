"""The functions behind the commands: what the command line does, three lines of Python do; what a run reports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fuelrail.__main__ import main
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetExistsError,
    FuelrailError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding import progress as module
from fuelrail.sharding.api import inspect, reshard, shard, verify
from fuelrail.sharding.append import append
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import JsonLines
from fuelrail.sharding.write.shard_writer import ShardDone
from support.sharding import digests, environment

TWO = ("CAM_FRONT", "CAM_BACK")


@pytest.fixture(scope="module")
def source(dataroot):
    return f"nuscenes:{dataroot('a3 b3', cameras=TWO).root}"


@pytest.fixture(scope="module")
def out(dataroot, sharded):
    return sharded(dataroot("a3 b3", cameras=TWO), splits={"train": 0.5, "val": 0.5})


def test_shard_makes_what_the_command_makes(source, out, tmp_path, capsys):
    arguments = [
        "shard",
        source,
        str(tmp_path / "out"),
        "--seed",
        "7",
        "--splits",
        "train=0.5,val=0.5",
    ]
    assert main([*arguments, "--workers", "1"]) == 0
    assert digests(tmp_path / "out") == digests(out)
    assert "6 samples (train 3, val 3) of 2 clips in 2 shards, " in capsys.readouterr().out


def test_the_report_of_a_run(source, tmp_path):
    recipe = make_recipe(seed=7, name="mine")
    report = shard(
        source,
        tmp_path / "out",
        recipe,
        options={"version": "v1.0-mini", "points": False},
        workers=1,
    )
    assert (report.num_samples, report.num_clips, report.num_shards) == (
        6,
        2,
        1,
    )
    assert (report.num_written, report.num_kept, report.samples_by_split) == (
        1,
        0,
        {"train": 6},
    )
    assert report.fingerprint == open_dataset(tmp_path / "out").manifest.fingerprint
    assert report.scan is not None
    assert report.scan.samples == 6
    assert (
        json.loads(report.as_json())["num_bytes"]
        == (tmp_path / "out" / "train-000000.tar").stat().st_size
    )
    repeated = shard(
        source,
        tmp_path / "out",
        recipe,
        options={"points": False},
        engine=LocalEngine(1),
    )
    assert (repeated.num_written, repeated.num_kept, repeated.fingerprint) == (
        0,
        1,
        report.fingerprint,
    )
    assert "in 1 shard (1 reused), " in repeated.as_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sede": 7}, "the field 'sede' is unknown"),
        ({"seed": -1}, "'seed': must be a whole number from 0"),
        ({"workers": -1}, "'workers': must be a whole number >= 0"),
        (
            {"engine": "gpu"},
            "must be one of processes, ray, threads, or None; got 'gpu'",
        ),
        ({"ray_address": "auto"}, "a Ray address needs the engine ray"),
        (
            {"recipe": make_recipe(), "seed": 7},
            "as a recipe or as keywords, not both",
        ),
        ({"order": "random"}, "known: frame, clip, window:N"),
        ({"options": {"colour": 1}}, "colour"),
    ],
)
def test_wrong_options_are_errors_of_ours(source, tmp_path, options, said):
    with pytest.raises(ConfigError) as caught:
        shard(source, tmp_path / "out", **options)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_reshard_merges_and_appends(out, dataroot, sharded, tmp_path):
    merged = reshard(out, tmp_path / "merged", seed=3, workers=1)
    assert (merged.num_samples, merged.num_shards, merged.samples_by_split) == (
        6,
        2,
        {"train": 3, "val": 3},
    )
    other_out = sharded(dataroot("c2", cameras=TWO))
    report = reshard([out, other_out], tmp_path / "both", append=True)
    assert (
        report.num_samples,
        report.num_clips,
        report.num_written,
        report.num_kept,
    ) == (
        8,
        3,
        0,
        3,
    )
    assert not verify(tmp_path / "both", deep=True).faults
    for options, name in (
        ({"seed": 3}, "seed"),
        ({"points": False}, "points"),
        ({"workers": 2}, "workers"),
    ):
        with pytest.raises(
            ConfigError,
            match=f"append=True reuses shards .* combined with {name}",
        ):
            reshard([out, other_out], tmp_path / "more", append=True, **options)
    with pytest.raises(ConfigError, match="input and output are the same folder"):
        reshard(out, out)
    with pytest.raises(
        ConfigError,
        match="is already a Fuelrail dataset: use `fuelrail reshard",
    ):
        shard(f"fuelrail:{out}", tmp_path / "new")
    with pytest.raises(DatasetExistsError):
        reshard(out, tmp_path / "merged", seed=4)


def test_verify_finds_and_repairs(source, tmp_path):
    out = tmp_path / "out"
    shard(source, out, workers=1)
    before = digests(out)
    checked = []
    damage = []
    assert (
        verify(
            out,
            deep=True,
            progress=lambda shard, number: checked.append((shard.name, number)),
        ).faults
        == []
    )
    assert checked == [("train-000000.tar", 1)]
    (out / "train-000000.tar").write_bytes(b"gone")
    assert verify(out).faults[0].file == "train-000000.tar"
    assert verify(out, repair=source, before_repair=damage.append).faults == []
    assert len(damage) == 1
    assert damage[0].faults
    assert digests(out) == before
    with pytest.raises(
        ConfigError,
        match="'workers': must be a whole number from 1 to 1024 or None; got 0",
    ):
        verify(out, workers=0)
    with pytest.raises(FuelrailError, match="is not a folder"):
        verify(tmp_path / "nowhere")


def test_inspect_describes(out):
    description = inspect(out)
    assert description.facts["manifest"]["num_samples"] == 6
    assert str(description) == description.as_text()
    assert "cam_front" in description.text
    assert inspect(out, "a-000001").facts["meta"]["frame_idx"] == 1
    with pytest.raises(ConfigError, match="has no sample 'x'"):
        inspect(out, "x")


def test_a_nuscenes_root_is_not_a_dataset(source, tmp_path):
    with pytest.raises(
        FuelrailError,
        match=r"is a nuScenes root, not a Fuelrail dataset; convert it with `fuelrail shard",
    ):
        open_dataset(source.removeprefix("nuscenes:"))
    with pytest.raises(
        FuelrailError,
        match=r"v1\.0-trainval' is not a folder with tables; there are: v1\.0-mini",
    ):
        shard(source, tmp_path / "out", options={"version": "v1.0-trainval"})


@pytest.mark.process
def test_a_script_without_a_main_guard_gets_a_sentence(source, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import fuelrail\nfuelrail.shard({source!r}, {str(tmp_path / 'out')!r}, workers=2, engine='processes')\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 1
    assert f"ConfigError: {script}:2: this call starts worker processes" in done.stderr
    assert "FuelrailError: a worker process died" in done.stderr.splitlines()[-1]
    assert "another run" not in done.stderr


def events_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_bytes_rate_time_to_go_and_the_current_shard(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    lines = JsonLines()
    lines.planned(30, ["train-000000", "train-000001", "val-000000"], 4000)
    for num_bytes, seconds in ((600, 0.5), (400, 1.5)):
        now[0] += seconds
        lines.advanced(num_bytes)
    lines.shard_done(ShardDone(1, "train-000001.tar.zst", 700, is_kept=False))
    lines.shard_done(ShardDone(0, "train-000000.tar.zst", 300, is_kept=True))
    now[0] += 2
    lines.advanced(0)
    planned, first, *_, last = events_of(capsys)
    assert planned == {
        "event": "planned",
        "samples": 30,
        "shards": 3,
        "bytes": 4000,
    }
    assert first == {
        "event": "progress",
        "bytes": 1000,
        "total_bytes": 4000,
        "bytes_per_s": 500,
        "eta_s": 6.0,
        "shards": 0,
        "total_shards": 3,
        "current": "train-000000",
    }
    assert (
        last["shards"],
        last["current"],
        last["bytes_per_s"],
        last["eta_s"],
    ) == (
        2,
        "val-000000",
        250,
        12.0,
    )


def test_appending_shows_its_shards_too(dataroot, sharded, tmp_path, capsys):
    folders = [sharded(dataroot(clips, cameras=TWO), name="d") for clips in ("a2", "b2")]
    with JsonLines() as lines:
        append([str(folder) for folder in folders], tmp_path / "both", lines)
    planned, *shards = events_of(capsys)
    sizes = [(folder / "train-000000.tar").stat().st_size for folder in folders]
    assert planned == {
        "event": "planned",
        "samples": 4,
        "shards": 2,
        "bytes": sum(sizes),
    }
    assert shards == [
        {
            "event": "shard",
            "name": f"train-00000{number}.tar",
            "bytes": size,
            "kept": False,
        }
        for number, size in enumerate(sizes)
    ]
