"""Adds the lidar sweeps between keyframes to a made nuScenes dataroot: files, poses, and links in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from support.nuscenes_tables import token, yaw_quaternion

if TYPE_CHECKING:
    from support.nuscenes_tables import Dataroot

SPEED_M_PER_S = 7.0
WALL = np.array([(25.0, y, z) for y in np.linspace(-8, 8, 9) for z in np.linspace(0.2, 3.0, 4)])
"""Points that stand still in the world, metres from the clip's first pose; every sweep sees them."""


def add_sweeps(dataroot: Dataroot, per_keyframe: int, num_points: int = 40, seed: int = 0) -> None:
    """Give every keyframe but the clips' first ``per_keyframe`` earlier sweeps, 50 ms apart, and link all of them.

    The vehicle drives and turns. A sweep holds what stands still (`WALL`), then ``num_points`` random points, some of
    them closer than a metre.
    """
    rng = np.random.default_rng(seed)
    tables = dataroot.tables
    lidar = token("calibrated", "LIDAR_TOP")
    (calibration,) = [record for record in tables["calibrated_sensor"] if record["token"] == lidar]
    lidar2ego = _matrix(calibration)
    poses = {record["token"]: record for record in tables["ego_pose"]}
    tables["sample_data"] = [
        row
        for row in tables["sample_data"]
        if row["is_key_frame"] or row["calibrated_sensor_token"] != lidar
    ]
    rows = [row for row in tables["sample_data"] if row["calibrated_sensor_token"] == lidar]
    scene_of = {sample["token"]: sample["scene_token"] for sample in tables["sample"]}
    for scene in dict.fromkeys(scene_of.values()):
        keys = sorted(
            (row for row in rows if scene_of[row["sample_token"]] == scene),
            key=lambda row: row["timestamp"],
        )
        chain = []
        for number, key in enumerate(keys):
            for back in range(per_keyframe if number else 0, 0, -1):
                at_us = key["timestamp"] - 50_000 * back + int(rng.integers(-900, 900))
                sweep_token = token("sweep", key["token"], back)
                sweep = {
                    **key,
                    "token": sweep_token,
                    "ego_pose_token": sweep_token,
                    "timestamp": at_us,
                    "is_key_frame": False,
                }
                sweep["filename"] = f"sweeps/LIDAR_TOP/{sweep_token}.pcd.bin"
                tables["ego_pose"].append({"token": sweep_token})
                poses[sweep_token] = tables["ego_pose"][-1]
                chain.append(sweep)
            chain.append(key)
        start_us = chain[0]["timestamp"]
        origin = np.array([400.0, 1100.0, 0.0])
        for number, row in enumerate(chain):
            row["prev"] = chain[number - 1]["token"] if number else ""
            row["next"] = chain[number + 1]["token"] if number + 1 < len(chain) else ""
            elapsed_s = (row["timestamp"] - start_us) * 1e-6
            pose = {
                "timestamp": row["timestamp"],
                "translation": (origin + elapsed_s * np.array([SPEED_M_PER_S, 0.4, 0.02])).tolist(),
                "rotation": yaw_quaternion(0.15 * elapsed_s),
            }
            poses[row["ego_pose_token"]].update(pose)
            still = (
                np.c_[WALL + origin, np.ones(len(WALL))]
                @ np.linalg.inv(_matrix(pose) @ lidar2ego).T
            )
            points = np.r_[still[:, :3], rng.normal(0, [6, 6, 1], (num_points, 3))]
            points = np.c_[
                points,
                rng.uniform(0, 255, len(points)),
                rng.integers(0, 32, len(points)),
            ]
            path = dataroot.root / row["filename"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(points.astype("<f4").tobytes())
        tables["sample_data"] += [row for row in chain if not row["is_key_frame"]]
    dataroot.write()


def _matrix(record: dict) -> np.ndarray:
    from fuelrail.pipeline.rigid import rigid

    return rigid(np.array(record["rotation"]), np.array(record["translation"]))
