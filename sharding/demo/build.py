"""A synthetic world on disk: captures recorded by local processes, tables last, published by one rename."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Final, NamedTuple

import cv2
import msgspec
import numpy as np

from fuelrail.pipeline.errors import ConfigError, DatasetError, DatasetExistsError, FuelrailError
from fuelrail.pipeline.runtime.workers import ctrl_c_waits, set_up_worker
from fuelrail.sharding.demo.capture import Recorded, record
from fuelrail.sharding.demo.channels import TOKENS, demo_channels
from fuelrail.sharding.demo.occupancy import OCCUPANCY, voxelise
from fuelrail.sharding.demo.rig import CAMERA_CHANNELS, LIDAR_CHANNEL
from fuelrail.sharding.demo.tables import make_tables, map_filename, splits
from fuelrail.sharding.demo.world import Capture, WorldSpec, captures, make_clip
from fuelrail.sharding.sources.nuscenes.channels import CHANNELS_FILE, CHANNELS_FOLDER

MARKER: Final = "synth.json"
_RENDERING: Final = 2  # raised when the same spec gives other bytes
_MAP_PX: Final = 8


class Built(NamedTuple):
    """What is at the output folder; ``was_there`` when it had been before."""

    num_clips: int
    num_frames: int
    num_images: int
    num_sweeps: int
    num_annotations: int
    num_bytes: int
    was_there: bool


class _Marker(msgspec.Struct, frozen=True, kw_only=True):
    """``synth.json``: what the folder was made from, and what must be in it."""

    rendering: int
    spec: WorldSpec
    num_files: int
    num_bytes: int
    num_images: int
    num_sweeps: int
    num_annotations: int


def check_spec(spec: WorldSpec) -> None:
    """Raise ConfigError for a world that cannot be made."""
    limits = {
        "seed": (spec.seed, 0, 2**63 - 1),
        "number of clips": (spec.num_clips, 1, 999),
        "number of frames": (spec.num_frames, 1, 400),
        "number of lidar sweeps": (spec.num_lidar_sweeps, 0, 9),
        "number of camera sweeps": (spec.num_camera_sweeps, 0, 5),
        "image width in pixels": (spec.width_px, 64, 4096),
        "image height in pixels": (spec.height_px, 36, 2304),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise ConfigError(f"{name}: got {value}, must be {low} to {high}")
    plain = spec.version.replace("-", "").replace(".", "").replace("_", "").isalnum()
    if not plain or spec.version in ("samples", "sweeps", "maps") or spec.version.startswith("."):
        raise ConfigError(
            f"version '{spec.version}': must be a folder's name such as v1.0-mini, of letters, digits, '.', '-' and '_'"
        )


def build(
    spec: WorldSpec, out: Path, num_workers: int, advance: Callable[[int, int], None] = lambda _done, _total: None
) -> Built:
    """Make the world at ``out``, a folder that isn't there or is empty. ``advance`` gets captures done and in all.

    Raises ConfigError for a bad spec, DatasetExistsError where ``out`` holds anything but exactly this world, and
    DatasetError where it cannot be written. Whatever happens, ``out`` is either complete or untouched.
    """
    check_spec(spec)
    out = Path(os.path.abspath(out))  # noqa: PTH100 - a link as OUT stays the link
    there = _already_there(spec, out)
    if there is not None:
        return there
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as error:
        raise DatasetError(f"cannot write to '{out.parent}': {error.strerror}") from error
    try:
        built = _build(spec, partial, num_workers, advance)
        partial.chmod(0o755)
        partial.rename(out)
    except OSError as error:
        raise DatasetError(f"cannot write '{out}': {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return built


def _already_there(spec: WorldSpec, out: Path) -> Built | None:
    # The world that is at `out`, None where nothing is.
    if not out.exists():
        return None
    if not out.is_dir():
        raise DatasetExistsError(f"'{out}' is a file; name a folder that isn't there yet, or an empty one")
    try:
        if not any(out.iterdir()):
            return None
        marker = msgspec.json.decode((out / MARKER).read_bytes(), type=_Marker)
    except (OSError, msgspec.DecodeError):
        raise DatasetExistsError(
            f"'{out}' isn't empty and holds no synthetic world; name another folder, or empty this one"
        ) from None
    if marker.spec != spec or marker.rendering != _RENDERING:
        raise DatasetExistsError(
            f"'{out}' holds another synthetic world ({_differences(marker, spec)}); name another folder, "
            "or remove this one"
        )
    if _files_and_bytes(out) != (marker.num_files, marker.num_bytes):
        raise DatasetExistsError(
            f"'{out}' holds this world, but files were changed or removed; remove it and run this again"
        )
    return _summary(marker, was_there=True)


def _differences(marker: _Marker, spec: WorldSpec) -> str:
    other, current = msgspec.structs.asdict(marker.spec), msgspec.structs.asdict(spec)
    found = [f"{name} {other[name]}, not {current[name]}" for name in current if other[name] != current[name]]
    return ", ".join(found) or "of another version of this program"


def _files_and_bytes(folder: Path) -> tuple[int, int]:
    # All files but the marker itself.
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file() and path != folder / MARKER]
    return len(sizes), sum(sizes)


def _summary(marker: _Marker, *, was_there: bool) -> Built:
    return Built(
        marker.spec.num_clips,
        marker.spec.num_frames,
        marker.num_images,
        marker.num_sweeps,
        marker.num_annotations,
        marker.num_bytes,
        was_there,
    )


def _build(spec: WorldSpec, root: Path, num_workers: int, advance: Callable[[int, int], None]) -> Built:
    tasks = [capture for index in range(spec.num_clips) for capture in captures(spec, make_clip(spec, index))]
    for kind, wanted in (("samples", True), ("sweeps", False)):
        for channel in (*CAMERA_CHANNELS, LIDAR_CHANNEL):
            if any(
                task.is_key_frame == wanted and (task.lidar if channel == LIDAR_CHANNEL else task.cameras)
                for task in tasks
            ):
                (root / kind / channel).mkdir(parents=True)
    channels = demo_channels(make_clip(spec, 0).rig) if spec.channels else ()
    grids = (*((OCCUPANCY,) if spec.occupancy else ()), *((TOKENS,) if spec.tokens else ()))
    for one in (*channels, *grids):
        (root / CHANNELS_FOLDER / one.name).mkdir(parents=True)
    recorded: list[Recorded] = []
    advance(0, len(tasks))
    for item in _record_all(spec, tasks, root, num_workers):
        recorded.append(item)
        advance(len(recorded), len(tasks))
    tables = make_tables(spec, recorded)
    folder = root / spec.version
    folder.mkdir()
    for name, rows in tables.items():
        _write_json(folder / f"{name}.json", rows)
    _write_json(folder / "splits.json", splits(spec))
    if spec.occupancy:
        voxelise(root, spec.version, spec.num_lidar_sweeps)
    if channels or grids:
        _write_json(folder / CHANNELS_FILE, msgspec.to_builtins((*channels, *grids)))
    mask = root / map_filename(spec)
    mask.parent.mkdir()
    mask.write_bytes(cv2.imencode(".png", np.zeros((_MAP_PX, _MAP_PX), np.uint8))[1].tobytes())
    num_files, num_bytes = _files_and_bytes(root)
    marker = _Marker(
        rendering=_RENDERING,
        spec=spec,
        num_files=num_files,
        num_bytes=num_bytes,
        num_images=sum(len(CAMERA_CHANNELS) for task in tasks if task.cameras),
        num_sweeps=sum(task.lidar for task in tasks),
        num_annotations=len(tables["sample_annotation"]),
    )
    (root / MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(marker), indent=2) + b"\n")
    return _summary(marker, was_there=False)


def _write_json(path: Path, rows: object) -> None:
    path.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")


def _record_all(spec: WorldSpec, tasks: list[Capture], root: Path, num_workers: int) -> Iterator[Recorded]:
    if num_workers <= 1 or len(tasks) == 1:
        threads = cv2.getNumThreads()
        cv2.setNumThreads(1)
        try:
            for task in tasks:
                yield record(spec, task, root)
        finally:
            cv2.setNumThreads(threads)
        return
    # Spawned: nothing of this process's threads and locks is copied.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(num_workers, len(tasks)), context, _start_worker)
    try:
        with ctrl_c_waits():
            futures = [pool.submit(record, spec, task, root) for task in tasks]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise FuelrailError(
            "a worker process died: it was killed, perhaps for lack of memory (use fewer workers), or the calling "
            "script lacks `if __name__ == '__main__':`"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Set up a worker process, of one thread."""
    set_up_worker()
    cv2.setNumThreads(1)
