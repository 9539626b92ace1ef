"""The tables, checked against the format's rules and, where it is installed, against nuScenes' own devkit."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fuelrail.sharding.demo.options import VERSION, SynthOptions
from fuelrail.sharding.demo.tables import splits, visibility_level

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

Tables = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def tables(small_world: Path) -> Tables:
    folder = small_world / VERSION
    return {
        path.stem: json.loads(path.read_text())
        for path in folder.glob("*.json")
        if path.stem != "splits"
    }


def test_all_thirteen_are_there_and_tokens_are_unique(tables: Tables) -> None:
    assert len(tables) == 13
    for name, rows in tables.items():
        assert rows, name
        assert len({row["token"] for row in rows}) == len(rows), name


@pytest.mark.parametrize("name", ["sample", "sample_data", "sample_annotation"])
def test_chains_go_both_ways_in_time(tables: Tables, name: str) -> None:
    rows = {row["token"]: row for row in tables[name]}
    times = {row["token"]: row["timestamp"] for row in tables["sample"]}
    groups = {
        "sample": "scene_token",
        "sample_data": "calibrated_sensor_token",
        "sample_annotation": "instance_token",
    }

    def time_of(row: dict[str, Any]) -> int:
        timestamp_us: int = row["timestamp"] if "timestamp" in row else times[row["sample_token"]]
        return timestamp_us

    num_starts = 0
    for row in rows.values():
        num_starts += not row["prev"]
        if row["next"]:
            following = rows[row["next"]]
            assert following["prev"] == row["token"]
            assert following[groups[name]] == row[groups[name]]
            assert time_of(following) > time_of(row)
    assert num_starts == len({row[groups[name]] for row in rows.values()})


def test_sweeps_point_to_the_keyframe_after_them(tables: Tables) -> None:
    samples = {row["token"]: row for row in tables["sample"]}
    num_sweeps = 0
    for row in tables["sample_data"]:
        sample = samples[row["sample_token"]]
        if row["is_key_frame"]:
            assert abs(row["timestamp"] - sample["timestamp"]) < 50_000
            assert row["filename"].startswith("samples/")
        else:
            num_sweeps += 1
            assert samples[sample["prev"]]["timestamp"] < row["timestamp"] < sample["timestamp"]
            assert row["filename"].startswith("sweeps/")
    assert num_sweeps == 2


def test_instances_count_their_annotations(tables: Tables) -> None:
    annotations = {row["token"]: row for row in tables["sample_annotation"]}
    for row in tables["instance"]:
        token = row["first_annotation_token"]
        count = 1
        while annotations[token]["next"]:
            token = annotations[token]["next"]
            count = count + 1
        assert (token, count) == (
            row["last_annotation_token"],
            row["nbr_annotations"],
        )
    assert sum(row["num_lidar_pts"] > 0 for row in annotations.values()) > 0.7 * len(annotations)


@pytest.mark.parametrize(
    ("num_clips", "expected"),
    [(1, ([0], [])), (2, ([0], [1])), (5, ([0, 1, 2, 4], [3]))],
)
def test_splits_are_by_clip(num_clips: int, expected: tuple[list[int], list[int]]) -> None:
    scenes_by_split = splits(SynthOptions(clips=num_clips, frames=1))
    assert scenes_by_split == {
        name: [f"scene-{9001 + index}" for index in indices]
        for name, indices in zip(("train", "val"), expected, strict=True)
    }


@pytest.fixture(scope="module")
def devkit(small_world: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its dependencies say about themselves
        module = pytest.importorskip("nuscenes.nuscenes")
        return module.NuScenes(VERSION, str(small_world), verbose=False)


@pytest.mark.filterwarnings(
    "ignore:.*utcfromtimestamp:DeprecationWarning"
)  # the devkit's own, from Python 3.12 on
def test_the_devkit_opens_it(devkit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    devkit.list_scenes()
    listed = capsys.readouterr().out
    assert "scene-9001" in listed
    assert "scene-9002" in listed
    assert len(devkit.sample) == 4
    for sample in devkit.sample:
        assert len(sample["data"]) == 7
        assert len(sample["anns"]) > 10


def test_the_devkit_projects_boxes_as_the_matrices_say(devkit: Any) -> None:
    from pyquaternion import Quaternion

    def matrix(row: dict[str, Any]) -> np.ndarray:
        pose: np.ndarray = Quaternion(row["rotation"]).transformation_matrix
        pose[:3, 3] = row["translation"]
        return pose

    num_boxes = 0
    for channel, token in devkit.sample[1]["data"].items():
        _, boxes, intrinsic = devkit.get_sample_data(token)
        row = devkit.get("sample_data", token)
        sensor2ego = matrix(devkit.get("calibrated_sensor", row["calibrated_sensor_token"]))
        global2sensor = np.linalg.inv(
            matrix(devkit.get("ego_pose", row["ego_pose_token"])) @ sensor2ego
        )
        for box in boxes:
            annotation = devkit.get("sample_annotation", box.token)
            w, l, h = annotation["size"]  # noqa: E741
            signs = np.array(np.meshgrid([-0.5, 0.5], [-0.5, 0.5], [-0.5, 0.5])).reshape(3, 8)
            corners = matrix(annotation) @ np.vstack([signs * [[l], [w], [h]], np.ones(8)])
            ours = (global2sensor @ corners)[:3]
            np.testing.assert_allclose(_sorted(ours), _sorted(box.corners()), atol=1e-5)
            if channel != "LIDAR_TOP" and ours[2].min() > 1:
                u, v, _ = intrinsic @ (ours / ours[2])
                assert u.max() > 0
                assert u.min() < row["width"]
                assert v.max() > 0
                assert v.min() < row["height"]
                num_boxes += 1
    assert num_boxes > 10


@pytest.mark.parametrize(
    ("share", "level"),
    [
        (0.0, "1"),
        (0.4, "1"),
        (0.41, "2"),
        (0.61, "3"),
        (0.8, "3"),
        (0.81, "4"),
        (1.0, "4"),
    ],
)
def test_levels_end_where_nuscenes_says(share: float, level: str) -> None:
    assert visibility_level(share) == level


def _sorted(corners: np.ndarray) -> np.ndarray:
    return np.array(sorted(map(tuple, np.round(corners.T, 4))))


def test_lidar_counts_are_the_devkits(devkit: Any) -> None:
    from nuscenes.utils.data_classes import LidarPointCloud
    from nuscenes.utils.geometry_utils import points_in_box

    for sample in devkit.sample[::3]:
        path, boxes, _ = devkit.get_sample_data(sample["data"]["LIDAR_TOP"])
        cloud = LidarPointCloud.from_file(path)
        assert cloud.points.shape[1] > 10_000
        assert len(boxes) == len(sample["anns"])
        counted = [int(points_in_box(box, cloud.points[:3]).sum()) for box in boxes]
        assert counted == [
            devkit.get("sample_annotation", box.token)["num_lidar_pts"] for box in boxes
        ]
