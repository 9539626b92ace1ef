"""The functions behind the commands: what the command line does, three lines of Python do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuelrail.__main__ import main
from fuelrail.pipeline.errors import ConfigError, DatasetExistsError, FuelrailError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.api import inspect, reshard, shard, verify
from fuelrail.sharding.demo.synth import synth
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from support.nuscenes_tables import build_nuscenes
from support.sharding import digests

TWO = ("CAM_FRONT", "CAM_BACK")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = build_nuscenes(tmp_path_factory.mktemp("source"), {"a": 3, "b": 3}, cameras=TWO).root
    return f"nuscenes:{root}"


@pytest.fixture(scope="module")
def out(source, tmp_path_factory):
    made = tmp_path_factory.mktemp("api") / "out"
    shard(source, made, seed=7, splits={"train": 0.5, "val": 0.5}, workers=1)
    return made


def test_shard_makes_what_the_command_makes(source, out, tmp_path, capsys):
    arguments = ["shard", source, str(tmp_path / "out"), "--seed", "7", "--splits", "train=0.5,val=0.5"]
    assert main([*arguments, "--workers", "1"]) == 0
    assert digests(tmp_path / "out") == digests(out)
    assert "6 samples (train 3, val 3) of 2 clips in 2 shards, " in capsys.readouterr().out


def test_the_report_of_a_run(source, tmp_path):
    recipe = make_recipe(seed=7, name="mine")
    report = shard(source, tmp_path / "out", recipe, options={"version": "v1.0-mini", "points": False}, workers=1)
    assert (report.num_samples, report.num_clips, report.num_shards) == (6, 2, 1)
    assert (report.num_written, report.num_kept, report.samples_by_split) == (1, 0, {"train": 6})
    assert report.fingerprint == open_dataset(tmp_path / "out").manifest.fingerprint
    assert report.scan is not None
    assert report.scan.samples == 6
    assert json.loads(report.as_json())["num_bytes"] == (tmp_path / "out" / "train-000000.tar").stat().st_size
    again = shard(source, tmp_path / "out", recipe, options={"points": False}, engine=LocalEngine(1))
    assert (again.num_written, again.num_kept, again.fingerprint) == (0, 1, report.fingerprint)
    assert "in 1 shard (1 reused), " in again.as_text()


def test_progress_gets_what_happens(source, tmp_path):
    seen = []

    class Watch(Quiet):
        def shard_done(self, shard):
            seen.append(shard.name)

    shard(source, tmp_path / "out", workers=1, progress=Watch())
    assert seen == ["train-000000.tar"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sede": 7}, "unknown field `sede`"),
        ({"seed": -1}, "'seed': Expected `int` >= 0"),
        ({"workers": -1}, "'workers': Expected `int` >= 0"),
        ({"engine": "gpu"}, "Invalid enum value 'gpu'; allowed here: processes, ray, threads"),
        ({"ray_address": "auto"}, "a Ray address needs the engine ray"),
        ({"recipe": make_recipe(), "seed": 7}, "as a recipe or as keywords, not both"),
        ({"order": "random"}, "known: frame, clip, window:N"),
        ({"options": {"colour": 1}}, "colour"),
    ],
)
def test_wrong_options_are_errors_of_ours(source, tmp_path, options, said):
    with pytest.raises(ConfigError) as caught:
        shard(source, tmp_path / "out", **options)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_reshard_merges_and_appends(source, out, tmp_path):
    merged = reshard(out, tmp_path / "merged", seed=3, workers=1)
    assert (merged.num_samples, merged.num_shards, merged.samples_by_split) == (6, 2, {"train": 3, "val": 3})
    other = build_nuscenes(tmp_path / "source", {"c": 2}, cameras=TWO).root
    shard(f"nuscenes:{other}", tmp_path / "other", workers=1)
    both = reshard([out, tmp_path / "other"], tmp_path / "both", append=True)
    assert (both.num_samples, both.num_clips, both.num_written, both.num_kept) == (8, 3, 0, 3)
    assert not verify(tmp_path / "both", deep=True).faults
    for options, name in (({"seed": 3}, "seed"), ({"points": False}, "points"), ({"workers": 2}, "workers")):
        with pytest.raises(ConfigError, match=f"append=True reuses shards .* combined with {name}"):
            reshard([out, tmp_path / "other"], tmp_path / "more", append=True, **options)
    with pytest.raises(ConfigError, match="input and output are the same folder"):
        reshard(out, out)
    with pytest.raises(ConfigError, match="is already a Fuelrail dataset: use `fuelrail reshard"):
        shard(f"fuelrail:{out}", tmp_path / "new")
    with pytest.raises(DatasetExistsError):
        reshard(out, tmp_path / "merged", seed=4)


def test_verify_finds_and_repairs(source, tmp_path):
    out = tmp_path / "out"
    shard(source, out, workers=1)
    before, checked, damage = digests(out), [], []
    assert verify(out, deep=True, progress=lambda shard, number: checked.append((shard.name, number))).faults == []
    assert checked == [("train-000000.tar", 1)]
    (out / "train-000000.tar").write_bytes(b"gone")
    assert verify(out).faults[0].file == "train-000000.tar"
    assert verify(out, repair=source, before_repair=damage.append).faults == []
    assert len(damage) == 1
    assert damage[0].faults
    assert digests(out) == before
    with pytest.raises(ConfigError, match="'workers': Expected `int` >= 1"):
        verify(out, workers=0)
    with pytest.raises(FuelrailError, match="is not a folder"):
        verify(tmp_path / "nowhere")


def test_inspect_describes(out):
    found = inspect(out)
    assert found.facts["manifest"]["num_samples"] == 6
    assert str(found) == found.as_text()
    assert "cam_front" in found.text
    assert inspect(out, "a-000001").facts["meta"]["frame_idx"] == 1
    with pytest.raises(ConfigError, match="has no sample 'x'"):
        inspect(out, "x")


@pytest.mark.slow
def test_synth_renders(tmp_path):
    seen = []
    report = synth(
        tmp_path / "world", seed=7, clips=1, frames=2, size=(64, 36), workers=1, lidar_sweeps=0,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert (report.num_clips, report.num_frames, report.num_images, report.reused) == (1, 2, 12, False)
    assert seen[-1] == (2, 2)
    assert report.as_text().startswith("wrote: ")
    assert synth(tmp_path / "world", seed=7, clips=1, frames=2, size=(64, 36), lidar_sweeps=0).reused
    with pytest.raises(ConfigError, match="unknown field `clip`"):
        synth(tmp_path / "other", clip=1)
    with pytest.raises(ConfigError, match="number of clips: got 0"):
        synth(tmp_path / "other", clips=0)


def test_a_nuscenes_root_is_no_dataset(source, tmp_path):
    with pytest.raises(
        FuelrailError, match=r"is a nuScenes root, not a Fuelrail dataset; convert it with `fuelrail shard"
    ):
        open_dataset(source.removeprefix("nuscenes:"))
    with pytest.raises(FuelrailError, match=r"v1\.0-trainval' is not a folder with tables; there are: v1\.0-mini"):
        shard(source, tmp_path / "out", options={"version": "v1.0-trainval"})


@pytest.mark.process
def test_a_script_without_a_main_guard_gets_a_sentence(source, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import fuelrail\nfuelrail.shard({source!r}, {str(tmp_path / 'out')!r}, workers=2, engine='processes')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / ".src")}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"ConfigError: {script}:2: this call starts worker processes" in done.stderr
    assert "FuelrailError: a worker process died" in done.stderr.splitlines()[-1]
    assert "another run" not in done.stderr
