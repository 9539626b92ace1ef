"""One shard from its plan: read, encode, digest, publish. A pure function of scan table, plan, recipe and number.

A shard's record (where each sample lies, digests, image sizes) is kept beside the work until the dataset is finished;
a shard whose record and bytes agree is not written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from fuelrail.pipeline.errors import FuelrailError, ImageError, SourceError
from fuelrail.pipeline.index import IndexRow  # noqa: TC001 - msgspec reads the annotation
from fuelrail.pipeline.schema import (
    BOXES,
    GEOMETRY,
    IMAGE_EXTENSIONS,
    META,
    Geometry,
    Meta,
    decode_arrays,
    encode_arrays,
    encode_meta,
)
from fuelrail.sharding.images import image_size
from fuelrail.sharding.packing import RawMember, ShardPacker
from fuelrail.sharding.reading import ReadBuffer
from fuelrail.sharding.recipe import Recipe, codec_of
from fuelrail.sharding.restart import with_restart_rows
from fuelrail.sharding.source import FileSource, SourceSpec, make_source
from fuelrail.sharding.table import Reference, ScanRow, ScanTable
from fuelrail.sharding.transcode import scale_geometry, scale_meta, stored_field, stored_size, transcode
from fuelrail.sharding.workspace import publish, writing_to

if TYPE_CHECKING:
    from pathlib import Path

    from fuelrail.pipeline.buffers import Buffer
    from fuelrail.pipeline.manifest import LidarEntry
    from fuelrail.sharding.plan import PlannedShard

_META_DECODER = msgspec.json.Decoder(Meta)


class RunStoppedError(FuelrailError):
    """The run was told to stop between two samples; nothing is half-written."""


Pulse = Callable[[int], None]
"""Called after each sample with the bytes it took; raises RunStoppedError where the run is to end."""


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a written shard: its file, its DALI index, its rows of the index, its images' sizes (w, h)."""

    stem: str
    bytes: int
    sha256: str
    idx_bytes: int
    idx_sha256: str
    rows: list[IndexRow]
    image_sizes: dict[str, list[tuple[int, int]]]


class ShardDone(NamedTuple):
    """What a finished shard tells the run: its number, name, size, and whether it was there already."""

    number: int
    stem: str
    num_bytes: int
    kept: bool


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What a worker needs to write any shard of a run; small, and the same for all."""

    out: Path
    scan_table: Path
    plan_rows: Path
    selection: Path
    records: Path
    temporary: Path
    shards: tuple[PlannedShard, ...]
    source: SourceSpec
    recipe: Recipe
    dataset: str
    license: str | None
    lidars: tuple[LidarEntry, ...]
    clip_ids: tuple[str, ...]


class ShardWriter:
    """Writes shards of one run; each process has its own."""

    def __init__(self, job: WriteJob) -> None:
        self._job = job
        self._table = ScanTable(job.scan_table)
        self._rows = np.load(job.plan_rows, mmap_mode="r")
        self._selection = np.load(job.selection, mmap_mode="r")
        self._source = make_source(job.source)
        self._files = self._source if isinstance(self._source, FileSource) else None
        self._buffer = ReadBuffer()

    def make(self, number: int, pulse: Pulse) -> ShardDone:
        """Write shard ``number`` of the plan, unless it is there already, whole.

        Raises SourceError naming the member that cannot be stored, DatasetError where OUT cannot be written.
        """
        shard = self._job.shards[number]
        with writing_to(self._job.out):
            record = load_record(self._job.records, shard.stem)
            if record is not None and self._is_there(record):
                pulse(record.bytes)
                return ShardDone(number, shard.stem, record.bytes, kept=True)
            record = self._write(number, shard, pulse)
        return ShardDone(number, shard.stem, record.bytes, kept=False)

    def _write(self, number: int, shard: PlannedShard, pulse: Pulse) -> ShardRecord:
        job = self._job
        sizes: dict[str, set[tuple[int, int]]] = {}
        with publish(job.out / f"{shard.stem}.tar", job.temporary / f"{shard.stem}.tar") as file:
            packer = ShardPacker(file, number, job.recipe.compression_level)
            for row in self._rows[shard.first_sample : shard.first_sample + shard.num_samples].tolist():
                scanned = self._table.row(row)
                self._buffer.clear()
                members = self._members(scanned, row, shard.split, sizes)
                clip_id = job.clip_ids[scanned.clip]
                pulse(packer.add(scanned.key, clip_id, scanned.frame, scanned.timestamp_ns, members))
            packed = packer.close()
            with publish(job.out / f"{shard.stem}.idx", job.temporary / f"{shard.stem}.idx") as idx:
                idx.write(packed.listing)
            record = ShardRecord(
                stem=shard.stem,
                bytes=packed.num_bytes,
                sha256=packed.sha256,
                idx_bytes=len(packed.listing),
                idx_sha256=hashlib.sha256(packed.listing).hexdigest(),
                rows=packed.rows,
                image_sizes={channel: sorted(found) for channel, found in sizes.items()},
            )
            # The record comes before the shard's own name: a shard without a record cannot be told from a foreign file.
            with publish(record_path(job.records, shard.stem), job.temporary / f"{shard.stem}.record") as out:
                out.write(msgspec.msgpack.encode(record))
        return record

    def _members(
        self, row: ScanRow, number: int, split: str, sizes: dict[str, set[tuple[int, int]]]
    ) -> list[RawMember]:
        """The members of row ``number``, in the order in which they are stored."""
        job = self._job
        scanned = _META_DECODER.decode(row.meta)
        # Neighbours in the clip stand next to it in the table; those that are not selected are none.
        meta = msgspec.structs.replace(
            scanned,
            dataset=job.dataset,
            split=split,
            license=job.license,
            prev_key=scanned.prev_key if scanned.prev_key and self._selection[number - 1] else None,
            next_key=scanned.next_key if scanned.next_key and self._selection[number + 1] else None,
        )
        geometry, images = row.geometry, job.recipe.images
        if images is not None:
            meta = scale_meta(meta, images)
            geometry = encode_arrays(scale_geometry(decode_arrays(geometry, Geometry), images))
        raw: dict[str, Buffer] = {META: encode_meta(meta), GEOMETRY: geometry}
        if row.boxes is not None:
            raw[BOXES] = row.boxes
        for member in row.members:
            data = self._read(member)
            channel, _, extension = member.name.partition(".")
            if extension in IMAGE_EXTENSIONS:
                data, size = self._image(row, member, data, extension)
                sizes.setdefault(channel, set()).add(size)
            field = stored_field(member.name, images)
            if field.endswith(".jpg") and job.recipe.jpeg == "restart":
                data = self._restart_rows(row, member, data)
            raw[field] = data
        return [RawMember(name, codec_of(name, job.recipe, job.lidars), data) for name, data in raw.items()]

    def _read(self, member: Reference) -> Buffer:
        """A sensor member's bytes: straight from its file where those are the member, else as the source makes them."""
        path = None if self._files is None else self._files.path(member.ref)
        return self._source.open(member.ref) if path is None else self._buffer.read(path, member.bytes)

    def _where(self, row: ScanRow, member: Reference) -> str:
        return f"image '{member.ref}' of {self._job.source.kind}:{self._job.source.location} (sample {row.key})"

    def _restart_rows(self, row: ScanRow, member: Reference, data: Buffer) -> bytes:
        try:
            return with_restart_rows(data)
        except ImageError as error:
            raise SourceError(f"{self._where(row, member)}: {error}") from error

    def _image(self, row: ScanRow, member: Reference, data: Buffer, extension: str) -> tuple[Buffer, tuple[int, int]]:
        """An image as it is stored, with its size then (w, h) [px], after a look at what the source has."""
        if len(data) != member.bytes:
            where = self._where(row, member)
            raise SourceError(f"{where} had {member.bytes} bytes when the run began and has {len(data)} now")
        try:
            size = image_size(data, extension)
            if size != (member.width, member.height):
                raise SourceError(
                    f"{self._where(row, member)} is {size[0]} x {size[1]} pixels, the source's tables say "
                    f"{member.width} x {member.height}"
                )
            if (images := self._job.recipe.images) is not None:
                return transcode(data, extension, images), stored_size(images, size)
        except ImageError as error:
            raise SourceError(f"{self._where(row, member)}: {error}") from error
        return data, size

    def _is_there(self, record: ShardRecord) -> bool:
        out = self._job.out
        return file_is(out / f"{record.stem}.idx", record.idx_bytes, record.idx_sha256) and file_is(
            out / f"{record.stem}.tar", record.bytes, record.sha256
        )


def record_path(records: Path, stem: str) -> Path:
    """File of a shard's record."""
    return records / f"{stem}.msgpack"


def load_record(records: Path, stem: str) -> ShardRecord | None:
    """A shard's record; None where there is none, or none that can be read."""
    try:
        return msgspec.msgpack.decode(record_path(records, stem).read_bytes(), type=ShardRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def file_is(path: Path, num_bytes: int, sha256: str) -> bool:
    """Whether a file is there with this size and SHA-256."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size != num_bytes:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False
