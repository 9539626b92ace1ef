"""Argoverse 2 logs: the synthetic world, what is wrong with a log, and a real one."""

from __future__ import annotations

import json
import shutil
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
from pyarrow import feather
from scipy.spatial.transform import Rotation

import fuelrail as fr
from fuelrail.pipeline.channels.selection import decode_values
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.argoverse2 import RING
from fuelrail.sharding.sources.registry import SourceSpec
from support.shared_data import shared_data
from support.source_at_url import AtUrl
from support.source_suite import SourceSuite
from support.source_world import ego_at, samples_of
from support.spoil import LFS_POINTER, column, content, gone

POSE = ("qw", "qx", "qy", "qz", "tx_m", "ty_m", "tz_m")


def pose_columns(matrices) -> dict[str, list[float]]:
    """Make a pose as the dataset has it: quaternion and translation, a column for each number."""
    rows = np.array(matrices).reshape(-1, 4, 4)
    x, y, z, w = Rotation.from_matrix(rows[:, :3, :3]).as_quat().T
    return dict(
        zip(
            POSE,
            [values.tolist() for values in (w, x, y, z, *rows[:, :3, 3].T)],
            strict=True,
        )
    )


def write_table(path, columns) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    feather.write_feather(pa.table(columns), path)


def write_log(folder, clip, late_ns=0) -> None:
    """Write a clip of the world as one log; images are ``late_ns`` later."""
    first = clip.frames[0].images
    write_table(
        folder / "calibration" / "intrinsics.feather",
        {
            "sensor_name": list(first),
            "fx_px": [camera.intrinsics[0, 0] for camera in first.values()],
            "fy_px": [camera.intrinsics[1, 1] for camera in first.values()],
            "cx_px": [camera.intrinsics[0, 2] for camera in first.values()],
            "cy_px": [camera.intrinsics[1, 2] for camera in first.values()],
            **dict.fromkeys(("k1", "k2", "k3"), [-0.2] * len(first)),
            "height_px": pa.array([camera.size[1] for camera in first.values()], pa.uint16()),
            "width_px": pa.array([camera.size[0] for camera in first.values()], pa.uint16()),
        },
    )
    mounts = {name: camera.cam2ego for name, camera in first.items()} | {"up_lidar": np.eye(4)}
    write_table(
        folder / "calibration" / "egovehicle_SE3_sensor.feather",
        {"sensor_name": list(mounts), **pose_columns(list(mounts.values()))},
    )
    poses = {
        reading.timestamp_ns + late: reading.ego2global
        for frame in clip.frames
        for reading, late in [
            (frame, 0),
            *((image, late_ns) for image in frame.images.values()),
        ]
    }
    times = sorted(poses)
    write_table(
        folder / "city_SE3_egovehicle.feather",
        {
            "timestamp_ns": times,
            **pose_columns([poses[time] for time in times]),
        },
    )
    rows = []
    for frame in clip.frames:
        for name, image in frame.images.items():
            path = folder / "sensors" / "cameras" / name / f"{image.timestamp_ns + late_ns}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image.jpeg)
        for sweep in frame.sweeps.values():
            x, y, z, intensity, ring = sweep.points.T
            write_table(
                folder / "sensors" / "lidar" / f"{sweep.timestamp_ns}.feather",
                {
                    "x": x.astype(np.float16),
                    "y": y.astype(np.float16),
                    "z": z.astype(np.float16),
                    "intensity": intensity.astype(np.uint8),
                    "laser_number": (ring % 64).astype(np.uint8),
                    "offset_ns": np.arange(len(x), dtype=np.int32) * 1000,
                },
            )
        to_ego = np.linalg.inv(frame.ego2global)
        for box in frame.boxes:
            box2global = np.eye(4)
            box2global[:3, :3] = Rotation.from_euler("z", box.yaw).as_matrix()
            box2global[:3, 3] = box.centre
            rows.append(
                {
                    "timestamp_ns": frame.timestamp_ns,
                    "track_uuid": box.track,
                    "category": box.category,
                    **dict(
                        zip(
                            ("length_m", "width_m", "height_m"),
                            box.size_lwh.tolist(),
                            strict=True,
                        )
                    ),
                    **{
                        name: values[0]
                        for name, values in pose_columns([to_ego @ box2global]).items()
                    },
                    "num_interior_pts": box.num_points,
                }
            )
    write_table(
        folder / "annotations.feather",
        {name: [row[name] for row in rows] for name in rows[0]},
    )
    (folder / "map").mkdir()
    (folder / "map" / f"log_map_archive_{clip.name}____PIT_city_31785.json").write_text("{}")


class TestArgoverse2(AtUrl, SourceSuite):
    kind = "argoverse2"
    options: ClassVar = {"match": "nearest"}

    def world(self, **changes):
        sizes = {name: (48, 64) if name == RING[0] else (64, 48) for name in RING}
        world = super().world(**{"cameras": sizes, "lidars": ("lidar",), **changes})
        for _, _, frame in world.frames():
            for image in frame.images.values():  # at most 25 ms from the sweep, as at 20 Hz
                image.timestamp_ns -= (
                    (image.timestamp_ns - frame.timestamp_ns) // 20_000_000 * 20_000_000
                )
            for sweep in frame.sweeps.values():
                sweep.lidar2ego = np.eye(4)
                sweep.points[:, :3] = sweep.points[:, :3].astype(np.float16)
        return with_own_poses(world)

    def write(self, world, root):
        for number, clip in enumerate(world.clips):
            write_log(root / ("train", "val")[number % 2] / clip.name, clip)
        return str(root)

    def test_attributes_and_columns_of_points(self, made):
        manifest = open_dataset(made.folder / "out").manifest
        sample = next(iter(samples_of(made.folder / "out").values()))
        points = sample.points["lidar"]
        assert points.shape[1] == 6
        np.testing.assert_allclose(points[:, 5], np.arange(len(points)) * 1e-6, rtol=1e-6)
        assert sample.meta.tags["location"] == "PIT"
        assert manifest.time_base == "vehicle_clock"


def with_own_poses(world):
    """The ego pose of each image at its own time, after times were changed."""
    for number, clip in enumerate(world.clips):
        for frame in clip.frames:
            for image in frame.images.values():
                image.ego2global = ego_at(number, image.timestamp_ns)
    return world


def one_log(tmp_path):
    """The folder of one log of the world, in the split train, and its source."""
    suite = TestArgoverse2()
    world = suite.world(num_clips=1)
    root = tmp_path / "source"
    root.mkdir()
    suite.write(world, root)
    return root / "train" / world.clips[0].name, SourceSpec(
        "argoverse2", str(root), {"match": "nearest"}
    )


BOXES = "annotations.feather"
POSES = "city_SE3_egovehicle.feather"
LENSES = "calibration/intrinsics.feather"
MOUNTS = "calibration/egovehicle_SE3_sensor.feather"
BAD = {
    "no calibration": (gone("calibration"), r"calibration/intrinsics\.feather"),
    "no images": (gone("sensors/cameras"), r"has no images in sensors/cameras"),
    "no boxes": (
        gone(BOXES),
        r"annotations\.feather' is not there; boxes=false",
    ),
    "no poses": (gone(POSES), r"city_SE3_egovehicle\.feather"),
    "one image missing": (
        lambda log: next((log / "sensors" / "cameras" / RING[1]).iterdir()).unlink(),
        r"frame \d+ has no image of ring_front_left",
    ),
    "empty table": (content(BOXES, b""), r"annotations\.feather' is empty"),
    "cut table": (
        content(BOXES, lambda data: data[:-40]),
        r"annotations\.feather' cannot be read as feather",
    ),
    "LFS pointer": (
        content(BOXES, LFS_POINTER),
        r"annotations\.feather' is a git-LFS pointer",
    ),
    "column missing": (
        column(POSES, "qw", None),
        r"egovehicle\.feather' has no column 'qw'; it has timestamp_ns",
    ),
    "times as floats": (
        column(BOXES, "timestamp_ns", pa.array([1.6e18] * 12)),
        r"column 'timestamp_ns' is double, expected int64",
    ),
    "no quaternion": (
        column(MOUNTS, "qw", pa.array([2.0] * 8)),
        r"SE3_sensor\.feather': row 0: .*unit length",
    ),
    "NaN": (
        column(LENSES, "fx_px", pa.array([np.nan] * 7)),
        r"ring_front_center: the camera is not calibrated",
    ),
    "two rows for a camera": (
        column(LENSES, "sensor_name", pa.array([RING[0]] * 7)),
        r"has two rows for the sensor ring_front_center",
    ),
    "a camera without calibration": (
        column(LENSES, "sensor_name", pa.array(list("abcdefg"))),
        r"has images of ring_front_center, but no row for it",
    ),
    "two boxes of a track": (
        column(BOXES, "track_uuid", pa.array(["a"] * 12)),
        r"has two rows for time and track",
    ),
    "poses that go back": (
        column(
            POSES,
            "timestamp_ns",
            lambda times: times.take(list(range(31, -1, -1))),
        ),
        r"city_SE3_egovehicle\.feather': row 1 has the time \d+, not later",
    ),
    "another name": (
        content("sensors/lidar/first.feather", b"x"),
        r"first\.feather' has no time in its name",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_log_is_named(tmp_path, name):
    log, spec = one_log(tmp_path)
    break_it, message = BAD[name]
    break_it(log)
    with pytest.raises(SourceError, match=message):
        scan_source(spec)


def test_a_log_is_not_a_root(tmp_path):
    log, _ = one_log(tmp_path)
    with pytest.raises(SourceError, match="is one log; give the folder that holds it"):
        scan_source(SourceSpec("argoverse2", str(log), {}))


def test_logs_without_boxes_and_lidar(tmp_path):
    log, spec = one_log(tmp_path)
    shutil.rmtree(log / "sensors" / "lidar")
    info = scan_source(spec)
    assert info.num_samples == 4, "times of boxes are frames"
    assert info.report.masked == {"lidar": {"no sweep": 4}}
    shutil.move(log.parent, log.parent.parent / "test")
    (log.parent.parent / "test" / log.name / "annotations.feather").unlink()
    with pytest.raises(SourceError, match="no lidar sweeps and no boxes, so no frames"):
        scan_source(spec)


def test_forward_takes_the_first_image_of_each_sweep(tmp_path):
    suite = TestArgoverse2()
    world = suite.world(num_clips=1)
    write_log(tmp_path / "val" / "log", world.clips[0], late_ns=30_000_000)
    info = scan_source(SourceSpec("argoverse2", str(tmp_path), {}))
    assert info.num_samples == 4
    offsets = info.report.max_offset_ms
    for name, image in world.clips[0].frames[0].images.items():
        assert (
            offsets[name] == (image.timestamp_ns - world.clips[0].frames[0].timestamp_ns) / 1e6 + 30
        )


@pytest.mark.real
def test_a_real_log(tmp_path):
    """Against pyarrow and scipy; the real log has no pictures, so plain ones of the right sizes are laid beside it."""
    split = shared_data("av2-sensor") / "val"
    real = next(split.iterdir())
    log = tmp_path / "source" / "val" / real.name
    shutil.copytree(real, log)
    time = int(next((real / "sensors" / "lidar").iterdir()).stem)
    lenses = {
        row["sensor_name"]: row
        for row in feather.read_table(real / "calibration" / "intrinsics.feather").to_pylist()
    }
    plain = {}
    for name in RING:
        size = lenses[name]["height_px"], lenses[name]["width_px"]
        plain[size] = plain.get(size) or simplejpeg.encode_jpeg(np.full((*size, 3), 128, np.uint8))
        (log / "sensors" / "cameras" / name).mkdir(parents=True)
        (log / "sensors" / "cameras" / name / f"{time + 20_000_000}.jpg").write_bytes(plain[size])
    report = fr.shard(
        f"argoverse2:{tmp_path / 'source'}",
        tmp_path / "out",
        workers=1,
        options={"missing_camera": "drop"},
    )
    assert report.num_samples == 1
    (sample,) = samples_of(tmp_path / "out").values()
    dataset = open_dataset(tmp_path / "out")
    rows = feather.read_table(real / "city_SE3_egovehicle.feather").to_pylist()
    near = {row["timestamp_ns"]: row for row in rows}
    np.testing.assert_allclose(sample.geometry.ego2global, matrix(near[time]), atol=1e-9)
    before = max(
        (row for row in rows if row["timestamp_ns"] <= time + 20_000_000),
        key=lambda row: row["timestamp_ns"],
    )
    for index, name in enumerate(RING):
        assert (
            np.linalg.norm(sample.geometry.cam_ego2global[index][:3, 3] - matrix(before)[:3, 3])
            < 0.1
        )
        k = sample.geometry.intrinsics[index]
        row = lenses[name]
        assert [k[0, 0], k[1, 1], k[0, 2], k[1, 2]] == [
            row["fx_px"],
            row["fy_px"],
            row["cx_px"],
            row["cy_px"],
        ]
        assert sample.geometry.img_wh[index].tolist() == [
            row["width_px"],
            row["height_px"],
        ]
        assert np.isnan(sample.geometry.dist[index]).all(), "the images are rectified"
    mounts = feather.read_table(real / "calibration" / "egovehicle_SE3_sensor.feather").to_pylist()
    for row in mounts:
        if row["sensor_name"] in RING:
            np.testing.assert_allclose(
                sample.geometry.cam2ego[RING.index(row["sensor_name"])],
                matrix(row),
                atol=1e-9,
            )
    boxes = [
        row
        for row in feather.read_table(real / "annotations.feather").to_pylist()
        if row["timestamp_ns"] == time
    ]
    assert len(boxes) == len(sample.boxes.label) > 50
    for index, row in enumerate(boxes):
        expected = [
            row[name]
            for name in (
                "tx_m",
                "ty_m",
                "tz_m",
                "length_m",
                "width_m",
                "height_m",
            )
        ]
        np.testing.assert_allclose(sample.boxes.boxes3d[index, :6], expected, atol=1e-4)
        yaw = Rotation.from_matrix(matrix(row)[:3, :3]).as_euler("ZYX")[0]
        assert abs(np.angle(np.exp(1j * (sample.boxes.boxes3d[index, 6] - yaw)))) < 1e-4
        assert dataset.manifest.classes[sample.boxes.label[index]] == row["category"]
    sweep = feather.read_table(real / "sensors" / "lidar" / f"{time}.feather")
    np.testing.assert_array_equal(
        sample.points["lidar"][:, 2], sweep["z"].to_numpy().astype(np.float32)
    )


def matrix(row):
    pose = np.eye(4)
    pose[:3, :3] = Rotation.from_quat([row[name] for name in ("qx", "qy", "qz", "qw")]).as_matrix()
    pose[:3, 3] = [row[name] for name in ("tx_m", "ty_m", "tz_m")]
    return pose


def test_the_vector_map_is_a_channel(tmp_path):
    world = TestArgoverse2().world(num_clips=1)
    TestArgoverse2().write(world, tmp_path / "source")
    place = world.clips[0].frames[0].ego2global

    def line(*in_ego):
        points = (
            np.c_[np.array(in_ego, float), np.zeros((len(in_ego), 1))] @ place[:3, :3].T
            + place[:3, 3]
        )
        return [dict(zip("xyz", point, strict=True)) for point in points.tolist()]

    shared = line((0, 2), (40, 2))
    lane = {
        "left_lane_mark_type": "SOLID_WHITE",
        "right_lane_mark_type": "NONE",
    }
    content = {
        "drivable_areas": {"1": {"area_boundary": line((-5, -5), (5, -5), (5, 5))}},
        "pedestrian_crossings": {
            "2": {
                "edge1": line((10, -3), (10, 3)),
                "edge2": line((12, -3), (12, 3)),
            }
        },
        "lane_segments": {
            "3": {
                **lane,
                "left_lane_boundary": shared,
                "right_lane_boundary": line((0, -2), (90, -2)),
            },
            "4": {
                **lane,
                "left_lane_boundary": line((0, 6), (40, 6)),
                "right_lane_boundary": shared,
                "right_lane_mark_type": "SOLID_WHITE",
            },
        },
    }
    (file,) = (tmp_path / "source").rglob("log_map_archive*")
    file.write_text(json.dumps(content))
    spec = SourceSpec(
        "argoverse2",
        str(tmp_path / "source"),
        {"match": "nearest", "map": True},
    )
    TestArgoverse2().make(spec, tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    (channel,) = dataset.manifest.extra_channels
    samples = sorted(
        map(dataset.__getitem__, range(len(dataset))),
        key=lambda sample: sample.meta.timestamp_ns,
    )
    vectors = decode_values(samples[0].extra, (channel,), samples[0].key)["map"]
    assert np.bincount(vectors["line"]).tolist() == [4, 5, 2, 2, 2]
    first = np.flatnonzero(np.diff(vectors["line"], prepend=-1))
    assert vectors["layer"][first].tolist() == [0, 1, 2, 3, 2]
    np.testing.assert_allclose(
        vectors["point"][4:9],
        [(10, -3), (10, 3), (12, 3), (12, -3), (10, -3)],
        atol=0.02,
    )
    np.testing.assert_allclose(vectors["point"][11:13], [(0, -2), (51.2, -2)], atol=0.02)  # cut
    file.write_text("{}")
    with pytest.raises(SourceError, match="is not a vector map of Argoverse 2: the field '"):
        TestArgoverse2().make(spec, tmp_path / "other")
    file.unlink()
    assert scan_source(spec).report.noted == {"logs without a vector map": 1}
