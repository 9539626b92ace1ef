"""2-D boxes of images go into the channel table: KITTI's labels, Waymo's camera labels, T4's object_ann."""

from __future__ import annotations

import json
import shutil

import pytest

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import scan_source, shard
from fuelrail.sharding.sources.adapter.boxes import stable_id
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.verify.dataset import verify
from support.kitti_files import as_kitti, write_object
from support.sharding import scanned
from support.shared_data import shared_data
from support.source_world import make_world
from support.waymo_files import CAMERAS, write_segment
from support.waymo_tables import write_segment as write_tables


def read_frames(tmp_path, kind, root, **options):
    """Classes, and by frame and camera the 2-D boxes; the dataset that is made of it is sound."""
    source, info, table = scanned(kind, root, tmp_path, boxes2d=True, **options)
    frames = []
    channels = {channel.field: channel for channel in info.channels}
    for number in range(len(table)):
        members = {
            member.name: bytes(source.open(member.ref))
            for member in table.row(number).members
            if member.name in channels
        }
        frames.append(
            {
                channels[name].law.camera: KINDS["ragged"].decode(data, channels[name])
                for name, data in members.items()
            }
        )
    recipe = make_recipe(splits={"train": 1.0})
    shard(
        SourceSpec(kind, str(root), source.options),
        out=tmp_path / "out",
        recipe=recipe,
        num_workers=1,
        progress=Quiet(),
        engine=LocalEngine(1),
    )
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    assert {channel.name for channel in open_dataset(tmp_path / "out").manifest.channels} >= {
        f"boxes2d_{camera}" for camera in frames[0]
    }
    plain = scan_source(SourceSpec(kind, str(root), {**options, "boxes2d": False}))
    assert not plain.channels
    return info.classes, frames


def kitti(root, **changes):
    world = as_kitti(
        make_world(
            num_clips=1,
            num_frames=2,
            cameras={"image_2": (64, 48)},
            lidars=("lidar",),
        )
    )
    for number, (_, _, frame) in enumerate(world.frames()):
        write_object(root / "training", number, frame)
    return world


def test_kitti_s_boxes_are_rows_of_the_boxes_in_space(tmp_path):
    kitti(tmp_path / "source")
    classes, frames = read_frames(
        tmp_path, "kitti_object", tmp_path / "source", missing_camera="mask"
    )
    assert len(frames) == 2
    for frame in frames:
        (boxes,) = frame.values()
        assert boxes["box"].tolist() == [[number, 2.5, number + 3, 4.25] for number in range(3)], (
            "DontCare is left out"
        )
        assert boxes["row"].tolist() == [0, 1, 2]
        assert [classes[label] for label in boxes["label"]] == [
            "Car",
            "Pedestrian",
            "Car",
        ]
        assert boxes["instance_id"].tolist() == [-1] * 3


@pytest.mark.parametrize("form", ["waymo", "waymo_v2"])
def test_waymo_s_labels_in_images(tmp_path, form):
    sizes = dict.fromkeys(CAMERAS, (64, 48))
    world = make_world(num_clips=1, num_frames=2, cameras=sizes, lidars=())
    for _, _, frame in world.frames():
        for box in frame.boxes:
            box.category = {"car": "vehicle"}.get(box.category, box.category)
    root = tmp_path / "source"
    root.mkdir()
    if form == "waymo":
        write_segment(root / "segment-one_with_camera_labels.tfrecord", world.clips[0])
    else:
        write_tables(root, world.clips[0])
    classes, frames = read_frames(tmp_path, form, root)
    for frame in frames:
        assert set(frame) == set(CAMERAS), "an image of a labelled frame without labels has no box"
        front = frame["cam_front"]
        assert front["box"].tolist() == [[16, 8, 24, 12], [4, 4.5, 6, 7.5]], (
            "the centre of the first pixel is 0"
        )
        assert [classes[label] for label in front["label"]] == [
            "vehicle",
            "pedestrian",
        ]
        assert front["instance_id"].tolist() == [stable_id("a"), stable_id("b")]
        assert front["row"].tolist() == [-1, -1]
        assert not len(frame["cam_side_left"]["box"])


@pytest.mark.real
def test_t4_s_annotations_in_images(tmp_path):
    root = shared_data("t4-sample")
    tables = {
        name: json.loads((root / "annotation" / f"{name}.json").read_text())
        for name in (
            "object_ann",
            "category",
            "sample_data",
            "sample_annotation",
            "sample",
        )
    }
    classes, frames = read_frames(tmp_path, "t4", root)
    names = {row["token"]: row["name"] for row in tables["category"]}
    sample_of = {row["token"]: row["sample_token"] for row in tables["sample_data"]}
    order = [row["token"] for row in sorted(tables["sample"], key=lambda row: row["timestamp"])]
    expected = sorted(
        (
            order.index(sample_of[row["sample_data_token"]]),
            *map(float, row["bbox"]),
            names[row["category_token"]],
        )
        for row in tables["object_ann"]
    )
    rows = sorted(
        (number, *box.tolist(), classes[label])
        for number, frame in enumerate(frames)
        for boxes in frame.values()
        for box, label in zip(boxes["box"], boxes["label"], strict=True)
    )
    assert rows == expected
    for number, frame in enumerate(frames):
        tracks = [
            row["instance_token"]
            for row in tables["sample_annotation"]
            if row["sample_token"] == order[number]
        ]
        for boxes in frame.values():
            for row, track in zip(boxes["row"], boxes["instance_id"], strict=True):
                assert (stable_id(tracks[row]) if row >= 0 else -1) in (
                    track,
                    -1,
                )


def test_boxes_in_the_wrong_order_or_not_finite_are_named(tmp_path):
    kitti(tmp_path / "source")
    label = tmp_path / "source" / "training" / "label_2" / "000001.txt"
    spec = SourceSpec("kitti_object", str(tmp_path / "source"), {"boxes2d": True})
    text = label.read_text()
    for box, edges in (
        (" 3 2.5 0 4.25 ", r"\[3.0, 2.5, 0.0, 4.25\]"),
        (" nan 2.5 3 4.25 ", r"\[nan"),
    ):
        label.write_text(text.replace(" 0 2.5 3 4.25 ", box))
        with pytest.raises(SourceError, match=rf"frame 0: 2-D box 0 of image_2 is {edges}"):
            scan_source(spec)
    shutil.rmtree(tmp_path / "source" / "training" / "label_2")
    assert scan_source(spec).channels, (
        "images without labels have no boxes; the channel is optional"
    )
