"""Loose files as a nuScenes dataroot has them, made for the sharding benchmarks: tables, images, lidar sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
NUM_POINTS = 34_720
_START_US = 1_600_000_000_000_000

Files = list[tuple[str, list[Path]]]
"""Key of a frame and its files."""


def make_dataroot(
    root: Path, num_frames: int, *, lidar: bool, size: tuple[int, int] = (1600, 900), num_files: int | None = None
) -> None:
    """A nuScenes dataroot of scenes of 40 frames: images of noise of about 150 kB, sweeps of smooth surfaces and rings.

    ``num_files``: so many files for each sensor, which the frames name in turns (None: each frame has its own).
    """
    num_files = num_files or num_frames
    rng = np.random.default_rng(0)
    image = noise_jpeg(rng, size)
    sweeps = [_sweep(rng) for _ in range(8 if lidar else 0)]
    channels = [*CAMERAS, *(["LIDAR_TOP"] if lidar else [])]
    for channel in channels:
        (root / "samples" / channel).mkdir(parents=True)
        for frame in range(num_files):
            content = sweeps[frame % len(sweeps)] if channel == "LIDAR_TOP" else image
            (root / _file_name(frame, channel)).write_bytes(content)
    write_tables(root, channels, num_frames, size, num_files)


def noise_jpeg(rng: np.random.Generator, size: tuple[int, int]) -> bytes:
    """A JPEG of noise, as large as a photograph of this size (width, height)."""
    width, height = size
    coarse = rng.random((height // 4 + 1, width // 4 + 1, 3))
    pixels = (np.kron(coarse, np.ones((4, 4, 1)))[:height, :width] * 60 + 90).astype(np.uint8)
    return bytes(simplejpeg.encode_jpeg(pixels, 60, "RGB", "420"))


def _sweep(rng: np.random.Generator) -> bytes:
    """A sweep as a 32-beam lidar stores it: by azimuth and ring, ranges with centimetres of noise."""
    ring = np.arange(NUM_POINTS) % 32
    azimuth = np.arange(NUM_POINTS) // 32 * (2 * np.pi / (NUM_POINTS // 32))
    elevation = np.deg2rad(-30 + ring * 1.29)
    distance = np.minimum(1.8 / np.maximum(np.sin(-elevation), 0.03), 40) + rng.normal(0, 0.02, NUM_POINTS)
    flat = distance * np.cos(elevation)
    columns = [flat * np.cos(azimuth), flat * np.sin(azimuth), distance * np.sin(elevation)]
    intensity = rng.integers(0, 60, NUM_POINTS)
    return np.column_stack([*columns, intensity, ring]).astype("<f4").tobytes()


def _file_name(frame: int, channel: str) -> str:
    return f"samples/{channel}/{frame:06d}.{'pcd.bin' if channel.startswith('LIDAR') else 'jpg'}"


def write_tables(root: Path, channels: list[str], num_frames: int, size: tuple[int, int], num_files: int) -> None:
    """The thirteen tables, without annotations, record by record: no memory that grows with the frames."""
    folder = root / "v1.0-bench"
    folder.mkdir()
    width, height = size
    still = {"translation": [0, 0, 0], "rotation": [1, 0, 0, 0]}
    camera = [[1200, 0, width / 2], [0, 1200, height / 2], [0, 0, 1]]
    scenes = range(0, num_frames, 40)

    def near(frame: int) -> dict[str, Any]:
        first, last = frame // 40 * 40, min(frame // 40 * 40 + 40, num_frames) - 1
        return {"prev": _token(frame - 1) if frame > first else "", "next": _token(frame + 1) if frame < last else ""}

    def sensor_row(frame: int, channel: str) -> dict[str, Any]:
        is_lidar = channel.startswith("LIDAR")
        own = _token(frame, channel)
        return {
            "token": own, "sample_token": _token(frame), "ego_pose_token": own, "calibrated_sensor_token": channel,
            "filename": _file_name(frame % num_files, channel), "timestamp": _START_US + frame * 500_000,
            "is_key_frame": True, "width": 0 if is_lidar else width, "height": 0 if is_lidar else height,
        }  # fmt: skip

    frames = range(num_frames)
    rows = {
        "attribute": (), "category": (), "instance": (), "map": (), "sample_annotation": (), "visibility": (),
        "log": [{"token": "log", "vehicle": "v", "location": "bench"}],
        "scene": (
            {"token": _token(first, "scene"), "name": f"bench-{first // 40:05d}", "log_token": "log",
             "nbr_samples": min(40, num_frames - first)} for first in scenes
        ),
        "sensor": (
            {"token": c, "channel": c, "modality": "lidar" if c.startswith("LIDAR") else "camera"} for c in channels
        ),
        "calibrated_sensor": (
            {"token": c, "sensor_token": c, **still, "camera_intrinsic": [] if c.startswith("LIDAR") else camera}
            for c in channels
        ),
        "sample": (
            {"token": _token(f), "timestamp": _START_US + f * 500_000, "scene_token": _token(f // 40 * 40, "scene"),
             **near(f)} for f in frames
        ),
        "sample_data": (sensor_row(f, c) for f in frames for c in channels),
        "ego_pose": (
            {"token": _token(f, c), "timestamp": _START_US + f * 500_000, "translation": [f, 0, 0],
             "rotation": [1, 0, 0, 0]} for f in frames for c in channels
        ),
    }  # fmt: skip
    for table, records in rows.items():
        with (folder / f"{table}.json").open("w") as file:
            file.write("[")
            for number, record in enumerate(records):
                file.write((",\n" if number else "\n") + json.dumps(record))
            file.write("\n]")


def _token(frame: int, of: str = "sample") -> str:
    """A token of 32 characters, as nuScenes' are."""
    return f"{of:_>16}{frame:016x}"


def list_files(root: Path) -> Files:
    """The keyframe files of a dataroot, frame by frame."""
    folder = next(path.parent for path in root.glob("*/sample_data.json"))
    frames: dict[str, list[Path]] = {}
    for row in json.loads((folder / "sample_data.json").read_text()):
        if row["is_key_frame"] and row["filename"].endswith((".jpg", ".bin")):
            frames.setdefault(row["sample_token"], []).append(root / row["filename"])
    return list(frames.items())
