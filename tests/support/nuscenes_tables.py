"""Small nuScenes dataroots made in code: all thirteen tables, sensor files, moving boxes, sweeps and a radar."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import simplejpeg

if TYPE_CHECKING:
    from pathlib import Path

CAMERAS = (
    "CAM_FRONT",
    "CAM_FRONT_RIGHT",
    "CAM_FRONT_LEFT",
    "CAM_BACK",
    "CAM_BACK_LEFT",
    "CAM_BACK_RIGHT",
)
CATEGORIES = (
    "vehicle.car",
    "human.pedestrian.adult",
    "movable_object.barrier",
    "animal",
)
ATTRIBUTES = ("vehicle.moving", "vehicle.parked")
START_US = 1_600_000_000_000_000


def token(*parts: object) -> str:
    """A 32-digit token, the same for the same parts."""
    return hashlib.md5(repr(parts).encode()).hexdigest()


def yaw_quaternion(yaw: float) -> list[float]:
    """Rotation about z as w, x, y, z."""
    return [math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)]


@dataclass
class Dataroot:
    """A dataroot that was built: where it is, its tables (as they were written), its version."""

    root: Path
    version: str
    tables: dict[str, list[dict]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.root / self.version

    def write(self, *names: str) -> None:
        """Write tables again, after a test has changed them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in names or self.tables:
            (self.folder / f"{name}.json").write_text(json.dumps(self.tables[name], indent=0))

    def files(self, channel: str) -> list[Path]:
        """The keyframe files of one channel, in time order."""
        rows = [
            row
            for row in self.tables["sample_data"]
            if row["is_key_frame"] and f"/{channel}/" in row["filename"]
        ]
        return [
            self.root / row["filename"] for row in sorted(rows, key=lambda row: row["timestamp"])
        ]


def opened_by_devkit(root: Path, version: str = "v1.0-mini") -> Any:
    """The dataroot as the official devkit opens it; skips the test where that is not installed."""
    module = pytest.importorskip("nuscenes.nuscenes", reason="nuscenes-devkit is not installed")
    return module.NuScenes(version=version, dataroot=str(root), verbose=False)


def encode_image(seed: int, width: int, height: int) -> bytes:
    """A JPEG of a random smooth picture."""
    rng = np.random.default_rng(seed)
    coarse = rng.random((height // 8 + 1, width // 8 + 1, 3))
    pixels = (np.kron(coarse, np.ones((8, 8, 1)))[:height, :width] * 255).astype(np.uint8)
    return simplejpeg.encode_jpeg(pixels, 90, "RGB", "420")


def build_nuscenes(
    root: Path,
    clips: dict[str, int],
    *,
    version: str = "v1.0-mini",
    cameras: tuple[str, ...] = CAMERAS,
    size: tuple[int, int] = (48, 32),
    num_points: int = 60,
    num_tracks: int = 3,
    images: list[bytes] | None = None,
    seed: int = 0,
) -> Dataroot:
    """Build a dataroot; ``clips`` maps scene names to their numbers of keyframes.

    ``images`` are JPEGs (of ``size``) to use in turn; left out, each camera file gets a picture of its own.
    ``num_points`` 0 leaves the lidar out, ``num_tracks`` 0 the annotations.
    """
    rng = np.random.default_rng(seed)
    dataroot = Dataroot(root, version, {name: [] for name in _TABLES})
    tables = dataroot.tables
    lidars = ("LIDAR_TOP",) if num_points else ()
    for number, channel in enumerate((*cameras, *lidars, "RADAR_FRONT")):
        modality = channel.split("_")[0].lower().replace("cam", "camera")
        tables["sensor"].append(
            {
                "token": token("sensor", channel),
                "channel": channel,
                "modality": modality,
            }
        )
        intrinsics = [
            [40.0 + number, 0.0, size[0] / 2],
            [0.0, 40.0, size[1] / 2],
            [0.0, 0.0, 1.0],
        ]
        tables["calibrated_sensor"].append(
            {
                "token": token("calibrated", channel),
                "sensor_token": token("sensor", channel),
                "translation": [1.0 + number / 8, 0.25 * number, 1.5],
                "rotation": _camera_rotation(number)
                if modality == "camera"
                else yaw_quaternion(-math.pi / 2),
                "camera_intrinsic": intrinsics if modality == "camera" else [],
            }
        )
    tables["category"] = [
        {"token": token("category", n), "name": n, "description": ""} for n in CATEGORIES
    ]
    tables["attribute"] = [
        {"token": token("attribute", n), "name": n, "description": ""} for n in ATTRIBUTES
    ]
    tables["visibility"] = [
        {"token": str(n + 1), "level": level, "description": ""}
        for n, level in enumerate(("v0-40", "v40-60", "v60-80", "v80-100"))
    ]
    tables["map"].append(
        {
            "token": token("map"),
            "category": "semantic_prior",
            "filename": "maps/none.png",
            "log_tokens": [],
        }
    )
    (root / "maps").mkdir(parents=True, exist_ok=True)
    (root / "maps" / "none.png").touch()  # the devkit asks only whether it is there
    for clip, (name, num_frames) in enumerate(clips.items()):
        _add_clip(
            dataroot,
            rng=rng,
            clip=clip,
            name=name,
            num_frames=num_frames,
            cameras=cameras,
            lidars=lidars,
            size=size,
            num_points=num_points,
            num_tracks=num_tracks,
            images=images,
        )
    dataroot.write()
    return dataroot


_TABLES = (
    "attribute",
    "calibrated_sensor",
    "category",
    "ego_pose",
    "instance",
    "log",
    "map",
    "sample",
    "sample_annotation",
    "sample_data",
    "scene",
    "sensor",
    "visibility",
)


def _add_clip(
    dataroot,
    rng,
    clip,
    name,
    num_frames,
    cameras,
    lidars,
    size,
    num_points,
    num_tracks,
    images,
):
    tables = dataroot.tables
    root = dataroot.root
    log = token("log", name)
    tables["log"].append(
        {
            "token": log,
            "logfile": f"n{clip:03d}-2030-01-01",
            "vehicle": f"n{clip:03d}",
            "date_captured": "2030-01-01",
            "location": "testville",
        }
    )
    tables["map"][0]["log_tokens"].append(log)
    samples = [token("sample", name, frame) for frame in range(num_frames)]
    tables["scene"].append(
        {
            "token": token("scene", name),
            "log_token": log,
            "nbr_samples": num_frames,
            "first_sample_token": samples[0] if samples else "",
            "last_sample_token": samples[-1] if samples else "",
            "name": name,
            "description": "Night, rain, parked cars" if clip % 2 else "A quiet street",
        }
    )
    start_us = START_US + clip * 3_600_000_000
    heading = float(rng.uniform(-3, 3))
    for frame, sample in enumerate(samples):
        timestamp = start_us + frame * 500_000 + int(rng.integers(-1000, 1000))
        tables["sample"].append(
            {
                "token": sample,
                "timestamp": timestamp,
                **_neighbours(samples, frame),
                "scene_token": token("scene", name),
            }
        )
        for number, channel in enumerate((*cameras, *lidars, "RADAR_FRONT")):
            shift_us = 0 if channel == "LIDAR_TOP" else -7000 * (number + 1)
            for is_key in (True, False):
                at_us = timestamp + shift_us - (0 if is_key else 80_000)
                extension = {"C": "jpg", "L": "pcd.bin", "R": "pcd"}[channel[0]]
                folder = "samples" if is_key else "sweeps"
                filename = f"{folder}/{channel}/{name}__{channel}__{at_us}.{extension}"
                data_token = token("data", name, frame, channel, is_key)
                tables["ego_pose"].append(
                    {
                        "token": data_token,
                        "timestamp": at_us,
                        "translation": _ego(clip, heading, at_us - start_us),
                        "rotation": yaw_quaternion(heading + (at_us - start_us) * 1e-8),
                    }
                )
                is_camera = channel.startswith("CAM")
                tables["sample_data"].append(
                    {
                        "token": data_token,
                        "sample_token": sample,
                        "ego_pose_token": data_token,
                        "calibrated_sensor_token": token("calibrated", channel),
                        "timestamp": at_us,
                        "fileformat": extension.split(".")[0],
                        "is_key_frame": is_key,
                        "height": size[1] if is_camera else 0,
                        "width": size[0] if is_camera else 0,
                        "filename": filename,
                        "prev": "",
                        "next": "",
                    }
                )
                if not is_key or channel.startswith("RADAR"):
                    continue  # tables name far more files than a sharding run needs
                path = root / filename
                path.parent.mkdir(parents=True, exist_ok=True)
                if is_camera:
                    turn = len(tables["sample_data"])
                    path.write_bytes(
                        images[turn % len(images)] if images else encode_image(turn, *size)
                    )
                else:
                    path.write_bytes(rng.normal(0, 20, (num_points, 5)).astype("<f4").tobytes())
    for track in range(num_tracks):
        _add_track(
            tables,
            clip=clip,
            name=name,
            track=track,
            samples=samples,
            start_us=start_us,
            heading=heading,
        )


def _add_track(tables, clip, name, track, samples, start_us, heading):
    instance = token("instance", name, track)
    category = CATEGORIES[track % len(CATEGORIES)]
    annotation_tokens = [token("annotation", name, track, frame) for frame in range(len(samples))]
    tables["instance"].append(
        {
            "token": instance,
            "category_token": token("category", category),
            "nbr_annotations": len(annotation_tokens),
            "first_annotation_token": annotation_tokens[0] if annotation_tokens else "",
            "last_annotation_token": annotation_tokens[-1] if annotation_tokens else "",
        }
    )
    rows = tables["sample"][len(tables["sample"]) - len(samples) :]
    for frame, sample in enumerate(rows):
        seconds = (sample["timestamp"] - start_us) * 1e-6
        ego_position = _ego(clip, heading, 0)
        x = ego_position[0] + 8 + 5 * track + seconds * (1 + track)
        y = ego_position[1] + 3 - track * 4 + 0.5 * seconds
        tables["sample_annotation"].append(
            {
                "token": annotation_tokens[frame],
                "sample_token": sample["token"],
                "instance_token": instance,
                "visibility_token": str(track % 4 + 1) if track else "",
                "attribute_tokens": [token("attribute", ATTRIBUTES[track % 2])]
                if track != 1
                else [],
                "translation": [x, y, 0.9],
                "size": [1.8 + track / 4, 4.2, 1.5],
                "rotation": yaw_quaternion(heading + 0.3 * track + 0.02 * frame),
                **_neighbours(annotation_tokens, frame),
                "num_lidar_pts": 7 * track,
                "num_radar_pts": 0,
            }
        )


def _neighbours(tokens: list[str], index: int) -> dict[str, str]:
    return {
        "prev": tokens[index - 1] if index else "",
        "next": tokens[index + 1] if index + 1 < len(tokens) else "",
    }


def _ego(clip: int, heading: float, elapsed_us: float) -> list[float]:
    distance = 8e-6 * elapsed_us
    return [
        400.0 + 100 * clip + distance * math.cos(heading),
        1100.0 + distance * math.sin(heading),
        0.0,
    ]


def _camera_rotation(number: int) -> list[float]:
    """Optical axes in ego, turned by 60 degrees a camera: z ahead, x to the right, y down."""
    yaw = -math.pi / 3 * number
    turn = yaw_quaternion(yaw)
    ahead = [0.5, -0.5, 0.5, -0.5]
    w1, x1, y1, z1 = turn
    w2, x2, y2, z2 = ahead
    return [
        w1 * w2 - x1 * x2 - y1 * y2 - z1 * z2,
        w1 * x2 + x1 * w2 + y1 * z2 - z1 * y2,
        w1 * y2 - x1 * z2 + y1 * w2 + z1 * x2,
        w1 * z2 + x1 * y2 - y1 * x2 + z1 * w2,
    ]
