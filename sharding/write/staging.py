"""Staging: the members of a source that reads well only clip by clip are first brought into the
work folder.

Shards that follow each other in the plan are a band. Each clip becomes a file for each band, of the
members that its shards need one after the other, and a list of where each is; the rows of the scan
table then refer to those, so that shards are written in any order. A clip is read once. When all
shards of a band are finished, its files are removed: so the disk holds the dataset and one band
more, not all members twice. A clip whose files and list are complete, and whose rows have not
changed, is kept when an interrupted run is resumed. Nothing is left when the dataset is finished,
for the work folder goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fuelrail.pipeline.errors import DatasetError, SourceError
from fuelrail.pipeline.runtime.workers import in_threads, set_up_worker
from fuelrail.pipeline.storage.files import (
    map_npy,
    published,
    read_file,
    save_npy,
)
from fuelrail.sharding.sources.adapter.source import FrameSource
from fuelrail.sharding.sources.registry import SourceSpec, make_source, naming
from fuelrail.sharding.sources.shared.pictures import JpegForm, StoredJpeg
from fuelrail.sharding.sources.shared.scan_table import (
    ROWS_PER_BATCH,
    ClipInfo,
    ScanTable,
    decode_row,
)
from fuelrail.sharding.sources.source import ClipSource, Place
from fuelrail.sharding.write.images import stored_share, stored_size

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U64
    from fuelrail.sharding.planning.recipe import ImageRecipe

_MAX_THREADS: Final = 4
_ROWS_LOOKED_AT: Final = 1000
_SAMPLE: Final = "sample"
_MOST_BANDS: Final = 16
_DONE_BYTES: Final = 16
_INDEX_BYTES: Final = 1 << 30
NO_BAND: Final = -1

_worker_state = threading.local()
"""The `Staging` of each worker, a thread or a process of one pool."""

STORED: Final = "stored:"
"""Begins the reference of an image as it is to be stored."""


class Placed(NamedTuple):
    """Where a member is in the files of its clip, and whether it is an image as it is to be
    stored.
    """

    band: int
    offset: int
    length: int
    is_stored: bool


class _Index(msgspec.Struct, frozen=True, array_like=True):
    """What a staged clip holds: digest of its rows, bytes of each band, and by reference its
    place.
    """

    digest: str
    sizes: dict[int, int]
    places: dict[str, Placed]


class Bands:
    """The bands of the shards that a run makes, and how many of these bands are finished;
    ``folder`` is of staging.

    Bands are removed in their order, for a member that more than one band needs is in the last of
    these.
    """

    def __init__(self, numbers: Sequence[int], folder: Path) -> None:
        """Cut the shards of these numbers into bands."""
        self.folder = folder
        self._done = folder.with_suffix(".done")
        count = min(_MOST_BANDS, len(numbers))
        self.of_shard = {
            number: position * count // len(numbers) for position, number in enumerate(numbers)
        }
        self._left = [set[int]() for _ in range(count)]
        for number, band in self.of_shard.items():
            self._left[band].add(number)
        self.num_done = 0
        with contextlib.suppress(OSError, ValueError):
            stated = int(read_file(self._done, _DONE_BYTES))
            self.num_done = max(0, min(stated, count))

    def forget(self) -> None:
        """Count no band as finished: its files are staged again."""
        self.num_done = 0
        self._done.unlink(missing_ok=True)

    def finished(self, number: int) -> None:
        """Note that a shard is; removes what no shard needs any more."""
        self._left[self.of_shard[number]].discard(number)
        before = self.num_done
        while self.num_done < len(self._left) and not self._left[self.num_done]:
            self.num_done += 1
        if self.num_done > before:
            with published(self._done, sync=False) as file:
                file.write(str(self.num_done).encode())
            self.sweep()

    def sweep(self) -> None:
        """Remove the files of finished bands."""
        for band in range(self.num_done):
            for path in self.folder.glob(f"*.{band}.bin"):
                path.unlink()


class StageTask(NamedTuple):
    """One clip to be staged: its number, its run of rows, and a number that changes when its
    files do.
    """

    number: int
    first_row: int
    num_rows: int
    stamp: int


class Staging:
    """The clips of one source in a folder; each worker has its own."""

    def __init__(
        self,
        spec: SourceSpec,
        images: ImageRecipe | None,
        scan_table: Path,
        bands: Path,
        folder: Path,
        num_done: int,
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._bands = map_npy(bands)
        self._num_done = num_done
        self._table = ScanTable(scan_table)
        source: Any = make_source(spec)
        if images is not None and isinstance(source, FrameSource):
            source.stored = JpegForm(images.quality, partial(stored_size, images))
        assert isinstance(source, ClipSource), "a source that reads by clip"
        self._source = source

    def is_known(self, task: StageTask) -> bool:
        """Return whether a clip was staged whole with its present rows."""
        index = _load_index(self._folder, task.number)
        return index is not None and index.digest == self._clip_refs(task)[0]

    def stage(self, task: StageTask) -> None:
        """Bring one clip's members here, unless they are or their band is finished; SourceError
        for a missing one.
        """
        digest, refs = self._clip_refs(task)
        index = _load_index(self._folder, task.number)
        places: dict[str, Placed] = {}
        if index is not None and index.digest == digest:
            paths = {
                band: clip_file(self._folder, task.number, band)
                for band in index.sizes
                if band >= self._num_done
            }
            if all(
                path.exists() and path.stat().st_size == index.sizes[band]
                for band, path in paths.items()
            ):
                return
            places = {
                ref: place for ref, place in index.places.items() if place.band < self._num_done
            }
            refs = {ref: band for ref, band in refs.items() if ref not in places}
        path = index_file(self._folder, task.number)
        path.unlink(missing_ok=True)
        sizes = dict.fromkeys(sorted(set(refs.values())), 0)
        with naming(self._spec), contextlib.ExitStack() as stack:
            files = {
                band: stack.enter_context(
                    published(clip_file(self._folder, task.number, band), sync=False)
                )
                for band in sizes
            }
            for ref, data in self._source.read_clip(list(refs)):
                if ref in places or ref not in refs:
                    raise SourceError(
                        f"the {self._spec.kind} source made '{ref}' twice, or without being "
                        "asked for it"
                    )
                num_bytes = memoryview(data).nbytes
                band = refs[ref]
                files[band].write(data)
                places[ref] = Placed(
                    band=band,
                    offset=sizes[band],
                    length=num_bytes,
                    is_stored=isinstance(data, StoredJpeg),
                )
                sizes[band] += num_bytes
            missing = refs.keys() - places.keys()
            if missing:
                raise SourceError(f"the {self._spec.kind} source has no bytes for '{min(missing)}'")
        with published(path, sync=False) as file:
            file.write(msgspec.msgpack.encode(_Index(digest, sizes, places)))

    def _clip_refs(self, task: StageTask) -> tuple[str, dict[str, int]]:
        """Return digest of a clip's rows, and the references of their members with the last band
        that needs each.
        """
        digest = hashlib.sha256(task.stamp.to_bytes(8))
        refs = dict[str, int]()
        # The rows of the clip that are written.
        clip_bands = self._bands[task.first_row :][: task.num_rows]
        rows_of_clip = np.flatnonzero(clip_bands != NO_BAND)
        rows: list[int] = (rows_of_clip + task.first_row).tolist()
        for row in rows:
            encoded = self._table.encoded_row(row)
            band = int(self._bands[row])
            digest.update(band.to_bytes(1) + encoded)
            for member in decode_row(encoded).members:
                refs[member.ref] = max(band, refs.get(member.ref, band))
        return digest.hexdigest(), refs


class StagedSource:
    """Reads staged members; a reference is ``FILE#OFFSET+LENGTH``."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.fspath(folder)
        if not folder.is_dir():
            raise DatasetError(
                f"the staged clips in '{folder}' are not on this machine: give an output "
                "folder that all nodes share"
            )

    def place(self, ref: str) -> Place:
        """Return where the bytes are."""
        name, _, part = ref.removeprefix(STORED).partition("#")
        offset, _, length = part.partition("+")
        return Place(f"{self._folder}/{name}", int(offset), int(length))

    def open(self, ref: str) -> bytes:
        """Return the bytes."""
        path, offset, length = self.place(ref)
        with Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(length)


def stage_clips(
    spec: SourceSpec,
    images: ImageRecipe | None,
    scan_table: Path,
    bands_of_rows: NDArray[np.int8],
    clips: Sequence[ClipInfo],
    stamps: U64,
    bands: Bands,
    *,
    num_workers: int,
) -> Path:
    """Stage the clips of these rows, in parallel; returns a scan table whose rows refer to what is
    staged.

    Images that the source decodes itself are staged as they are stored, by ``images``.

    ``bands_of_rows`` has the band of each row of the table, NO_BAND where it is not wanted, and
    ``stamps`` a number for each, which changes when a file of the row does.
    """
    folder = bands.folder
    path = bands.folder.with_suffix(".npy")
    folder.mkdir(exist_ok=True)
    save_npy(path, bands_of_rows)
    tasks = []
    for number, clip in enumerate(clips):
        rows_of_clip = slice(clip.first_row, clip.first_row + clip.num_samples)
        if (bands_of_rows[rows_of_clip] == NO_BAND).all():
            continue
        digest = hashlib.sha256(stamps[rows_of_clip].tobytes()).digest()
        stamp = int.from_bytes(digest[:8])
        tasks.append(
            StageTask(
                number=number,
                first_row=clip.first_row,
                num_rows=clip.num_samples,
                stamp=stamp,
            )
        )
    make_staging = partial(
        Staging,
        spec=spec,
        images=images,
        scan_table=scan_table,
        bands=path,
        folder=folder,
    )
    if bands.num_done and not all(map(make_staging(num_done=bands.num_done).is_known, tasks)):
        # Finished shards may be made again.
        bands.forget()
    bands.sweep()
    rows = np.flatnonzero(bands_of_rows >= bands.num_done)
    if len(rows):
        # The space that they take, by the sizes of some of them.
        rows_of_table = ScanTable(scan_table)
        step = -(-len(rows) // _ROWS_LOOKED_AT)
        looked_at = rows[::step].tolist()
        total = 0.0
        for row in looked_at:
            for member in rows_of_table.row(row).members:
                share = stored_share(images, (member,)) if member.is_estimate else 1.0
                total += member.bytes * share
        # A band goes when its shards are there.
        bytes_of_row = total / len(looked_at)
        num_bytes = int(bytes_of_row * len(rows) * (1 + 1 / _MOST_BANDS))
        staged_bytes = sum(path.stat().st_size for path in folder.glob("*.bin"))
        free = shutil.disk_usage(folder).free
        if num_bytes > free + staged_bytes:
            raise DatasetError(
                "the source reads well only clip by clip, so images and sweeps are first "
                f"brought into '{folder}', which takes with the shards about "
                f"{num_bytes / 1e9:,.1f} GB (images of video as JPEG take several times the "
                f"video's bytes), and {free / 1e9:,.1f} GB are free; free some, give an output "
                "on a larger disk, or select fewer samples"
            )
    num_workers = min(num_workers, len(tasks))
    stage = partial(_stage_clip, partial(make_staging, num_done=bands.num_done))
    if num_workers > _MAX_THREADS:
        with ProcessPoolExecutor(num_workers, get_context("spawn"), set_up_worker) as pool:
            try:
                list(pool.map(stage, tasks))
            finally:
                pool.shutdown(cancel_futures=True)
    else:
        list(in_threads(stage, tasks, max(num_workers, 1)))
    table = folder / scan_table.name
    _rewrite_table(
        scan_table,
        target=table,
        folder=folder,
        staged={task.number for task in tasks},
    )
    return table


def _stage_clip(make_staging: Callable[[], Staging], task: StageTask) -> None:
    """Stage a clip in a worker, which makes its `Staging` with its first one."""
    if not hasattr(_worker_state, "staging"):
        _worker_state.staging = make_staging()
    staging: Staging = _worker_state.staging
    staging.stage(task)


def clip_file(folder: Path, number: int, band: int) -> Path:
    """Return the file of a clip's members for a band."""
    return folder / f"{number:06d}.{band}.bin"


def index_file(folder: Path, number: int) -> Path:
    """Return the file that lists the content of a clip's files."""
    return folder / f"{number:06d}.index"


def _load_index(folder: Path, number: int) -> _Index | None:
    """Read the list of a clip's files; None where it is missing or not whole."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        data = read_file(index_file(folder, number), _INDEX_BYTES)
        index = msgspec.msgpack.decode(data, type=_Index)
        are_inside = [
            0 <= offset <= offset + length <= index.sizes.get(band, offset + length)
            for band, offset, length, _ in index.places.values()
        ]
        if all(are_inside):
            return index
    return None


def _rewrite_table(
    scan_table: Path,
    target: Path,
    folder: Path,
    staged: set[int],
) -> None:
    """Copy the scan table, with references to staged clips and the sizes that members have
    there.
    """
    table = ScanTable(scan_table)
    current = -1
    places = dict[str, Placed]()
    target.unlink(missing_ok=True)  # not written through: it may be another file's second name
    with (
        pa.memory_map(os.fspath(scan_table)) as mapped,
        pa.OSFile(os.fspath(target), "wb") as sink,
    ):
        file = pa.ipc.open_file(mapped)
        column = file.schema.get_field_index(_SAMPLE)
        with pa.ipc.new_file(sink, file.schema) as writer:
            for number in range(file.num_record_batches):
                batch = file.get_batch(number)
                rows = []
                for row_number in range(batch.num_rows):
                    row = table.row(number * ROWS_PER_BATCH + row_number)
                    if row.clip != current:
                        current = row.clip
                        index = _load_index(folder, current) if current in staged else None
                        places = {} if index is None else index.places
                    members = []
                    for member in row.members:
                        place = places.get(member.ref)
                        if place is None:  # of a clip from which nothing is to be written
                            members.append(member)
                            continue
                        start = STORED if place.is_stored else ""
                        file_name = clip_file(folder, current, place.band).name
                        members.append(
                            msgspec.structs.replace(
                                member,
                                ref=f"{start}{file_name}#{place.offset}+{place.length}",
                                bytes=place.length,
                                is_estimate=False,
                            )
                        )
                    staged_row = row._replace(members=tuple(members))
                    rows.append(msgspec.msgpack.encode(staged_row))
                arrays = batch.columns
                arrays[column] = pa.array(rows, file.schema.field(column).type)
                writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=file.schema))
