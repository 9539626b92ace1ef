"""2-D boxes against nuscenes-devkit, cv2 and points on the boxes; tokens against the tables."""

from __future__ import annotations

import json
from typing import Any

import cv2
import numpy as np
import pytest

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.selection import decode_values
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.schema import Boxes, decode_arrays, decode_meta
from fuelrail.sharding.api import shard, verify
from fuelrail.sharding.sources.nuscenes.extras.boxes2d import (
    _FACES,
    image_bounds,
)
from support.nuscenes_radar import add_radar_files
from support.nuscenes_tables import build_nuscenes, opened_by_devkit
from support.sharding import scanned

CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT")
K = np.array([[400.0, 0.0, 320.0], [0.0, 410.0, 180.0], [0.0, 0.0, 1.0]])
SIZE = (640, 360)


@pytest.fixture(scope="module")
def nuscenes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("boxes2d") / "root"
    return build_nuscenes(
        root,
        {"scene-0061": 3, "scene-0103": 2},
        cameras=CAMERAS,
        size=(640, 480),
        num_tracks=9,
    )


def values(source: Any, info: Any, row: Any) -> dict[str, Any]:
    refs = {member.name: member.ref for member in row.members}
    return {
        channel.name: KINDS[channel.kind].decode(source.open(refs[channel.field]), channel)
        for channel in info.channels
        if channel.field in refs
    }


def random_corners(rng: np.random.Generator, number: int) -> np.ndarray:
    signs = np.array([[x, y, z] for x in (1, -1) for y in (1, -1) for z in (1, -1)]) / 2
    turn = np.linalg.qr(rng.normal(size=(number, 3, 3)))[0]
    centre = rng.normal(size=(number, 3)) * (6, 3, 8) + (0, 0, 6)
    return (
        np.einsum("mij,mkj->mki", turn, signs * rng.uniform(0.5, 5, (number, 1, 3)))
        + centre[:, None]
    )


@pytest.mark.costly
def test_whole_boxes_are_those_of_nuscenes_devkit(nuscenes, tmp_path) -> None:
    devkit = opened_by_devkit(nuscenes.root)
    from nuscenes.utils.geometry_utils import BoxVisibility, view_points

    source, info, table = scanned("nuscenes", nuscenes.root, tmp_path, channels=["boxes2d"])
    num_boxes = 0
    for number in range(len(table)):
        row = table.row(number)
        sample = devkit.get("sample", decode_meta(row.meta).sample_token)
        channels = values(source, info, row)
        for camera in CAMERAS:
            _, boxes, intrinsics = devkit.get_sample_data(
                sample["data"][camera], box_vis_level=BoxVisibility.NONE
            )
            ours = channels[f"boxes2d_{camera.lower()}"]
            for box_index, box in enumerate(boxes):
                corners = box.corners()
                pixels = view_points(corners, intrinsics, normalize=True)[:2]
                in_image = (
                    (pixels > 0).all() and (pixels[0] < 639).all() and (pixels[1] < 479).all()
                )
                if (corners[2] > 0.2).all() and in_image:
                    mine = np.flatnonzero(ours["row"] == box_index)
                    assert len(mine) == 1
                    expected = [*pixels.min(1), *pixels.max(1)]
                    np.testing.assert_allclose(ours["box"][mine[0]], expected, atol=2e-2)
                    num_boxes += 1
    assert num_boxes > 3


@pytest.mark.costly
def test_cut_off_boxes_bound_what_is_left() -> None:
    rng = np.random.default_rng(1)
    corners = random_corners(rng, 400)
    bounds, rows = image_bounds(corners, K, SIZE)
    frame = np.array([[-0.5, -0.5], [639.5, -0.5], [639.5, 359.5], [-0.5, 359.5]], np.float32)
    cut = 0
    for row in np.flatnonzero((corners[..., 2] > 0.1).all(1)).tolist():
        pixels = corners[row] @ K.T
        hull = cv2.convexHull((pixels[:, :2] / pixels[:, 2:]).astype(np.float32))
        area, polygon = cv2.intersectConvexConvex(hull, frame)
        matches = np.flatnonzero(rows == row)
        if area > 1 and len(matches):
            polygon = polygon.reshape(-1, 2)
            np.testing.assert_allclose(
                bounds[matches[0]],
                [*polygon.min(0), *polygon.max(0)],
                atol=0.05,
            )
            cut += not (
                np.abs(bounds[matches[0]] - [*hull.min((0, 1)), *hull.max((0, 1))]) < 0.01
            ).all()
        else:
            assert area < 1.5
    assert cut > 20


@pytest.mark.costly
def test_boxes_around_the_camera_bound_their_visible_sides() -> None:
    rng = np.random.default_rng(2)
    corners = random_corners(rng, 60) - (0, 0, 5)
    bounds, rows = image_bounds(corners, K, SIZE)
    steps = np.linspace(0, 1, 160)
    a, b = (axis.reshape(-1, 1) for axis in np.meshgrid(steps, steps))
    near = 0
    for row in range(len(corners)):
        faces = [corners[row, face] for face in _FACES]
        points = np.concatenate(
            [
                f[0] * (1 - a) * (1 - b) + f[1] * a * (1 - b) + f[2] * a * b + f[3] * (1 - a) * b
                for f in faces
            ]
        )
        points = points[points[:, 2] >= 0.1]
        pixels = points @ K.T
        pixels = pixels[:, :2] / pixels[:, 2:]
        pixels = pixels[((pixels >= -0.5) & (pixels <= (639.5, 359.5))).all(1)]
        matches = np.flatnonzero(rows == row)
        if not len(matches):
            assert len(pixels) < 5
        elif len(pixels):
            bound = bounds[matches[0]]
            assert (pixels.min(0) >= bound[:2] - 1e-6).all()
            assert (pixels.max(0) <= bound[2:] + 1e-6).all()
            near += bool((corners[row, :, 2] < 0.1).any())
            assert (pixels.min(0) - bound[:2] < 30).all()  # samples are up to 30 px apart
            assert (bound[2:] - pixels.max(0) < 30).all()
    assert near >= 5


def test_the_near_plane_is_a_decimetre_before_the_camera() -> None:
    signs = np.array([[x, y, z] for x in (1, -1) for y in (1, -1) for z in (1, -1)]) / 2
    through = signs * (0.01, 0.01, 2.0) + (
        0.025,
        0.025,
        0.0,
    )  # x and y from 0.02 to 0.03 m, z from -1 to 1 m
    corners = np.stack([through, signs * (1, 1, 0.08) + (0, 0, 0.05)])  # the second ends at 0.09 m
    bounds, rows = image_bounds(corners, K, SIZE)
    assert rows.tolist() == [0]
    expected = [
        320 + 400 * 0.02 / 1,
        180 + 410 * 0.02 / 1,
        320 + 400 * 0.03 / 0.1,
        180 + 410 * 0.03 / 0.1,
    ]
    np.testing.assert_allclose(bounds, [expected], atol=1e-6)


def test_tokens_are_those_of_the_tables_in_the_order_of_boxes(nuscenes, tmp_path) -> None:
    source, info, table = scanned(
        "nuscenes", nuscenes.root, tmp_path, channels=["tokens", "description"]
    )
    annotations = {row["token"]: row for row in nuscenes.tables["sample_annotation"]}
    scenes = {row["name"]: row["description"] for row in nuscenes.tables["scene"]}
    ids: dict[str, int] = {}
    for number in range(len(table)):
        row = table.row(number)
        channels = values(source, info, row)
        boxes = decode_arrays(row.boxes, Boxes)
        meta = decode_meta(row.meta)
        assert channels["description"] == scenes[meta.clip_name]
        tokens = json.loads(channels["box_tokens"])
        assert len(tokens["annotation"]) == len(boxes.label) == 9
        for box_index, token in enumerate(tokens["annotation"]):
            record = annotations[token]
            assert record["sample_token"] == meta.sample_token
            assert tokens["instance"][box_index] == record["instance_token"]
            assert tokens["visibility"][box_index] == record["visibility_token"]
            np.testing.assert_allclose(
                boxes.boxes3d[box_index, 3:5],
                [record["size"][1], record["size"][0]],
                atol=1e-6,
            )
            assert (
                ids.setdefault(record["instance_token"], boxes.instance_id[box_index])
                == boxes.instance_id[box_index]
            )
    assert len(set(ids.values())) == 18


@pytest.mark.costly
def test_a_dataset_with_all_groups_is_sound(nuscenes, tmp_path) -> None:
    add_radar_files(nuscenes)
    options = {
        "channels": [
            "boxes2d",
            "tokens",
            "trajectories",
            "description",
            "radar",
        ],
        "radar_sweeps": 1,
    }
    shard(
        f"nuscenes:{nuscenes.root}",
        tmp_path / "out",
        workers=1,
        options=options,
    )
    assert verify(tmp_path / "out", deep=True, workers=1).faults == []
    dataset = open_dataset(tmp_path / "out")
    names = [channel.name for channel in dataset.manifest.extra_channels]
    assert names == [
        "radar_front",
        "boxes2d_cam_front",
        "boxes2d_cam_front_right",
        "boxes2d_cam_front_left",
        "box_tokens",
        "ego_trajectory",
        "agent_trajectories",
        "description",
    ]
    channel = dataset.manifest.extra_channels[0]
    assert (channel.sensor, channel.frame) == ("radar", "ego")
    value = decode_values(dataset[1].extra, (channel,), dataset[1].key)["radar_front"]
    assert value.shape[1] == 19
    assert set(np.unique(value[:, 18] > 0.05)) == {
        False,
        True,
    }  # a keyframe's own sweep, and an earlier one
    shard(f"nuscenes:{nuscenes.root}", tmp_path / "plain", workers=1)
    assert set(dataset[0].extra) > set(open_dataset(tmp_path / "plain")[0].extra)


def test_without_annotations_there_are_no_channels_of_boxes(tmp_path) -> None:
    nuscenes = build_nuscenes(
        tmp_path / "root",
        {"scene-0061": 2},
        cameras=("CAM_FRONT",),
        num_tracks=0,
    )
    _, info, table = scanned(
        "nuscenes",
        nuscenes.root,
        tmp_path,
        channels=["boxes2d", "tokens", "trajectories"],
    )
    assert [channel.name for channel in info.channels] == ["ego_trajectory"]
    assert [member.name for member in table.row(0).members][-1] == "ego_trajectory.npy"


def test_images_that_are_not_rectified_are_refused(tmp_path) -> None:
    nuscenes = build_nuscenes(tmp_path / "root", {"scene-0061": 1}, cameras=("CAM_FRONT",))
    nuscenes.tables["calibrated_sensor"][0]["camera_distortion"] = [
        0.1,
        0.0,
        0.0,
        0.0,
        0.0,
    ]
    nuscenes.write("calibrated_sensor")
    with pytest.raises(SourceError, match=r"'cam_front' is not rectified.*leave out 'boxes2d'"):
        scanned("nuscenes", nuscenes.root, tmp_path, channels=["boxes2d"])


def test_a_channel_of_the_same_name_beside_the_tables_is_refused(
    tmp_path,
) -> None:
    nuscenes = build_nuscenes(tmp_path / "root", {"scene-0061": 1}, cameras=("CAM_FRONT",))
    entry = {
        "name": "description",
        "kind": "text",
        "field": "description.txt",
        "law": {"name": "fixed"},
        "optional": True,
    }
    (nuscenes.folder / "channels.json").write_text(json.dumps([entry]))
    with pytest.raises(
        SourceError,
        match=r"channels\.json' has the channel 'description', which the option channels",
    ):
        scanned("nuscenes", nuscenes.root, tmp_path, channels=["description"])
