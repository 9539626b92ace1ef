"""OpenScene's files of a small world: one pickle a log, images, and a merged lidar."""

from __future__ import annotations

import math
import pickle

import numpy as np

from support.source_world import make_world

CAMERAS = dict.fromkeys(
    (
        "cam_f0",
        "cam_l0",
        "cam_r0",
        "cam_l1",
        "cam_r1",
        "cam_l2",
        "cam_r2",
        "cam_b0",
    ),
    (64, 48),
)
CATEGORIES = {"car": "vehicle", "pedestrian": "pedestrian"}
LENS = [0.05, -0.01, 0.001, -0.002, 0.003]
PCD = """# .PCD v0.7 - Point Cloud Data file format
VERSION 0.7
FIELDS x y z intensity ring lidar_info
SIZE 4 4 4 1 1 1
TYPE F F F U U U
COUNT 1 1 1 1 1 1
WIDTH {0}
HEIGHT 1
VIEWPOINT 0 0 0 1 0 0 0
POINTS {0}
DATA binary
"""


def openscene_world(every=1, **changes):
    """The world at the times that logs have: images expose at the frame's; ``every``: frames that are kept."""
    changes["cameras"] = dict.fromkeys(
        CAMERAS, next(iter(changes.get("cameras", CAMERAS).values()))
    )
    world = make_world(**{"lidars": ("lidar_merged",), **changes})
    for clip in world.clips:
        clip.frames = clip.frames[::every]
        for frame in clip.frames:
            for image in frame.images.values():
                image.timestamp_ns = frame.timestamp_ns
                image.ego2global = frame.ego2global
            for box in frame.boxes:
                box.category = CATEGORIES[box.category]
    return world


def rows_of(clip, write=lambda name, data: None):
    """The frames of a log, as OpenScene's program writes them; ``write`` takes files below sensor_blobs."""
    return [_row(clip, number, frame, write) for number, frame in enumerate(clip.frames)]


def _row(clip, number, frame, write):
    (sweep,) = frame.sweeps.values()
    ego2global = frame.ego2global
    lidar2ego = sweep.lidar2ego
    to_ego = np.linalg.inv(frame.ego2global)
    cams = {}
    for name, image in frame.images.items():
        to_lidar = np.linalg.inv(lidar2ego) @ image.cam2ego
        path = f"{clip.name}/{name.upper()}/{number:016x}.jpg"
        write(path, image.jpeg)
        cams[name.upper()] = {
            "data_path": path,
            "sensor2lidar_rotation": to_lidar[:3, :3],
            "sensor2lidar_translation": to_lidar[:3, 3],
            "cam_intrinsic": image.intrinsics,
            "distortion": np.array(LENS),
        }
    points = np.zeros(len(sweep.points), "f4,f4,f4,u1,u1,u1")
    for column, name in enumerate(points.dtype.names[:5]):
        points[name] = sweep.points[:, column]
    path = f"{clip.name}/MergedPointCloud/{number:016x}.pcd"
    write(path, PCD.format(len(points)).encode() + points.tobytes() + bytes(100))
    ego_yaw = math.atan2(ego2global[1, 0], ego2global[0, 0])
    rotation = _wxyz(ego2global[:3, :3])
    boxes = [
        [*(to_ego @ [*box.centre, 1])[:3], *box.size_lwh, box.yaw - ego_yaw] for box in frame.boxes
    ]
    speeds = [box.velocity @ ego2global[:3, :3] @ lidar2ego[:3, :3] for box in frame.boxes]
    can_bus = np.array(
        [
            *ego2global[:3, 3],
            *rotation,
            0.1,
            0.2,
            9.8,
            8.0,
            0.5,
            0,
            0,
            0,
            0.2,
            0,
            0,
        ]
    )
    return {
        "token": f"{clip.name}{number:08x}",
        "frame_idx": number,
        "timestamp": frame.timestamp_ns // 1000,
        "log_name": clip.name,
        "scene_name": "log-0001-scene",
        "map_location": "us-nv-las-vegas-strip",
        "roadblock_ids": ["60100", "60205"] if number else [],
        "vehicle_name": "veh-35",
        "can_bus": can_bus,
        "lidar_path": path,
        "lidar2ego_translation": lidar2ego[:3, 3],
        "lidar2ego_rotation": _wxyz(lidar2ego[:3, :3]),
        "ego2global_translation": can_bus[:3],
        "ego2global_rotation": can_bus[3:7],
        "ego_dynamic_state": [8.0, 0.5, np.float64(0.1), 0.2],
        "traffic_lights": [(68, True), (70 + number, False)],
        "driving_command": np.eye(4, dtype=int)[number % 4],
        "cams": cams,
        "anns": {
            "gt_boxes": np.array(boxes).reshape(-1, 7),
            "gt_names": np.array([box.category for box in frame.boxes]),
            "gt_velocity_3d": np.array(speeds).reshape(-1, 3),
            "instance_tokens": [],
            "track_tokens": [box.track for box in frame.boxes],
        },
    }


def _wxyz(rotation):
    """A quaternion, as pyquaternion has it."""
    w = math.sqrt(max(0.0, 1 + np.trace(rotation))) / 2
    x = rotation[2, 1] - rotation[1, 2]
    y = rotation[0, 2] - rotation[2, 0]
    z = rotation[1, 0] - rotation[0, 1]
    return [w, x / (4 * w), y / (4 * w), z / (4 * w)]


def write_log(root, clip, part="trainval", folder="navsim_logs"):
    """Write a clip's log and its files; return the log's path and frames."""

    def write(name, data):
        path = root / "sensor_blobs" / part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    rows = rows_of(clip, write)
    path = root / folder / part / f"{clip.name}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(rows, pickle.HIGHEST_PROTOCOL))
    return path, rows
