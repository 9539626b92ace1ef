"""The files that make shards a dataset: index, attributes and manifest; the manifest is written last."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuelrail.pipeline.channels.sensors import CameraEntry, channel_table
from fuelrail.pipeline.errors import DatasetError
from fuelrail.pipeline.format.codecs import DICTIONARY_FILE
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.index.samples import INDEX_FILE, IndexWriter
from fuelrail.pipeline.format.index.shards import ShardEntry
from fuelrail.pipeline.format.index.tables import write_tables
from fuelrail.pipeline.format.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    SplitEntry,
    decode_manifest,
    encode_manifest,
)
from fuelrail.pipeline.storage.columns import Disk
from fuelrail.sharding.planning.recipe import codec_of
from fuelrail.sharding.sources.shared.scan_table import CLIP_NUMBER, ScanTable, frame_keys
from fuelrail.sharding.write.images import stored_channel, stored_field
from fuelrail.sharding.write.records import load_record

if TYPE_CHECKING:
    from fuelrail.sharding.output.workspace import Workspace
    from fuelrail.sharding.planning.plan import Plan
    from fuelrail.sharding.sources.source import ScanInfo
    from fuelrail.sharding.write.shard_writer import WriteJob

ROWS_PER_GROUP: Final = 1 << 14

_NEVER_NULL: Final = ("key", "frame", "timestamp_ns")


class _Shards(NamedTuple):
    """The entries of all shards, and the image sizes of each camera."""

    entries: list[ShardEntry]
    sizes: dict[str, set[tuple[int, int]]]


def finish(
    work: Workspace,
    job: WriteJob,
    plan: Plan,
    info: ScanInfo,
    table: ScanTable,
    clips_by_split: Mapping[str, Sequence[int]],
) -> Manifest:
    """Write tables, attributes and manifest; every file appears under its name complete, the manifest last."""
    extra = {channel.field for channel in info.channels}
    stored = (name if name in extra else stored_field(name, job.recipe.images) for name in info.names)
    names = list(dict.fromkeys(stored))
    codecs = {name: codec_of(name, job.recipe, job.lidars, job.channels) for name in names}
    index, attributes = work.temporary / INDEX_FILE, work.temporary / ATTRIBUTES_FILE
    shards = _write_index(index, work, plan, info, codecs)
    _write_attributes(attributes, plan, table, info, clips_by_split)
    files = write_tables(work.temporary, shards.entries)
    for entry in files:
        work.out.publish_file(entry.name, work.temporary / entry.name)
    if job.dictionary is not None:
        data = job.dictionary.data
        files.append(FileEntry(name=DICTIONARY_FILE, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
    manifest = _manifest(job, plan, info, clips_by_split, codecs, shards, files)
    encoded = encode_manifest(manifest)
    with work.out.publish(MANIFEST_FILE) as file:
        file.write(encoded)
    return decode_manifest(encoded, f"{work.out.shown}/{MANIFEST_FILE}")


def _write_index(path: Path, work: Workspace, plan: Plan, info: ScanInfo, codecs: Mapping[str, str]) -> _Shards:
    """Write the index from the records of the shards."""
    shards = _Shards([], {camera.channel: set() for camera in info.cameras})
    with IndexWriter(path, list(codecs), sorted(set(codecs.values()))) as rows:
        for planned in plan.shards:
            record = load_record(work.out, planned.stem)
            if record is None:
                raise DatasetError(
                    f"the record of shard {planned.stem} was removed from '{work.out.shown}': run the command again"
                )
            for row in record.rows:
                rows.append(row)
            for channel, found in record.image_sizes.items():
                shards.sizes[channel].update(found)
            shards.entries.append(
                ShardEntry(
                    name=record.name,
                    split=planned.split,
                    first_sample=planned.first_sample,
                    num_samples=planned.num_samples,
                    bytes=record.bytes,
                    sha256=record.sha256,
                    idx_bytes=record.idx_bytes,
                    idx_sha256=record.idx_sha256,
                )
            )
    return shards


def _manifest(
    job: WriteJob,
    plan: Plan,
    info: ScanInfo,
    clips_by_split: Mapping[str, Sequence[int]],
    codecs: Mapping[str, str],
    shards: _Shards,
    files: Sequence[FileEntry],
) -> Manifest:
    num_clips = sum(map(len, clips_by_split.values()))
    return Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name=job.dataset,
        fingerprint="",
        num_samples=len(plan.rows),
        num_clips=num_clips,
        num_bytes=sum(entry.bytes for entry in shards.entries),
        seed=job.recipe.seed,
        order_unit=job.recipe.order,
        channels=channel_table(
            [
                CameraEntry(
                    channel=camera.channel,
                    source_name=camera.source_name,
                    sizes=tuple(sorted(shards.sizes[camera.channel])),
                )
                for camera in info.cameras
            ],
            info.lidars,
            [
                stored_channel(channel, job.recipe.images, shards.sizes.get(channel.law.camera or "", ()))
                for channel in info.channels
            ],
            codecs,
        ),
        classes=tuple(info.classes),
        attributes=tuple(info.attributes),
        time_base=info.time_base,
        ego_origin=info.ego_origin,
        license=job.license,
        compression={
            "layout": job.recipe.layout,
            "level": job.recipe.compression_level,
            "codecs": dict(codecs),
        },
        splits=_splits(plan, clips_by_split),
        files=tuple(files),
        lineage=info.lineage,
        provenance={
            "recipe": msgspec.to_builtins(job.recipe),
            "facts": info.facts,
            **({} if info.report is None else {"scan": info.report.builtins()}),
            "num_clips_in_no_split": len(info.clips) - num_clips,
        },
    )


def _splits(plan: Plan, clips_by_split: Mapping[str, Sequence[int]]) -> dict[str, SplitEntry]:
    entries: dict[str, SplitEntry] = {}
    for split, clips in clips_by_split.items():
        numbers = [number for number, shard in enumerate(plan.shards) if shard.split == split]
        run = [plan.shards[number] for number in numbers]
        entries[split] = SplitEntry(
            first_sample=run[0].first_sample,
            num_samples=sum(shard.num_samples for shard in run),
            first_shard=numbers[0],
            num_shards=len(run),
            num_clips=len(clips),
        )
    return entries


def _write_attributes(
    path: Path, plan: Plan, table: ScanTable, info: ScanInfo, clips_by_split: Mapping[str, Sequence[int]]
) -> None:
    """Write ``attributes.parquet``: a row for each sample in the order of the index, with the source's attributes."""
    disk = Disk(path.parent)
    # Keys are not kept: they are made of clip and frame.
    whole = disk.table(part.drop_columns(["key"]) for part in table.attribute_parts())
    clip_ids = pa.array([entry.clip_id for entry in info.clips])
    split_of_clip = np.zeros(len(info.clips), np.int32)
    for number, clips in enumerate(clips_by_split.values()):
        split_of_clip[list(clips)] = number
    names = pa.array(list(clips_by_split))
    writer: Any = None
    for first in range(0, len(plan.rows), ROWS_PER_GROUP):
        found = disk.take(whole, plan.rows[first : first + ROWS_PER_GROUP])
        ids = clip_ids.take(found[CLIP_NUMBER].combine_chunks())
        columns = {
            "key": frame_keys(ids, found["frame"].combine_chunks()),
            "clip_id": ids,
            "split": names.take(pa.array(split_of_clip[found[CLIP_NUMBER].to_numpy()])),
            **{name: found[name] for name in found.column_names if name != CLIP_NUMBER},
        }
        known = [pa.field(name, values.type, name not in _NEVER_NULL) for name, values in columns.items()]
        part = pa.table(columns, schema=pa.schema(known))
        if writer is None:
            writer = pq.ParquetWriter(path, part.schema, compression="zstd")
        writer.write_table(part)
    writer.close()
