"""Lyft Level 5: nuScenes' tables with classes, sensors, names and times of its own, through the options of nuScenes."""

from __future__ import annotations

import json

import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import (
    Boxes,
    Geometry,
    decode_arrays,
    decode_meta,
)
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec
from support.nuscenes_tables import build_nuscenes
from support.sharding import scanned

LYFT = ("car", "pedestrian", "other_vehicle", "emergency_vehicle")
CAMERAS = ("CAM_FRONT", "CAM_FRONT_ZOOMED", "CAM_BACK")
OPTIONS = {"version": "v1.02-train", "classes": "source"}
FRACTION_US = 0.2


@pytest.fixture
def lyft(tmp_path):
    """A made dataroot with Lyft's quirks."""
    nuscenes = build_nuscenes(
        tmp_path / "source",
        {"host-a007-lidar0-1": 3},
        version="v1.02-train",
        cameras=CAMERAS,
    )
    tables = nuscenes.tables
    for row, name in zip(tables["category"], LYFT, strict=True):
        row["name"] = name
    for row in tables["sample_annotation"]:
        row.update(num_lidar_pts=-1, num_radar_pts=0, visibility_token="")
    for row in tables["sample_data"]:
        folder = "lidar" if "/LIDAR" in row["filename"] else "images"
        channel, name = row["filename"].split("/")[1:]
        moved = f"{folder}/host-a007_{channel}_{name}".replace(".jpg", ".jpeg").replace(
            ".pcd.bin", ".bin"
        )
        (nuscenes.root / folder).mkdir(exist_ok=True)
        if (nuscenes.root / row["filename"]).exists():
            (nuscenes.root / row["filename"]).rename(nuscenes.root / moved)
        row["filename"], row["fileformat"] = (
            moved,
            "jpeg" if folder == "images" else "bin",
        )
    nuscenes.write()
    for name in ("sample", "sample_data", "ego_pose"):
        path = nuscenes.folder / f"{name}.json"
        rows = json.loads(path.read_text())
        for row in rows:
            row["timestamp"] += FRACTION_US
        path.write_text(json.dumps(rows))
    return nuscenes


def test_the_options_of_the_page_read_it(lyft, tmp_path):
    _, info, table = scanned("nuscenes", lyft.root, tmp_path, **OPTIONS)
    assert info.num_samples == len(table) == 3
    assert sorted(info.classes) == sorted({row["name"] for row in lyft.tables["category"]})
    assert not info.report.unmapped
    assert {camera.channel for camera in info.cameras} == {name.lower() for name in CAMERAS}
    for number, sample in enumerate(
        sorted(lyft.tables["sample"], key=lambda row: row["timestamp"])
    ):
        row = table.row(number)
        assert decode_meta(row.meta).timestamp_ns == sample["timestamp"] * 1000, (
            "the fraction is rounded away"
        )
        geometry = decode_arrays(row.geometry, Geometry)
        boxes = decode_arrays(row.boxes, Boxes)
        assert (geometry.cam_valid == 1).all()
        assert (boxes.label >= 0).all()
        assert (boxes.num_lidar_pts == -1).all()
        assert (boxes.valid == 1).all(), "unknown is not 0"
        assert (boxes.visibility == -1).all()
        assert {member.name.rpartition(".")[2] for member in row.members} == {
            "jpg",
            "npy",
        }


UNIT = r"table 'sample': row .*2000 and 2100.*microseconds since 1970"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda time: round(time * 1e-6, 1), UNIT),
        (lambda time: round(time * 1000), UNIT),
        (str, r"sample\.json"),
    ],
    ids=["seconds", "nanoseconds", "text"],
)
def test_times_in_another_unit_are_refused(lyft, change, match):
    for name in ("sample", "sample_data"):
        path = lyft.folder / f"{name}.json"
        rows = [
            row | {"timestamp": change(row["timestamp"])} for row in json.loads(path.read_text())
        ]
        path.write_text(json.dumps(rows))
    with pytest.raises(SourceError, match=match):
        scan_source(SourceSpec("nuscenes", str(lyft.root), OPTIONS))
