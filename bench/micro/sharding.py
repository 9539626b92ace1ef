"""Sharding loose files: Fuelrail, digests and index and all, beside GNU tar, ``tarfile`` and other shard writers.

``python -m fuelrail.bench.micro.sharding [--dir DIR] [--source DATAROOT] [--out FILE] [--quick]``. All read the same
camera files of a nuScenes dataroot out of the page cache and write to DIR, by default a folder in memory, so that the
writers are measured and not a disk. Without ``--source`` the dataroot is made: images as large as real ones, of noise.

GNU tar and ``tarfile`` just copy; the others make datasets that a trainer can shuffle. Fuelrail's time is the whole
run: scan of the tables, plan, shards, index, attributes, manifest; SHA-256 of every file and XXH3 of every sample.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import simplejpeg
import zstandard

from fuelrail.bench.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.timing import QUICK, Comparison, Effort, Report, compare, render
from fuelrail.pipeline.codecs import DEFAULT_ZSTD_LEVEL
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.recipe import make_recipe
from fuelrail.sharding.run import shard
from fuelrail.sharding.source import SourceSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NUM_FRAMES = 240
NUM_ROUNDS = 7
SHARD_BYTES = 128 << 20
CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
NUM_POINTS = 34_720
_START_US = 1_600_000_000_000_000

Files = list[tuple[str, list[Path]]]
"""Key of a frame and its files."""


class ShardingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Rates [MB of source files a second] of each candidate, and the comparisons they come from."""

    benchmark: str
    machine: MachineFacts
    num_files: int
    num_bytes: int
    mb_per_s: dict[str, dict[str, float]]
    comparisons: list[Comparison]


def make_dataroot(root: Path, num_frames: int, *, lidar: bool, size: tuple[int, int] = (1600, 900)) -> None:
    """A nuScenes dataroot of one scene: images of noise of about 150 kB, sweeps of smooth surfaces and rings."""
    rng = np.random.default_rng(0)
    width, height = size
    coarse = rng.random((height // 4 + 1, width // 4 + 1, 3))
    pixels = (np.kron(coarse, np.ones((4, 4, 1)))[:height, :width] * 60 + 90).astype(np.uint8)
    image = simplejpeg.encode_jpeg(pixels, 60, "RGB", "420")
    channels = [*CAMERAS, *(["LIDAR_TOP"] if lidar else [])]
    tables: dict[str, list[dict[str, Any]]] = {
        "attribute": [], "category": [], "instance": [], "map": [], "sample_annotation": [], "visibility": [],
        "log": [{"token": "log", "vehicle": "v", "location": "bench"}],
        "scene": [{"token": "scene", "name": "bench", "log_token": "log", "nbr_samples": num_frames}],
        "sensor": [
            {"token": c, "channel": c, "modality": "lidar" if c.startswith("LIDAR") else "camera"} for c in channels
        ],
        "calibrated_sensor": [], "sample": [], "sample_data": [], "ego_pose": [],
    }  # fmt: skip
    for channel in channels:
        (root / "samples" / channel).mkdir(parents=True)
        rows = [] if channel.startswith("LIDAR") else [[1200, 0, width / 2], [0, 1200, height / 2], [0, 0, 1]]
        pose = {"translation": [0, 0, 0], "rotation": [1, 0, 0, 0]}
        tables["calibrated_sensor"].append(
            {"token": channel, "sensor_token": channel, "camera_intrinsic": rows, **pose}
        )
    for frame in range(num_frames):
        near = {"prev": str(frame - 1) if frame else "", "next": str(frame + 1) if frame + 1 < num_frames else ""}
        time_us = _START_US + frame * 500_000
        tables["sample"].append({"token": str(frame), "timestamp": time_us, "scene_token": "scene", **near})
        for channel in channels:
            own = f"{frame}-{channel}"
            is_lidar = channel.startswith("LIDAR")
            name = f"samples/{channel}/{frame:06d}.{'pcd.bin' if is_lidar else 'jpg'}"
            tables["ego_pose"].append(
                {"token": own, "timestamp": time_us, "translation": [frame, 0, 0], "rotation": [1, 0, 0, 0]}
            )
            tables["sample_data"].append(
                {
                    "token": own, "sample_token": str(frame), "ego_pose_token": own, "filename": name,
                    "calibrated_sensor_token": channel, "timestamp": time_us, "is_key_frame": True,
                    "width": 0 if is_lidar else width, "height": 0 if is_lidar else height,
                }
            )  # fmt: skip
            (root / name).write_bytes(_sweep(rng) if is_lidar else image)
    (root / "v1.0-bench").mkdir()
    for table, records in tables.items():
        (root / "v1.0-bench" / f"{table}.json").write_text(json.dumps(records))


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


@contextlib.contextmanager
def _fresh(folder: Path) -> Iterator[Path]:
    """An empty folder that is removed afterwards: removing counts for every candidate alike."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def with_fuelrail(root: Path, out: Path, num_workers: int) -> None:
    """The whole run of `fuelrail shard`."""
    with _fresh(out) as folder:
        recipe = make_recipe(shard_size_bytes=SHARD_BYTES)
        shard(SourceSpec("nuscenes", str(root), {}), folder, recipe, num_workers, Quiet())


def with_gnu_tar(files: Files, out: Path) -> None:
    """One tar of all files."""
    with _fresh(out) as folder:
        names = b"\0".join(os.fsencode(path) for _, paths in files for path in paths)
        command = ["tar", "--create", "--absolute-names", "--null", "--files-from=-", f"--file={folder / 'all.tar'}"]
        subprocess.run(command, input=names, check=True)


def with_tarfile(files: Files, out: Path) -> None:
    """One tar of all files, by Python's own module."""
    with _fresh(out) as folder, tarfile.open(folder / "all.tar", "w") as tar:
        for key, paths in files:
            for path in paths:
                tar.add(path, f"{key}.{path.parent.name.lower()}.{path.suffix}")


def with_webdataset(files: Files, out: Path) -> None:
    """``webdataset.ShardWriter``; sweeps compressed as Fuelrail does, so that both do the same work."""
    import webdataset

    compress = zstandard.ZstdCompressor(level=DEFAULT_ZSTD_LEVEL).compress
    with (
        _fresh(out) as folder,
        contextlib.redirect_stdout(io.StringIO()),
        webdataset.ShardWriter(str(folder / "%06d.tar"), maxsize=SHARD_BYTES, verbose=0) as writer,
    ):
        for key, paths in files:
            sample: dict[str, Any] = {"__key__": key}
            for path in paths:
                data, channel = path.read_bytes(), path.parent.name.lower()
                is_sweep = path.suffix == ".bin"
                sample[f"{channel}.bin.zst" if is_sweep else f"{channel}.jpg"] = compress(data) if is_sweep else data
            writer.write(sample)


def with_mds(files: Files, out: Path) -> None:
    """``streaming.MDSWriter`` with hashes, as its guide recommends."""
    writer_type = importlib.import_module("streaming").MDSWriter
    compress = zstandard.ZstdCompressor(level=DEFAULT_ZSTD_LEVEL).compress
    columns = {"key": "str", **{path.parent.name.lower(): "bytes" for path in files[0][1]}}
    with (
        _fresh(out) as folder,
        writer_type(out=str(folder), columns=columns, hashes=["xxh3_64"], size_limit=SHARD_BYTES) as writer,
    ):
        for key, paths in files:
            sample: dict[str, Any] = {"key": key}
            for path in paths:
                data = path.read_bytes()
                sample[path.parent.name.lower()] = compress(data) if path.suffix == ".bin" else data
            writer.write(sample)


def measure(title: str, root: Path, work: Path, effort: Effort) -> tuple[Comparison, Files]:
    """All candidates that are installed, in turns."""
    files = list_files(root)
    candidates: dict[str, Callable[[], object]] = {}
    if shutil.which("tar"):
        candidates["GNU tar"] = partial(with_gnu_tar, files, work / "gnu")
    candidates["tarfile"] = partial(with_tarfile, files, work / "tarfile")
    if importlib.util.find_spec("webdataset"):
        candidates["webdataset.ShardWriter"] = partial(with_webdataset, files, work / "webdataset")
    if importlib.util.find_spec("streaming"):
        candidates["streaming.MDSWriter"] = partial(with_mds, files, work / "mds")
    candidates["fuelrail, in this process"] = partial(with_fuelrail, root, work / "fuelrail", 1)
    candidates["fuelrail, 2 processes"] = partial(with_fuelrail, root, work / "fuelrail-2", 2)
    return compare(title, candidates, effort), files


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.sharding")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to write (default: in memory)")
    parser.add_argument("--source", type=Path, metavar="DATAROOT", help="a nuScenes dataroot instead of a made one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--quick", action="store_true", help="a few frames, to see that it runs")
    options = parser.parse_args(argv)
    memory = Path("/dev/shm")
    base = options.dir or (memory if os.access(memory, os.W_OK) else None)
    effort = QUICK if options.quick else Effort(num_rounds=NUM_ROUNDS, min_lap_s=0.0)
    num_frames, size = (6, (320, 180)) if options.quick else (NUM_FRAMES, (1600, 900))
    comparisons: list[Comparison] = []
    rates: dict[str, dict[str, float]] = {}
    num_files = num_bytes = 0
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        work = Path(scratch)
        for title, lidar in (("cameras", False), ("cameras and lidar, sweeps compressed", True)):
            root = options.source
            if root is None:
                root = work / "source"
                shutil.rmtree(root, ignore_errors=True)
                make_dataroot(root, num_frames if not lidar else num_frames // 2, lidar=lidar, size=size)
            comparison, files = measure(title, root, work, effort)
            num_bytes = sum(path.stat().st_size for _, paths in files for path in paths)
            num_files = sum(len(paths) for _, paths in files)
            rates[title] = {entry.name: num_bytes / 1e6 / entry.seconds_per_call for entry in comparison.entries}
            comparisons.append(comparison)
            if options.source is not None:
                break
    report = ShardingReport(
        benchmark="sharding",
        machine=machine_facts(),
        num_files=num_files,
        num_bytes=num_bytes,
        mb_per_s=rates,
        comparisons=comparisons,
    )
    sys.stdout.write(render(Report(benchmark="sharding", machine=report.machine, comparisons=comparisons)) + "\n")
    for title, by_name in rates.items():
        for name, rate in by_name.items():
            sys.stdout.write(f"  {title}, {name}: {rate:,.0f} MB/s\n")
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
