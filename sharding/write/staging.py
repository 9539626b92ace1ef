"""Staging: the members of a source that reads well only clip by clip are first brought into the work folder.

Each clip becomes one file, of the members of its selected samples one after the other, and a list of where each is; the
rows of the scan table then refer to those, so that shards are written in any order. A clip is read once. One whose file
and list are complete, and whose rows have not changed, is kept when an interrupted run is resumed. Nothing is left when
the dataset is finished, for the work folder goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.pipeline.errors import DatasetError, SourceError
from fuelrail.pipeline.runtime.workers import in_threads, set_up_worker
from fuelrail.pipeline.sample.arrays import map_npy
from fuelrail.pipeline.storage.files import published
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from fuelrail.sharding.sources.scan_table import ROWS_PER_BATCH, ClipInfo, Reference, ScanTable, decode_row
from fuelrail.sharding.sources.source import ClipSource, Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray


_MAX_THREADS: Final = 4
_ROWS_LOOKED_AT: Final = 1000
_SAMPLE: Final = "sample"


class _Index(msgspec.Struct, frozen=True, array_like=True):
    """What a staged clip holds: digest of its rows, and by reference where the bytes begin and how many they are."""

    digest: str
    num_bytes: int
    places: dict[str, tuple[int, int]]


class StageTask(NamedTuple):
    """One clip to be staged: its number, its run of rows, and a number that changes when its files do."""

    number: int
    first_row: int
    num_rows: int
    stamp: int


class Staging:
    """The clips of one source in a folder; each worker has its own."""

    def __init__(self, spec: SourceSpec, scan_table: Path, selection: Path, folder: Path) -> None:
        self._spec, self._folder, self._is_selected = spec, folder, map_npy(selection)
        self._table = ScanTable(scan_table)
        source = make_source(spec)
        assert isinstance(source, ClipSource), "a source that reads by clip"
        self._source = source

    def stage(self, task: StageTask) -> int:
        """Bring one clip's members here, unless they are; returns their bytes. Raises SourceError for a missing one."""
        digest, refs = hashlib.sha256(task.stamp.to_bytes(8)), dict[str, None]()
        for row in _selected(task, self._is_selected):
            encoded = self._table.encoded_row(row)
            digest.update(encoded)
            refs.update((member.ref, None) for member in decode_row(encoded).members)
        path = clip_file(self._folder, task.number)
        index = _load_index(path)
        if index is not None and index.digest == digest.hexdigest():
            return index.num_bytes
        index_of(path).unlink(missing_ok=True)
        places: dict[str, tuple[int, int]] = {}
        with published(path, sync=False) as file:
            at = 0
            for ref, data in self._source.read_clip(list(refs)):
                if ref in places or ref not in refs:
                    raise SourceError(f"the {self._spec.kind} source made '{ref}' twice, or without being asked for it")
                num_bytes = memoryview(data).nbytes
                file.write(data)
                places[ref] = at, num_bytes
                at += num_bytes
            if missing := refs.keys() - places.keys():
                raise SourceError(f"the {self._spec.kind} source has no bytes for '{min(missing)}'")
        with published(index_of(path), sync=False) as file:
            file.write(msgspec.msgpack.encode(_Index(digest.hexdigest(), at, places)))
        return at


class StagedSource:
    """Reads staged members; a reference is ``FILE#OFFSET+LENGTH``."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.fspath(folder)
        if not folder.is_dir():
            raise DatasetError(
                f"the staged clips in '{folder}' are not on this machine: give an output folder that all nodes share"
            )

    def place(self, ref: str) -> Place:
        """Where the bytes are."""
        name, _, part = ref.partition("#")
        offset, _, length = part.partition("+")
        return Place(f"{self._folder}/{name}", int(offset), int(length))

    def open(self, ref: str) -> bytes:
        """The bytes."""
        path, offset, length = self.place(ref)
        with Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(length)


def stage_clips(
    spec: SourceSpec, scan_table: Path, selection: Path, clips: Sequence[ClipInfo], stamps: NDArray[np.uint64],
    folder: Path, *, wanted: Iterable[int], num_workers: int,
) -> Path:  # fmt: skip
    """Stage the clips of these numbers, in parallel; returns a scan table whose rows refer to what is in ``folder``.

    ``selection`` is the mask of the rows that are in the plan, and ``stamps`` has a number for each row of the table,
    which changes when a file of the row does.
    """
    folder.mkdir(exist_ok=True)
    tasks = []
    for number in sorted(set(wanted)):
        clip = clips[number]
        own = stamps[clip.first_row : clip.first_row + clip.num_samples].tobytes()
        stamp = int.from_bytes(hashlib.sha256(own).digest()[:8])
        tasks.append(StageTask(number, clip.first_row, clip.num_samples, stamp))
    rows = np.concatenate([_selected(task, map_npy(selection)) for task in tasks])
    _check_space(ScanTable(scan_table), rows, folder)
    for _ in _staged((spec, scan_table, selection, folder), tasks, min(num_workers, len(tasks))):
        pass
    table = folder / scan_table.name
    _rewrite(scan_table, table, folder, {task.number for task in tasks})
    return table


def _selected(task: StageTask, selection: NDArray[np.generic]) -> list[int]:
    """The rows of a clip that are in the plan."""
    found: list[int] = (np.flatnonzero(selection[task.first_row :][: task.num_rows]) + task.first_row).tolist()
    return found


def _check_space(table: ScanTable, rows: NDArray[np.int64], folder: Path) -> None:
    """Raise DatasetError where the disk of ``folder`` lacks room for these rows, by the sizes of some of them."""
    looked_at = rows[:: -(-len(rows) // _ROWS_LOOKED_AT)].tolist()
    mean = sum(member.bytes for row in looked_at for member in table.row(row).members) / len(looked_at)
    needed, there = int(mean * len(rows)), sum(path.stat().st_size for path in folder.glob("*.bin"))
    free = shutil.disk_usage(folder).free
    if needed > free + there:
        raise DatasetError(
            f"the source reads well only clip by clip, so images and sweeps are first brought into '{folder}', which "
            f"takes about {needed / 1e9:,.1f} GB (images of video as JPEG take several times the video's bytes), and "
            f"{free / 1e9:,.1f} GB are free; free some, give an output on a larger disk, or select fewer samples"
        )


def _staged(given: tuple[SourceSpec, Path, Path, Path], tasks: Sequence[StageTask], num_workers: int) -> Iterator[int]:
    if num_workers > _MAX_THREADS:
        context = get_context("spawn")
        with ProcessPoolExecutor(num_workers, context, _start_worker, given) as pool:
            try:
                yield from pool.map(_stage, tasks)
            finally:
                pool.shutdown(cancel_futures=True)
        return
    own = threading.local()

    def stage(task: StageTask) -> int:
        if not hasattr(own, "staging"):
            own.staging = Staging(*given)
        staging: Staging = own.staging
        return staging.stage(task)

    yield from in_threads(stage, tasks, max(num_workers, 1))


_staging: Staging


def _start_worker(spec: SourceSpec, scan_table: Path, selection: Path, folder: Path) -> None:
    global _staging
    set_up_worker()
    _staging = Staging(spec, scan_table, selection, folder)


def _stage(task: StageTask) -> int:
    return _staging.stage(task)


def clip_file(folder: Path, number: int) -> Path:
    """The file of a clip's members."""
    return folder / f"{number:06d}.bin"


def index_of(path: Path) -> Path:
    """The list of what a clip's file holds."""
    return path.with_suffix(".index")


def _load_index(path: Path) -> _Index | None:
    """The list of a clip's file; None where either is not there or not whole."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        index = msgspec.msgpack.decode(index_of(path).read_bytes(), type=_Index)
        if path.stat().st_size == index.num_bytes:
            return index
    return None


def _rewrite(scan_table: Path, target: Path, folder: Path, staged: set[int]) -> None:
    """Copy the scan table, with references to staged clips and the sizes that members have there."""
    table = ScanTable(scan_table)
    current, places = -1, dict[str, tuple[int, int]]()
    with pa.memory_map(os.fspath(scan_table)) as mapped, pa.OSFile(os.fspath(target), "wb") as sink:
        file = pa.ipc.open_file(mapped)
        column = file.schema.get_field_index(_SAMPLE)
        with pa.ipc.new_file(sink, file.schema) as writer:
            for number in range(file.num_record_batches):
                batch = file.get_batch(number)
                rows = []
                for at in range(batch.num_rows):
                    row = table.row(number * ROWS_PER_BATCH + at)
                    if row.clip != current:
                        current = row.clip
                        index = _load_index(clip_file(folder, current)) if current in staged else None
                        places = {} if index is None else index.places
                    members = tuple(_moved(member, current, places) for member in row.members)
                    rows.append(msgspec.msgpack.encode(row._replace(members=members)))
                arrays = batch.columns
                arrays[column] = pa.array(rows, file.schema.field(column).type)
                writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=file.schema))


def _moved(member: Reference, clip: int, places: dict[str, tuple[int, int]]) -> Reference:
    if member.ref not in places:  # of a clip from which nothing is to be written
        return member
    offset, length = places[member.ref]
    return member._replace(ref=f"{clip:06d}.bin#{offset}+{length}", bytes=length, is_estimate=False)
