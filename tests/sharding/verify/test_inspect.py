"""What `fuelrail inspect` says is what the dataset holds."""

from __future__ import annotations

import json
import re
import shutil

import pyarrow.parquet as pq
import pytest

from fuelrail.pipeline.errors import ChecksumError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.verify.inspect import describe_dataset, describe_sample
from support.fault_server import FaultServer
from support.sharding import flip


@pytest.fixture(scope="module")
def out(dataroot, sharded):
    return sharded(dataroot("a3 b2", cameras=("CAM_FRONT", "CAM_BACK")), license="CC0-1.0")


def test_the_dataset(out):
    text = describe_dataset(out).text
    manifest = open_dataset(out).manifest
    for part in (
        "5 of 2 clips",
        "CC0-1.0",
        manifest.fingerprint,
        "CAM_FRONT",
        "48 x 32",
        "x, y, z, intensity, ring",
    ):
        assert part in text
    facts = json.loads(describe_dataset(out).as_json())
    assert facts["manifest"] == json.loads((out / "dataset.json").read_text())
    members = {member["name"]: member for member in facts["members"]}
    stored = sum(member["stored_bytes"] for member in members.values())
    assert 0.5 * manifest.num_bytes < stored < manifest.num_bytes
    assert members["cam_front.jpg"]["count"] == 5
    assert members["cam_front.jpg"]["stored_bytes"] == members["cam_front.jpg"]["raw_bytes"]
    assert members["lidar_top.npy"]["codec"] == "zstd-p20"
    assert members["lidar_top.npy"]["raw_bytes"] == 5 * (128 + 60 * 20)


def test_the_attributes_that_filters_may_name(out):
    description = describe_dataset(out)
    table = pq.read_table(out / "attributes.parquet")
    named = {attribute["name"]: attribute for attribute in description.facts["attributes"]}
    assert named.keys() == set(table.column_names) - {"key", "clip_id"}
    boxes = table["num_boxes"].to_pylist()
    said = str(boxes[0]) if len(set(boxes)) == 1 else f"{min(boxes)} to {max(boxes)}"
    assert (named["num_boxes"]["type"], named["num_boxes"]["values"]) == (
        "int64",
        said,
    )
    assert named["clip_name"]["values"] == "a (3), b (2)"
    assert table["night"].to_pylist().count(True) == 2
    assert named["night"]["values"] == "true (2), unknown (3)"
    assert re.search(r"^night +bool +", description.text, re.MULTILINE)


def test_one_sample(out):
    text = describe_sample(out, "a-000001").text
    for part in (
        "a-000000, a-000002",
        "3 (car 1, pedestrian 1, barrier 1)",
        "60 points",
        "48 x 32",
        "frame 2 of 3",
    ):
        assert part in text
    facts = json.loads(describe_sample(out, "a-000001").as_json())
    row = open_dataset(out).index.row(facts["position"])
    assert (row.key, row.offset, row.length) == (
        "a-000001",
        facts["offset"],
        facts["length"],
    )
    assert facts["meta"]["license"] == "CC0-1.0"
    assert facts["meta"]["dataset"] == "nuscenes-v1.0-mini"
    assert [member["name"] for member in facts["members"]] == [
        member.name for member in row.members
    ]


@pytest.mark.network
def test_one_sample_at_a_url(out):
    with FaultServer(out) as server:
        assert describe_sample(server.url, "a-000001") == describe_sample(out, "a-000001")


def test_damage_is_reported(out, tmp_path):
    shutil.copytree(out, tmp_path / "out")
    flip(
        tmp_path / "out" / "train-000000.tar",
        open_dataset(out).index.row(0).offset + 20,
    )
    with pytest.raises(ChecksumError, match=r"train-000000\.tar, offset 0"):
        describe_sample(tmp_path / "out", open_dataset(out).index.row(0).key)
