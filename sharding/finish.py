"""The end of a run: index, attributes and, last, the manifest, from the records of the shards."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuelrail.pipeline.attributes import ATTRIBUTES_FILE
from fuelrail.pipeline.dictionary import DICTIONARY_FILE
from fuelrail.pipeline.errors import DatasetError
from fuelrail.pipeline.index import INDEX_FILE, IndexWriter
from fuelrail.pipeline.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    CameraEntry,
    FileEntry,
    Manifest,
    ShardEntry,
    SplitEntry,
    decode_manifest,
    encode_manifest,
)
from fuelrail.pipeline.spill import Spill
from fuelrail.sharding.recipe import codec_of
from fuelrail.sharding.records import load_record
from fuelrail.sharding.spilled_table import SpilledTable
from fuelrail.sharding.table import CLIP_NUMBER, frame_keys
from fuelrail.sharding.transcode import stored_field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fuelrail.sharding.plan import Plan
    from fuelrail.sharding.source import ScanInfo
    from fuelrail.sharding.table import ScanTable
    from fuelrail.sharding.workspace import Workspace
    from fuelrail.sharding.writer import WriteJob

ROWS_PER_GROUP: Final = 1 << 14
_NEVER_NULL: Final = ("key", "frame", "timestamp_ns")


def finish(
    work: Workspace, job: WriteJob, plan: Plan, info: ScanInfo, table: ScanTable, dealt: Mapping[str, Sequence[int]]
) -> Manifest:
    """Write what makes the shards a dataset; every file appears under its name whole, the manifest last."""
    names = list(dict.fromkeys(stored_field(name, job.recipe.images) for name in info.names))
    codec_names = [codec_of(name, job.recipe, job.lidars) for name in names]
    shards: list[ShardEntry] = []
    listings: list[FileEntry] = []
    sizes: dict[str, set[tuple[int, int]]] = {camera.channel: set() for camera in info.cameras}
    index = work.temporary / INDEX_FILE
    with IndexWriter(index, names, sorted(set(codec_names))) as rows:
        for planned in plan.shards:
            record = load_record(work.out, planned.stem)
            if record is None:
                raise DatasetError(
                    f"the record of shard {planned.stem} is gone from '{work.out.shown}': run the same command"
                )
            for row in record.rows:
                rows.append(row)
            for channel, found in record.image_sizes.items():
                sizes[channel].update(found)
            shards.append(
                ShardEntry(
                    name=record.name,
                    split=planned.split,
                    first_sample=planned.first_sample,
                    num_samples=planned.num_samples,
                    bytes=record.bytes,
                    sha256=record.sha256,
                )
            )
            if record.idx_bytes:
                listings.append(FileEntry(name=f"{planned.stem}.idx", bytes=record.idx_bytes, sha256=record.idx_sha256))
    attributes = work.temporary / ATTRIBUTES_FILE
    _write_attributes(attributes, plan, table, info, dealt)
    files = [_entry(index), _entry(attributes)]
    if job.dictionary is not None:
        data = job.dictionary.data
        files.append(FileEntry(name=DICTIONARY_FILE, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
    files += listings
    for path in (index, attributes):
        work.out.publish_file(path.name, path)
    manifest = Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name=job.dataset,
        fingerprint="",
        num_samples=len(plan.rows),
        num_clips=sum(map(len, dealt.values())),
        seed=job.recipe.seed,
        order_unit=job.recipe.order,
        cameras=tuple(
            CameraEntry(
                channel=camera.channel, source_name=camera.source_name, sizes=tuple(sorted(sizes[camera.channel]))
            )
            for camera in info.cameras
        ),
        lidars=tuple(info.lidars),
        classes=tuple(info.classes),
        attributes=tuple(info.attributes),
        time_base=info.time_base,
        ego_origin=info.ego_origin,
        license=job.license,
        compression={
            "layout": job.recipe.layout,
            "level": job.recipe.compression_level,
            "codecs": dict(zip(names, codec_names, strict=True)),
        },
        splits=_splits(plan, dealt),
        shards=tuple(shards),
        files=tuple(files),
        provenance={
            "recipe": msgspec.to_builtins(job.recipe),
            "facts": info.facts,
            **({} if info.report is None else {"scan": info.report.builtins()}),
            "num_clips_in_no_split": len(info.clips) - sum(map(len, dealt.values())),
        },
    )
    encoded = encode_manifest(manifest)
    with work.out.publish(MANIFEST_FILE) as file:
        file.write(encoded)
    return decode_manifest(encoded, f"{work.out.shown}/{MANIFEST_FILE}")


def _splits(plan: Plan, dealt: Mapping[str, Sequence[int]]) -> dict[str, SplitEntry]:
    entries: dict[str, SplitEntry] = {}
    for split, clips in dealt.items():
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
    path: Path, plan: Plan, table: ScanTable, info: ScanInfo, dealt: Mapping[str, Sequence[int]]
) -> None:
    """``attributes.parquet``: a row for each sample in the order of the index, with what the source knows of it."""
    whole: SpilledTable | None = None
    for part in table.attribute_parts():
        # Keys are not kept: they are made of clip and frame.
        whole = whole or SpilledTable(Spill(path.parent), part.drop_columns(["key"]).schema)
        whole.append(part)
    assert whole is not None, "a plan has rows"
    clip_ids = pa.array([entry.clip_id for entry in info.clips])
    split_of_clip = np.zeros(len(info.clips), np.int32)
    for number, clips in enumerate(dealt.values()):
        split_of_clip[list(clips)] = number
    names = pa.array(list(dealt))
    writer: Any = None
    for first in range(0, len(plan.rows), ROWS_PER_GROUP):
        found = whole.take(plan.rows[first : first + ROWS_PER_GROUP])
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


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(name=path.name, bytes=path.stat().st_size, sha256=digest)
