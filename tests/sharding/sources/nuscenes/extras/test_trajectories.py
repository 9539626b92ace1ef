"""Trajectories against nuscenes-devkit's prediction helper, and tables that are not usual."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.sample.schema import (
    Boxes,
    Geometry,
    decode_arrays,
    decode_meta,
)
from fuelrail.sharding.sources.nuscenes.extras.trajectories import (
    AGENTS,
    EGO,
    PAST,
    STEPS,
)
from support.nuscenes_tables import build_nuscenes, opened_by_devkit
from support.sharding import scanned

CLIPS = {"scene-0061": 16, "scene-0103": 2}


@pytest.fixture(scope="module")
def nuscenes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_nuscenes(
        tmp_path_factory.mktemp("paths") / "root",
        CLIPS,
        cameras=("CAM_FRONT",),
        num_points=4,
    )


def scan(nuscenes: Any, tmp_path: Any) -> Any:
    return scanned("nuscenes", nuscenes.root, tmp_path, channels=["trajectories", "tokens"])


def value(source: Any, row: Any, channel: Any) -> Any:
    (ref,) = [member.ref for member in row.members if member.name == channel.field]
    return KINDS[channel.kind].decode(source.open(ref), channel)


def test_agents_are_where_nuscenes_devkit_predicts_from(nuscenes, tmp_path) -> None:
    helper = pytest.importorskip(
        "nuscenes.prediction.helper", reason="nuscenes-devkit lacks a module"
    )
    devkit = opened_by_devkit(nuscenes.root)
    predict = helper.PredictHelper(devkit)
    source, _, table = scan(nuscenes, tmp_path)
    num_future = 0
    for number in range(0, len(table), 3):
        row = table.row(number)
        token = decode_meta(row.meta).sample_token
        trajectories = value(source, row, AGENTS)
        (ref,) = [member.ref for member in row.members if member.name == "box_tokens.txt"]
        ego2global = decode_arrays(row.geometry, Geometry).ego2global
        for agent, instance in enumerate(json.loads(source.open(ref))["instance"]):
            is_valid = trajectories["valid"][agent].astype(bool)
            xyz = (
                trajectories["position"][agent].astype(np.float64) @ ego2global[:3, :3].T
                + ego2global[:3, 3]
            )
            future = predict.get_future_for_agent(
                instance, token, seconds=6, in_agent_frame=False
            ).reshape(-1, 2)
            past = predict.get_past_for_agent(
                instance, token, seconds=2, in_agent_frame=False
            ).reshape(-1, 2)
            # The helper allows a buffer beyond the seconds, so that it may give one step more than 2 or 6 s have.
            ours = xyz[PAST + 1 :][is_valid[PAST + 1 :], :2]
            np.testing.assert_allclose(ours[: len(future)], future[: len(ours)], atol=1e-4)
            assert abs(len(ours) - len(future)) <= 1
            ours = xyz[:PAST][is_valid[:PAST], :2][::-1]
            np.testing.assert_allclose(ours[: len(past)], past[: len(ours)], atol=1e-4)
            assert abs(len(ours) - len(past)) <= 1
            num_future += len(future)
    assert num_future > 50


def test_the_step_of_the_sample_is_its_boxes(nuscenes, tmp_path) -> None:
    source, _, table = scan(nuscenes, tmp_path)
    for number in (0, 7, 17):
        row = table.row(number)
        boxes = decode_arrays(row.boxes, Boxes)
        trajectories = value(source, row, AGENTS)
        np.testing.assert_allclose(
            trajectories["position"][:, PAST], boxes.boxes3d[:, :3], atol=1e-4
        )
        np.testing.assert_allclose(trajectories["yaw"][:, PAST, 0], boxes.boxes3d[:, 6], atol=1e-5)
        assert (trajectories["valid"][:, PAST] == 1).all()
        np.testing.assert_array_equal(
            np.isnan(trajectories["yaw"][..., 0]), trajectories["valid"] == 0
        )


def test_the_ego_vehicle_is_where_its_poses_are(nuscenes, tmp_path) -> None:
    source, _, table = scan(nuscenes, tmp_path)
    poses = [
        decode_arrays(table.row(number).geometry, Geometry).ego2global
        for number in range(len(table))
    ]
    times = [table.row(number).timestamp_ns for number in range(len(table))]
    for number in range(len(table)):
        trajectory = value(source, table.row(number), EGO)
        first, end = (0, 16) if number < 16 else (16, 18)
        for step in range(STEPS):
            target = number + step - PAST
            assert trajectory[step, 5] == (first <= target < end)
            if first <= target < end:
                expected = np.linalg.inv(poses[number]) @ poses[target]
                np.testing.assert_allclose(trajectory[step, :3], expected[:3, 3], atol=1e-4)
                assert trajectory[step, 3] == pytest.approx(
                    np.arctan2(expected[1, 0], expected[0, 0]), abs=1e-6
                )
                assert trajectory[step, 4] == pytest.approx(
                    (times[target] - times[number]) * 1e-9, abs=1e-5
                )
            else:
                assert np.isnan(trajectory[step, :5]).all()


def test_a_track_that_leaves_keyframes_out_keeps_its_times(tmp_path) -> None:
    nuscenes = build_nuscenes(
        tmp_path / "root",
        {"scene-0061": 4},
        cameras=("CAM_FRONT",),
        num_tracks=1,
    )
    rows = nuscenes.tables["sample_annotation"]
    gone = rows.pop(1)
    rows[0]["next"], rows[1]["prev"] = gone["next"], gone["prev"]
    nuscenes.tables["instance"][0]["nbr_annotations"] = 3
    nuscenes.write("sample_annotation", "instance")
    source, _, table = scan(nuscenes, tmp_path)
    assert (
        value(source, table.row(0), AGENTS)["valid"][0].tolist()
        == [0] * PAST + [1, 0, 1, 1] + [0] * 9
    )
    assert value(source, table.row(1), AGENTS)["valid"].shape == (0, STEPS)


def test_links_in_a_circle_end(tmp_path) -> None:
    nuscenes = build_nuscenes(
        tmp_path / "root",
        {"scene-0061": 2, "b": 1},
        cameras=("CAM_FRONT",),
        num_tracks=1,
    )
    rows = nuscenes.tables["sample_annotation"]
    rows[0]["next"] = rows[0]["token"]
    rows[1]["next"] = rows[2]["token"]  # of another scene
    nuscenes.write("sample_annotation")
    source, _, table = scan(nuscenes, tmp_path)
    assert value(source, table.row(0), AGENTS)["valid"].sum() == 1
    assert value(source, table.row(1), AGENTS)["valid"].sum() == 2
