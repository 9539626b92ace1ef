"""Loose files as a nuScenes dataroot has them, made for the sharding benchmarks: tables, images, lidar sweeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import simplejpeg

from fuelrail.bench.micro.sharding_tables import file_name, write_tables
from fuelrail.pipeline.format import codecs

CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
NUM_POINTS = 34_720

SWEEP_CODEC = codecs.planes(20)
"""Of sweeps of five float32 a point."""

Files = list[tuple[str, list[Path]]]
"""Key of a frame and its files."""


def make_dataroot(
    root: Path,
    num_frames: int,
    *,
    lidar: bool,
    size: tuple[int, int] = (1600, 900),
    num_files: int | None = None,
    full_tables: bool = True,
) -> None:
    """A nuScenes dataroot of scenes of 40 frames: images of noise of about 150 kB, sweeps of smooth surfaces and rings.

    ``num_files``: number of files for each sensor, which the frames name in turns (None: each frame has its own).
    ``full_tables``: with annotations, and as many rows for each frame as nuScenes' own tables have.
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
            (root / file_name(frame, channel)).write_bytes(content)
    write_tables(root, channels, num_frames, size, num_files, full=full_tables)


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


def list_files(root: Path) -> Files:
    """The keyframe files of a dataroot, frame by frame."""
    folder = next(path.parent for path in root.glob("*/sample_data.json"))
    frames: dict[str, list[Path]] = {}
    for row in json.loads((folder / "sample_data.json").read_text()):
        if row["is_key_frame"] and row["filename"].endswith((".jpg", ".bin")):
            frames.setdefault(row["sample_token"], []).append(root / row["filename"])
    return list(frames.items())


def packed(path: Path) -> bytes:
    """A member's bytes as the writers of samples store it: sweeps compressed, images as they are."""
    data = path.read_bytes()
    return bytes(codecs.encode(SWEEP_CODEC, data)) if path.suffix == ".bin" else data
