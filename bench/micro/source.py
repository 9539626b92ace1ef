"""Loose files as a nuScenes dataroot has them, made for the sharding benchmarks: images, lidar
sweeps, tables.

The thirteen tables are lean, or as full as the real ones: the trainval split has 34,149 samples,
and for each of them, on average, 77 rows of ``sample_data`` and of ``ego_pose`` (12 keyframes of
six cameras, a lidar and five radars; the sweeps between keyframes are the rest), 34 of
``sample_annotation`` and 2 of ``instance``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from fuelrail.pipeline.format import codecs

CAMERAS = (
    "CAM_FRONT",
    "CAM_FRONT_RIGHT",
    "CAM_FRONT_LEFT",
    "CAM_BACK",
    "CAM_BACK_LEFT",
    "CAM_BACK_RIGHT",
)
NUM_POINTS = 34_720

SWEEP_CODEC = codecs.planes(20)
"""The codec of sweeps of five float32 a point."""

Files = list[tuple[str, list[Path]]]
"""Key of a frame and its files."""

SCENE_FRAMES = 40
NUM_BOXES = 34
"""Annotations of a frame."""

TRACK_FRAMES = 18
"""Annotations of an instance: those of one place in the list of ``NUM_BOXES``, for this number
of frames in a row.
"""

NUM_OTHER_ROWS = 70
"""Rows of ``sample_data`` of a frame that are no samples of cameras and lidar: radars, and
sweeps of all sensors.
"""

_START_US = 1_600_000_000_000_000
_FRAME_US = 500_000
_RADAR = "RADAR_FRONT"
_CATEGORIES = (
    "vehicle.car",
    "human.pedestrian.adult",
    "movable_object.barrier",
    "vehicle.truck",
    "animal",
)
_VISIBILITIES = ("v0-40", "v40-60", "v60-80", "v80-100")

Rows = dict[str, "Iterable[dict[str, Any]]"]


def make_dataroot(
    root: Path,
    num_frames: int,
    *,
    lidar: bool,
    size: tuple[int, int] = (1600, 900),
    num_files: int | None = None,
    full_tables: bool = True,
) -> None:
    """Make a nuScenes dataroot of scenes of 40 frames: noise images of about 150 kB, sweeps of
    surfaces and rings.

    ``num_files``: number of files for each sensor, which the frames name in turns (None: each frame
    has its own). ``full_tables``: with annotations, and as many rows for each frame as nuScenes'
    own tables have.
    """
    num_files = num_files or num_frames
    rng = np.random.default_rng(0)
    # Noise, as large as a photograph of this size.
    width, height = size
    coarse = rng.random((height // 4 + 1, width // 4 + 1, 3))
    pixels = (np.kron(coarse, np.ones((4, 4, 1)))[:height, :width] * 60 + 90).astype(np.uint8)
    image = bytes(simplejpeg.encode_jpeg(pixels, 60, "RGB", "420"))
    # Sweeps as a 32-beam lidar stores them: by azimuth and ring, ranges with centimetres of noise.
    ring = np.arange(NUM_POINTS) % 32
    azimuth = np.arange(NUM_POINTS) // 32 * (2 * np.pi / (NUM_POINTS // 32))
    elevation = np.deg2rad(-30 + ring * 1.29)
    sweeps = []
    for _ in range(8 if lidar else 0):
        distance = np.minimum(1.8 / np.maximum(np.sin(-elevation), 0.03), 40)
        distance += rng.normal(0, 0.02, NUM_POINTS)
        flat = distance * np.cos(elevation)
        columns = [
            flat * np.cos(azimuth),
            flat * np.sin(azimuth),
            distance * np.sin(elevation),
        ]
        intensity = rng.integers(0, 60, NUM_POINTS)
        points = np.column_stack([*columns, intensity, ring]).astype("<f4")
        sweeps.append(points.tobytes())
    channels = [*CAMERAS, *(["LIDAR_TOP"] if lidar else [])]
    for channel in channels:
        (root / "samples" / channel).mkdir(parents=True)
        for frame in range(num_files):
            content = sweeps[frame % len(sweeps)] if channel == "LIDAR_TOP" else image
            (root / file_name(frame, channel)).write_bytes(content)
    write_tables(
        root,
        channels=channels,
        num_frames=num_frames,
        size=size,
        num_files=num_files,
        full=full_tables,
    )


def list_files(root: Path) -> Files:
    """Return the keyframe files of a dataroot, frame by frame."""
    folder = next(path.parent for path in root.glob("*/sample_data.json"))
    frames: dict[str, list[Path]] = {}
    for row in json.loads((folder / "sample_data.json").read_text()):
        if row["is_key_frame"] and row["filename"].endswith((".jpg", ".bin")):
            frames.setdefault(row["sample_token"], []).append(root / row["filename"])
    return list(frames.items())


def packed(path: Path) -> bytes:
    """Return a member's bytes as the writers of samples store it: sweeps compressed, images as
    they are.
    """
    data = path.read_bytes()
    return bytes(codecs.encode(SWEEP_CODEC, data)) if path.suffix == ".bin" else data


def file_name(frame: int, channel: str) -> str:
    """Return a sensor file of a keyframe, from the dataroot."""
    return f"samples/{channel}/{frame:06d}.{'pcd.bin' if channel.startswith('LIDAR') else 'jpg'}"


def write_tables(
    root: Path,
    channels: list[str],
    num_frames: int,
    size: tuple[int, int],
    num_files: int,
    *,
    full: bool,
) -> None:
    """Write the tables, record by record: no memory that grows with the frames.

    Scenes have 40 frames; ``num_files`` files of each sensor are named in turns. Without ``full``
    there are no annotations, and no rows of ``sample_data`` but the keyframes of ``channels``.
    """
    folder = root / "v1.0-bench"
    folder.mkdir()
    width, height = size
    still = {"translation": [0, 0, 0], "rotation": [1, 0, 0, 0]}
    camera = [[1200, 0, width / 2], [0, 1200, height / 2], [0, 0, 1]]
    sensors = [*channels, *([_RADAR] if full else [])]
    frames = range(num_frames)
    rows: Rows = {
        "map": (),
        "log": [{"token": "log", "vehicle": "v", "location": "bench"}],
        "scene": (
            {
                "token": _token(first, "scene"),
                "name": f"bench-{first // SCENE_FRAMES:05d}",
                "log_token": "log",
                "nbr_samples": min(SCENE_FRAMES, num_frames - first),
            }
            for first in range(0, num_frames, SCENE_FRAMES)
        ),
        "sensor": (
            {
                "token": c,
                "channel": c,
                "modality": {
                    "CAM": "camera",
                    "LIDAR": "lidar",
                    "RADAR": "radar",
                }[c.partition("_")[0]],
            }
            for c in sensors
        ),
        "calibrated_sensor": (
            {
                "token": c,
                "sensor_token": c,
                **still,
                "camera_intrinsic": camera if c.startswith("CAM") else [],
            }
            for c in sensors
        ),
        "sample": (
            {
                "token": _token(f),
                "timestamp": _START_US + f * _FRAME_US,
                "scene_token": _token(f // SCENE_FRAMES * SCENE_FRAMES, "scene"),
                **_neighbours(f, num_frames),
            }
            for f in frames
        ),
        "sample_data": _sample_data(num_frames, channels, size, num_files, full=full),
        "ego_pose": (
            {
                "token": token,
                "timestamp": _START_US + f * _FRAME_US,
                # With as many digits as real ones.
                "translation": [411.3039349319818 + f, 1180.8903791765097, 0.0],
                "rotation": [math.cos(1e-3 * f), 0.0, 0.0, math.sin(1e-3 * f)],
            }
            for f in frames
            for token in _sensor_tokens(f, channels, full=full)
        ),
        "attribute": (),
        "category": (),
        "instance": (),
        "sample_annotation": (),
        "visibility": (),
        **(_annotations(num_frames) if full else {}),
    }
    for table, records in rows.items():
        with (folder / f"{table}.json").open("w") as file:
            file.write("[")
            for number, record in enumerate(records):
                file.write((",\n" if number else "\n") + json.dumps(record, indent=0))
            file.write("\n]")


def _sample_data(
    num_frames: int,
    channels: list[str],
    size: tuple[int, int],
    num_files: int,
    *,
    full: bool,
) -> Iterator[dict[str, Any]]:
    for frame in range(num_frames):
        for number, token in enumerate(_sensor_tokens(frame, channels, full=full)):
            is_key_frame = number < len(channels)
            channel = channels[number] if is_key_frame else _RADAR
            width, height = size if channel.startswith("CAM") else (0, 0)
            yield {
                "token": token,
                "sample_token": _token(frame),
                "ego_pose_token": token,
                "calibrated_sensor_token": channel,
                "timestamp": _START_US + frame * _FRAME_US,
                "fileformat": "jpg",
                "is_key_frame": is_key_frame,
                "height": height,
                "width": width,
                "prev": "",
                "next": "",
                "filename": file_name(frame % num_files, channel)
                if is_key_frame
                else f"sweeps/{channel}/{token}.pcd",
            }


def _annotations(num_frames: int) -> Rows:
    """Yield tables of annotations: ``NUM_BOXES`` tracks at any time, each of up to
    ``TRACK_FRAMES`` frames.
    """
    rng = np.random.default_rng(0)

    def track(frame: int, place: int) -> int:
        first = frame // SCENE_FRAMES * SCENE_FRAMES
        return first + (frame - first + place) // TRACK_FRAMES * TRACK_FRAMES

    def boxes() -> Iterator[dict[str, Any]]:
        for frame in range(num_frames):
            near = _neighbours(frame, num_frames)
            for place in range(NUM_BOXES):
                track_start = track(frame, place)
                x, y, yaw = rng.uniform(-50, 50, 3)
                yield {
                    "token": _token(frame, f"box{place}"),
                    "sample_token": _token(frame),
                    "instance_token": _token(track_start, f"track{place}"),
                    "visibility_token": str(1 + place % 4),
                    "attribute_tokens": [_token(0, "attribute")] if place % 2 else [],
                    "translation": [round(frame + x, 3), round(y, 3), 1.0],
                    "size": [1.9, 4.6, 1.7],
                    "rotation": [
                        float(np.cos(yaw)),
                        0.0,
                        0.0,
                        float(np.sin(yaw)),
                    ],
                    "prev": _token(frame - 1, f"box{place}")
                    if near["prev"] and track(frame - 1, place) == track_start
                    else "",
                    "next": _token(frame + 1, f"box{place}")
                    if near["next"] and track(frame + 1, place) == track_start
                    else "",
                    "num_lidar_pts": place,
                    "num_radar_pts": 0,
                }

    tracks = dict.fromkeys(
        (track(f, place), place) for f in range(num_frames) for place in range(NUM_BOXES)
    )
    return {
        "attribute": [
            {
                "token": _token(0, "attribute"),
                "name": "vehicle.moving",
                "description": "",
            }
        ],
        "category": [
            {"token": _token(i, "category"), "name": name} for i, name in enumerate(_CATEGORIES)
        ],
        "visibility": [
            {"token": str(1 + i), "level": level} for i, level in enumerate(_VISIBILITIES)
        ],
        "instance": (
            {
                "token": _token(first, f"track{place}"),
                "category_token": _token(place % len(_CATEGORIES), "category"),
            }
            for first, place in tracks
        ),
        "sample_annotation": boxes(),
    }


def _sensor_tokens(frame: int, channels: list[str], *, full: bool) -> list[str]:
    """Return tokens of a frame's rows of ``sample_data``, keyframes of ``channels`` first; ego
    poses have the same.
    """
    return [
        _token(frame, name)
        for name in (
            *channels,
            *(f"other{n}" for n in range(NUM_OTHER_ROWS if full else 0)),
        )
    ]


def _neighbours(frame: int, num_frames: int) -> dict[str, str]:
    """Return the links to the samples before and after in the scene."""
    first = frame // SCENE_FRAMES * SCENE_FRAMES
    last = min(first + SCENE_FRAMES, num_frames) - 1
    return {
        "prev": _token(frame - 1) if frame > first else "",
        "next": _token(frame + 1) if frame < last else "",
    }


def _token(frame: int, kind: str = "sample") -> str:
    """Make a token of 32 characters, as nuScenes' are."""
    return f"{kind:_>16}{frame:016x}"
