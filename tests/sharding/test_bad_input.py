"""What users' data is like: names that are no keys, files that are too large, unreadable or empty, clocks that jump."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import time

import pytest
import webdataset

from fuelrail.loaders import DataLoader
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.codecs import MAX_MEMBER_BYTES
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import shard as shard_again
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.verify.dataset import verify
from support.nuscenes_tables import build_nuscenes
from support.sharding import digests, shard_nuscenes

TWO = ("CAM_FRONT", "CAM_BACK")


def rename_scenes(root, names):
    path = root / "v1.0-mini" / "scene.json"
    scenes = json.loads(path.read_text())
    for scene, name in zip(scenes, names, strict=True):
        scene["name"] = name
    path.write_text(json.dumps(scenes))


@pytest.mark.parametrize(
    "names",
    [
        ("scene", "scene", "scene"),  # three drives of one name
        ("2024.05.01/drive.1", "2024.05.01/drive.2", "../../etc/passwd"),
        ("Münchner Straße", "東京", "\u0000\n"),
        ("__meta", "a b", ""),
        ("n" * 60, "N" * 300, "n" * 61),
    ],
)
def test_any_scene_name_leads_to_legal_keys(tmp_path, names):
    source = build_nuscenes(tmp_path / "source", {"a": 2, "b": 2, "c": 2}, cameras=TWO)
    rename_scenes(source.root, names)
    out = tmp_path / "out"
    shard_nuscenes(source.root, out, shard_size_bytes=20_000)
    assert verify(out, deep=True, num_threads=1).faults == []
    dataset = open_dataset(out)
    keys = dataset.index.strings("key")
    assert len(set(keys)) == 6
    assert not any(character in key for key in keys for character in "./ ")
    listed = []
    for shard in dataset.shards:
        with tarfile.open(out / shard.name) as archive:
            listed += archive.getnames()
    assert {name.partition(".")[0] for name in listed} == set(keys)
    assert not any("/" in name for name in listed)


def test_lists_of_splits_may_use_the_names_that_users_know(tmp_path):
    source = build_nuscenes(tmp_path / "source", {"a": 2, "b": 2}, cameras=TWO)
    rename_scenes(source.root, ("2024.05.01/drive.1", "2024.05.01/drive.2"))
    splits = {"train": ["2024.05.01/drive.2"], "val": ["2024.05.01/drive.1"]}
    manifest = shard_nuscenes(source.root, tmp_path / "out", splits=splits).manifest
    assert {name: split.num_samples for name, split in manifest.splits.items()} == {"train": 2, "val": 2}


def test_a_file_over_the_cap_is_named(tmp_path):
    source = build_nuscenes(tmp_path / "source", {"a": 2}, cameras=TWO)
    victim = source.files("LIDAR_TOP")[1]
    os.truncate(victim, MAX_MEMBER_BYTES + 20)  # a hole: it takes no space
    says = rf"'samples/LIDAR_TOP/{victim.name}' \(lidar_top\.npy of sample .*\) has {MAX_MEMBER_BYTES + 20} bytes"
    with pytest.raises(SourceError, match=says):
        shard_nuscenes(source.root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("channel", ["LIDAR_TOP", "CAM_BACK"])
def test_an_empty_file_is_named_before_work_begins(tmp_path, channel):
    source = build_nuscenes(tmp_path / "source", {"a": 2}, cameras=TWO)
    victim = source.files(channel)[1]
    victim.write_bytes(b"")
    with pytest.raises(SourceError, match=rf"{channel}/{victim.name}' of table 'sample_data' is empty \(0 bytes\)"):
        shard_nuscenes(source.root, tmp_path / "out", missing_camera="mask")
    assert not (tmp_path / "out").exists()


def test_times_of_files_play_no_part(tmp_path):
    # The machine's clock may have gone back, or the files may come from another one's future.
    source = build_nuscenes(tmp_path / "source", {"a": 4, "b": 4}, cameras=TWO)
    shard_nuscenes(source.root, tmp_path / "expected", shard_size_bytes=20_000)

    class Stop(Quiet):
        def shard_done(self, shard):
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(source.root, out, shard_size_bytes=20_000, progress=Stop())
    shutil.copytree(out, tmp_path / "again", copy_function=shutil.copy)

    def turn_clocks(root):
        for path in root.rglob("*"):
            ahead = time.time() + (86_400 if path.name < "m" else -86_400)
            os.utime(path, (ahead, ahead))

    turn_clocks(out)
    assert shard_nuscenes(source.root, out, shard_size_bytes=20_000).num_kept == 1
    assert digests(out) == digests(tmp_path / "expected")
    # A source file of another time may have another content: its shard is written again, to the same bytes.
    turn_clocks(source.root)
    assert shard_nuscenes(source.root, tmp_path / "again", shard_size_bytes=20_000).num_kept == 0
    assert digests(tmp_path / "again") == digests(tmp_path / "expected")


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves its files to the collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("layout", ["member", "frame"])
def test_names_over_100_bytes_go_all_the_way(tmp_path, layout):
    """Sharded, listed and extracted by GNU tar, read by webdataset and the loader, verified, and resharded."""
    cameras = ("CAM_FRONT", "CAM_" + "LONG_" * 11)
    source = build_nuscenes(tmp_path / "Füße 数据", {"a": 2, "b": 2}, cameras=cameras)
    rename_scenes(source.root, ("n" * 64, "2024.05.01/Straße " + "ü" * 90))
    out = tmp_path / "aus gabe ü"
    shard_nuscenes(source.root, out, layout=layout)
    assert verify(out, deep=True, num_threads=1).faults == []
    dataset = open_dataset(out)
    (shard,) = dataset.shards
    options = ["--zstd"] if layout == "frame" else []
    listed = subprocess.run(["tar", *options, "-tf", out / shard.name], capture_output=True, check=True).stdout
    names = listed.decode().splitlines()
    assert max(map(len, names)) > 100
    extracted = tmp_path / "extracted"
    extracted.mkdir()
    subprocess.run(["tar", *options, "-xf", out / shard.name, "-C", extracted], check=True)
    assert sorted(path.name for path in extracted.iterdir()) == sorted(names)
    keys = dataset.index.strings("key")
    path = extracted.parent / "shard.tar"  # a pipe's command may have no blanks in its names
    path.symlink_to(out / shard.name)
    url = f"pipe:zstd -dcqf {path}" if layout == "frame" else str(path)
    read = list(webdataset.WebDataset(url, shardshuffle=False, empty_check=False))
    assert [sample["__key__"] for sample in read] == keys
    field = cameras[1].lower() + ".jpg"
    assert [sample[field] for sample in read] == [(extracted / f"{key}.{field}").read_bytes() for key in keys]
    with DataLoader(out, 2, num_workers=1, shuffle=False) as loader:
        assert [key for batch in loader for key in batch["sample_key"]] == keys
    again = tmp_path / "again"
    shard_again(SourceSpec("fuelrail", str(out), {}), again, make_recipe(seed=9, layout="none"), 1, Quiet())
    assert verify(again, deep=True, num_threads=1).faults == []
    assert sorted(open_dataset(again).index.strings("key")) == sorted(keys)
