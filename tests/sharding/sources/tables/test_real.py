"""Real nuScenes keyframes, named by a manifest that has the rows of nuScenes' tables, against the adapter."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fuelrail.pipeline.sample.schema import Geometry, decode_arrays
from fuelrail.sharding.sources.shared.files import LINKED
from support.manifest_world import write_table
from support.sharding import scanned
from support.shared_data import shared_data

pytestmark = pytest.mark.real


def test_real_keyframes_by_a_manifest_are_those_of_the_adapter(tmp_path, monkeypatch):
    """Times, poses and calibration are copied from the tables as text; images are the files themselves."""
    root = shared_data("nuscenes-mini")
    monkeypatch.setenv(LINKED, str(root))
    tables = {
        name: {
            row["token"]: row
            for row in json.loads((root / "v1.0-derived" / f"{name}.json").read_text())
        }
        for name in (
            "scene",
            "sample",
            "sample_data",
            "ego_pose",
            "calibrated_sensor",
            "sensor",
        )
    }
    data = []
    poses = {}
    for row in tables["sample_data"].values():
        calibrated = tables["calibrated_sensor"][row["calibrated_sensor_token"]]
        sensor = tables["sensor"][calibrated["sensor_token"]]
        if not row["is_key_frame"] or sensor["modality"] != "camera":
            continue
        clip = tables["scene"][tables["sample"][row["sample_token"]]["scene_token"]]["name"]
        pose = tables["ego_pose"][row["ego_pose_token"]]
        data.append((clip, row, sensor["channel"], calibrated, pose))
        poses[clip, row["timestamp"]] = pose
    (tmp_path / "samples").symlink_to(root / "samples")
    frames: dict[str, dict] = {}
    for clip, row, channel, calibrated, pose in data:
        sample = tables["sample"][row["sample_token"]]
        frame = frames.setdefault(
            row["sample_token"],
            {"clip_id": clip, "timestamp_us": sample["timestamp"]},
        )
        frame |= {
            "ego2global.t": pose["translation"],
            "ego2global.q_wxyz": pose["rotation"],
            f"cam.{channel}.path": row["filename"],
            f"cam.{channel}.timestamp_us": row["timestamp"],
            f"cam.{channel}.intrinsics": calibrated["camera_intrinsic"],
            f"cam.{channel}.cam2ego.t": calibrated["translation"],
            f"cam.{channel}.cam2ego.q_wxyz": calibrated["rotation"],
            f"cam.{channel}.ego2global.t": pose["translation"],
            f"cam.{channel}.ego2global.q_wxyz": pose["rotation"],
        }
    write_table(
        tmp_path,
        "frames",
        sorted(frames.values(), key=lambda row: row["clip_id"]),
        "jsonl",
    )
    ours, _, table = scanned("manifest", tmp_path, tmp_path)
    (tmp_path / "theirs").mkdir()
    theirs, _, expected = scanned(
        "nuscenes",
        root,
        tmp_path / "theirs",
        version="v1.0-derived",
        points=False,
    )
    assert len(table) == len(expected) == 3
    by_time = {expected.row(number).timestamp_ns: expected.row(number) for number in range(3)}
    for number in range(3):
        manifest_row = table.row(number)
        expected_row = by_time[manifest_row.timestamp_ns]
        assert {member.name for member in manifest_row.members} == {
            member.name for member in expected_row.members
        }
        for member in manifest_row.members:
            same = next(two for two in expected_row.members if two.name == member.name)
            assert (member.width, member.height) == (same.width, same.height) == (1600, 900)
            assert bytes(ours.open(member.ref)) == bytes(theirs.open(same.ref))
        channels = [member.name.partition(".")[0] for member in manifest_row.members]
        order = [channels.index(member.name.partition(".")[0]) for member in expected_row.members]
        mine = decode_arrays(manifest_row.geometry, Geometry)
        geometry = decode_arrays(expected_row.geometry, Geometry)
        for name in (
            "cam_timestamp_ns",
            "intrinsics",
            "cam2ego",
            "cam_ego2global",
            "img_wh",
        ):
            np.testing.assert_allclose(
                getattr(mine, name)[order],
                getattr(geometry, name),
                atol=1e-9,
                err_msg=name,
            )
