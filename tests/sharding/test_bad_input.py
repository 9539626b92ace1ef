"""What users' data is like: names that are no keys or over 100 bytes, files that are empty."""

from __future__ import annotations

import json
import subprocess
import tarfile

import pytest
import webdataset

from fuelrail import DataLoader, ImageAugment, Transforms
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.verify.dataset import verify
from support.nuscenes_tables import build_nuscenes
from support.sharding import reshard, shard_nuscenes

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
    keys = open_dataset(out).index.strings("key")
    assert len(set(keys)) == 6
    assert not any(character in key for key in keys for character in "./ ")
    listed = []
    for shard in out.glob("*.tar"):
        with tarfile.open(shard) as archive:
            listed += archive.getnames()
    assert {name.partition(".")[0] for name in listed} == set(keys)
    assert not any("/" in name for name in listed)
    # Lists of splits may use the names that users know.
    if len({*names}) == 3:
        splits = {"train": [names[1]], "val": [names[0], names[2]]}
        manifest = shard_nuscenes(source.root, tmp_path / "named", splits=splits).manifest
        assert {name: split.num_samples for name, split in manifest.splits.items()} == {
            "train": 2,
            "val": 4,
        }


@pytest.mark.parametrize("channel", ["LIDAR_TOP", "CAM_BACK"])
def test_an_empty_file_is_named_before_work_begins(tmp_path, channel):
    source = build_nuscenes(tmp_path / "source", {"a": 2}, cameras=TWO)
    victim = source.files(channel)[1]
    victim.write_bytes(b"")
    with pytest.raises(SourceError, match=rf"frame 1, .*{channel}/{victim.name}' is empty"):
        shard_nuscenes(source.root, tmp_path / "out", missing_camera="mask")
    assert not (tmp_path / "out").exists()


@pytest.mark.process
@pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning"
)  # webdataset leaves its files to the collector
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
    listed = subprocess.run(
        ["tar", *options, "-tf", out / shard.name],
        capture_output=True,
        check=True,
    ).stdout
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
    assert [sample[field] for sample in read] == [
        (extracted / f"{key}.{field}").read_bytes() for key in keys
    ]
    transforms = Transforms(image=ImageAugment(height=32, width=48))
    with DataLoader(out, 2, transforms=transforms, num_workers=1) as loader:
        assert [key for batch in loader for key in batch["sample_key"]] == keys
    resharded = tmp_path / "again"
    reshard(out, resharded, seed=9, layout="none")
    assert verify(resharded, deep=True, num_threads=1).faults == []
    assert sorted(open_dataset(resharded).index.strings("key")) == sorted(keys)
