"""One shard from its plan: read, encode, digest, publish.

A pure function of scan table, plan, recipe and number.

A shard's record (each sample's place, digests, image sizes) is kept beside the work until the
dataset is finished; a shard whose record and bytes agree is not written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fuelrail.pipeline.errors import FuelrailError
from fuelrail.pipeline.format.index.shards import ShardEntry, shard_name
from fuelrail.pipeline.runtime.workers import one_at_a_time
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    META,
    Geometry,
    decode_arrays,
    decode_meta,
    encode_arrays,
    encode_meta,
)
from fuelrail.pipeline.storage.files import map_npy
from fuelrail.sharding.output.folder import open_output
from fuelrail.sharding.sources.registry import SourceSpec, make_source, naming
from fuelrail.sharding.sources.shared.scan_table import (
    ScanRow,
    ScanTable,
    decode_row,
)
from fuelrail.sharding.write.images import (
    scale_geometry,
    scale_meta,
    stored_channel,
)
from fuelrail.sharding.write.member_check import MemberCheck
from fuelrail.sharding.write.members import Members
from fuelrail.sharding.write.packer import RawMember, ShardPacker
from fuelrail.sharding.write.read_buffer import ReadBuffer
from fuelrail.sharding.write.records import (
    ShardRecord,
    is_whole,
    load_record,
    publish_listing,
    store_record,
    store_version_tag,
)
from fuelrail.sharding.write.staging import StagedSource

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from fuelrail.pipeline.channels.sensors import LidarEntry
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.codecs import Dictionary
    from fuelrail.pipeline.format.rules import Rig
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.planning.plan import PlannedShard
    from fuelrail.sharding.planning.recipe import Recipe

Pulse = Callable[[int], None]
"""Called after each sample with the bytes it took; raises RunStoppedError where the run is to
end.
"""


class RunStoppedError(FuelrailError):
    """The run was stopped between two samples; there is no partial file."""


class ShardDone(NamedTuple):
    """A finished shard: number, name, size, and whether it was already complete and kept."""

    number: int
    name: str
    num_bytes: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Everything that a worker needs to write any shard of a run; small, and the same for all.

    ``stamps`` has for each shard a number that changes when a file of the source that it is made of
    does. ``staging`` is the folder that the members were brought into, of a source that is read
    clip by clip.
    """

    out: str
    scan_table: Path
    plan_rows: Path
    selection: Path
    shards: tuple[PlannedShard, ...]
    stamps: tuple[int, ...]
    source: SourceSpec
    recipe: Recipe
    dataset: str
    license: str | None
    lidars: tuple[LidarEntry, ...]
    clip_ids: tuple[str, ...]
    dictionary: Dictionary | None
    rig: Rig
    channels: tuple[Channel, ...] = ()
    staging: Path | None = None


class ShardWriter:
    """Writes shards of one run; each process has its own."""

    def __init__(self, job: WriteJob, threads: Executor | None = None) -> None:
        """``threads`` rewrite the images of a sample side by side, and may compute digests."""
        self._job = job
        self._threads = threads
        self._out = open_output(job.out)
        self._table = ScanTable(job.scan_table)
        self._rows = map_npy(job.plan_rows)
        self._selection = map_npy(job.selection)
        self._source = make_source(job.source) if job.staging is None else StagedSource(job.staging)
        self._buffer = ReadBuffer()
        self._place = f"{job.source.kind}:{job.source.location}"
        self._members = Members(
            source=self._source,
            recipe=job.recipe,
            lidars=job.lidars,
            extra=job.channels,
            buffer=self._buffer,
            spec=job.source,
            threads=threads,
        )

    def make(self, number: int, pulse: Pulse, *, digest_apart: bool = False) -> ShardDone:
        """Write shard ``number`` of the plan, unless OUT has it complete.

        ``digest_apart``: the threads compute its digest, where CPUs have nothing else to do. Raises
        SourceError naming the member that cannot be stored, DatasetError where OUT cannot be
        written.
        """
        shard = self._job.shards[number]
        with self._out.writing():
            record = load_record(self._out, shard.stem)
            if record is not None and record.source_stamp == self._job.stamps[number]:
                digest = hashlib.sha256(self._head(shard))
                for row in self._list_rows(shard):
                    digest.update(self._table.encoded_row(row))
                is_same = digest.hexdigest() == record.source_sha256
                if is_same and is_whole(self._out, record):
                    pulse(record.shard.bytes)
                    return ShardDone(
                        number=number,
                        name=record.shard.name,
                        num_bytes=record.shard.bytes,
                        is_kept=True,
                    )
            with naming(self._job.source):
                threads = self._threads if digest_apart else None
                record = self._write_shard(number, shard, pulse, threads)
            store_version_tag(self._out, record)
        return ShardDone(
            number=number,
            name=record.shard.name,
            num_bytes=record.shard.bytes,
            is_kept=False,
        )

    def _write_shard(
        self,
        number: int,
        shard: PlannedShard,
        pulse: Pulse,
        threads: Executor | None,
    ) -> ShardRecord:
        job = self._job
        sizes: dict[str, set[tuple[int, int]]] = {}
        digest = hashlib.sha256(self._head(shard))
        is_framed = job.recipe.layout == "frame"
        name = shard_name(shard.split, shard.number, framed=is_framed)
        with self._out.publish(name) as file:
            packer = ShardPacker(
                file=file,
                number=number,
                level=job.recipe.compression_level,
                dictionary=job.dictionary,
                buffer=self._buffer,
                threads=threads,
                framed=is_framed,
            )
            stored = [stored_channel(channel, job.recipe.images) for channel in job.channels]
            check = MemberCheck(job.rig, self._place, stored)
            for row in self._list_rows(shard):
                encoded = self._table.encoded_row(row)
                digest.update(encoded)
                scanned = decode_row(encoded)
                self._buffer.clear(keep=threads is not None)
                clip_id = job.clip_ids[scanned.clip]
                with one_at_a_time(sum(member.bytes for member in scanned.members)):
                    length = packer.add(
                        scanned.key,
                        clip_id=clip_id,
                        frame=scanned.frame,
                        timestamp_ns=scanned.timestamp_ns,
                        members=self._make_members(
                            scanned,
                            number=row,
                            split=shard.split,
                            sizes=sizes,
                            check=check,
                        ),
                    )
                pulse(length)
            check.close()
            packed = packer.close()
            entry = ShardEntry(
                name=name,
                split=shard.split,
                first_sample=shard.first_sample,
                num_samples=shard.num_samples,
                bytes=packed.num_bytes,
                sha256=packed.sha256,
            )
            record = ShardRecord(
                stem=shard.stem,
                shard=publish_listing(self._out, entry, packed.listing),
                rows=packed.rows,
                image_sizes={
                    channel: sorted(image_sizes) for channel, image_sizes in sizes.items()
                },
                source_sha256=digest.hexdigest(),
                source_stamp=job.stamps[number],
            )
            store_record(self._out, record)
        return record

    def _list_rows(self, shard: PlannedShard) -> list[int]:
        rows: list[int] = self._rows[
            shard.first_sample : shard.first_sample + shard.num_samples
        ].tolist()
        return rows

    def _head(self, shard: PlannedShard) -> bytes:
        """Return what all rows have in common besides the recipe; the digest of a shard's source
        begins with it.
        """
        job = self._job
        dictionary = b"" if job.dictionary is None else job.dictionary.data
        columns = (tuple(lidar.columns) for lidar in job.lidars)
        head = (
            job.dataset,
            job.license,
            shard.split,
            dictionary,
            *columns,
            *job.channels,
        )
        return msgspec.msgpack.encode(head)

    def _make_members(
        self,
        row: ScanRow,
        number: int,
        split: str,
        sizes: dict[str, set[tuple[int, int]]],
        check: MemberCheck,
    ) -> list[RawMember]:
        """Return the members of row ``number``, in the order in which they are stored."""
        job = self._job
        scanned = decode_meta(row.meta)
        # Neighbours in the clip are the next rows of the table; rows that are not selected are no
        # neighbours.
        meta = msgspec.structs.replace(
            scanned,
            dataset=job.dataset,
            split=split,
            license=job.license,
            prev_key=scanned.prev_key if scanned.prev_key and self._selection[number - 1] else None,
            next_key=scanned.next_key if scanned.next_key and self._selection[number + 1] else None,
        )
        geometry = row.geometry
        images = job.recipe.images
        if images is not None:
            meta = scale_meta(meta, images)
            geometry = encode_arrays(scale_geometry(decode_arrays(geometry, Geometry), images))
        raw: dict[str, Buffer] = {META: encode_meta(meta), GEOMETRY: geometry}
        if row.boxes is not None:
            raw[BOXES] = row.boxes
        self._members.run(row.key, row.members, raw, sizes)
        check.add(row.key, meta, raw)
        return self._members.encoded(raw)
