"""A whole sharding run, top to bottom: scan, plan, write, finish."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.frames import is_framed, shard_stem
from fuelrail.pipeline.manifest import MANIFEST_FILE, Manifest, ShardEntry, load_manifest
from fuelrail.pipeline.sample_rules import Rig
from fuelrail.sharding.dictionaries import settle_dictionary
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.finish import finish
from fuelrail.sharding.output import check_out, manifest_in, open_output
from fuelrail.sharding.plan import deal_clips, make_plan, select_rows, selection
from fuelrail.sharding.restart import jpegtran_version
from fuelrail.sharding.resume import (
    recipe_of,
    refuse_other_recipe,
    refuse_other_samples,
    shard_stamps,
    shards_of,
    what_begins,
)
from fuelrail.sharding.source import ScanInfo, Source, SourceSpec, make_source, parse_source
from fuelrail.sharding.table import ScanTable, ScanWriter, uncompressed_share
from fuelrail.sharding.threads import in_threads
from fuelrail.sharding.transcode import stored_share
from fuelrail.sharding.workspace import Workspace
from fuelrail.sharding.writer import ShardDone, WriteJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fuelrail.sharding.engines import Engine
    from fuelrail.sharding.output import Output
    from fuelrail.sharding.recipe import Recipe
    from fuelrail.sharding.scan_report import ScanReport


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
