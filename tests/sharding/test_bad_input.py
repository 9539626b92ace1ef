"""What users' data is like: names that are no keys, files that are too large, unreadable or empty, clocks that jump."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time

import pytest

from fuelrail.pipeline.codecs import MAX_MEMBER_BYTES
from fuelrail.pipeline.dataset import open_dataset
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.verify import verify
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
    for shard in dataset.manifest.shards:
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
