"""A dataset sharded again: other shards, the same samples."""

from __future__ import annotations

import shutil

import pyarrow.parquet as pq
import pytest

from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetExistsError,
    SourceError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import repair
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from fuelrail.sharding.verify.dataset import verify
from support.nuscenes_tables import build_nuscenes
from support.sharding import digests, flip, members_of, reshard, shard_nuscenes

SPLITS = {"train": 0.75, "val": 0.25}


@pytest.fixture(scope="module")
def first(dataroot, sharded):
    return sharded(
        dataroot("a4 b5 c3 d4"),
        splits=SPLITS,
        shard_size_bytes=40_000,
        license="CC0-1.0",
    )


def attributes(out):
    return (
        pq.read_table(out / "attributes.parquet").drop_columns(["split"]).sort_by("key").to_pylist()
    )


@pytest.mark.costly
def test_there_and_back_gives_the_same_shards(first, tmp_path):
    # The order of the source's own shards plays no part: a dataset shuffled otherwise leads to the same bytes.
    recipe = {"seed": 7, "splits": SPLITS, "shard_size_bytes": 1 << 30}
    reshard(first, tmp_path / "direct", **recipe)
    reshard(
        first,
        tmp_path / "other",
        seed=1,
        order="clip",
        layout="none",
        splits={"all": 1.0},
    )
    reshard(tmp_path / "other", tmp_path / "back", **recipe)
    direct, back = (
        {name: digest for name, digest in digests(tmp_path / out).items() if name.endswith(".tar")}
        for out in ("direct", "back")
    )
    assert direct == back
    assert len(back) == 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_samples_are_the_same_in_another_order(first, tmp_path, num_workers):
    out = tmp_path / "out"
    manifest = reshard(
        first,
        out,
        num_workers,
        seed=99,
        layout="none",
        order="window:2",
        shard_size_bytes=30_000,
    )
    assert verify(out, deep=True, num_threads=2).faults == []
    assert members_of(out) == members_of(first)
    assert attributes(out) == attributes(first)
    old = open_dataset(first).manifest
    assert open_dataset(out).index.strings("key") != open_dataset(first).index.strings("key")
    assert {name: split.num_clips for name, split in manifest.splits.items()} == {
        "train": 3,
        "val": 1,
    }
    for name in (
        "cameras",
        "lidars",
        "classes",
        "attributes",
        "time_base",
        "ego_origin",
        "license",
        "name",
    ):
        assert getattr(manifest, name) == getattr(old, name), name
    assert manifest.provenance["facts"]["provenance"] == old.provenance
    assert manifest.provenance["recipe"]["source_options"]["fingerprint"] == old.fingerprint


def test_a_selection_can_be_selected_from(first, tmp_path):
    reshard(first, tmp_path / "one", select="frame != 1")
    reshard(
        tmp_path / "one",
        tmp_path / "two",
        select="clip_id in ('b', 'c') and num_boxes > 0",
    )
    members = members_of(tmp_path / "two")
    assert sorted(members) == [
        "b-000000",
        "b-000002",
        "b-000003",
        "b-000004",
        "c-000000",
        "c-000002",
    ]
    assert members["b-000002"]["meta.json"].prev_key is None
    assert members["b-000002"]["meta.json"].next_key == "b-000003"
    assert members["b-000003"]["lidar_top.npy"] == members_of(first)["b-000003"]["lidar_top.npy"]


def test_points_may_be_left_out(first, tmp_path):
    manifest = reshard(first, tmp_path / "out", options={"points": False})
    assert all("lidar_top.npy" not in members for members in members_of(tmp_path / "out").values())
    assert manifest.lidars == open_dataset(first).manifest.lidars


def test_a_masked_camera_stays_absent(tmp_path):
    nuscenes = build_nuscenes(tmp_path / "source", {"a": 2})
    nuscenes.files("CAM_BACK")[0].unlink()
    shard_nuscenes(nuscenes.root, tmp_path / "one", missing_camera="mask")
    reshard(tmp_path / "one", tmp_path / "two")
    assert members_of(tmp_path / "two") == members_of(tmp_path / "one")
    assert "cam_back.jpg" not in members_of(tmp_path / "two")["a-000000"]
    assert verify(tmp_path / "two", deep=True, num_threads=1).faults == []


def test_damage_in_the_source_is_not_copied(first, tmp_path):
    shutil.copytree(first, tmp_path / "source")
    path = tmp_path / "source" / "train-000000.tar"
    flip(path)
    with pytest.raises(SourceError, match=r"is damaged: .*xxh3.*train-000000\.tar"):
        reshard(tmp_path / "source", tmp_path / "out")
    path.unlink()
    with pytest.raises(SourceError, match=r"train-000000\.tar' cannot be read: No such file"):
        reshard(tmp_path / "source", tmp_path / "out2")


def test_sources_that_cannot_be(first, tmp_path):
    with pytest.raises(SourceError, match=r"has no dataset\.json"):
        make_source(SourceSpec("fuelrail", str(tmp_path), {}))
    with pytest.raises(ConfigError, match="expected 00"):
        make_source(SourceSpec("fuelrail", str(first), {"fingerprint": "00"}))
    with pytest.raises(ConfigError, match="allowed here: points, cameras, fingerprint"):
        make_source(SourceSpec("fuelrail", str(first), {"version": "v1.0-mini"}))


def test_repair_from_a_dataset(first, tmp_path):
    out = tmp_path / "out"
    reshard(first, out, shard_size_bytes=30_000)
    before = digests(out)
    (out / "train-000001.tar").unlink()
    repair(out, f"fuelrail:{first}", 1, Quiet())
    assert digests(out) == before
    reshard(first, tmp_path / "other", seed=5)
    with pytest.raises((ConfigError, DatasetExistsError), match="fingerprint"):
        repair(out, f"fuelrail:{tmp_path / 'other'}", 1, Quiet())
