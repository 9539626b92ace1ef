"""Real keyframes in shards: what is read back, by any tool, is what the source holds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fuelrail.pipeline.format.dataset import open_dataset
from support.sharding import shard_nuscenes
from support.shared_data import shared_data
from support.source_world import samples_of

pytestmark = pytest.mark.real

VERSION = "v1.0-derived"


@pytest.fixture(scope="module")
def root():
    return shared_data("nuscenes-mini")


@pytest.fixture(scope="module", params=["member", "frame", "none"])
def out(request, root, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "out"
    splits = {"train": ["scene-0103"], "val": ["scene-0061"]}
    shard_nuscenes(
        root,
        folder,
        version=VERSION,
        splits=splits,
        layout=request.param,
        license="CC BY-NC-SA 4.0",
    )
    return folder


@pytest.fixture(scope="module")
def tables(root):
    names = ("sample", "sample_data", "calibrated_sensor", "sensor", "ego_pose")
    read = {name: json.loads((root / VERSION / f"{name}.json").read_text()) for name in names}
    return {name: {row["token"]: row for row in rows} for name, rows in read.items()}


def keyframe_files(tables, sample_token):
    """Channel (lower case) to its row of sample_data."""
    rows = {}
    for data in tables["sample_data"].values():
        if data["sample_token"] == sample_token and data["is_key_frame"]:
            calibrated = tables["calibrated_sensor"][data["calibrated_sensor_token"]]
            rows[tables["sensor"][calibrated["sensor_token"]]["channel"].lower()] = data
    return rows


def test_every_member_is_the_sources(root, out, tables):
    dataset = open_dataset(out)
    samples = samples_of(out).values()
    assert len(samples) == 3
    num_images = 0
    for sample in samples:
        files = keyframe_files(tables, sample.meta.sample_token)
        assert set(sample.images) | set(sample.points) == set(files)
        for channel, image in sample.images.items():
            assert bytes(image) == (root / files[channel]["filename"]).read_bytes()
            num_images += 1
        for channel, points in sample.points.items():
            source = np.fromfile(root / files[channel]["filename"], np.float32).reshape(-1, 5)
            np.testing.assert_array_equal(points, source)
        for number, camera in enumerate(dataset.manifest.cameras):
            calibrated = tables["calibrated_sensor"][
                files[camera.channel]["calibrated_sensor_token"]
            ]
            pose = tables["ego_pose"][files[camera.channel]["ego_pose_token"]]
            np.testing.assert_array_equal(
                sample.geometry.intrinsics[number],
                calibrated["camera_intrinsic"],
            )
            np.testing.assert_array_equal(
                sample.geometry.cam2ego[number, :3, 3],
                calibrated["translation"],
            )
            np.testing.assert_array_equal(
                sample.geometry.cam_ego2global[number, :3, 3],
                pose["translation"],
            )
        assert sample.meta.license == "CC BY-NC-SA 4.0"
        assert sample.meta.dataset == f"nuscenes-{VERSION}"
        assert sample.meta.split == ("val" if sample.meta.clip_name == "scene-0061" else "train")
    assert num_images == 18
