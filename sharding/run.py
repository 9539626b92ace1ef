"""A whole sharding run, top to bottom: scan, plan, write, finish."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from fuelrail.pipeline.channels.selection import check_table
from fuelrail.pipeline.channels.sensors import CameraEntry, channel_table
from fuelrail.pipeline.errors import ConfigError, ImageError, SourceError
from fuelrail.pipeline.format.index.blocks import BlockFile
from fuelrail.pipeline.format.index.shards import (
    SHARDS_FILE,
    ShardEntry,
    ShardTable,
)
from fuelrail.pipeline.format.layers import EITHER, LayerManifest
from fuelrail.pipeline.format.manifest import (
    MANIFEST_FILE,
    Manifest,
    load_manifest,
)
from fuelrail.pipeline.format.rules import Rig
from fuelrail.pipeline.runtime.workers import in_threads
from fuelrail.pipeline.storage.files import save_npy
from fuelrail.pipeline.text import shortened
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.output.folder import (
    Output,
    check_out,
    if_whole,
    open_output,
)
from fuelrail.sharding.output.resume import (
    check_cut,
    check_same_samples,
    load_finished,
    load_started,
    recipe_of,
    run_state,
    shard_stamps,
    shards_of,
)
from fuelrail.sharding.output.workspace import RunState, Workspace
from fuelrail.sharding.planning.plan import (
    Plan,
    assign_splits,
    make_plan,
    select_rows,
    selection,
)
from fuelrail.sharding.sources.adapter.classes import NUSCENES10, SOURCE
from fuelrail.sharding.sources.adapter.source import FrameSource
from fuelrail.sharding.sources.registry import (
    SourceSpec,
    check_place,
    make_source,
    naming,
    parse_source,
)
from fuelrail.sharding.sources.shared.scan_table import (
    ScanTable,
    ScanWriter,
    uncompressed_share,
)
from fuelrail.sharding.write.break_even import break_even
from fuelrail.sharding.write.dictionary import train_or_load_dictionary
from fuelrail.sharding.write.finish import finish
from fuelrail.sharding.write.images import (
    restart_writer,
    stored_channel,
    stored_share,
)
from fuelrail.sharding.write.member_check import check_rows
from fuelrail.sharding.write.records import is_whole, load_record
from fuelrail.sharding.write.shard_writer import WriteJob
from fuelrail.sharding.write.staging import NO_BAND, Bands, stage_clips

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U64
    from fuelrail.pipeline.format.codecs import Dictionary
    from fuelrail.pipeline.sample.schema import F64
    from fuelrail.sharding.engines import Engine
    from fuelrail.sharding.planning.recipe import Recipe
    from fuelrail.sharding.progress import Quiet
    from fuelrail.sharding.sources.shared.scan_report import ScanReport
    from fuelrail.sharding.sources.source import ScanInfo, Source
    from fuelrail.sharding.write.break_even import BreakEven


class Outcome(NamedTuple):
    """The result of a run. ``num_kept`` shards were already complete and were reused.

    ``report`` is that of the source's scan, where the source counts.
    """

    manifest: Manifest
    num_written: int
    num_kept: int
    report: ScanReport | None = None


class _Scan(NamedTuple):
    """The scanned source; ``recipe`` has the digest of the scan table, ``stamps`` one number per
    row.
    """

    info: ScanInfo
    table: ScanTable
    recipe: Recipe
    stamps: U64


class _Planned(NamedTuple):
    """The plan of a run, and the state that it stores; ``shard_bytes`` are the approximate sizes
    of its shards.
    """

    plan: Plan
    clips_by_split: dict[str, list[int]]
    shard_bytes: F64
    state: RunState


def shard(
    spec: SourceSpec,
    out: str | os.PathLike[str],
    recipe: Recipe,
    num_workers: int,
    progress: Quiet,
    engine: Engine | None = None,
) -> Outcome:
    """Make a dataset from a source, or resume a run that was started with the same recipe.

    ``out`` is a folder or a URL that fsspec can write; ``engine`` None makes the shards in
    ``num_workers`` threads or processes of this machine. A finished dataset is checked, and its
    damaged files are made again. Raises SourceError for faults of the source, DatasetExistsError
    where OUT holds another dataset or other work, DatasetError where OUT cannot be written or
    another run is writing to it.
    """
    engine = engine or LocalEngine(num_workers)
    if not os.fspath(out):
        raise ConfigError("the output folder has no name")  # abspath would make it the current one
    output = open_output(out)
    check_out(output)
    check_place(spec)
    source = make_source(spec)
    recipe = msgspec.structs.replace(
        recipe,
        source=spec.kind,
        source_options=source.options,
        restart_writer=restart_writer() if recipe.jpeg == "restart" else "",
    )
    load_finished(output, recipe)  # refused before anything is read
    with output.writing(), Workspace(output) as work:
        started = load_started(work, recipe)
        with naming(spec):
            path = work.temporary / work.scan_table.name
            info, stamps = _fill_table(source, path)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            path.replace(work.scan_table)
        scan = _Scan(
            info=info,
            table=ScanTable(work.scan_table),
            recipe=msgspec.structs.replace(recipe, scan_sha256=digest),
            stamps=stamps,
        )
        progress.scanned(info)
        _check_channels(info, recipe, spec)
        finished = load_finished(output, scan.recipe)
        shards = None if finished is None else _load_stored_shards(work, finished)
        planned = _plan_dataset(work, scan, started, shards)
        manifest, dictionary = _start_run(work, scan, planned, finished)
        job = WriteJob(
            out=output.location,
            scan_table=work.scan_table,
            plan_rows=work.plan_rows,
            selection=work.selection,
            shards=tuple(planned.plan.shards),
            stamps=shard_stamps(planned.plan, scan.stamps),
            source=spec,
            recipe=scan.recipe,
            dataset=recipe.name or info.name,
            license=recipe.license or info.license,
            lidars=tuple(info.lidars),
            clip_ids=tuple(clip.clip_id for clip in info.clips),
            dictionary=dictionary,
            rig=_make_rig(info),
            channels=info.channels,
        )
        num_shards = len(job.shards)
        numbers: Sequence[int] = range(num_shards)
        if manifest is not None and shards is not None:
            numbers = _find_damaged_shards(output, shards, num_workers)
        bands = None
        if source.reads == "clip" and numbers:
            bands = Bands(numbers, work.folder / "staging")
            job = _stage_shards(
                work,
                scan=scan,
                plan=planned.plan,
                job=job,
                bands=bands,
                num_workers=num_workers,
            )
        num_written = _make_shards(
            work,
            engine=engine,
            job=job,
            numbers=numbers,
            planned=planned,
            progress=progress,
            bands=bands,
        )
        if manifest is None:
            manifest = finish(
                work,
                job=job,
                plan=planned.plan,
                info=info,
                table=scan.table,
                clips_by_split=planned.clips_by_split,
            )
        work.remove()
    return Outcome(
        manifest=manifest,
        num_written=num_written,
        num_kept=num_shards - num_written,
        report=info.report,
    )


def repair(
    root: str | os.PathLike[str],
    source: str,
    num_workers: int,
    progress: Quiet,
) -> Outcome:
    """Rebuild the damaged files of a finished dataset from its original source (``KIND:LOCATION``).

    Raises ConfigError for a layer and for what ``--append`` or ``forget`` made, DatasetExistsError
    where the source has changed, and what :func:`shard` raises.
    """
    manifest = load_manifest(root, EITHER)
    if isinstance(manifest, LayerManifest):
        raise ConfigError(
            f"'{root}' is a layer, which no source has: write it again, or bring the files "
            "back from a copy"
        )
    recipe = recipe_of(str(root), manifest)
    if recipe.source == "forget":
        raise ConfigError(
            f"clips were deleted from '{root}', and its source may still have them: use a copy"
        )
    if recipe.source == "append":
        raise ConfigError(
            f"'{root}' was made by `fuelrail reshard --append`: run the same command again, "
            "which makes its damaged files again"
        )
    classes = recipe.source_options.get("classes", {})
    if not isinstance(classes, dict) and classes not in (SOURCE, NUSCENES10):
        # A manifest has the mapping itself; a name would be that of a file of this machine.
        raise ConfigError(
            f"the manifest of '{root}' has classes={shortened(classes)} in its recipe: allowed are "
            f"{SOURCE}, {NUSCENES10} or a mapping; it was edited"
        )
    spec = parse_source(source, recipe.source_options)
    return shard(
        spec,
        out=root,
        recipe=msgspec.structs.replace(recipe, scan_sha256=""),
        num_workers=num_workers,
        progress=progress,
    )


def scan_source(spec: SourceSpec) -> ScanInfo:
    """Scan a source and keep nothing but the result; raises SourceError with what is wrong with
    it.
    """
    return checked_source(spec)[0]


def checked_source(
    spec: SourceSpec, recipe: Recipe | None = None
) -> tuple[ScanInfo, BreakEven | None]:
    """Scan a source as `scan_source`; with a recipe, also estimate what its video costs as
    JPEGs.
    """
    with tempfile.TemporaryDirectory(prefix="fuelrail-") as folder:
        path = Path(folder) / "scan.arrow"
        with naming(spec):
            source: Any = make_source(spec)
            info, _ = _fill_table(source, path, is_check=True)
        table = ScanTable(path)
        check_rows(table, _make_rig(info), f"{spec.kind}:{spec.location}")
        if recipe is None or not isinstance(source, FrameSource):
            return info, None
        return info, break_even(table, source, recipe.images)


def _make_rig(info: ScanInfo) -> Rig:
    cameras = [camera.channel for camera in info.cameras]
    return Rig.make(
        cameras,
        lidars=info.lidars,
        classes=info.classes,
        attributes=info.attributes,
        extra=info.channels,
    )


def _fill_table(
    source: Source,
    path: Path,
    *,
    is_check: bool = False,
) -> tuple[ScanInfo, U64]:
    with ScanWriter(path, source.attribute_types, is_check=is_check) as out:
        info = source.scan(out)
    if not info.num_samples:
        raise SourceError(f"the {source.kind} source has no samples")
    return info, out.stamps


def _load_stored_shards(work: Workspace, finished: Manifest) -> tuple[ShardEntry, ...] | None:
    """Return the shards of a finished dataset; None where their table is damaged, so that all
    are made again.
    """
    entry = finished.file(SHARDS_FILE)
    if entry is None or not work.out.holds(entry.name, entry.bytes, entry.sha256):
        return None
    path = work.temporary / SHARDS_FILE
    work.out.fetch(SHARDS_FILE, path)
    return tuple(ShardTable(BlockFile(path), finished))


def _plan_dataset(
    work: Workspace,
    scan: _Scan,
    started: RunState | None,
    finished: Sequence[ShardEntry] | None,
) -> _Planned:
    """Plan the dataset, and write `plan_rows` and `selection` into the workspace.

    A finished dataset or a started run keeps the cut into shards that it has.
    """
    info, table, recipe, _ = scan
    rows = select_rows(table, info.clips, recipe)
    clip, frame, size_bytes = (
        table.numbers(name)[rows] for name in ("clip", "frame", "size_bytes")
    )
    # Stored bytes of a scanned byte, estimated from the first sample.
    first = table.row(int(rows[0])).members
    share = stored_share(recipe.images, first) * (
        uncompressed_share(first) if recipe.layout == "none" else 1.0
    )
    clips_by_split = assign_splits(
        info.clips,
        recipe=recipe,
        own_splits=info.splits,
        present=np.unique(clip).tolist(),
    )
    plan = make_plan(
        rows,
        clip=clip,
        frame=frame,
        size_bytes=(size_bytes * share).astype(np.int64),
        clips_by_split=clips_by_split,
        recipe=recipe,
    )
    selected = selection(plan.rows, len(table))
    state = run_state(
        recipe,
        plan=plan,
        table=table,
        selection=selected,
        clips=info.clips,
        clips_by_split=clips_by_split,
    )
    if finished is not None:
        check_cut(work.out.shown, shards_of(finished), plan.shards)
        plan = plan._replace(shards=shards_of(finished))
    elif started is not None:
        check_same_samples(work.out.shown, started, state)
        check_cut(work.out.shown, started.shards, plan.shards)
        plan = plan._replace(shards=started.shards)
    save_npy(work.plan_rows, plan.rows)
    save_npy(work.selection, selected)
    first_rows = [planned.first_sample for planned in plan.shards]
    sample_bytes = table.numbers("size_bytes")[plan.rows]
    shard_bytes = np.add.reduceat(sample_bytes, first_rows) * share
    state = msgspec.structs.replace(state, shards=plan.shards)
    return _Planned(
        plan=plan,
        clips_by_split=clips_by_split,
        shard_bytes=shard_bytes,
        state=state,
    )


def _start_run(
    work: Workspace,
    scan: _Scan,
    planned: _Planned,
    finished: Manifest | None,
) -> tuple[Manifest | None, Dictionary | None]:
    """Store the state of the run, unless the dataset is finished; returns the manifest then, and
    the dictionary.
    """
    out = work.out
    rows = planned.plan.rows
    if finished is None:
        work.start(planned.state)
        out.remove(MANIFEST_FILE)
        # The state comes first, so that a dictionary in OUT is that of this recipe.
        return None, train_or_load_dictionary(
            out,
            recipe=scan.recipe,
            finished=None,
            table=scan.table,
            rows=rows,
        )
    # The dictionary comes first: it may be the one file that is damaged.
    dictionary = train_or_load_dictionary(
        out,
        recipe=scan.recipe,
        finished=finished,
        table=scan.table,
        rows=rows,
    )
    manifest = if_whole(out, finished)
    if manifest is None:
        work.start(planned.state)
        out.remove(MANIFEST_FILE)
    return manifest, dictionary


def _check_channels(info: ScanInfo, recipe: Recipe, spec: SourceSpec) -> None:
    """Raise SourceError for a table of channels that does not hold together, or that the recipe
    would make untrue.
    """
    where = f"{spec.kind}:{spec.location}"
    cameras = [
        CameraEntry(channel=camera.channel, source_name=camera.source_name, sizes=())
        for camera in info.cameras
    ]
    check_table(channel_table(cameras, info.lidars, info.channels), where, SourceError)
    for channel in info.channels:
        try:
            stored_channel(channel, recipe.images)
        except ImageError as error:
            raise SourceError(f"'{where}': {error}") from error


def _stage_shards(
    work: Workspace,
    scan: _Scan,
    plan: Plan,
    job: WriteJob,
    bands: Bands,
    num_workers: int,
) -> WriteJob:
    """Bring the clips of these shards into the work folder; returns the job that reads them
    there.
    """
    bands_of_rows = np.full(len(scan.table), NO_BAND, np.int8)
    for number, band in bands.of_shard.items():
        shard = job.shards[number]
        end = shard.first_sample + shard.num_samples
        rows = plan.rows[shard.first_sample : end]
        bands_of_rows[rows] = band
        if band < bands.num_done:
            record = load_record(work.out, shard.stem)
            if record is None or not is_whole(work.out, record):
                bands.forget()
    with work.out.writing():
        table = stage_clips(
            job.source,
            images=job.recipe.images,
            scan_table=job.scan_table,
            bands_of_rows=bands_of_rows,
            clips=scan.info.clips,
            stamps=scan.stamps,
            bands=bands,
            num_workers=num_workers,
        )
    return dataclasses.replace(job, scan_table=table, staging=bands.folder)


def _make_shards(
    work: Workspace,
    engine: Engine,
    job: WriteJob,
    numbers: Sequence[int],
    planned: _Planned,
    progress: Quiet,
    bands: Bands | None,
) -> int:
    """Make these shards; returns how many were written, since complete ones are kept."""
    making = [job.shards[number] for number in numbers]
    num_bytes = int(planned.shard_bytes[list(numbers)].sum())
    progress.planned(
        sum(shard.num_samples for shard in making),
        [shard.stem for shard in making],
        num_bytes,
    )
    num_written = len(numbers)
    try:
        for done in engine.make_shards(job, numbers, progress.advanced):
            work.check()
            num_written -= done.is_kept
            if bands is not None:
                bands.finished(done.number)
            progress.shard_done(done)
    except SourceError as error:
        raise SourceError(
            f"{error}; finished shards are kept: fix the source and run the same command "
            "again to resume"
        ) from error
    return num_written


def _find_damaged_shards(
    out: Output,
    shards: Sequence[ShardEntry],
    num_threads: int,
) -> Sequence[int]:
    """Return the numbers of shards that, with their DALI index, do not match their table byte
    for byte.
    """

    def is_whole(shard: ShardEntry) -> bool:
        return out.holds(shard.name, shard.bytes, shard.sha256) and (
            not shard.idx_bytes or out.holds(shard.idx_name, shard.idx_bytes, shard.idx_sha256)
        )

    checked = in_threads(is_whole, shards, num_threads)
    return [number for number, is_sound in enumerate(checked) if not is_sound]
