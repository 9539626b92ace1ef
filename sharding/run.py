"""A whole sharding run, top to bottom: scan, plan, write, finish."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuelrail.pipeline.errors import ConfigError, DatasetError, SourceError
from fuelrail.pipeline.format.attributes import ATTRIBUTES_FILE
from fuelrail.pipeline.format.codecs import DICTIONARY_FILE
from fuelrail.pipeline.format.index import INDEX_FILE, IndexWriter
from fuelrail.pipeline.format.manifest import (
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
    load_manifest,
)
from fuelrail.pipeline.format.rules import Rig
from fuelrail.pipeline.format.zstd_frames import is_framed, shard_stem
from fuelrail.pipeline.runtime.workers import in_threads
from fuelrail.pipeline.storage.spill import Spill
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.output.folder import check_out, manifest_in, open_output
from fuelrail.sharding.output.resume import (
    recipe_of,
    refuse_other_recipe,
    refuse_other_samples,
    shard_stamps,
    shards_of,
    what_begins,
)
from fuelrail.sharding.output.workspace import Workspace
from fuelrail.sharding.planning.plan import deal_clips, make_plan, select_rows, selection
from fuelrail.sharding.planning.recipe import codec_of
from fuelrail.sharding.sources.scan_table import CLIP_NUMBER, ScanTable, ScanWriter, frame_keys, uncompressed_share
from fuelrail.sharding.sources.source import ScanInfo, Source, SourceSpec, make_source, parse_source
from fuelrail.sharding.sources.spilled_table import SpilledTable
from fuelrail.sharding.write.dictionary import settle_dictionary
from fuelrail.sharding.write.images import jpegtran_version, stored_field, stored_share
from fuelrail.sharding.write.records import load_record
from fuelrail.sharding.write.shard_writer import ShardDone, WriteJob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fuelrail.sharding.engines import Engine
    from fuelrail.sharding.output.folder import Output
    from fuelrail.sharding.planning.plan import Plan
    from fuelrail.sharding.planning.recipe import Recipe
    from fuelrail.sharding.sources.scan_report import ScanReport


class Progress(Protocol):
    """Who wants to know how a run goes on."""

    def scanned(self, info: ScanInfo) -> None:
        """The source was scanned."""

    def planned(self, num_samples: int, shards: Sequence[str], num_bytes: int) -> None:
        """These shards are about to be made, in this order; ``num_bytes`` is what they will take, roughly."""

    def advanced(self, num_bytes: int) -> None:
        """So many more bytes are in shards."""

    def shard_done(self, shard: ShardDone) -> None:
        """A shard is there."""


class Outcome(NamedTuple):
    """What a run has made. ``num_kept`` shards were there already, whole, and were not written again.

    ``report`` is that of the source's scan, where the source counts.
    """

    manifest: Manifest
    num_written: int
    num_kept: int
    report: ScanReport | None = None


def shard(
    spec: SourceSpec,
    out: str | os.PathLike[str],
    recipe: Recipe,
    num_workers: int,
    progress: Progress,
    engine: Engine | None = None,
) -> Outcome:
    """Make a dataset from a source, or go on with one that was begun by the same recipe.

    ``out`` is a folder or a URL that fsspec can write; ``engine`` None makes the shards in ``num_workers`` threads or
    processes here. A dataset that is finished already is checked, and what is damaged in it is made again. Raises
    SourceError for the source's faults, DatasetExistsError where OUT holds another dataset or other work, DatasetError
    where it can't be written or another run is at it.
    """
    engine = engine or LocalEngine(num_workers)
    if not os.fspath(out):
        raise ConfigError("the output folder has no name")  # abspath would make it the current one
    output = open_output(out)
    check_out(output)
    source = make_source(spec)
    jpegtran = jpegtran_version() if recipe.jpeg == "restart" else ""
    recipe = msgspec.structs.replace(recipe, source=spec.kind, source_options=source.options, jpegtran=jpegtran)
    refuse_other_recipe(output.shown, _finished_recipe(output), recipe)
    with output.writing(), Workspace(output) as work:
        begun = work.begun()
        refuse_other_recipe(output.shown, begun.recipe if begun else None, recipe)
        info, recipe, stamps = _scan(work, source, recipe)
        progress.scanned(info)
        finished = manifest_in(output)
        refuse_other_recipe(output.shown, recipe_of(output.shown, finished) if finished else None, recipe)

        table = ScanTable(work.scan_table)
        rows = select_rows(table, info.clips, recipe)
        clip, frame, size_bytes = (table.numbers(name)[rows] for name in ("clip", "frame", "size_bytes"))
        first = table.row(int(rows[0])).members
        share = stored_share(recipe.images, first) * (uncompressed_share(first) if recipe.layout == "none" else 1.0)
        dealt = deal_clips(info.clips, recipe, info.splits, np.unique(clip).tolist())
        plan = make_plan(rows, clip, frame, (size_bytes * share).astype(np.int64), dealt, recipe)
        selected = selection(plan.rows, len(table))
        here = what_begins(recipe, plan, table, selected, info.clips, dealt)
        if finished is not None:
            plan = plan._replace(shards=shards_of(finished))
        elif begun is not None:
            refuse_other_samples(output.shown, begun, here)
            plan = plan._replace(shards=begun.shards)
        np.save(work.plan_rows, plan.rows)
        np.save(work.selection, selected)
        firsts = [planned.first_sample for planned in plan.shards]
        shard_bytes = np.add.reduceat(table.numbers("size_bytes")[plan.rows], firsts) * share
        # Before the look at what is whole, where it may be the one file that is not; else once the run is noted as
        # begun, so that a dictionary in OUT is that of this recipe.
        settle = partial(settle_dictionary, output, recipe, finished, table, plan.rows)
        dictionary = settle() if finished is not None else None
        manifest = _if_whole(output, finished)
        if manifest is None:
            work.begin(msgspec.structs.replace(here, shards=plan.shards))
            output.remove(MANIFEST_FILE)
        if finished is None:
            dictionary = settle()
        job = WriteJob(
            out=output.location,
            scan_table=work.scan_table,
            plan_rows=work.plan_rows,
            selection=work.selection,
            shards=tuple(plan.shards),
            stamps=shard_stamps(plan, stamps),
            source=spec,
            recipe=recipe,
            dataset=recipe.name or info.name,
            license=recipe.license or info.license,
            lidars=tuple(info.lidars),
            clip_ids=tuple(clip.clip_id for clip in info.clips),
            dictionary=dictionary,
            rig=Rig.make([camera.channel for camera in info.cameras], info.lidars, info.classes, info.attributes),
        )
        wanted = range(len(plan.shards)) if manifest is None else _damaged_shards(output, manifest, num_workers)
        num_kept = len(plan.shards) - len(wanted)
        making = [plan.shards[number] for number in wanted]
        num_bytes = int(shard_bytes[list(wanted)].sum())
        progress.planned(sum(s.num_samples for s in making), [s.stem for s in making], num_bytes)
        try:
            for done in engine.make_shards(job, wanted, progress.advanced):
                work.check()
                num_kept += done.kept
                progress.shard_done(done)
        except SourceError as error:
            raise SourceError(f"{error}; finished shards are kept: mend it, and the same command goes on") from error

        if manifest is None:
            manifest = finish(work, job, plan, info, table, dealt)
        work.remove()
    return Outcome(manifest, len(plan.shards) - num_kept, num_kept, info.report)


def repair(root: str | os.PathLike[str], source: str, num_workers: int, progress: Progress) -> Outcome:
    """Make the damaged files of a finished dataset again, from the source it was made from (``KIND:LOCATION``).

    Raises DatasetExistsError where the source is not the same any more, and what :func:`shard` raises.
    """
    recipe = recipe_of(str(root), load_manifest(root))
    spec = parse_source(source, recipe.source_options)
    return shard(spec, root, msgspec.structs.replace(recipe, scan_sha256=""), num_workers, progress)


def _scan(work: Workspace, source: Source, recipe: Recipe) -> tuple[ScanInfo, Recipe, NDArray[np.uint64]]:
    """Scan the source into the working folder; returns what it found, the recipe with the table's digest, stamps."""
    path = work.temporary / work.scan_table.name
    with ScanWriter(path, source.attribute_types) as out:
        info = source.scan(out)
    if not info.num_samples:
        raise SourceError(f"the {source.kind} source has no samples")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    path.replace(work.scan_table)
    return info, msgspec.structs.replace(recipe, scan_sha256=digest), out.stamps


def _finished_recipe(out: Output) -> Recipe | None:
    """The recipe of a dataset that is finished in OUT; None where there is none."""
    manifest = manifest_in(out)
    return None if manifest is None else recipe_of(out.shown, manifest)


def _listings(manifest: Manifest) -> dict[str, str]:
    """Shard name to the name of its DALI index, for those that have one."""
    return {shard.name: f"{shard_stem(shard.name)}.idx" for shard in manifest.shards if not is_framed(shard.name)}


def _if_whole(out: Output, manifest: Manifest | None) -> Manifest | None:
    """The manifest, if index and attributes are as it says."""
    if manifest is None:
        return None
    listings = set(_listings(manifest).values())
    files = [entry for entry in manifest.files if entry.name not in listings]
    return manifest if all(out.holds(entry.name, entry.bytes, entry.sha256) for entry in files) else None


def _damaged_shards(out: Output, manifest: Manifest, num_threads: int) -> list[int]:
    """Numbers of the shards that are not, with their DALI index, byte for byte what the manifest says."""
    files, listings = {entry.name: entry for entry in manifest.files}, _listings(manifest)

    def is_whole(shard: ShardEntry) -> bool:
        idx = files[listings[shard.name]] if shard.name in listings else None
        return out.holds(shard.name, shard.bytes, shard.sha256) and (
            idx is None or out.holds(idx.name, idx.bytes, idx.sha256)
        )

    checked = in_threads(is_whole, manifest.shards, num_threads)
    return [number for number, whole in enumerate(checked) if not whole]


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
