"""The nuScenes adapter against the tables themselves and against the official devkit; its splits."""

from __future__ import annotations

import copy as copying
import os
import shutil

import numpy as np
import pytest

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.sample.schema import (
    Boxes,
    Geometry,
    decode_arrays,
    decode_meta,
    decode_points,
)
from fuelrail.sharding.sources.nuscenes.boxes import CLASSES
from fuelrail.sharding.sources.nuscenes.source import source_splits
from fuelrail.sharding.sources.nuscenes.tables import Tables
from fuelrail.sharding.sources.shared.files import source_files
from support.nuscenes_tables import (
    CAMERAS,
    build_nuscenes,
    opened_by_devkit,
    token,
)
from support.sharding import scanned
from support.shared_data import shared_data

CLIPS = {"scene-0061": 3, "scene-0103": 2, "scene-0916": 1}


@pytest.fixture(scope="module")
def nuscenes(tmp_path_factory):
    return build_nuscenes(tmp_path_factory.mktemp("nuscenes"), CLIPS)


@pytest.fixture
def copy(nuscenes, tmp_path):
    """A dataroot of its own, for tests that break it."""
    fresh = copying.deepcopy(nuscenes)
    fresh.root = shutil.copytree(nuscenes.root, tmp_path / "copy")
    return fresh


def scan(root, tmp_path, **options):
    return scanned("nuscenes", root, tmp_path, **options)


def transform(record):
    from pyquaternion import Quaternion

    matrix = np.eye(4)
    matrix[:3, :3] = Quaternion(record["rotation"]).rotation_matrix
    matrix[:3, 3] = record["translation"]
    return matrix


def check_against_devkit(devkit, info, table, source, *, points_of: int):
    """Every scalar, matrix and file of every sample, as the devkit reads them."""
    num_points = 0
    for number in range(len(table)):
        row = table.row(number)
        meta = decode_meta(row.meta)
        geometry = decode_arrays(row.geometry, Geometry)
        sample = devkit.get("sample", meta.sample_token)
        scene = devkit.get("scene", sample["scene_token"])
        log = devkit.get("log", scene["log_token"])
        assert meta.timestamp_ns == sample["timestamp"] * 1000 == row.timestamp_ns
        assert (meta.clip_name, meta.vehicle, meta.tags["location"]) == (
            scene["name"],
            log["vehicle"],
            log["location"],
        )
        assert (meta.prev_key is None, meta.next_key is None) == (
            sample["prev"] == "",
            sample["next"] == "",
        )
        assert meta.num_frames == scene["nbr_samples"]
        members = {member.name.partition(".")[0]: member for member in row.members}
        for index, camera in enumerate(info.cameras):
            data = devkit.get("sample_data", sample["data"][camera.source_name])
            calibrated = devkit.get("calibrated_sensor", data["calibrated_sensor_token"])
            assert geometry.cam_valid[index] == 1
            assert geometry.cam_timestamp_ns[index] == data["timestamp"] * 1000
            assert meta.cameras[camera.channel].token == data["token"]
            assert geometry.img_wh[index].tolist() == [
                data["width"],
                data["height"],
            ]
            np.testing.assert_array_equal(
                geometry.intrinsics[index], calibrated["camera_intrinsic"]
            )
            np.testing.assert_allclose(geometry.cam2ego[index], transform(calibrated), atol=1e-12)
            pose = transform(devkit.get("ego_pose", data["ego_pose_token"]))
            np.testing.assert_allclose(geometry.cam_ego2global[index], pose, atol=1e-9)
            member = members[camera.channel]
            assert member.ref == data["filename"]
            assert (member.width, member.height) == (
                data["width"],
                data["height"],
            )
        assert np.isnan(geometry.dist).all()
        data = (
            devkit.get("sample_data", sample["data"]["LIDAR_TOP"])
            if "LIDAR_TOP" in sample["data"]
            else None
        )
        if data is not None:
            calibrated = devkit.get("calibrated_sensor", data["calibrated_sensor_token"])
            pose = transform(devkit.get("ego_pose", data["ego_pose_token"]))
            np.testing.assert_allclose(geometry.lidar2ego[0], transform(calibrated), atol=1e-12)
            np.testing.assert_allclose(geometry.lidar_ego2global[0], pose, atol=1e-9)
            np.testing.assert_allclose(geometry.ego2global, pose, atol=1e-9)
            assert geometry.lidar_timestamp_ns[0] == data["timestamp"] * 1000
            points = decode_points(source.open(members["lidar_top"].ref))
            from nuscenes.utils.data_classes import LidarPointCloud

            cloud = LidarPointCloud.from_file(devkit.get_sample_data_path(data["token"]))
            np.testing.assert_array_equal(points[:, :4].T, cloud.points)
            num_points += len(points)
        check_boxes(devkit, sample, geometry, row)
    assert num_points == points_of


def check_boxes(devkit, sample, geometry, row):
    if not devkit.sample_annotation:
        assert row.boxes is None
        return
    from nuscenes.eval.detection.utils import category_to_detection_name
    from pyquaternion import Quaternion

    boxes = decode_arrays(row.boxes, Boxes)
    assert len(boxes.label) == len(sample["anns"])
    rotation = geometry.ego2global[:3, :3]
    for index, annotation in enumerate(devkit.get("sample_annotation", t) for t in sample["anns"]):
        box = devkit.get_box(annotation["token"])
        box.velocity = devkit.box_velocity(annotation["token"])
        box.translate(-geometry.ego2global[:3, 3])
        box.rotate(Quaternion(matrix=rotation, atol=1e-6).inverse)
        np.testing.assert_allclose(boxes.boxes3d[index, :3], box.center, atol=1e-4)
        np.testing.assert_allclose(boxes.boxes3d[index, 3:6], box.wlh[[1, 0, 2]], atol=1e-6)
        turn = boxes.boxes3d[index, 6] - box.orientation.yaw_pitch_roll[0]
        assert abs((turn + np.pi) % (2 * np.pi) - np.pi) < 1e-5
        np.testing.assert_allclose(
            np.abs(boxes.rotation_wxyz[index] @ box.orientation.elements),
            1,
            atol=1e-6,
        )
        velocity = np.linalg.inv(rotation) @ devkit.box_velocity(annotation["token"])
        np.testing.assert_allclose(boxes.velocity[index], velocity, atol=1e-4)
        np.testing.assert_allclose(
            np.sort(boxes.corners()[index], 0),
            np.sort(box.corners().T, 0),
            atol=1e-4,
        )
        name = category_to_detection_name(annotation["category_name"])
        assert boxes.label[index] == (-1 if name is None else CLASSES.index(name))
        assert boxes.num_lidar_pts[index] == annotation["num_lidar_pts"]
        assert boxes.num_radar_pts[index] == annotation["num_radar_pts"]
        assert boxes.visibility[index] == int(annotation["visibility_token"] or -1)
        names = [record["name"] for record in devkit.attribute]
        box_attributes = [
            devkit.get("attribute", entry)["name"] for entry in annotation["attribute_tokens"]
        ]
        assert boxes.attribute[index] == (names.index(box_attributes[0]) if box_attributes else -1)
        assert boxes.valid[index] == (annotation["num_lidar_pts"] + annotation["num_radar_pts"] > 0)


def test_made_tables_against_the_devkit(nuscenes, tmp_path):
    source, info, table = scan(nuscenes.root, tmp_path)
    assert [(clip.clip_id, clip.num_samples) for clip in info.clips] == list(CLIPS.items())
    assert [camera.source_name for camera in info.cameras] == list(CAMERAS)
    assert info.names == [
        "meta.json",
        "geometry.safetensors",
        "boxes.safetensors",
        *(f"{camera.lower()}.jpg" for camera in CAMERAS),
        "lidar_top.npy",
    ]
    assert info.splits == {
        "train": ["scene-0061"],
        "val": ["scene-0103", "scene-0916"],
    }
    check_against_devkit(
        opened_by_devkit(nuscenes.root, nuscenes.version),
        info,
        table,
        source,
        points_of=6 * 60,
    )


@pytest.mark.real
def test_real_keyframes_against_the_devkit(tmp_path):
    root = shared_data("nuscenes-mini")
    source, info, table = scan(root, tmp_path, version="v1.0-derived")
    assert [row.key for row in map(table.row, range(3))] == [
        "scene-0061-000000",
        "scene-0103-000000",
        "scene-0103-000001",
    ]
    check_against_devkit(
        opened_by_devkit(root, "v1.0-derived"),
        info,
        table,
        source,
        points_of=34688,
    )


def test_tracks_keep_their_ids_over_a_clip(nuscenes, tmp_path):
    _, _, table = scan(nuscenes.root, tmp_path)
    ids = [decode_arrays(table.row(number).boxes, Boxes).instance_id for number in range(6)]
    assert set(ids[0]) == set(ids[1]) == set(ids[2])
    assert not set(ids[0]) & set(ids[3])
    assert min(map(min, ids)) >= 0


def test_velocity_is_unknown_over_a_gap(copy, tmp_path):
    for number, sample in enumerate(copy.tables["sample"][:3]):
        sample["timestamp"] += number * 2_000_000
    copy.write("sample")
    _, _, table = scan(copy.root, tmp_path)
    velocity = decode_arrays(table.row(0).boxes, Boxes).velocity
    assert np.isnan(velocity).all()


def test_attributes(nuscenes, tmp_path):
    _, _, table = scan(nuscenes.root, tmp_path)
    rows = next(table.attribute_parts()).to_pylist()
    assert rows[0]["num_boxes"] == 3
    assert (
        rows[0]["num_car"],
        rows[0]["num_pedestrian"],
        rows[0]["num_barrier"],
        rows[0]["num_bus"],
    ) == (1, 1, 1, 0)
    assert [row["night"] for row in rows] == [
        None,
        None,
        None,
        True,
        True,
        None,
    ]
    assert rows[0]["location"] == "testville"
    assert rows[0]["num_cameras"] == 6


@pytest.mark.parametrize(
    ("location", "description", "night", "rain"),
    [  # the first three are nuScenes' own
        (
            "singapore-onenorth",
            "Parked truck, construction, intersection, turn left, following a van",
            False,
            False,
        ),
        (
            "singapore-hollandvillage",
            "Night, big street, bus stop, high speed, construction vehicle",
            True,
            False,
        ),
        (
            "boston-seaport",
            "Rain, peds, turn right, traffic lights",
            False,
            True,
        ),
        ("boston-seaport", "Night time, no rain, train station", True, False),
        ("boston-seaport", "", None, None),
        ("testville", "It rains", None, True),
        ("testville", "Midnight blue car, a train", None, None),
    ],
)
def test_night_and_rain_are_false_only_where_a_description_would_name_them(
    copy, tmp_path, location, description, night, rain
):
    for row in copy.tables["log"]:
        row["location"] = location
    for row in copy.tables["scene"]:
        row["description"] = description
    copy.write("log")
    copy.write("scene")
    _, _, table = scan(copy.root, tmp_path)
    rows = next(table.attribute_parts()).to_pylist()
    assert {(row.get("night"), row.get("rain")) for row in rows} == {(night, rain)}


def test_a_source_without_annotations_or_lidar(tmp_path):
    with pytest.raises(SourceError, match="no rows: nothing to shard"):
        scan(build_nuscenes(tmp_path / "empty", {}).root, tmp_path)
    nuscenes = build_nuscenes(
        tmp_path / "root",
        {"a": 2},
        num_points=0,
        num_tracks=0,
        cameras=("CAM_BACK", "CAM_FRONT"),
    )
    _, info, table = scan(nuscenes.root, tmp_path)
    assert [camera.channel for camera in info.cameras] == [
        "cam_front",
        "cam_back",
    ]
    assert info.lidars == []
    row = table.row(0)
    assert row.boxes is None
    geometry = decode_arrays(row.geometry, Geometry)
    assert geometry.lidar2ego.shape == (0, 4, 4)
    # Without a lidar the ego pose is that of the sensor row nearest to the sample's time: the camera that fired last.
    np.testing.assert_array_equal(geometry.ego2global, geometry.cam_ego2global[1])


def test_points_may_be_left_out(nuscenes, tmp_path):
    _, info, table = scan(nuscenes.root, tmp_path, points=False)
    assert "lidar_top.npy" not in info.names
    assert decode_arrays(table.row(0).geometry, Geometry).lidar2ego.shape == (
        1,
        4,
        4,
    )


def test_the_version_may_be_left_out_where_there_is_one(nuscenes, tmp_path):
    source, _, _ = scan(nuscenes.root, tmp_path)
    assert source.options["version"] == "v1.0-mini"
    with pytest.raises(SourceError, match=r"v1\.0-trainval' is not a folder"):
        scan(nuscenes.root, tmp_path, version="v1.0-trainval")
    for version in ("..", "../x", ""):
        with pytest.raises(ConfigError, match="version"):
            scan(nuscenes.root, tmp_path, version=version)


def test_several_versions_must_be_distinguished(copy, tmp_path):
    shutil.copytree(copy.folder, copy.root / "v1.0-other")
    with pytest.raises(
        ConfigError,
        match=r"such as -o version=v1\.0-mini; there are: v1\.0-mini, v1\.0-other",
    ):
        scan(copy.root, tmp_path)
    with pytest.raises(SourceError, match="nowhere' cannot be read: No such file"):
        scan(copy.root / "nowhere", tmp_path)


def test_a_missing_camera_file(copy, tmp_path):
    gone = copy.files("CAM_BACK")[2]
    gone.unlink()
    says = rf"frame 2 has no image of cam_back .*{gone.name}' \(no file\); the option missing_camera=mask"
    with pytest.raises(SourceError, match=says):
        scan(copy.root, tmp_path)
    _, info, table = scan(copy.root, tmp_path, missing_camera="mask")
    assert info.report.masked == {"cam_back": {"no file": 1}}
    row = table.row(2)
    assert decode_arrays(row.geometry, Geometry).cam_valid.tolist() == [
        1,
        1,
        1,
        0,
        1,
        1,
    ]
    assert "cam_back.jpg" not in [member.name for member in row.members]
    assert decode_meta(row.meta).sync["dropped"] == ["cam_back"]
    assert decode_meta(table.row(1).meta).sync["dropped"] == []


def test_a_missing_camera_row(copy, tmp_path):
    data = copy.tables["sample_data"]
    data.remove(next(row for row in data if row["is_key_frame"] and "CAM_BACK/" in row["filename"]))
    copy.write("sample_data")
    says = r"frame 0 has no image of cam_back \(no row\); the option missing_camera=mask"
    with pytest.raises(SourceError, match=says):
        scan(copy.root, tmp_path)
    _, _, table = scan(copy.root, tmp_path, missing_camera="mask")
    geometry = decode_arrays(table.row(0).geometry, Geometry)
    assert geometry.cam_valid.tolist() == [1, 1, 1, 0, 1, 1]
    assert np.isnan(geometry.cam2ego[3]).all()
    assert geometry.cam_timestamp_ns[3] == -1


def test_a_missing_lidar_file(copy, tmp_path):
    copy.files("LIDAR_TOP")[0].unlink()
    with pytest.raises(
        SourceError,
        match=r"lidar file .* is not there; the option points=false",
    ):
        scan(copy.root, tmp_path, missing_camera="mask")


def test_a_lidar_file_that_was_cut(copy, tmp_path):
    source, _, table = scan(copy.root, tmp_path)
    path = copy.files("LIDAR_TOP")[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match="of 1199 bytes does not hold rows of 5 float32"):
        source.open(table.row(0).members[-1].ref)
    path.unlink()
    with pytest.raises(SourceError, match="No such file"):
        source.open(table.row(0).members[-1].ref)


BREAKS = {
    "a dangling ego pose": (
        "sample_data",
        0,
        {"ego_pose_token": "nowhere"},
        "ego_pose_token 'nowhere'",
    ),
    "a dangling calibration": (
        "sample_data",
        0,
        {"calibrated_sensor_token": "x"},
        "calibrated_sensor_token 'x'",
    ),
    "a dangling sample": (
        "sample_data",
        0,
        {"sample_token": "x"},
        "sample_token 'x'",
    ),
    "a dangling scene": (
        "sample",
        0,
        {"scene_token": "x"},
        "table 'sample'.*scene_token 'x'",
    ),
    "a dangling log": ("scene", 0, {"log_token": "x"}, "log_token 'x'"),
    "a dangling instance": (
        "sample_annotation",
        0,
        {"instance_token": "x"},
        "instance_token 'x'",
    ),
    "a dangling category": (
        "instance",
        0,
        {"category_token": "x"},
        "category_token 'x'",
    ),
    "a dangling neighbour": ("sample_annotation", 0, {"next": "x"}, "next 'x'"),
    "a wrong count": (
        "scene",
        0,
        {"nbr_samples": 4},
        "nbr_samples 4, table 'sample' has 3",
    ),
    "a clock going backwards": (
        "sample",
        1,
        {"timestamp": 5},
        "its next is not the scene's following sample in time",
    ),
    "a broken chain": (
        "sample",
        0,
        {"next": ""},
        "its next is not the scene's following",
    ),
    "a token twice": (
        "sample",
        1,
        {"token": token("sample", "scene-0061", 0)},
        "twice",
    ),
    "a pose of NaN": (
        "ego_pose",
        0,
        {"translation": [float("nan"), 0, 0]},
        "table 'ego_pose'",
    ),
    "no rotation": (
        "calibrated_sensor",
        0,
        {"rotation": [0, 0, 0, 0]},
        r"rotation \[0.0, 0.0, 0.0, 0.0\]",
    ),
    "no intrinsics": (
        "calibrated_sensor",
        0,
        {"camera_intrinsic": []},
        "no 3 x 3 intrinsics",
    ),
    "a file outside": (
        "sample_data",
        0,
        {"filename": "../secret.jpg"},
        "scene-0061': the file name .* is not inside the",
    ),
    "an absolute file": (
        "sample_data",
        0,
        {"filename": "/etc/passwd"},
        "scene-0061': the file name .* is not inside the",
    ),
    "another kind of file": (
        "sample_data",
        0,
        {"filename": "v1.0-mini/map.json"},
        "map.json': image is neither JPEG",
    ),
    "another kind of lidar file": (
        "sample_data",
        12,
        {"filename": "a.las"},
        "has the file 'a.las', of a kind that is",
    ),
    "a negative size": (
        "sample_data",
        0,
        {"width": -1},
        "stated to have -1 x 32 px",
    ),
    "a channel with a dot": (
        "sensor",
        3,
        {"channel": "CAM.BACK"},
        "'CAM.BACK' has other characters",
    ),
    "a channel without a name": (
        "sensor",
        3,
        {"channel": ""},
        "'' has other characters",
    ),
    "two cases": (
        "sensor",
        3,
        {"channel": "cam_front"},
        "'CAM_FRONT' and 'cam_front' differ in case alone",
    ),
}


@pytest.mark.parametrize("case", BREAKS)
def test_tables_that_are_wrong(copy, tmp_path, case):
    table, row, change, says = BREAKS[case]
    copy.tables[table][row].update(change)
    copy.write(table)
    if case == "a pose of NaN":  # JSON has no NaN: it is read as null
        says = "ego_pose.json', counted from record 0: at 'translation.*' of entry 0: must be a number; got None"
    with pytest.raises(SourceError, match=says):
        scan(copy.root, tmp_path)


def test_a_size_that_is_not_stated_is_read(copy, tmp_path):
    copy.tables["sample_data"][0].update(width=0, height=None)
    copy.write("sample_data")
    _, _, table = scan(copy.root, tmp_path)
    assert decode_arrays(table.row(0).geometry, Geometry).img_wh[0].tolist() == [48, 32]


def test_a_frame_without_a_camera_is_dropped(copy, tmp_path):
    copy.files("CAM_BACK")[1].unlink()
    _, info, table = scan(copy.root, tmp_path, missing_camera="drop")
    assert info.report.dropped_samples == {"cam_back: no file": 1}
    assert [row.key for row in map(table.row, range(2))] == [
        "scene-0061-000000",
        "scene-0061-000002",
    ]


def test_a_file_over_the_cap(copy, tmp_path):
    path = copy.files("CAM_BACK")[0]
    os.truncate(path, (1 << 30) + 1)  # sparse: it takes no room
    with pytest.raises(
        SourceError,
        match=rf"{path.name}.*cam_back\.jpg of sample scene-0061-000000.*1073741825 bytes",
    ):
        scan(copy.root, tmp_path)


def test_two_keyframes_of_one_camera(copy, tmp_path):
    row = copy.tables["sample_data"][0]
    copy.tables["sample_data"].append({**row, "token": "second"})
    copy.write("sample_data")
    with pytest.raises(SourceError, match="row 'second' is a second keyframe of CAM_FRONT"):
        scan(copy.root, tmp_path)


def test_a_pose_that_is_there_twice(copy, tmp_path):
    poses = copy.tables["ego_pose"]
    poses.append({**poses[0], "translation": [1.0, 2.0, 3.0]})
    copy.write("ego_pose")
    with pytest.raises(
        SourceError,
        match=rf"table 'ego_pose' has the token '{poses[0]['token']}' twice",
    ):
        scan(copy.root, tmp_path)


def test_names_that_are_no_keys_become_slugs(tmp_path):
    nuscenes = build_nuscenes(tmp_path / "root", {"drive": 1, "scene-0001": 1, "x" * 90: 1})
    nuscenes.tables["scene"][0]["name"] = "2021.05.12/Drive Ä"
    nuscenes.write("scene")
    _, info, table = scan(nuscenes.root, tmp_path)
    ids = [clip.clip_id for clip in info.clips]
    assert ids[0].startswith("2021-05-12-drive-")
    assert ids[1] == "scene-0001"
    assert len(ids[2]) == 57
    assert decode_meta(table.row(0).meta).clip_name == "2021.05.12/Drive Ä"
    assert len(f"{table.row(2).key}.geometry.safetensors.zst") <= 100


def names(*numbers):
    return [f"scene-{number:04d}" for number in numbers]


def splits_of(folder, scenes):
    folder.mkdir(exist_ok=True)
    return source_splits(Tables(source_files(str(folder.parent)), folder.name), scenes)


def test_official_lists(tmp_path):
    splits = pytest.importorskip("nuscenes.utils.splits", reason="nuscenes-devkit is not installed")
    scenes_by_split = splits_of(tmp_path / "v1.0-trainval", [*splits.val, *splits.train])
    assert {name: set(scenes) for name, scenes in scenes_by_split.items()} == {
        "train": set(splits.train),
        "val": set(splits.val),
    }
    scenes_by_split = splits_of(tmp_path / "v1.0-mini", [*splits.mini_train, *splits.mini_val])
    assert scenes_by_split == {
        "train": splits.mini_train,
        "val": splits.mini_val,
    }
    assert splits_of(tmp_path / "v1.0-test", splits.test) == {"test": splits.test}


def test_other_tables_have_none(tmp_path):
    assert splits_of(tmp_path / "v1.0-derived", names(61, 103)) is None
    assert splits_of(tmp_path / "v1.0-mini", names(61, 62)) is None
    assert splits_of(tmp_path / "v1.0-mini", names(9001, 9002)) is None
    assert splits_of(tmp_path / "v1.0-trainval", ["scene-0001", "my-drive"]) is None


def test_a_file_beside_the_tables_comes_first(tmp_path):
    folder = tmp_path / "v1.0-mini"
    folder.mkdir()
    (folder / "splits.json").write_text('{"train": ["scene-0103"], "val": ["scene-0061"]}')
    assert splits_of(folder, names(61, 103)) == {
        "train": ["scene-0103"],
        "val": ["scene-0061"],
    }
    for bad in ('{"train": "scene-0103"}', "[]", "{"):
        (folder / "splits.json").write_text(bad)
        with pytest.raises(SourceError, match=r"splits\.json"):
            splits_of(folder, names(61, 103))
