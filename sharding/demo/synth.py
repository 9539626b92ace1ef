"""``fuelrail.synth``: workers record the captures of a world, tables come last, one rename
publishes it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetError,
    DatasetExistsError,
    needs,
)
from fuelrail.pipeline.runtime.host import num_usable_cpus
from fuelrail.pipeline.runtime.workers import in_processes, in_threads
from fuelrail.pipeline.settings import make_options
from fuelrail.pipeline.storage.filesystem import is_url, shown_url
from fuelrail.sharding.demo.capture import TOKENS, Sighting, record
from fuelrail.sharding.demo.options import (
    CAPTURES_OF_A_WORKER,
    MOST_WORKERS,
    VERSION,
    SynthOptions,
    SynthReport,
)
from fuelrail.sharding.demo.rig import CAMERA_CHANNELS, LIDAR_CHANNEL
from fuelrail.sharding.demo.tables import make_tables, map_filename, splits
from fuelrail.sharding.demo.world import captures, make_clip
from fuelrail.sharding.sources.nuscenes.extras.groups import (
    CHANNELS_FILE,
    CHANNELS_FOLDER,
)

with needs("`fuelrail synth`"):
    import cv2

MARKER: Final = "synth.json"
_RENDERING: Final = 5  # raised when the same options give other bytes


class _Marker(msgspec.Struct, frozen=True):
    """``synth.json``: which program made the folder, and what must be in it."""

    rendering: int
    report: SynthReport


def synth(
    out: str | os.PathLike[str],
    world: SynthOptions | None = None,
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    **options: Any,  # checked by the conversion
) -> SynthReport:
    """Render a synthetic street world as nuScenes v1.0 tables; the same options give the same
    bytes.

    ``out`` is a folder that does not exist or is empty; it is either completed or left as it was.
    Options are the fields of :class:`SynthOptions`, as keywords (``seed=7, clips=2``) or as one
    struct. ``progress`` is called with the number of captures done and in all. Raises ConfigError
    for options, DatasetExistsError where ``out`` holds something else than exactly this world,
    DatasetError where it cannot be written.
    """
    if world is not None and options:
        raise ConfigError(
            f"give the options as a struct or as keywords, not both; got {', '.join(options)} too"
        )
    chosen = make_options(SynthOptions, world, options)
    if is_url(os.fspath(out)):
        raise ConfigError(
            "the output of synth must be a folder of this machine, got "
            f"'{shown_url(os.fspath(out))}'"
        )
    folder = Path(os.path.abspath(out))  # noqa: PTH100 - a link as OUT stays the link
    plain = msgspec.structs.replace(chosen, workers=0)
    report = _report_of(folder, plain)
    if report is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(
                tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent)
            )
        except OSError as error:
            raise DatasetError(f"cannot write to '{folder.parent}': {error.strerror}") from error
        try:
            report = _write_world(unfinished, plain, chosen.workers, progress)
            unfinished.chmod(0o755)
            unfinished.rename(folder)
        except OSError as error:
            raise DatasetError(f"cannot write '{folder}': {error.strerror or error}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return msgspec.structs.replace(report, folder=os.fspath(out))


def _report_of(out: Path, world: SynthOptions) -> SynthReport | None:
    """Return the report of the world that is at ``out``, None where nothing is."""
    if not out.exists():
        return None
    if not out.is_dir():
        raise DatasetExistsError(
            f"'{out}' is a file; name a folder that isn't there yet, or an empty one"
        )
    try:
        if not any(out.iterdir()):
            return None
        marker = msgspec.json.decode((out / MARKER).read_bytes(), type=_Marker)
    except (OSError, msgspec.DecodeError, ConfigError):
        raise DatasetExistsError(
            f"'{out}' isn't empty and holds no synthetic world; name another folder, or "
            "empty this one"
        ) from None
    report = marker.report
    if report.world != world or marker.rendering != _RENDERING:
        stored = msgspec.structs.asdict(report.world)
        requested = msgspec.structs.asdict(world)
        changed = ", ".join(
            f"{name} {value}, not {requested[name]}"
            for name, value in stored.items()
            if value != requested[name]
        )
        raise DatasetExistsError(
            f"'{out}' holds another synthetic world "
            f"({changed or 'of another version of this program'}); name another folder, or remove "
            "this one"
        )
    if _count_bytes(out) != report.num_bytes:
        raise DatasetExistsError(
            f"'{out}' holds this world, but files were changed or removed; remove it and "
            "run this again"
        )
    return msgspec.structs.replace(report, reused=True)


def _count_bytes(folder: Path) -> int:
    """Return the size of all files but the marker."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path != folder / MARKER
    )


def _write_world(
    root: Path,
    world: SynthOptions,
    num_workers: int,
    advance: Callable[[int, int], None],
) -> SynthReport:
    tasks = [
        capture
        for index in range(world.clips)
        for capture in captures(world, make_clip(world, index))
    ]
    for channel in (*CAMERA_CHANNELS, LIDAR_CHANNEL):
        (root / "samples" / channel).mkdir(parents=True)
    (root / "sweeps" / LIDAR_CHANNEL).mkdir(parents=True)
    folder = root / VERSION
    folder.mkdir()
    if world.tokens:
        (root / CHANNELS_FOLDER / TOKENS.name).mkdir(parents=True)
        _write_json(folder / CHANNELS_FILE, [msgspec.to_builtins(TOKENS)])
    sightings: dict[tuple[int, int], list[Sighting]] = {}
    advance(0, len(tasks))
    if num_workers == 0:
        num_workers = min(MOST_WORKERS, num_usable_cpus(), len(tasks) // CAPTURES_OF_A_WORKER)
    num_workers = max(1, min(num_workers, len(tasks)))
    # Most of the time is spent with the interpreter's lock held.
    in_workers = in_threads if num_workers == 1 else in_processes
    recorded = in_workers(partial(record, world, root), tasks, num_workers)
    for done, (capture, actors_seen) in enumerate(recorded, 1):
        if capture.is_key_frame:
            sightings[capture.clip, capture.frame] = actors_seen
        advance(done, len(tasks))
    tables = make_tables(world, sightings)
    for name, rows in tables.items():
        _write_json(folder / f"{name}.json", rows)
    _write_json(folder / "splits.json", splits(world))
    mask = root / map_filename(world)
    mask.parent.mkdir()
    _, png = cv2.imencode(".png", np.zeros((8, 8), np.uint8))
    mask.write_bytes(png.tobytes())
    report = SynthReport(
        folder="",
        world=world,
        num_images=len(CAMERA_CHANNELS) * len(sightings),
        num_sweeps=len(tasks),
        num_annotations=len(tables["sample_annotation"]),
        num_bytes=_count_bytes(root),
        reused=False,
    )
    marker = msgspec.json.encode(_Marker(_RENDERING, report))
    (root / MARKER).write_bytes(msgspec.json.format(marker, indent=2) + b"\n")
    return report


def _write_json(path: Path, rows: object) -> None:
    path.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")
