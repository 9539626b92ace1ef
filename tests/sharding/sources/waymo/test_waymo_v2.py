"""Waymo's Parquet files: the synthetic world, what is wrong with a segment, and a real file of poses."""

from __future__ import annotations

import shutil
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from fuelrail.sharding.sources.shared.arrow import read_parquet
from fuelrail.sharding.sources.waymo import parquet_lidar
from support.sharding import scanned
from support.shared_data import shared_data
from support.source_at_url import AtUrl
from support.source_suite import SourceSuite
from support.spoil import column, content, gone
from support.waymo_files import CAMERAS, add_sweep
from support.waymo_tables import write_lidar, write_segment


class TestWaymoParquet(AtUrl, SourceSuite):
    kind = "waymo_v2"
    impossible = ("no file",)

    def world(self, **changes):
        sizes = {name: (64, 48) if number < 4 else (64, 32) for name, number in CAMERAS.items()}
        world = super().world(**{"cameras": sizes, "lidars": (), **changes})
        for _, _, frame in world.frames():
            for box in frame.boxes:
                box.category = {"car": "vehicle"}.get(box.category, box.category)
        return world

    def write(self, world, root):
        for number, clip in enumerate(world.clips):
            write_segment(root / ("training", "validation")[number % 2], clip)
        return str(root)

    def test_attributes_and_splits(self, made):
        rows = pq.read_table(made.folder / "out" / "attributes.parquet").to_pylist()
        assert {(row["night"], row["rain"], row["location"]) for row in rows} == {
            (False, False, "location_phx")
        }
        assert made.scan.info.splits == {
            "train": ["drive-0"],
            "val": ["drive-1"],
        }


class TestWithLidar(TestWaymoParquet):
    """Range images, whose points are the same as those of version 1."""

    compare: ClassVar = {"points_m": 1e-4}

    def world(self, **changes):
        world = super().world(**changes)
        for _, _, frame in world.frames():
            add_sweep(frame)
        return world

    def write(self, world, root):
        for number, clip in enumerate(world.clips):
            write_lidar(root / ("training", "validation")[number % 2], clip)
        return super().write(world, root)

    def test_each_range_image_is_read_once(self, tmp_path, monkeypatch):
        spec = self.spec(tmp_path)
        read = []
        plain = parquet_lidar._read_range_images

        def counted(files, name, column, **options):
            for time, laser, image in plain(files, name, column, **options):
                read.append((column, time, laser))
                yield time, laser, image

        monkeypatch.setattr(parquet_lidar, "_read_range_images", counted)
        self.make(spec, tmp_path / "out")
        assert len(read) == len(set(read)) == 2 * 4 * (2 + 1)

    def test_bad_range_images_are_named(self, tmp_path):
        spec = self.spec(tmp_path)
        root = tmp_path / "source" / "training"
        part = "[LiDARComponent].range_image_return1"
        shapes = (
            pq.read_table(root / "lidar" / "drive-0.parquet").column(f"{part}.shape").to_pylist()
        )
        source, _, table = scanned(spec.kind, spec.location, tmp_path)
        (ref,) = [member.ref for member in table.row(0).members if member.name == "lidar.npy"]
        for values, message in (
            (
                [[[2, *shape[1:]] for shape in shapes]],
                r"drive-0.parquet': lidar \d: .*\d+ numbers",
            ),
            (
                None,
                r"has no column '\[LiDARComponent\].range_image_return1.shape'",
            ),
        ):
            column(file("lidar"), f"{part}.shape", values)(root)
            with pytest.raises(SourceError, match=message):
                source.open(ref)
        (root / "lidar_calibration" / "drive-0.parquet").unlink()
        with pytest.raises(SourceError, match=r"lidar_calibration/drive-0.parquet.*not there"):
            scan_source(spec)
        assert not scan_source(spec._replace(options={"points": False})).report.masked


def one_segment(tmp_path):
    """The folder of the components of one segment, and its source."""
    world = TestWaymoParquet().world(num_clips=1)
    write_segment(tmp_path / "source", world.clips[0])
    return tmp_path / "source", SourceSpec("waymo_v2", str(tmp_path / "source"), {})


def file(component: str) -> str:
    return f"{component}/drive-0.parquet"


POSE = "[VehiclePoseComponent].world_from_vehicle.transform"
TIME = "key.frame_timestamp_micros"
CAMERA = "key.camera_name"
BAD = {
    "no images": (
        gone("camera_image"),
        r"camera_image/drive-0\.parquet' is not there",
    ),
    "no calibration": (
        gone("camera_calibration"),
        r"camera_calibration/drive-0\.parquet' is not there",
    ),
    "not Parquet": (
        content(file("stats"), b"PAR1" * 9),
        r"stats/drive-0\.parquet' cannot be read as Parquet",
    ),
    "column missing": (
        column(file("camera_image"), "[CameraImageComponent].pose_timestamp", None),
        r"camera_image/drive-0\.parquet' has no column '\[CameraImageComponent\]\.pose_timestamp'; it has key\.segment",
    ),
    "times as floats": (
        column(file("vehicle_pose"), TIME, [pa.array([1.6e15] * 4)]),
        r"column 'key\.frame_timestamp_micros' is double, expected int64",
    ),
    "a camera as text": (
        column(file("camera_calibration"), CAMERA, [pa.array(list("abcde"))]),
        r"column 'key\.camera_name' is string, expected int64",
    ),
    "two rows for a camera": (
        column(file("camera_image"), CAMERA, [pa.array([1] * 20)]),
        r"has two rows for time and camera",
    ),
    "a camera without calibration": (
        column(file("camera_calibration"), CAMERA, [pa.array([1, 2, 3, 4, 6])]),
        r"has images of camera 5 \(SIDE_RIGHT\), which has no calibration",
    ),
    "two frames of a time": (
        column(file("vehicle_pose"), TIME, [pa.array([1_600_000_000_000_000] * 4)]),
        r"has no pose at \d+ us, where there are images",
    ),
    "no rotation": (
        column(file("vehicle_pose"), POSE, [pa.array([[2.0] * 16] * 4)]),
        r"is not a rotation",
    ),
    "matrices of another size": (
        column(file("vehicle_pose"), POSE, [pa.array([[2.0] * 12] * 4)]),
        r"world_from_vehicle\.transform' is list<.*expected fixed_size_list",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_segment_is_named(tmp_path, name):
    root, spec = one_segment(tmp_path)
    break_it, message = BAD[name]
    break_it(root)
    with pytest.raises(SourceError, match=message):
        scan_source(spec)


def test_single_precision_and_boxes_when_a_camera_sees_them(tmp_path):
    root, spec = one_segment(tmp_path)
    column(
        file("vehicle_pose"),
        POSE,
        lambda values: values.cast(pa.list_(pa.float32(), 16)),
    )(root)
    assert scan_source(spec).report.boxes == 12
    assert scan_source(spec._replace(options={"boxes": "camera_synced"})).report.boxes == 11
    shutil.rmtree(root / "lidar_box")
    assert "boxes.safetensors" not in scan_source(spec).names


def test_version_1_names_version_2(tmp_path):
    root, _ = one_segment(tmp_path)
    with pytest.raises(SourceError, match="Parquet files of version 2: its kind is waymo_v2"):
        scan_source(SourceSpec("waymo", str(root), {}))


@pytest.mark.real
def test_a_real_file_of_poses():
    """It has poses of 199 frames in single precision, and no images: both is named or read, by pyarrow too."""
    root = shared_data("waymo-v2-parquet")
    with pytest.raises(
        SourceError,
        match=r"camera_calibration/10023947602400723454_1120_000_1140_000\.parquet' is not there",
    ):
        scan_source(SourceSpec("waymo_v2", str(root), {}))
    source = make_source(SourceSpec("waymo_v2", str(root), {}))
    (clip,) = source.clips()
    rows = read_parquet(
        source.files,
        clip.files[2],
        {TIME: pa.int64(), POSE: pa.list_(pa.float64(), 16)},
    )
    expected = pq.read_table(next(root.rglob("*.parquet"))).to_pylist()
    assert rows[TIME].tolist() == [row[TIME] for row in expected]
    np.testing.assert_array_equal(rows[POSE], [row[POSE] for row in expected])
