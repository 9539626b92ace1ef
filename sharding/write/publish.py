"""The last step of each run that makes a dataset or a layer: tables get their names, the
manifest comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.index.attributes_file import (
    ATTRIBUTES_FILE,
    MAX_COLUMNS,
)
from fuelrail.pipeline.format.index.samples import INDEX_FILE, IndexWriter
from fuelrail.pipeline.format.index.tables import write_tables
from fuelrail.pipeline.format.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    SplitEntry,
    decode_manifest,
    encode_manifest,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.format.index.shards import ShardEntry
    from fuelrail.sharding.output.folder import Output

ROWS_PER_GROUP: Final = 1 << 14
"""Rows of a group of ``attributes.parquet``."""

M = TypeVar("M", bound=Manifest)


def write_index(
    folder: Path,
    names: Sequence[str],
    codecs: Iterable[str],
    rows: Iterable[IndexRow],
) -> None:
    """Write ``index.arrow`` into the folder: members of these names, stored with these codecs."""
    with IndexWriter(folder / INDEX_FILE, names, sorted({*codecs})) as index:
        for row in rows:
            index.append(row)


def write_attributes(folder: Path, parts: Iterable[pa.Table]) -> None:
    """Write ``attributes.parquet`` into the folder: one table or more, each of at most
    `ROWS_PER_GROUP` rows.
    """
    parts = iter(parts)
    first = next(parts)
    if first.num_columns > MAX_COLUMNS:
        raise SourceError(
            f"{ATTRIBUTES_FILE} of the dataset would have {first.num_columns:,} columns, at "
            f"most {MAX_COLUMNS:,} are read: leave attributes out"
        )
    with pq.ParquetWriter(folder / ATTRIBUTES_FILE, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        for part in parts:
            writer.write_table(part)


def publish_tables(
    out: Output,
    folder: Path,
    shards: Sequence[ShardEntry],
    clips_by_split: Mapping[str, int],
    make: Callable[..., M],
    published: Sequence[FileEntry] = (),
) -> M:
    """Publish the tables of finished shards, then the manifest; return it.

    ``folder`` has index and attributes. ``clips_by_split`` is the number of clips of each split.
    ``make`` makes the manifest of the fields that follow from these; ``published`` are further
    files of OUT that it names.
    """
    files = write_tables(folder, shards)
    for entry in files:
        out.publish_file(entry.name, folder / entry.name)
    splits = {}
    for split, num_clips in clips_by_split.items():
        numbers = [number for number, shard in enumerate(shards) if shard.split == split]
        splits[split] = SplitEntry(
            first_sample=shards[numbers[0]].first_sample,
            num_samples=sum(shards[number].num_samples for number in numbers),
            first_shard=numbers[0],
            num_shards=len(numbers),
            num_clips=num_clips,
        )
    manifest = make(
        fingerprint="",
        num_samples=sum(shard.num_samples for shard in shards),
        num_clips=sum(clips_by_split.values()),
        num_bytes=sum(shard.bytes for shard in shards),
        splits=splits,
        files=(*files, *published),
    )
    return publish_manifest(out, manifest)


def publish_manifest(out: Output, manifest: M) -> M:
    """Write ``dataset.json``, which finishes OUT; return the manifest with its fingerprint."""
    encoded = encode_manifest(manifest)
    with out.publish(MANIFEST_FILE) as file:
        file.write(encoded)
    kind = type(manifest)
    decoded = decode_manifest(encoded, f"{out.shown}/{MANIFEST_FILE}", {manifest.format: kind})
    assert isinstance(decoded, kind)
    return decoded
