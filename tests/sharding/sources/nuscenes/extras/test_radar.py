"""nuScenes' radars: against nuscenes-devkit, in a dataset, and hostile files."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.laws import LAWS, Motion
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.sample.schema import Geometry, decode_arrays, decode_meta
from fuelrail.pipeline.transforms.ego import BevMap
from fuelrail.sharding.sources.nuscenes.extras.radar import FIELDS, parse_pcd
from support.nuscenes_radar import ROW, add_radar_files, pcd, radar_rows
from support.nuscenes_tables import build_nuscenes, opened_by_devkit
from support.sharding import scanned

CAMERAS = ("CAM_FRONT",)


@pytest.fixture(scope="module")
def nuscenes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    built = build_nuscenes(
        tmp_path_factory.mktemp("radar") / "root",
        {"scene-0061": 4, "scene-0103": 2},
        cameras=CAMERAS,
    )
    # The radar leans, so that compensation is more than a turn about z.
    for row in built.tables["calibrated_sensor"]:
        if row["sensor_token"] == next(
            s["token"] for s in built.tables["sensor"] if s["modality"] == "radar"
        ):
            row["rotation"] = (
                np.array([0.9, 0.05, -0.03, 0.4]) / np.linalg.norm([0.9, 0.05, -0.03, 0.4])
            ).tolist()
    built.write("calibrated_sensor")
    built.files_of_radar = add_radar_files(built)
    return built


def points_of(source: Any, info: Any, row: Any) -> np.ndarray | None:
    (channel,) = info.channels
    for member in row.members:
        if member.name == channel.field:
            return KINDS["points"].decode(source.open(member.ref), channel)
    return None


@pytest.mark.parametrize("num_sweeps", [0, 2])
def test_radar_points_are_those_of_nuscenes_devkit(nuscenes, tmp_path, num_sweeps) -> None:
    devkit = opened_by_devkit(nuscenes.root)
    from nuscenes.utils.data_classes import RadarPointCloud

    source, info, table = scanned(
        "nuscenes",
        nuscenes.root,
        tmp_path,
        channels=["radar"],
        radar_sweeps=num_sweeps,
    )
    assert [channel.name for channel in info.channels] == ["radar_front"]
    RadarPointCloud.disable_filters()
    try:
        for number in range(len(table)):
            row = table.row(number)
            points = points_of(source, info, row)
            sample = devkit.get("sample", decode_meta(row.meta).sample_token)
            cloud, dt_s = RadarPointCloud.from_file_multisweep(
                devkit,
                sample,
                "RADAR_FRONT",
                "LIDAR_TOP",
                nsweeps=num_sweeps + 1,
                min_distance=0.0,
            )
            geometry = decode_arrays(row.geometry, Geometry)
            lidar2ego = geometry.lidar2ego[0]
            xyz = cloud.points[:3].T @ lidar2ego[:3, :3].T + lidar2ego[:3, 3]
            np.testing.assert_allclose(points[:, :3], xyz, atol=2e-5)
            columns = [
                column
                for column, name in enumerate(FIELDS)
                if (column > 2 and not name.startswith("v")) or name.endswith("rms")
            ]
            np.testing.assert_array_equal(points[:, columns], cloud.points[columns].T)
            np.testing.assert_allclose(points[:, 18], dt_s[0], atol=1e-6)
    finally:
        RadarPointCloud.default_filters()


def test_velocities_turn_with_the_points(nuscenes, tmp_path) -> None:
    source, info, table = scanned("nuscenes", nuscenes.root, tmp_path, channels=["radar"])
    row = table.row(1)
    points = points_of(source, info, row)
    tables = nuscenes.tables
    radar_row = next(
        r
        for r in tables["sample_data"]
        if r["is_key_frame"]
        and "/RADAR" in r["filename"]
        and r["sample_token"] == decode_meta(row.meta).sample_token
    )
    from pyquaternion import Quaternion

    calibrated = next(
        r for r in tables["calibrated_sensor"] if r["token"] == radar_row["calibrated_sensor_token"]
    )
    pose = next(r for r in tables["ego_pose"] if r["token"] == radar_row["ego_pose_token"])
    ego2global = decode_arrays(row.geometry, Geometry).ego2global[:3, :3]
    raw = nuscenes.files_of_radar[radar_row["filename"]]
    turn = (
        ego2global.T
        @ Quaternion(pose["rotation"]).rotation_matrix
        @ Quaternion(calibrated["rotation"]).rotation_matrix
    )
    for names in (("vx", "vy"), ("vx_comp", "vy_comp")):
        flat = np.stack([raw[names[0]], raw[names[1]], np.zeros(len(raw))], 1) @ turn.T
        columns = [list(FIELDS).index(name) for name in names]
        np.testing.assert_allclose(points[:, columns], flat[:, :2], atol=1e-4)
    moved = LAWS["ego_points"].move(points, info.channels[0], Motion(ego=BevMap(flip_y=True)))
    np.testing.assert_allclose(
        moved[:, list(FIELDS).index("vy_comp")],
        -points[:, list(FIELDS).index("vy_comp")],
    )


def test_a_radar_marked_as_not_valid_is_left_out(nuscenes, tmp_path) -> None:
    shutil.copytree(nuscenes.root, tmp_path / "root")
    import copy
    import json

    rows = copy.deepcopy(nuscenes.tables["sample_data"])
    radar_row = next(r for r in rows if r["is_key_frame"] and "/RADAR" in r["filename"])
    radar_row["is_valid"] = False
    (tmp_path / "root" / nuscenes.version / "sample_data.json").write_text(json.dumps(rows))
    source, info, table = scanned("nuscenes", tmp_path / "root", tmp_path, channels=["radar"])
    has_points = [
        points_of(source, info, table.row(number)) is not None for number in range(len(table))
    ]
    assert has_points.count(False) == 1


@pytest.mark.parametrize("key", [True, False])
def test_a_radar_file_that_is_absent_is_named(nuscenes, tmp_path, key) -> None:
    shutil.copytree(nuscenes.root, tmp_path / "root")
    rows = [
        r
        for r in nuscenes.tables["sample_data"]
        if r["is_key_frame"] is key and "/RADAR" in r["filename"]
    ]
    (tmp_path / "root" / rows[1]["filename"]).unlink()
    hint = "leave out 'radar'" if key else "radar_sweeps=0"
    with pytest.raises(SourceError, match=f"{rows[1]['filename']}.*{hint}"):
        scanned(
            "nuscenes",
            tmp_path / "root",
            tmp_path,
            channels=["radar"],
            radar_sweeps=2,
        )


def test_sweeps_without_radar_are_refused(nuscenes, tmp_path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"radar_sweeps=2 must be 0 or more, and 0 without channels=\[radar\]",
    ):
        scanned("nuscenes", nuscenes.root, tmp_path, radar_sweeps=2)
    with pytest.raises(ConfigError, match="channels"):
        scanned("nuscenes", nuscenes.root, tmp_path, channels=["sonar"])


def test_a_first_point_of_nan_means_no_points() -> None:
    rows = radar_rows(np.random.default_rng(0), 3)
    rows["x"][0] = np.nan
    assert parse_pcd(pcd(rows), "f").shape == (0, 18)
    assert parse_pcd(pcd(rows[:0]), "f").shape == (0, 18)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "without a line DATA"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"),
        (b"x" * 10_000 + b"\nDATA binary\n", "without a line DATA"),
        (pcd(np.zeros(2, ROW), FIELDS="x y z"), "fields of one number each"),
        (
            pcd(
                np.zeros(2, ROW),
                FIELDS=" ".join(f"f{column}" for column in range(18)),
            ),
            "has the fields f0 f1",
        ),
        (pcd(np.zeros(2, ROW), DATA="ascii"), "not a valid PCD"),
        (
            pcd(np.zeros(2, ROW), DATA="binary_compressed"),
            "DATA binary_compressed",
        ),
        (
            pcd(np.zeros(2, ROW), COUNT="2"),
            "COUNT 2; wanted are fields of one number each",
        ),
        (pcd(np.zeros(2, ROW), SIZE="4 4"), "fields of one number each"),
        (
            pcd(np.zeros(2, ROW), TYPE=" ".join("O" * 18)),
            "TYPE and SIZE O4; known are F2, F4",
        ),
        (pcd(np.zeros(2, ROW), POINTS="3"), "the file is cut off"),
        (
            pcd(np.zeros(2, ROW), POINTS="-1"),
            "has POINTS '-1'; expected a number of points",
        ),
        (pcd(np.zeros(2, ROW), POINTS="9" * 400), "has POINTS '9"),
        (pcd(np.zeros(2, ROW), POINTS=""), "has POINTS ''"),
    ],
)
def test_a_hostile_file_is_a_named_error(data, message) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        parse_pcd(data, "sweeps/x.pcd")
    assert "sweeps/x.pcd" in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_infinite_points_are_refused(nuscenes, tmp_path) -> None:
    shutil.copytree(nuscenes.root, tmp_path / "root")
    name, rows = next(iter(nuscenes.files_of_radar.items()))
    broken = rows.copy()
    broken["y"][1] = np.inf
    for name in nuscenes.files_of_radar:
        (tmp_path / "root" / name).write_bytes(pcd(broken))
    source, info, table = scanned("nuscenes", tmp_path / "root", tmp_path, channels=["radar"])
    with pytest.raises(SourceError, match="not finite"):
        points_of(source, info, table.row(0))
