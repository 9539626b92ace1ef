"""What sources that are lists of files take: the scan of a long manifest, and the rate of ranges and tars.

``python -m fuelrail.bench.micro.sharding.listed [--rows N] [--samples N] [--out FILE]``, or with
``--sources KIND:PATH ...`` the scans of these sources alone: processor time a frame, the best of three scans after one
that is not counted.

*Scan*: a Parquet table of ``--rows`` frames of six cameras, with calibration, poses and boxes in each row, 200 frames a
clip. Images are ranges of one file a clip, whose sizes the table states, so that not a million files are needed.
*Rate*: whole runs of `fuelrail shard` over the same images as loose files, as ranges of one file and as members of a
tar, in turns, one worker; after a first run that is not counted.

The scan is made in a process of its own; memory is its peak resident size, the libraries' own included.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import simplejpeg
from pyarrow import parquet

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import publish_json
from fuelrail.sharding.commands import ARROW_POOL
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import scan_source, shard
from fuelrail.sharding.sources.registry import SourceSpec

CAMERAS = ("front", "front_left", "front_right", "back", "back_left", "back_right")
FRAMES_PER_CLIP = 200
CLIPS_PER_GROUP = 25
NUM_BOXES = 4
IMAGE_BYTES = 150_000
FORMS = ("files", "ranges", "tar")
ROUNDS = 9
_START_NS = 1_600_000_000_000_000_000
_MIB = 1 << 20


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """One scan: rows of the table and its bytes, seconds, microseconds a row, peak memory [MiB]."""

    rows: int
    table_bytes: int
    seconds: float
    us_per_row: float
    peak_mib: float


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Whole runs over one form: median rate [MiB/s], and its ratio to loose files' of the same round; CPU's too."""

    form: str
    mib_per_s: float
    ratio: float
    ratios: list[float]
    cpu_ratio: float


class SourceScan(msgspec.Struct, frozen=True, kw_only=True):
    """The scan of one source: its kind, frames and cameras, processor time a frame [us]."""

    kind: str
    frames: int
    cameras: int
    cpu_us_per_frame: float


class Scans(msgspec.Struct, frozen=True, kw_only=True):
    """The result file of ``--sources``."""

    machine: MachineFacts
    scans: list[SourceScan]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result file."""

    machine: MachineFacts
    scan: Scan
    rates: list[Rate]


def write_table(root: Path, num_rows: int) -> None:
    """Write ``frames.parquet`` of ``num_rows`` frames of six cameras, 25 clips a row group, and the clips' files."""
    blob = root / "data"
    blob.mkdir()
    template = pa.Table.from_pylist(list(_rows(0, FRAMES_PER_CLIP)))
    writer = parquet.ParquetWriter(root / "frames.parquet", template.schema)
    pending: list[pa.Table] = []
    for first in range(0, num_rows, FRAMES_PER_CLIP):
        table = _of_clip(template.slice(0, num_rows - first), first)
        pending.append(table)
        if len(pending) == CLIPS_PER_GROUP or first + FRAMES_PER_CLIP >= num_rows:
            writer.write_table(pa.concat_tables(pending))
            pending = []
        with (blob / f"{first // FRAMES_PER_CLIP:05d}.jpg").open("wb") as file:
            file.truncate(FRAMES_PER_CLIP * len(CAMERAS) * IMAGE_BYTES)
    writer.close()


def _of_clip(template: pa.Table, first: int) -> pa.Table:
    """The rows of the first clip as those of the clip that begins at row ``first``."""
    clip = first // FRAMES_PER_CLIP
    time_ns = pa.array(_START_NS + (first + np.arange(len(template))) * 100_000_000)
    changed = {"clip_id": f"clip-{clip:06d}", "timestamp_ns": time_ns}
    for name in CAMERAS:
        changed |= {f"cam.{name}.timestamp_ns": time_ns, f"cam.{name}.path": f"data/{clip:05d}.jpg"}
    for name, value in changed.items():
        column = pa.repeat(value, len(template)) if isinstance(value, str) else value
        template = template.set_column(template.schema.get_field_index(name), name, column)
    return template


def _rows(first: int, number: int) -> Iterator[dict[str, Any]]:
    for at in range(number):
        pose = np.eye(4)
        pose[:2, 3] = at * 0.5, first
        row: dict[str, Any] = {
            "clip_id": f"clip-{first // FRAMES_PER_CLIP:06d}",
            "timestamp_ns": _START_NS + (first + at) * 100_000_000,
            "ego2global": pose.ravel().tolist(),
            "speed_limit": 50.0,
        }
        for camera, name in enumerate(CAMERAS):
            cam2ego = np.array([[0.0, 0, 1, camera], [-1, 0, 0, 0], [0, -1, 0, 1.5], [0, 0, 0, 1]])
            row |= {
                f"cam.{name}.path": f"data/{first // FRAMES_PER_CLIP:05d}.jpg",
                f"cam.{name}.byte_offset": (at * len(CAMERAS) + camera) * IMAGE_BYTES,
                f"cam.{name}.byte_length": IMAGE_BYTES,
                f"cam.{name}.timestamp_ns": _START_NS + (first + at) * 100_000_000,
                f"cam.{name}.width": 1600,
                f"cam.{name}.height": 900,
                f"cam.{name}.intrinsics": [1200.0, 0, 800, 0, 1200, 450, 0, 0, 1],
                f"cam.{name}.cam2ego": cam2ego.ravel().tolist(),
            }
        row["boxes"] = [
            {"centre": [10.0 + box, 2.0, 0.5], "size_lwh": [4.5, 1.9, 1.6], "yaw": 0.1 * box, "category": "car",
             "track": f"track-{box}", "num_lidar_pts": 12}
            for box in range(NUM_BOXES)
        ]  # fmt: skip
        yield row


def scan(root: Path) -> Scan:
    """Scan the manifest in ``root``; the peak is that of this process."""
    start = time.perf_counter()
    info = scan_source(SourceSpec("manifest", str(root), {}))
    seconds = time.perf_counter() - start
    return Scan(
        rows=info.num_samples,
        table_bytes=(root / "frames.parquet").stat().st_size,
        seconds=round(seconds, 1),
        us_per_row=round(seconds / info.num_samples * 1e6, 1),
        peak_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    )


def scan_once(source: str) -> SourceScan:
    """Scan a source, ``KIND:PATH``."""
    kind, _, path = source.partition(":")
    info, best = scan_source(SourceSpec(kind, path, {})), float("inf")
    for _ in range(3):
        start = time.process_time()
        scan_source(SourceSpec(kind, path, {}))
        best = min(best, time.process_time() - start)
    return SourceScan(
        kind=kind,
        frames=info.num_samples,
        cameras=len(info.cameras),
        cpu_us_per_frame=round(best / info.num_samples * 1e6, 1),
    )


def write_forms(root: Path, num_samples: int) -> None:
    """Write the same images as loose files, ranges and tar members, each with its table."""
    images = _images()
    for form in FORMS:
        (root / form).mkdir()
    with tarfile.open(root / "tar" / "data.tar", "w") as tar, (root / "ranges" / "data.jpg").open("wb") as blob:
        rows: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
        for number in range(num_samples):
            (made,) = _rows(number, 1)
            row = {name: value for name, value in made.items() if not name.endswith((".byte_offset", ".byte_length"))}
            row |= {"clip_id": f"clip-{number // FRAMES_PER_CLIP}"}
            paths: dict[str, dict[str, str]] = {form: {} for form in FORMS}
            for at, camera in enumerate(CAMERAS):
                name, data = f"{number}.{camera}.jpg", images[(number + at) % len(images)]
                (root / "files" / name).write_bytes(data)
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
                column = f"cam.{camera}.path"
                paths["files"][column], paths["tar"][column] = name, f"tar:data.tar#{name}"
                paths["ranges"][column] = f"data.jpg#{blob.tell()}+{len(data)}"
                blob.write(data)
            for form in FORMS:
                rows[form].append({**row, **paths[form]})
    for form in FORMS:
        parquet.write_table(pa.Table.from_pylist(rows[form]), root / form / "frames.parquet")


def _images() -> list[bytes]:
    """Some JPEGs of 1600x900, of about 150 kB."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(8):
        small = rng.integers(0, 255, (225, 400, 3), np.uint8)
        pixels = np.ascontiguousarray(np.kron(small, np.ones((4, 4, 1), np.uint8)))
        found.append(simplejpeg.encode_jpeg(pixels, 20, "RGB", "420"))
    return found


def rates(root: Path) -> list[Rate]:
    """Shard each form in turns."""
    num_bytes = sum(path.stat().st_size for path in (root / "files").glob("*.jpg"))
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    cpu: dict[str, list[float]] = {form: [] for form in FORMS}
    for number in range(ROUNDS + 1):
        for form in FORMS if number % 2 else reversed(FORMS):
            out = root / "out"
            start, start_cpu = time.perf_counter(), time.process_time()
            recipe = make_recipe(splits={"train": 1.0}, shard_size_bytes=64 * _MIB)
            shard(SourceSpec("manifest", str(root / form), {}), out, recipe, 1, Quiet(), LocalEngine(1))
            if number:
                seconds[form].append(time.perf_counter() - start)
                cpu[form].append(time.process_time() - start_cpu)
            shutil.rmtree(out)

    def ratios(times: dict[str, list[float]], form: str) -> list[float]:
        return [round(files / own, 3) for files, own in zip(times["files"], times[form], strict=True)]

    return [
        Rate(
            form=form,
            mib_per_s=round(num_bytes / _MIB / float(np.median(seconds[form])), 1),
            ratio=float(np.median(ratios(seconds, form))),
            ratios=ratios(seconds, form),
            cpu_ratio=float(np.median(ratios(cpu, form))),
        )
        for form in FORMS
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sources", nargs="+", metavar="KIND:PATH")
    parser.add_argument("--scan", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.scan is not None:
        sys.stdout.buffer.write(msgspec.json.encode(scan(args.scan)))
        return
    if args.sources:
        _publish(args.out, Scans(machine=machine_facts(), scans=[scan_once(source) for source in args.sources]))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "long").mkdir()
        write_table(root / "long", args.rows)
        command = [sys.executable, "-m", "fuelrail.bench.micro.sharding.listed", "--scan", str(root / "long")]
        done = subprocess.run(command, check=True, capture_output=True, env={**os.environ, **ARROW_POOL})
        write_forms(root, args.samples)
        result = Result(machine=machine_facts(), scan=msgspec.json.decode(done.stdout, type=Scan), rates=rates(root))
    _publish(args.out, result)


def _publish(out: Path | None, result: Result | Scans) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")
    if out is not None:
        publish_json(out, result)


if __name__ == "__main__":
    main()
