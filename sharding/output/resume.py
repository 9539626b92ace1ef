"""Going on with a run that was begun: what must be as it was, and what may have changed.

The recipe, the samples and their splits must be the same; anything else would be another dataset, and is refused with
both sides shown. A source file that was repaired in between may have another size, and tables other metadata: then the
shards keep the cut that was planned when the run began, and those whose own rows changed are written again (each
record has a digest of its rows, :mod:`fuelrail.sharding.write.shard_writer`). A file that has another content and the
same size is
known by its time of change, or its ETag at a URL: the scan looks at every file anyway, and a record has a number of
those too. It costs no reading, and a file that was merely touched costs writing a shard again, to the same bytes. A
finished dataset stands for itself, and the source may be gone: it is held against its manifest alone.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from fuelrail.pipeline.errors import DatasetExistsError
from fuelrail.pipeline.settings import convert
from fuelrail.sharding.output.workspace import Begun
from fuelrail.sharding.planning.plan import Plan, PlannedShard
from fuelrail.sharding.planning.recipe import Recipe, differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.format.manifest import Manifest
    from fuelrail.sharding.sources.scan_table import ClipInfo, ScanTable


def recipe_of(shown: str, manifest: Manifest) -> Recipe:
    """The recipe of a finished dataset; raises DatasetExistsError where it has none."""
    recipe = manifest.provenance.get("recipe")
    if recipe is None:
        raise DatasetExistsError(f"output folder '{shown}' holds a dataset that was not made by `fuelrail shard`")
    return convert(recipe, Recipe, f"recipe in the manifest of '{shown}'")


def refuse_other_recipe(shown: str, there: Recipe | None, here: Recipe) -> None:
    """Refuse work by another recipe than that in OUT, showing both; a digest that one side lacks is left out."""
    if there is None:
        return
    if not (here.scan_sha256 and there.scan_sha256):
        there, here = (msgspec.structs.replace(side, scan_sha256="") for side in (there, here))
    if there != here:
        raise DatasetExistsError(
            f"output folder '{shown}' holds another dataset: {differences(there, here)}; choose another folder"
        )


def what_begins(
    recipe: Recipe,
    plan: Plan,
    table: ScanTable,
    selection: NDArray[np.bool_],
    clips: Sequence[ClipInfo],
    dealt: Mapping[str, Sequence[int]],
) -> Begun:
    """What this run would note if it were the first. ``selection`` masks the scan table's rows that are in the plan."""
    digest = hashlib.sha256()
    for split, numbers in dealt.items():
        digest.update(f"{split}\n".encode())
        for number in numbers:
            digest.update(f"{clips[number].clip_id}\n".encode())
    row = 0
    for keys in table.key_batches():
        chosen = keys.filter(pa.array(selection[row : row + len(keys)]))
        # Arrow keeps texts one after the other: the buffer of those with their line ends is what is to be digested.
        lines = pc.binary_join_element_wise(chosen, "", "\n")
        _, ends, utf8 = lines.buffers()
        if utf8 is not None:
            digest.update(memoryview(utf8)[: np.frombuffer(ends, np.int32)[len(lines)]])
        row += len(keys)
    return Begun(
        recipe=msgspec.structs.replace(recipe, scan_sha256=""),
        num_samples=len(plan.rows),
        num_clips=sum(map(len, dealt.values())),
        samples_sha256=digest.hexdigest(),
        shards=plan.shards,
    )


def refuse_other_samples(shown: str, there: Begun | None, here: Begun) -> None:
    """Refuse to go on with other samples than those that were begun with, showing both."""
    if there is not None and there.samples_sha256 != here.samples_sha256:
        raise DatasetExistsError(
            f"output folder '{shown}' holds a begun run over other samples: {_samples(there)} there, {_samples(here)} "
            "here (clips or frames of the source, or their splits, have changed); choose another folder, or remove it "
            "to begin anew"
        )


def _samples(begun: Begun) -> str:
    return f"{begun.num_samples} samples of {begun.num_clips} clips (SHA-256 {begun.samples_sha256[:12]})"


def shard_stamps(plan: Plan, stamps: NDArray[np.uint64]) -> tuple[int, ...]:
    """One number for each shard, of the stamps of its rows in the scan table."""
    runs = (slice(shard.first_sample, shard.first_sample + shard.num_samples) for shard in plan.shards)
    return tuple(xxhash.xxh3_64_intdigest(stamps[plan.rows[run]].data.cast("B")) for run in runs)


def shards_of(manifest: Manifest) -> list[PlannedShard]:
    """How a finished dataset was cut."""
    numbers = dict.fromkeys(manifest.splits, 0)
    shards = []
    for entry in manifest.shards:
        shards.append(PlannedShard(entry.split, numbers[entry.split], entry.first_sample, entry.num_samples))
        numbers[entry.split] += 1
    return shards
