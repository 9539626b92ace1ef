"""The synthetic world as nuScenes tables."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from scipy.spatial.transform import Rotation

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from support.source_world import World

NAMES = {
    "cam_front": "CAM_FRONT",
    "cam_left": "CAM_LEFT",
    "cam_back": "CAM_BACK",
}


def write_nuscenes(world: World, root: Path, version: str) -> None:
    """Write the thirteen tables into the folder ``version``, and the files."""
    tables = {
        name: []
        for name in (
            "scene",
            "sample",
            "sample_data",
            "ego_pose",
            "calibrated_sensor",
            "sensor",
            "sample_annotation",
            "instance",
            "category",
            "attribute",
            "visibility",
            "log",
            "map",
        )
    }
    tables["log"].append(
        {
            "token": "log",
            "logfile": "log",
            "vehicle": "v",
            "date_captured": "",
            "location": "x",
        }
    )
    for name in ("car", "pedestrian"):
        tables["category"].append({"token": name, "name": name, "description": ""})
    sensors = {
        **{name: ("camera", NAMES[name]) for name in world.cameras},
        **{name: ("lidar", name.upper()) for name in world.lidars},
    }
    for name, (modality, channel) in sensors.items():
        tables["sensor"].append({"token": name, "channel": channel, "modality": modality})
    for clip in world.clips:
        _add_clip(tables, clip, root)
    folder = root / version
    folder.mkdir()
    for name, rows in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))


def _add_clip(tables, clip, root):
    keys = [f"{clip.name}-{number}" for number in range(len(clip.frames))]
    tables["scene"].append(
        {
            "token": clip.name,
            "name": clip.name,
            "description": "",
            "log_token": "log",
            "nbr_samples": len(keys),
            "first_sample_token": keys[0],
            "last_sample_token": keys[-1],
        }
    )
    for index, (key, frame) in enumerate(zip(keys, clip.frames, strict=True)):
        tables["sample"].append(
            {
                "token": key,
                "timestamp": frame.timestamp_ns // 1000,
                "scene_token": clip.name,
                "prev": keys[index - 1] if index else "",
                "next": keys[index + 1] if index + 1 < len(keys) else "",
            }
        )
        for name, image in frame.images.items():
            file = f"samples/{NAMES[name]}/{key}.jpg"
            _add_data(
                tables,
                root=root,
                key=key,
                name=name,
                file=file,
                record=image,
                data=image.jpeg,
                sensor2ego=image.cam2ego,
                intrinsics=image.intrinsics,
            )
        for name, sweep in frame.sweeps.items():
            file = f"samples/{name.upper()}/{key}.pcd.bin"
            _add_data(
                tables,
                root=root,
                key=key,
                name=name,
                file=file,
                record=sweep,
                data=sweep.points.tobytes(),
                sensor2ego=sweep.lidar2ego,
                intrinsics=None,
            )
        for box in frame.boxes:
            track = f"{clip.name}-{box.track}"
            if not index:
                tables["instance"].append(
                    {
                        "token": track,
                        "category_token": box.category,
                        "nbr_annotations": 4,
                        "first_annotation_token": "",
                        "last_annotation_token": "",
                    }
                )
            tables["sample_annotation"].append(
                {
                    "token": f"{key}-{box.track}",
                    "sample_token": key,
                    "instance_token": track,
                    "translation": box.centre.tolist(),
                    "size": box.size_lwh[[1, 0, 2]].tolist(),
                    "rotation": [
                        math.cos(box.yaw / 2),
                        0,
                        0,
                        math.sin(box.yaw / 2),
                    ],
                    "visibility_token": "",
                    "attribute_tokens": [],
                    "num_lidar_pts": box.num_points,
                    "num_radar_pts": 0,
                    "prev": f"{keys[index - 1]}-{box.track}" if index else "",
                    "next": f"{keys[index + 1]}-{box.track}" if index + 1 < len(keys) else "",
                }
            )


def _add_data(tables, root, key, name, file, record, data, sensor2ego, intrinsics):
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_bytes(data)
    token = f"{key}-{name}"
    calibration = f"{key.rpartition('-')[0]}-{name}"
    if all(row["token"] != calibration for row in tables["calibrated_sensor"]):
        tables["calibrated_sensor"].append(
            {
                "token": calibration,
                "sensor_token": name,
                **transform(sensor2ego),
                "camera_intrinsic": [] if intrinsics is None else intrinsics.tolist(),
            }
        )
    tables["ego_pose"].append(
        {
            "token": token,
            "timestamp": record.timestamp_ns // 1000,
            **transform(record.ego2global),
        }
    )
    width, height = (0, 0) if intrinsics is None else record.size
    tables["sample_data"].append(
        {
            "token": token,
            "sample_token": key,
            "ego_pose_token": token,
            "calibrated_sensor_token": calibration,
            "filename": file,
            "fileformat": "",
            "width": width,
            "height": height,
            "is_key_frame": True,
            "timestamp": record.timestamp_ns // 1000,
            "prev": "",
            "next": "",
        }
    )


def transform(matrix: np.ndarray) -> dict:
    """As nuScenes' tables have it."""
    x, y, z, w = Rotation.from_matrix(matrix[:3, :3]).as_quat().tolist()
    return {"translation": matrix[:3, 3].tolist(), "rotation": [w, x, y, z]}
