"""Waymo's Parquet files: the synthetic world, what is wrong with a segment, and a real file of poses."""

from __future__ import annotations

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from support.shared_data import shared_data
from support.source_at_url import AtUrl
from support.source_suite import SourceSuite
from support.waymo_files import CAMERAS
from support.waymo_tables import write_segment


class TestWaymoParquet(AtUrl, SourceSuite):
    kind = "waymo_v2"

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

    def test_attributes_and_splits(self, tmp_path):
        self.make(self.spec(tmp_path), tmp_path / "out")
        rows = pq.read_table(tmp_path / "out" / "attributes.parquet").to_pylist()
        assert {(row["night"], row["rain"], row["location"]) for row in rows} == {(False, False, "location_phx")}
        _, info, _ = self.scan(SourceSpec("waymo_v2", str(tmp_path / "source"), {}), tmp_path)
        assert info.splits == {"train": ["drive-0"], "val": ["drive-1"]}


def one_segment(tmp_path):
    """The folder of the components of one segment, and its source."""
    world = TestWaymoParquet().world(num_clips=1)
    write_segment(tmp_path / "source", world.clips[0])
    return tmp_path / "source", SourceSpec("waymo_v2", str(tmp_path / "source"), {})


def change(root, component, name, values) -> None:
    """Write a component with another column; None takes it out."""
    path = root / component / "drive-0.parquet"
    table = pq.read_table(path)
    at = table.column_names.index(name)
    pq.write_table(table.remove_column(at) if values is None else table.set_column(at, name, [values]), path)


BAD = {
    "no images": (lambda root: shutil.rmtree(root / "camera_image"), r"camera_image/drive-0\.parquet' is not there"),
    "no calibration": (
        lambda root: shutil.rmtree(root / "camera_calibration"), r"camera_calibration/drive-0\.parquet' is not there"
    ),
    "not Parquet": (
        lambda root: (root / "stats" / "drive-0.parquet").write_bytes(b"PAR1" * 9),
        r"stats/drive-0\.parquet' cannot be read as Parquet",
    ),
    "column missing": (
        lambda root: change(root, "camera_image", "[CameraImageComponent].pose_timestamp", None),
        r"camera_image/drive-0\.parquet' has no column '\[CameraImageComponent\]\.pose_timestamp'; it has key\.segment",
    ),
    "times as floats": (
        lambda root: change(root, "vehicle_pose", "key.frame_timestamp_micros", pa.array([1.6e15] * 4)),
        r"column 'key\.frame_timestamp_micros' is double, expected int64",
    ),
    "a camera as text": (
        lambda root: change(root, "camera_calibration", "key.camera_name", pa.array(list("abcde"))),
        r"column 'key\.camera_name' is string, expected int64",
    ),
    "two rows for a camera": (
        lambda root: change(root, "camera_image", "key.camera_name", pa.array([1] * 20)),
        r"camera_image/drive-0\.parquet' has two rows for time and camera",
    ),
    "a camera without calibration": (
        lambda root: change(root, "camera_calibration", "key.camera_name", pa.array([1, 2, 3, 4, 6])),
        r"has images of camera 5 \(SIDE_RIGHT\), which has no calibration",
    ),
    "two frames of a time": (
        lambda root: change(root, "vehicle_pose", "key.frame_timestamp_micros", pa.array([1_600_000_000_000_000] * 4)),
        r"has no pose at \d+ us, where there are images",
    ),
    "no rotation": (
        lambda root: change(
            root, "vehicle_pose", "[VehiclePoseComponent].world_from_vehicle.transform", pa.array([[2.0] * 16] * 4)
        ),
        r"is not a rotation",
    ),
    "matrices of another size": (
        lambda root: change(
            root, "vehicle_pose", "[VehiclePoseComponent].world_from_vehicle.transform", pa.array([[2.0] * 12] * 4)
        ),
        r"world_from_vehicle\.transform' is list<.*expected fixed_size_list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_segment_is_named(tmp_path, name):
    root, spec = one_segment(tmp_path)
    break_it, message = BAD[name]
    break_it(root)
    with pytest.raises(SourceError, match=message):
        scan_source(spec)


def test_single_precision_and_boxes_when_a_camera_sees_them(tmp_path):
    root, spec = one_segment(tmp_path)
    name = "[VehiclePoseComponent].world_from_vehicle.transform"
    values = pq.read_table(root / "vehicle_pose" / "drive-0.parquet")[name].cast(pa.list_(pa.float32(), 16))
    change(root, "vehicle_pose", name, values)
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
        SourceError, match=r"camera_calibration/10023947602400723454_1120_000_1140_000\.parquet' is not there"
    ):
        scan_source(SourceSpec("waymo_v2", str(root), {}))
    source = make_source(SourceSpec("waymo_v2", str(root), {}))
    (clip,) = source.clips()
    name = "[VehiclePoseComponent].world_from_vehicle.transform"
    rows = source._read(clip.files[2], {"key.frame_timestamp_micros": pa.int64(), name: pa.list_(pa.float64(), 16)})
    wanted = pq.read_table(next(root.rglob("*.parquet"))).to_pylist()
    assert rows["key.frame_timestamp_micros"].tolist() == [row["key.frame_timestamp_micros"] for row in wanted]
    np.testing.assert_array_equal(rows[name], [row[name] for row in wanted])
