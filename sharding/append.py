"""A new version of a dataset: the shards of several datasets under one manifest, with the existing
shards reused.

The new version has its own index, attributes and manifest, and so another fingerprint; it reuses
the existing shards. In a folder they are hard links (copies where the file systems differ), so that
each version is complete: the old one does not change, either may be removed, and what both have is
stored once. At a URL, which has no links, the store copies them. What is linked or copied by the
store is not read: `fuelrail verify` does that.

Samples keep their place relative to their split: those of the first dataset come first. An order
over the new version covers all of them; state of a loader that ran over the old one is refused,
because the fingerprint differs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.pipeline.channels.sensors import channel_table
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.format.codecs import DICTIONARY_FILE
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.index.shards import ShardEntry, shard_name
from fuelrail.pipeline.format.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Lineage,
    Manifest,
)
from fuelrail.pipeline.format.zstd_frames import is_framed, shard_stem
from fuelrail.pipeline.storage.columns import Disk
from fuelrail.pipeline.storage.files import open_file
from fuelrail.pipeline.storage.filesystem import filesystem
from fuelrail.sharding.output.folder import (
    FolderOutput,
    Output,
    check_out,
    if_whole,
    link_file,
    open_output,
)
from fuelrail.sharding.output.resume import load_finished, load_started
from fuelrail.sharding.output.url import UrlOutput
from fuelrail.sharding.output.workspace import RunState, Workspace
from fuelrail.sharding.planning.recipe import Recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.sources.fuelrail.merging import (
    check_alike,
    check_disjoint,
    joined,
    open_source,
)
from fuelrail.sharding.write.publish import (
    ROWS_PER_GROUP,
    publish_tables,
    write_attributes,
    write_index,
)
from fuelrail.sharding.write.shard_writer import ShardDone

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.sample.schema import I64

_COPY_BYTES: Final = 8 << 20


class Piece(NamedTuple):
    """A shard of one of the datasets, in its new place."""

    dataset: int
    old: ShardEntry
    new: ShardEntry


def append(
    locations: Sequence[str],
    out: str | os.PathLike[str],
    progress: Quiet | None = None,
) -> Manifest:
    """Make a dataset at ``out`` of all shards of the datasets; an interrupted run is resumed.

    A finished dataset is checked, and its damaged files are made again. Raises SourceError for
    datasets that do not fit together or have a clip in common, DatasetExistsError where OUT holds
    something else, DatasetError where it cannot be written.
    """
    if len(locations) < 2:
        raise ConfigError(
            "append needs at least two datasets, the one to append to and those to append; "
            f"got {len(locations)}"
        )
    progress = progress or Quiet()
    output = open_output(out)
    check_out(output)
    datasets = [open_source(location) for location in locations]
    check_alike(datasets)
    check_disjoint([(dataset.location, dataset.index.clip_ids()) for dataset in datasets])
    first = datasets[0]
    for second in datasets[1:]:
        for fact, first_value, second_value in (
            (
                "layout",
                first.manifest.compression.get("layout"),
                second.manifest.compression.get("layout"),
            ),
            (
                "order unit",
                first.manifest.order_unit,
                second.manifest.order_unit,
            ),
            (
                "zstd dictionary (SHA-256)",
                _dictionary_digest(first),
                _dictionary_digest(second),
            ),
        ):
            if first_value != second_value:
                raise SourceError(
                    f"the {fact} of '{first.location}' is {first_value}, that of "
                    f"'{second.location}' {second_value}: their shards cannot be reused in "
                    "one dataset; without --append they are written again"
                )
    pieces = _deal_shards(datasets)
    recipe = Recipe(
        source="append",
        source_options={"fingerprints": [d.manifest.fingerprint for d in datasets]},
    )
    finished = load_finished(output, recipe)
    with output.writing(), Workspace(output) as work:
        load_started(work, recipe)
        complete = if_whole(output, finished)
        if complete is None:
            work.start(RunState(recipe=recipe))
            output.remove(MANIFEST_FILE)
        num_samples = sum(dataset.manifest.num_samples for dataset in datasets)
        stems = [shard_stem(piece.new.name) for piece in pieces]
        num_bytes = sum(piece.new.bytes for piece in pieces)
        progress.planned(num_samples, stems, num_bytes)
        for number, (dataset, old, new) in enumerate(pieces):
            was_there = bring_shard(
                datasets[dataset],
                old,
                output,
                new,
                was_finished=finished is not None,
            )
            progress.advanced(new.bytes)
            progress.shard_done(
                ShardDone(
                    number=number,
                    name=new.name,
                    num_bytes=new.bytes,
                    is_kept=was_there,
                )
            )
        if complete is not None:
            work.remove()
            return complete
        manifest = _publish_version(work, datasets, pieces, recipe)
        work.remove()
    return manifest


def _dictionary_digest(dataset: Dataset) -> str | None:
    entry = dataset.manifest.file(DICTIONARY_FILE)
    return None if entry is None else entry.sha256


def _deal_shards(datasets: Sequence[Dataset]) -> list[Piece]:
    """Return all shards in their new places: split by split, dataset by dataset, numbered again
    within the split.
    """
    pieces: list[Piece] = []
    first_sample = 0
    splits = [name for dataset in datasets for name in dataset.manifest.splits]
    for split in dict.fromkeys(splits):
        number = 0
        for dataset_number, dataset in enumerate(datasets):
            for old in dataset.shards:
                if old.split != split:
                    continue
                name = shard_name(split, number, framed=is_framed(old.name))
                new = old._replace(name=name, first_sample=first_sample)
                pieces.append(Piece(dataset_number, old, new))
                first_sample += old.num_samples
                number += 1
    return pieces


def bring_shard(
    source: Dataset,
    old: ShardEntry,
    out: Output,
    new: ShardEntry,
    *,
    was_finished: bool,
) -> bool:
    """Copy or link a shard and its DALI index into OUT, unless OUT has them: as a link of the
    source's, or with their digest; returns whether it had.

    What is linked is not read; what is copied by this process is, and checked. ``was_finished``
    says that OUT was finished: then the digest decides of links too, as the source's file may be
    damaged meanwhile.
    """
    if new.idx_bytes:
        entry = FileEntry(name=new.idx_name, bytes=new.idx_bytes, sha256=new.idx_sha256)
        _bring_file(
            source,
            old=old.idx_name,
            out=out,
            entry=entry,
            was_finished=was_finished,
        )
    entry = FileEntry(name=new.name, bytes=new.bytes, sha256=new.sha256)
    return _bring_file(
        source,
        old=old.name,
        out=out,
        entry=entry,
        was_finished=was_finished,
    )


def _bring_file(
    source: Dataset,
    old: str,
    out: Output,
    entry: FileEntry,
    *,
    was_finished: bool,
) -> bool:
    new = entry.name
    if out.size(new) == entry.bytes:
        is_link = (
            not was_finished
            and source.url is None
            and isinstance(out, FolderOutput)
            and (out.root / new).samefile(source.root / old)
        )
        if is_link or out.holds(new, entry.bytes, entry.sha256):
            return True
    if source.url is None and isinstance(out, FolderOutput):
        if not link_file(source.root / old, out, new):
            _copy_file(source, old, out, entry)
    elif (
        source.url is not None
        and isinstance(out, UrlOutput)
        and source.url.partition("://")[0] == out.location.partition("://")[0]
    ):
        _, root = filesystem(source.url)
        out.fs.copy(f"{root}/{old}", out.path(new))
    else:
        _copy_file(source, old, out, entry)
    size = out.size(new)
    if size != entry.bytes:
        raise SourceError(
            f"'{source.location}/{old}' has {size} bytes, its manifest says {entry.bytes}: "
            "verify it"
        )
    if was_finished and not out.holds(new, entry.bytes, entry.sha256):
        raise SourceError(
            f"'{source.location}/{old}' is not the file that its manifest describes: verify it"
        )
    return False


def _copy_file(
    source: Dataset,
    old: str,
    out: Output,
    entry: FileEntry,
) -> None:
    """Copy a file, which gets its name if it has the entry's digest."""
    if source.url is None:
        opened: Any = open_file(source.root / old)
    else:
        fs, root = filesystem(source.url)
        opened = fs.open(f"{root}/{old}", "rb", block_size=_COPY_BYTES)
    digest = hashlib.sha256()
    with opened as file, out.publish(entry.name) as target:
        while data := file.read(_COPY_BYTES):
            digest.update(data)
            target.write(data)
        if digest.hexdigest() != entry.sha256:
            raise SourceError(
                f"'{source.location}/{old}' is not the file that its manifest describes: verify it"
            )


def _publish_version(
    work: Workspace,
    datasets: Sequence[Dataset],
    pieces: Sequence[Piece],
    recipe: Recipe,
) -> Manifest:
    """Publish dictionary, tables and manifest of the new version."""
    names = list(dict.fromkeys(name for dataset in datasets for name in dataset.index.names))
    codecs = {codec for dataset in datasets for codec in dataset.index.codecs}

    def rows_in_place() -> Iterator[IndexRow]:
        for number, piece in enumerate(pieces):
            old = piece.old
            source = datasets[piece.dataset].index
            for source_row in range(old.first_sample, old.first_sample + old.num_samples):
                yield source.row(source_row)._replace(shard=number)
            source.release()

    write_index(
        work.temporary,
        names=names,
        codecs=codecs,
        rows=rows_in_place(),
    )
    runs: list[tuple[int, range]] = []  # shards that stay neighbours are one run
    for dataset, old, _ in pieces:
        rows = range(old.first_sample, old.first_sample + old.num_samples)
        if runs and runs[-1][0] == dataset and runs[-1][1].stop == rows.start:
            rows = range(runs.pop()[1].start, rows.stop)
        runs.append((dataset, rows))
    write_attributes(work.temporary, take_attributes(work.temporary, datasets, runs))
    manifests = [dataset.manifest for dataset in datasets]
    first = manifests[0]
    dictionary = first.file(DICTIONARY_FILE)
    if dictionary is not None:
        _bring_file(
            datasets[0],
            dictionary.name,
            work.out,
            dictionary,
            was_finished=True,
        )
    cameras = [
        msgspec.structs.replace(
            camera,
            sizes=tuple(sorted({size for m in manifests for size in m.cameras[number].sizes})),
        )
        for number, camera in enumerate(first.cameras)
    ]
    stored = {channel.field: channel.codec for m in reversed(manifests) for channel in m.channels}
    stated = {
        name: codec
        for m in reversed(manifests)
        for name, codec in m.compression.get("codecs", {}).items()
    }
    make = partial(
        msgspec.structs.replace,
        first,
        name=joined([manifest.name for manifest in manifests]) or first.name,
        license=joined([manifest.license for manifest in manifests]),
        channels=channel_table(
            cameras,
            lidars=first.lidars,
            extra=first.extra_channels,
            fields=stored,
        ),
        compression={**first.compression, "codecs": stated},
        lineage=Lineage.from_parents(manifests),
        provenance={
            "recipe": msgspec.to_builtins(recipe),
            "facts": {
                "appended": [
                    {
                        "name": m.name,
                        "fingerprint": m.fingerprint,
                        "provenance": m.provenance,
                    }
                    for m in manifests
                ]
            },
        },
    )
    num_clips = {
        split: sum(m.splits[split].num_clips for m in manifests if split in m.splits)
        for split in dict.fromkeys(piece.new.split for piece in pieces)
    }
    return publish_tables(
        work.out,
        folder=work.temporary,
        shards=[piece.new for piece in pieces],
        clips_by_split=num_clips,
        make=make,
        published=[dictionary] if dictionary else [],
    )


def take_attributes(
    folder: Path,
    datasets: Sequence[Dataset],
    runs: Sequence[tuple[int, Sequence[int] | I64]],
) -> Iterator[pa.Table]:
    """Yield the attributes of runs of rows, each of a dataset; a column that a dataset lacks is
    null for its samples.

    ``folder`` is for the sort.
    """
    files = [dataset.attributes_file() for dataset in datasets]
    schemas = [
        file.schema(len(dataset.index)) for file, dataset in zip(files, datasets, strict=True)
    ]
    try:
        schema = pa.unify_schemas(schemas)
    except pa.ArrowException as error:
        raise SourceError(
            f"{ATTRIBUTES_FILE} of the datasets do not fit together: {error}"
        ) from error
    disk = Disk(folder)
    tables = [
        disk.table(file.batches(file_schema.names))
        for file, file_schema in zip(files, schemas, strict=True)
    ]
    for dataset, rows in runs:
        for first in range(0, len(rows), ROWS_PER_GROUP):
            rows_taken = disk.take(
                tables[dataset],
                np.asarray(rows[first : first + ROWS_PER_GROUP], np.int64),
            )
            columns = []
            for name, kind in zip(schema.names, schema.types, strict=True):
                if name in rows_taken.column_names:
                    columns.append(rows_taken[name])
                else:
                    columns.append(pa.nulls(len(rows_taken), kind))
            yield pa.Table.from_arrays(columns, schema=schema)
