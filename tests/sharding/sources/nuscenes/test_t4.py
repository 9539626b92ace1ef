"""T4 datasets: the synthetic world as two of them, what T4 has beyond nuScenes, bad input, and a real one."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.series import TIMES, VALUES
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.schema import (
    Boxes,
    Geometry,
    decode_arrays,
    decode_meta,
)
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec
from support.nuscenes_radar import pcd, radar_rows
from support.nuscenes_world import transform, write_nuscenes
from support.sharding import scanned
from support.shared_data import shared_data
from support.source_suite import SourceSuite
from support.source_world import World, samples_of, turn


def write_t4(world, root):
    for clip in world.clips:
        folder = root / clip.name / "0"
        folder.mkdir(parents=True)
        write_nuscenes(World([clip], world.cameras, world.lidars), folder, "annotation")
    return str(root)


class TestT4(SourceSuite):
    kind = "t4"

    def world(self, **changes):
        sizes = changes.pop(
            "cameras",
            {"cam_front": (64, 48), "cam_back": (48, 64), "cam_left": (64, 48)},
        )
        return super().world(**{"cameras": sizes, **changes})

    def write(self, world, root):
        return write_t4(world, root)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    write_t4(TestT4().world(), folder)
    return folder


def change(root, table, edit):
    file = root / "drive-0" / "0" / "annotation" / f"{table}.json"
    rows = json.loads(file.read_text())
    edit(rows)
    file.write_text(json.dumps(rows))


def test_what_t4_has_beyond_nuscenes(root, tmp_path):
    change(
        root,
        "visibility",
        lambda rows: rows.append({"token": "v", "level": "most"}),
    )
    change(
        root,
        "attribute",
        lambda rows: rows.append({"token": "a", "name": "vehicle.parked"}),
    )

    def annotate(rows):
        rows[0].update(
            velocity=[3.0, 4.0, 0.0],
            visibility_token="v",
            attribute_tokens=["a"],
        )

    change(root, "sample_annotation", annotate)
    change(
        root,
        "calibrated_sensor",
        lambda rows: rows[0].update(camera_distortion=[0.1, 0.2, 0, 0, 0, 0, 0, 0.3]),
    )

    def spoil(rows):
        next(row for row in rows if row["filename"].endswith(".jpg")).update(is_valid=False)

    change(root, "sample_data", spoil)
    _, info, table = scanned("t4", root, tmp_path)
    assert info.attributes == ["vehicle.parked"]
    assert info.report.masked == {"cam_front": {"marked as not valid": 1}}
    boxes = decode_arrays(table.row(0).boxes, Boxes)
    assert boxes.visibility.tolist() == [3, -1, -1]
    assert boxes.attribute.tolist() == [0, -1, -1]
    assert math.isclose(np.linalg.norm(boxes.velocity[0]), 5, rel_tol=1e-6)
    geometry = decode_arrays(table.row(1).geometry, Geometry)
    assert geometry.dist[0, 7] == 0.3
    assert decode_meta(table.row(1).meta).cameras["cam_front"].dist_model == "opencv_rational"
    assert [clip.clip_name for clip in info.clips] == ["drive-0", "drive-1"]
    with pytest.raises(SourceError, match=r"marked as not valid"):
        scanned("t4", root, tmp_path, missing_camera="error")


def test_what_no_sample_needs_may_dangle(root, tmp_path):
    """The links between annotations, and levels and attributes of them; rows of sensors that have no member."""
    before = scanned("t4", root, tmp_path).table
    lost = {
        "visibility_token": "x",
        "attribute_tokens": ["x"],
        "prev": "x",
        "next": "x",
    }
    change(
        root,
        "sample_annotation",
        lambda rows: [row.update(lost) for row in rows],
    )
    change(
        root,
        "sample",
        lambda rows: [row.update(prev="x", next="x") for row in rows],
    )
    change(
        root,
        "sensor",
        lambda rows: rows.append({"token": "i", "channel": "IMU", "modality": "imu"}),
    )
    mount = {
        "token": "ic",
        "sensor_token": "i",
        "camera_intrinsic": [],
        **transform(np.eye(4)),
    }
    change(root, "calibrated_sensor", lambda rows: rows.append(mount))
    change(
        root,
        "sample_data",
        lambda rows: rows.append({**rows[0], "token": "i", "calibrated_sensor_token": "ic"}),
    )
    after = scanned("t4", root, tmp_path).table
    assert [after.row(number) for number in range(len(after))] == [
        before.row(number) for number in range(len(before))
    ]


def add_radar(root) -> np.ndarray:
    """A radar of the first dataset, one file a sample; returns the rows of the first."""
    folder = root / "drive-0" / "0"
    turned = transform(pose_of(0.3, (3.4, 0.1, 0.5)))
    change(
        root,
        "sensor",
        lambda rows: rows.append({"token": "r", "channel": "RADAR_FRONT", "modality": "radar"}),
    )
    mount = {
        "token": "rc",
        "sensor_token": "r",
        "camera_intrinsic": [],
        **turned,
    }
    change(root, "calibrated_sensor", lambda rows: rows.append(mount))
    first = radar_rows(np.random.default_rng(3), 7)
    (folder / "data").mkdir()

    def add(rows):
        for number, row in enumerate(
            [entry for entry in rows if entry["filename"].endswith("pcd.bin")]
        ):
            kind = "json" if number == 1 else "pcd"
            (folder / "data" / f"{number}.{kind}").write_bytes(
                pcd(first) if kind == "pcd" else b"[]"
            )
            rows.append(
                {
                    **row,
                    "token": f"r{number}",
                    "calibrated_sensor_token": "rc",
                    "filename": f"data/{number}.{kind}",
                    "timestamp": row["timestamp"] - 20_000,
                }
            )

    change(root, "sample_data", add)
    return first


def pose_of(yaw, xyz):
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = turn(yaw, "z"), xyz
    return pose


def test_radars_are_channels(root, tmp_path):
    """As nuScenes' are: in ego at the sample's time, velocities turned, with the age of the points."""
    rows = add_radar(root)
    spec = SourceSpec("t4", str(root), {"radars": True})
    SourceSuite().make(spec, tmp_path / "out")
    assert "radar_front" in [
        channel.name for channel in open_dataset(tmp_path / "out").manifest.channels
    ]
    _, info, _ = scanned("t4", root, tmp_path, radars=True)
    assert info.report.noted == {"RADAR_FRONT: radar files of JSON, not read": 1}
    without = scanned("t4", root, tmp_path).info
    (first, *_) = sorted(samples_of(tmp_path / "out").items())
    assert without.channels == ()
    points = first[1].points["radar_front"]
    assert points.shape == (7, 19)
    mount = pose_of(0.3, (3.4, 0.1, 0.5))
    expected = np.stack([rows["x"], rows["y"], rows["z"]], 1) @ mount[:3, :3].T + mount[:3, 3]
    np.testing.assert_allclose(points[:, :3], expected, atol=1e-4)
    moved = np.stack([rows["vx_comp"], rows["vy_comp"]], 1) @ mount[:2, :2].T
    np.testing.assert_allclose(points[:, 8:10], moved, atol=1e-4)
    np.testing.assert_allclose(points[:, 18], 0.02, atol=1e-6)
    (root / "drive-0" / "0" / "data" / "2.pcd").unlink()
    with pytest.raises(SourceError, match=r"file '.*data/2.pcd' is not there"):
        scanned("t4", root, tmp_path, radars=True)


def test_states_of_the_vehicle_are_signals(root, tmp_path):
    """Those since the sample before; null is not known."""
    folder = root / "drive-0" / "0" / "annotation"
    first_us = min(row["timestamp"] for row in json.loads((folder / "sample.json").read_text()))
    rows = [
        {
            "token": f"s{number}",
            "timestamp": first_us + number * 40_000,
            "accel_pedal": 10.0 * number,
            "shift_state": "PARK",
            "indicators": {"left": "on", "right": "off", "hazard": None},
            "additional_info": {"speed": 36.0},
        }
        for number in (3, 0, 1, 2)
    ]
    (folder / "vehicle_state.json").write_text(json.dumps(rows))
    source, info, table = scanned("t4", root, tmp_path, vehicle_state=True)
    (channel,) = info.channels
    assert channel.columns[1] == "accel_pedal"
    assert channel.columns[-4:] == (
        "indicator_left",
        "indicator_right",
        "indicator_hazard",
        "speed",
    )
    members = [
        [member for member in table.row(index).members if member.name == channel.field]
        for index in range(8)
    ]
    assert [len(frame_members) for frame_members in members] == [
        1,
        1,
        1,
        0,
        0,
        0,
        0,
        0,
    ]
    signals = KINDS["points"].decode(source.open(members[1][0].ref), channel)
    np.testing.assert_allclose(signals[:, :2], [(0.06, 10), (0.02, 20)], atol=1e-9)
    np.testing.assert_array_equal(signals[:, 2:], [[np.nan] * 4 + [1, 0, np.nan, 36]] * 2)
    assert info.report.noted == {"datasets without vehicle_state": 1}
    SourceSuite().make(SourceSpec("t4", str(root), {"vehicle_state": True}), tmp_path / "out")
    source, info, table = scanned("t4", root, tmp_path, vehicle_state=True, series=True)
    (channel,) = info.channels
    assert channel.description.startswith("columns: accel_pedal [%], brake_pedal [%]")
    parts = [
        KINDS["ragged"].decode(source.open(member.ref), channel)
        for index in range(8)
        for member in table.row(index).members
        if member.name == channel.field
    ]
    stamps, first = np.unique(np.concatenate([part[TIMES] for part in parts]), return_index=True)
    assert stamps.tolist() == [(first_us + step * 40_000) * 1000 for step in range(4)]
    np.testing.assert_array_equal(
        np.concatenate([part[VALUES] for part in parts])[first, 0],
        [0, 10, 20, 30],
    )
    (folder / "vehicle_state.json").write_text(json.dumps([{"token": "s", "timestamp": "noon"}]))
    with pytest.raises(SourceError, match=r"vehicle_state\.json.*must be a whole number; got "):
        scanned("t4", root, tmp_path, vehicle_state=True)


@pytest.mark.parametrize(
    ("table", "edit", "match"),
    [
        (
            "sample_data",
            lambda rows: rows[0].update(calibrated_sensor_token="x"),
            "calibrated_sensor_token 'x', not found",
        ),
        (
            "sample_data",
            lambda rows: rows[0].update(ego_pose_token="y"),
            "ego_pose_token 'y', not found",
        ),
        (
            "sample_data",
            lambda rows: rows.append(rows[0]),
            "second keyframe of CAM_FRONT",
        ),
        (
            "sample_annotation",
            lambda rows: rows[0].update(instance_token="z"),
            "'z', not found in table 'instance'",
        ),
        (
            "ego_pose",
            lambda rows: rows[0].update(rotation=[2.0, 0, 0, 0]),
            r"drive-0/0/annotation.*ego_pose.* rotation \[2.0, ",
        ),
        (
            "scene",
            lambda rows: rows[0].update(log_token="l"),
            "drive-0/0/annotation.* log_token 'l', not found",
        ),
        (
            "scene",
            lambda rows: rows.append({**rows[0], "token": "other"}),
            "2 scenes",
        ),
        (
            "sample",
            lambda rows: rows[0].update(timestamp="noon"),
            "sample.json",
        ),
        (
            "calibrated_sensor",
            lambda rows: rows[0].update(camera_distortion=[0.1]),
            "has 1 values in camera_distortion",
        ),
    ],
)
def test_bad_tables_are_named(root, table, edit, match):
    change(root, table, edit)
    with pytest.raises(SourceError, match=match):
        scan_source(SourceSpec("t4", str(root), {}))


@pytest.mark.real
def test_a_real_dataset_against_its_tables(tmp_path):
    root = shared_data("t4-sample")
    _, info, table = scanned("t4", root, tmp_path)
    tables = {
        name: json.loads((root / "annotation" / f"{name}.json").read_text())
        for name in (
            "sample",
            "sample_data",
            "ego_pose",
            "sample_annotation",
            "calibrated_sensor",
        )
    }
    assert info.num_samples == len(tables["sample"]) == 3
    poses = {row["token"]: row for row in tables["ego_pose"]}
    for number, sample in enumerate(sorted(tables["sample"], key=lambda row: row["timestamp"])):
        row = table.row(number)
        geometry = decode_arrays(row.geometry, Geometry)
        data_rows = [
            data_row
            for data_row in tables["sample_data"]
            if data_row["sample_token"] == sample["token"]
        ]
        assert {member.ref.removeprefix("points:") for member in row.members} == {
            data_row["filename"] for data_row in data_rows
        }
        lidar = next(data_row for data_row in data_rows if "LIDAR" in data_row["filename"])
        np.testing.assert_allclose(
            geometry.ego2global[:3, 3],
            poses[lidar["ego_pose_token"]]["translation"],
        )
        boxes = decode_arrays(row.boxes, Boxes)
        annotations = [
            annotation
            for annotation in tables["sample_annotation"]
            if annotation["sample_token"] == sample["token"]
        ]
        assert len(boxes.label) == len(annotations)
        back = boxes.boxes3d[:, :3] @ geometry.ego2global[:3, :3].T + geometry.ego2global[:3, 3]
        centres = np.array([annotation["translation"] for annotation in annotations]).reshape(-1, 3)
        np.testing.assert_allclose(back, centres, atol=1e-4)
