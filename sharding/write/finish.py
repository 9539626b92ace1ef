"""The files that make shards a dataset: index, attributes and manifest; the manifest is written
last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.pipeline.channels.sensors import CameraEntry, channel_table
from fuelrail.pipeline.errors import DatasetError
from fuelrail.pipeline.format.codecs import DICTIONARY_FILE
from fuelrail.pipeline.format.manifest import (
    FORMAT,
    FORMAT_VERSION,
    FileEntry,
    Manifest,
)
from fuelrail.pipeline.storage.columns import Disk
from fuelrail.sharding.planning.recipe import codec_of
from fuelrail.sharding.sources.shared.scan_table import (
    CLIP_NUMBER,
    ScanTable,
    frame_keys,
)
from fuelrail.sharding.write.images import stored_channel, stored_field
from fuelrail.sharding.write.publish import (
    ROWS_PER_GROUP,
    publish_tables,
    write_attributes,
    write_index,
)
from fuelrail.sharding.write.records import load_record, record_name

if TYPE_CHECKING:
    from pathlib import Path

    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.format.index.shards import ShardEntry
    from fuelrail.sharding.output.workspace import Workspace
    from fuelrail.sharding.planning.plan import Plan
    from fuelrail.sharding.sources.source import ScanInfo
    from fuelrail.sharding.write.shard_writer import WriteJob

_NEVER_NULL: Final = ("key", "frame", "timestamp_ns")


def finish(
    work: Workspace,
    job: WriteJob,
    plan: Plan,
    info: ScanInfo,
    table: ScanTable,
    clips_by_split: Mapping[str, Sequence[int]],
) -> Manifest:
    """Write tables, attributes and manifest; every file appears under its name complete, the
    manifest last.
    """
    extra = {channel.field for channel in info.channels}
    stored = (
        name if name in extra else stored_field(name, job.recipe.images) for name in info.names
    )
    names = list(dict.fromkeys(stored))
    codecs = {name: codec_of(name, job.recipe, job.lidars, job.channels) for name in names}
    shards: list[ShardEntry] = []
    sizes: dict[str, set[tuple[int, int]]] = {camera.channel: set() for camera in info.cameras}
    rows = _iter_rows(
        work,
        plan=plan,
        codecs=codecs,
        shards=shards,
        sizes=sizes,
    )
    write_index(
        work.temporary,
        names=names,
        codecs=codecs.values(),
        rows=rows,
    )
    write_attributes(
        work.temporary,
        _iter_attributes(
            work.temporary,
            plan=plan,
            table=table,
            info=info,
            clips_by_split=clips_by_split,
        ),
    )
    published = []
    if job.dictionary is not None:
        data = job.dictionary.data
        published.append(
            FileEntry(
                name=DICTIONARY_FILE,
                bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )
    num_clips = {split: len(clips) for split, clips in clips_by_split.items()}
    cameras = [
        CameraEntry(
            channel=camera.channel,
            source_name=camera.source_name,
            sizes=tuple(sorted(sizes[camera.channel])),
        )
        for camera in info.cameras
    ]
    channels = [
        stored_channel(channel, job.recipe.images, sizes.get(channel.law.camera or "", ()))
        for channel in info.channels
    ]
    make = partial(
        Manifest,
        format=FORMAT,
        version=FORMAT_VERSION,
        name=job.dataset,
        seed=job.recipe.seed,
        order_unit=job.recipe.order,
        channels=channel_table(cameras, info.lidars, channels, codecs),
        classes=tuple(info.classes),
        attributes=tuple(info.attributes),
        time_base=info.time_base,
        ego_origin=info.ego_origin,
        license=job.license,
        compression={
            "layout": job.recipe.layout,
            "level": job.recipe.compression_level,
            "codecs": codecs,
        },
        lineage=info.lineage,
        provenance={
            "recipe": msgspec.to_builtins(job.recipe),
            "facts": info.facts,
            **({} if info.report is None else {"scan": info.report.builtins()}),
            "num_clips_in_no_split": len(info.clips) - sum(num_clips.values()),
        },
    )
    return publish_tables(
        work.out,
        folder=work.temporary,
        shards=shards,
        clips_by_split=num_clips,
        make=make,
        published=published,
    )


def _iter_rows(
    work: Workspace,
    plan: Plan,
    codecs: Mapping[str, str],
    shards: list[ShardEntry],
    sizes: dict[str, set[tuple[int, int]]],
) -> Iterator[IndexRow]:
    """Yield the rows of the index from the records of the shards; add the shards' entries and the
    images' sizes.

    ``codecs`` has the codec of each member that a sample of this run may have.
    """
    for planned in plan.shards:
        record = load_record(work.out, planned.stem)
        if record is None:
            raise DatasetError(
                f"the record of shard {planned.stem} was removed from '{work.out.shown}': "
                "run the command again"
            )
        names = {entry.name for row in record.rows for entry in row.members}
        kinds = {entry.codec for row in record.rows for entry in row.members}
        has_members = names <= codecs.keys() and kinds <= {*codecs.values()}
        is_of_run = has_members and record.image_sizes.keys() <= sizes.keys()
        if not is_of_run or len(record.rows) != planned.num_samples:
            raise DatasetError(
                f"'{work.out.shown}/{record_name(planned.stem)}' is not of this run: remove it and "
                "run the command again"
            )
        yield from record.rows
        for channel, image_sizes in record.image_sizes.items():
            sizes[channel].update(image_sizes)
        shards.append(record.shard._replace(first_sample=planned.first_sample))


def _iter_attributes(
    folder: Path,
    plan: Plan,
    table: ScanTable,
    info: ScanInfo,
    clips_by_split: Mapping[str, Sequence[int]],
) -> Iterator[pa.Table]:
    """Yield rows of the samples in the order of the index, with the source's attributes; the
    folder is for the sort.
    """
    disk = Disk(folder)
    # Keys are not kept: they are made of clip and frame.
    attributes_table = disk.table(part.drop_columns(["key"]) for part in table.attribute_parts())
    clip_ids = pa.array([entry.clip_id for entry in info.clips])
    split_of_clip = np.zeros(len(info.clips), np.int32)
    for number, clips in enumerate(clips_by_split.values()):
        split_of_clip[list(clips)] = number
    names = pa.array(list(clips_by_split))
    for first in range(0, len(plan.rows), ROWS_PER_GROUP):
        rows_taken = disk.take(attributes_table, plan.rows[first : first + ROWS_PER_GROUP])
        clip_numbers = rows_taken[CLIP_NUMBER].combine_chunks()
        ids = clip_ids.take(clip_numbers)
        split_numbers = split_of_clip[clip_numbers.to_numpy()]
        columns = {
            "key": frame_keys(ids, rows_taken["frame"].combine_chunks()),
            "clip_id": ids,
            "split": names.take(pa.array(split_numbers)),
            **{name: rows_taken[name] for name in rows_taken.column_names if name != CLIP_NUMBER},
        }
        fields = [
            pa.field(name, values.type, name not in _NEVER_NULL) for name, values in columns.items()
        ]
        yield pa.table(columns, schema=pa.schema(fields))
