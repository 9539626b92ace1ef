"""Resume an interrupted run: check what must be the same, and report what may have changed.

The recipe, the samples and their splits must be the same; anything else would be another dataset,
and is refused with both sides shown. A source file that was repaired in between may have another
size, and tables other metadata: the shards keep the cut that was planned when the run started, and
those whose own rows changed are written again (each record has a digest of its rows,
:mod:`fuelrail.sharding.write.shard_writer`). A file with other content of the same size is detected
by its time of change, or its ETag at a URL, which the scan reads anyway and the records keep. A
file that was merely touched costs writing a shard again, to the same bytes. A finished dataset is
checked against its manifest alone, so its source may be gone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from fuelrail.pipeline.errors import DatasetExistsError
from fuelrail.pipeline.settings import convert
from fuelrail.sharding.output.folder import manifest_in
from fuelrail.sharding.output.workspace import RunState
from fuelrail.sharding.planning.plan import Plan, PlannedShard
from fuelrail.sharding.planning.recipe import Recipe, recipe_differences

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U64
    from fuelrail.pipeline.format.index.shards import ShardEntry
    from fuelrail.pipeline.format.manifest import Manifest
    from fuelrail.pipeline.sample.schema import Mask
    from fuelrail.sharding.output.folder import Output
    from fuelrail.sharding.output.workspace import Workspace
    from fuelrail.sharding.sources.shared.scan_table import ClipInfo, ScanTable


def recipe_of(place: str, manifest: Manifest) -> Recipe:
    """Return the recipe of a finished dataset; raises DatasetExistsError where it has none."""
    recipe = manifest.provenance.get("recipe")
    if recipe is None:
        raise DatasetExistsError(
            f"output folder '{place}' holds a dataset that was not made by `fuelrail shard`"
        )
    return convert(recipe, Recipe, f"recipe in the manifest of '{place}'")


def load_finished(out: Output, recipe: Recipe) -> Manifest | None:
    """Return the manifest of a finished dataset in OUT, None where there is none; refuse one of
    another recipe.
    """
    manifest = manifest_in(out)
    if manifest is not None:
        check_same_recipe(out.shown, recipe_of(out.shown, manifest), recipe)
    return manifest


def load_started(work: Workspace, recipe: Recipe) -> RunState | None:
    """Return the state of an interrupted run in OUT, None where there is none; refuse one of
    another recipe.
    """
    state = work.state()
    if state is not None:
        check_same_recipe(work.out.shown, state.recipe, recipe)
    return state


def check_same_recipe(place: str, stored: Recipe, current: Recipe) -> None:
    """Refuse another recipe than the one in OUT, showing both; a digest that one side lacks is
    not compared.
    """
    if stored.source != current.source:
        raise DatasetExistsError(
            f"output folder '{place}' holds another dataset, of a source of kind "
            f"{stored.source}, not {current.source}; choose another folder"
        )
    if not (current.scan_sha256 and stored.scan_sha256):
        stored = msgspec.structs.replace(stored, scan_sha256="")
        current = msgspec.structs.replace(current, scan_sha256="")
    if stored != current:
        sides = recipe_differences(stored, current)
        raise DatasetExistsError(
            f"output folder '{place}' holds another dataset: {sides}; choose another folder"
        )


def run_state(
    recipe: Recipe,
    plan: Plan,
    table: ScanTable,
    selection: Mask,
    clips: Sequence[ClipInfo],
    clips_by_split: Mapping[str, Sequence[int]],
) -> RunState:
    """Return the state that this run stores if it is the first; ``selection`` masks the scan
    table's planned rows.
    """
    digest = hashlib.sha256()
    for split, numbers in clips_by_split.items():
        digest.update(f"{split}\n".encode())
        for number in numbers:
            digest.update(f"{clips[number].clip_id}\n".encode())
    row = 0
    for keys in table.key_batches():
        is_chosen = selection[row : row + len(keys)]
        chosen = keys.filter(pa.array(is_chosen))
        # Arrow keeps texts one after the other: the buffer of those with their line ends is what is
        # to be digested.
        lines = pc.binary_join_element_wise(chosen, "", "\n")
        _, ends, utf8 = lines.buffers()
        if utf8 is not None:
            num_bytes = np.frombuffer(ends, np.int32)[len(lines)]
            digest.update(memoryview(utf8)[:num_bytes])
        row += len(keys)
    return RunState(
        recipe=msgspec.structs.replace(recipe, scan_sha256=""),
        num_samples=len(plan.rows),
        num_clips=sum(map(len, clips_by_split.values())),
        samples_sha256=digest.hexdigest(),
        shards=plan.shards,
    )


def check_same_samples(place: str, started: RunState, current: RunState) -> None:
    """Refuse to resume a run with other samples than those it was started with, showing both."""
    if started.samples_sha256 != current.samples_sha256:
        raise DatasetExistsError(
            f"output folder '{place}' holds an unfinished run over other samples: "
            f"{_samples(started)} there, {_samples(current)} here (clips or frames of the "
            "source, or their splits, have changed); choose another folder, or remove it to "
            "start again"
        )


def check_cut(
    location: str,
    stored: Sequence[PlannedShard],
    planned: Sequence[PlannedShard],
) -> None:
    """Refuse a stored cut into shards that does not hold the planned samples, split by split.

    Shards are named after it, so nothing of a cut that came with the folder is taken unchecked.
    """
    counts: dict[str, int] = {}
    numbers: defaultdict[str, int] = defaultdict(int)
    position = 0
    is_sound = True
    for shard in stored:
        is_next = (shard.first_sample, shard.number) == (
            position,
            numbers[shard.split],
        )
        is_sound = is_sound and is_next and shard.num_samples > 0
        counts[shard.split] = counts.get(shard.split, 0) + shard.num_samples
        numbers[shard.split] += 1
        position += shard.num_samples
    expected: dict[str, int] = {}
    for shard in planned:
        expected[shard.split] = expected.get(shard.split, 0) + shard.num_samples
    if not is_sound or list(counts.items()) != list(expected.items()):
        raise DatasetExistsError(
            f"the cut into shards in output folder '{location}' is not one of these samples: it "
            "was edited or damaged; choose another folder, or remove it to start again"
        )


def _samples(state: RunState) -> str:
    return (
        f"{state.num_samples} samples of {state.num_clips} clips (SHA-256 "
        f"{state.samples_sha256[:12]})"
    )


def shard_stamps(plan: Plan, stamps: U64) -> tuple[int, ...]:
    """Return one number for each shard: a digest of the stamps of its rows in the scan table."""
    digests = []
    for shard in plan.shards:
        end = shard.first_sample + shard.num_samples
        rows = plan.rows[shard.first_sample : end]
        digests.append(xxhash.xxh3_64_intdigest(stamps[rows].data.cast("B")))
    return tuple(digests)


def shards_of(finished: Iterable[ShardEntry]) -> list[PlannedShard]:
    """Return the cut of a finished dataset into shards."""
    numbers: defaultdict[str, count[int]] = defaultdict(count)
    return [
        PlannedShard(
            entry.split,
            next(numbers[entry.split]),
            entry.first_sample,
            entry.num_samples,
        )
        for entry in finished
    ]
