"""Datasets made of datasets: merged, and appended to without a shard being written again."""

from __future__ import annotations

import errno
import os
import shutil

import pyarrow.parquet as pq
import pytest

import fuelrail as fr
from fuelrail.__main__ import main
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetExistsError,
    SourceError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.append import append
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import repair
from fuelrail.sharding.verify.dataset import verify
from support.sharding import digests, flip, members_of, reshard

SMALL = {"shard_size_bytes": 40_000}


@pytest.fixture(scope="module")
def old(dataroot, sharded):
    return sharded(
        dataroot("a4 b5"),
        license="CC0-1.0",
        splits={"train": 0.5, "val": 0.5},
        **SMALL,
    )


@pytest.fixture(scope="module")
def new(dataroot, sharded):
    return sharded(dataroot("c3 d4"), **SMALL)


@pytest.mark.costly
def test_two_datasets_become_one(old, new, tmp_path):
    manifest = reshard([old, new], tmp_path / "out", seed=5, order="window:2", layout="none")
    assert verify(tmp_path / "out", deep=True, num_threads=2).faults == []
    assert members_of(tmp_path / "out") == {
        **members_of(old),
        **members_of(new),
    }
    assert {name: split.num_clips for name, split in manifest.splits.items()} == {
        "train": 3,
        "val": 1,
    }
    assert manifest.license == "CC0-1.0"
    assert (
        manifest.provenance["facts"]["merged"][0]["provenance"]
        == open_dataset(old).manifest.provenance
    )
    # In another order the same shards.
    reshard(
        [new, old],
        tmp_path / "turned",
        seed=5,
        order="window:2",
        layout="none",
        name=manifest.name,
    )
    shards = [
        {name: d for name, d in digests(tmp_path / o).items() if name.endswith(".tar")}
        for o in ("out", "turned")
    ]
    assert shards[0] == shards[1]
    before = digests(tmp_path / "out")
    (tmp_path / "out" / open_dataset(tmp_path / "out").shards[0].name).write_bytes(b"damaged")
    repair(tmp_path / "out", f"fuelrail:{old}\n{new}", 1, Quiet())
    assert digests(tmp_path / "out") == before


@pytest.mark.costly
def test_the_cameras_that_are_kept_are_those_of_a_dataset_made_of_them(
    old, dataroot, sharded, tmp_path
):
    rig = [camera.channel for camera in open_dataset(old).manifest.cameras]
    cameras = rig[1:]
    main(
        [
            "reshard",
            str(old),
            str(tmp_path / "out"),
            "--cameras",
            ",".join(cameras[::-1]),
        ]
    )
    assert verify(tmp_path / "out", deep=True, num_threads=2).faults == []
    assert [camera.channel for camera in open_dataset(tmp_path / "out").manifest.cameras] == cameras
    expected = sharded(dataroot("a4 b5"), cameras=cameras, **SMALL)
    main(
        [
            "shard",
            f"nuscenes:{dataroot('a4 b5').root}",
            str(tmp_path / "flag"),
            "--cameras",
            ",".join(cameras),
        ]
    )
    assert members_of(tmp_path / "flag") == members_of(expected)
    assert members_of(tmp_path / "out") == members_of(expected)
    tables = [
        pq.read_table(folder / "attributes.parquet").column("num_cameras")
        for folder in (tmp_path / "out", expected)
    ]
    assert sorted(tables[0].to_pylist()) == sorted(tables[1].to_pylist())
    fingerprints = {open_dataset(folder).manifest.fingerprint for folder in (old, tmp_path / "out")}
    assert len(fingerprints) == 2
    for options in (
        {"cameras": ["cam_x"]},
        {"cameras": cameras, "append": True},
    ):
        with pytest.raises(
            ConfigError,
            match=r"has no camera 'cam_x'.*; it has: |cannot be combined with cameras",
        ):
            fr.reshard([old], tmp_path / "other", **options)


def test_a_new_version_takes_the_shards_that_are_there(old, new, tmp_path):
    before = digests(old)
    manifest = append([str(old), str(new)], tmp_path / "v2")
    assert verify(tmp_path / "v2", deep=True, num_threads=2).faults == []
    assert digests(old) == before
    ours = open_dataset(old).manifest
    theirs = open_dataset(new).manifest
    assert manifest.fingerprint not in (ours.fingerprint, theirs.fingerprint)
    assert manifest.num_samples == 16
    assert {name: split.num_clips for name, split in manifest.splits.items()} == {
        "train": 3,
        "val": 1,
    }
    shards, our_shards, their_shards = (
        open_dataset(place).shards for place in (tmp_path / "v2", old, new)
    )
    for entry in our_shards:
        assert (tmp_path / "v2" / entry.name).samefile(old / entry.name)
    assert {entry.sha256 for entry in shards} == {
        entry.sha256 for entry in (*our_shards, *their_shards)
    }
    assert members_of(tmp_path / "v2") == {**members_of(old), **members_of(new)}
    table = pq.read_table(tmp_path / "v2" / "attributes.parquet")
    assert table.column("key").to_pylist() == open_dataset(tmp_path / "v2").index.strings("key")
    assert table.column("split").to_pylist() == ["train"] * manifest.splits["train"].num_samples + [
        "val"
    ] * (manifest.splits["val"].num_samples)


def test_a_version_of_a_version_and_without_the_old_one(old, new, dataroot, sharded, tmp_path):
    shutil.copytree(old, tmp_path / "v1")
    append([str(tmp_path / "v1"), str(new)], tmp_path / "v2")
    shutil.rmtree(tmp_path / "v1")
    manifest = append(
        [str(tmp_path / "v2"), str(sharded(dataroot("e2"), **SMALL))],
        tmp_path / "v3",
    )
    assert manifest.num_samples == 16 + 2
    assert verify(tmp_path / "v3", deep=True, num_threads=2).faults == []


def test_the_same_command_again_makes_it_whole(old, new, tmp_path):
    out = tmp_path / "v2"
    append([str(old), str(new)], out)
    expected = digests(out)
    append([str(old), str(new)], out)
    assert digests(out) == expected
    (out / "dataset.json").unlink()  # as if it had been killed before
    (out / ".fuelrail").mkdir()
    (out / "train-000001.tar").unlink()
    append([str(old), str(new)], out)
    assert digests(out) == expected
    with pytest.raises(
        DatasetExistsError,
        match=r"holds another dataset: source options\.fingerprints: ",
    ):
        append([str(new), str(old)], out)


def test_a_file_of_the_right_size_is_not_taken_for_the_shard(old, new, tmp_path):
    out = tmp_path / "v2"
    append([str(old), str(new)], out)
    expected = digests(out)
    (out / "dataset.json").unlink()  # as if it had been killed before
    (out / ".fuelrail").mkdir()
    for name in ("train-000000.tar", "train-000000.tar.idx"):
        if (out / name).exists():
            (tmp_path / "x").write_bytes(bytes((out / name).stat().st_size))
            (tmp_path / "x").replace(out / name)
    append([str(old), str(new)], out)
    assert digests(out) == expected


def test_the_same_command_again_keeps_what_is_whole(old, new, tmp_path):
    shutil.copytree(old, tmp_path / "v1")
    sources = [str(tmp_path / "v1"), str(new)]
    out = tmp_path / "v2"
    append(sources, out)
    expected = digests(out)
    shard = tmp_path / "v1" / "train-000000.tar"
    data = shard.read_bytes()
    for damaged in (data[:-1024], data.replace(b"ustar", b"Ustar", 1)):
        (tmp_path / "x").write_bytes(damaged)
        (tmp_path / "x").replace(shard)  # the older version's file alone, not the link to it
        append(sources, out)
        assert digests(out) == expected
    os.link(shard, tmp_path / "x")
    (tmp_path / "x").replace(out / "train-000000.tar")  # damaged in both versions
    with pytest.raises(
        SourceError,
        match=r"v1/train-000000\.tar' is not the file that its manifest describes",
    ):
        append(sources, out)
    with pytest.raises(
        ConfigError,
        match=r"made by `fuelrail reshard --append`: run the same command again",
    ):
        repair(out, f"nuscenes:{old}", 1, Quiet())
    (tmp_path / "x").write_bytes(data)
    (tmp_path / "x").replace(shard)
    append(sources, out)
    assert digests(out) == expected


def test_across_file_systems_shards_are_copied_and_checked(old, new, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    shutil.copytree(old, tmp_path / "v1")
    append([str(tmp_path / "v1"), str(new)], tmp_path / "v2")
    assert verify(tmp_path / "v2", deep=False, num_threads=1).faults == []
    flip(tmp_path / "v1" / "train-000000.tar", 3000, 255)
    with pytest.raises(
        SourceError,
        match=r"train-000000\.tar' is not the file that its manifest describes",
    ):
        append([str(tmp_path / "v1"), str(new)], tmp_path / "v3")
    assert not (tmp_path / "v3" / "dataset.json").exists()


def test_what_does_not_fit_together(old, new, dataroot, sharded, tmp_path):
    with pytest.raises(ConfigError, match="append needs at least two datasets"):
        append([str(old)], tmp_path / "out")
    shutil.copytree(old, tmp_path / "copy")
    rig = sharded(dataroot("x2", cameras=("CAM_FRONT", "CAM_BACK")))
    says = r"the cameras of the first are cam_front \(CAM_FRONT\), .*, of the second cam_front \(CAM_FRONT\), cam_back"
    for way in (append, reshard):
        with pytest.raises(SourceError, match=r"clip '.*' is in '.*out' and in '.*copy'"):
            way([str(old), str(tmp_path / "copy")], tmp_path / "out")
        with pytest.raises(SourceError, match=r"the dataset '.*out' is named twice"):
            way([str(old), str(old)], tmp_path / "out")
        with pytest.raises(SourceError, match=says):
            way([str(old), str(rig)], tmp_path / "out")
    reshard([new], tmp_path / "none", layout="none")
    with pytest.raises(SourceError, match=r"layout of '.*out' is member, that of '.*none' none"):
        append([str(old), str(tmp_path / "none")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.costly
def test_the_commands(old, new, tmp_path, capsys):
    assert (
        main(
            [
                "reshard",
                str(old),
                str(new),
                str(tmp_path / "out"),
                "--seed",
                "3",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    assert "16 samples" in capsys.readouterr().out
    assert main(["reshard", "--append", str(old), str(new), str(tmp_path / "v2")]) == 0
    assert "16 samples" in capsys.readouterr().out
    assert (
        main(
            [
                "reshard",
                "--append",
                str(old),
                str(new),
                str(tmp_path / "v3"),
                "--seed",
                "3",
            ]
        )
        == 2
    )
    assert (
        "--append reuses shards as they are, so it cannot be combined with --seed"
        in capsys.readouterr().err
    )
    for more in ([], ["--append"]):
        assert main(["reshard", str(old), str(new), f"{new}/", *more]) == 2
        assert f"input and output are the same folder, '{new}/'" in capsys.readouterr().err
    assert main(["shard", f"fuelrail:{old}", str(tmp_path / "v3")]) == 2
    assert f"fuelrail reshard {old} {tmp_path / 'v3'}" in capsys.readouterr().err
    (tmp_path / "out" / "index.arrow").write_bytes(b"damaged")
    assert (
        main(
            [
                "verify",
                str(tmp_path / "out"),
                "--repair",
                f"fuelrail:{old}",
                str(new),
            ]
        )
        == 0
    )
    assert "OK, no errors found" in capsys.readouterr().out
