"""The plan, which gives each sample its place: a pure function of the scan table's columns and the
recipe.

Every clip belongs to one split. Within a split, units (single frames, windows of consecutive
frames, or whole clips) are put in the order of a keyed permutation and cut into shards of about
equal size, never inside a unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.order.permutation import KeyedPermutation, derive_key
from fuelrail.pipeline.order.select import Filter
from fuelrail.sharding.planning.recipe import (
    Recipe,
    Splits,
    check_split_names,
    unit_frames,
)
from fuelrail.sharding.sources.shared.scan_table import (
    CLIP_NUMBER,
    ClipInfo,
    ScanTable,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I32
    from fuelrail.pipeline.sample.schema import I64, Mask

DEFAULT_SPLIT = "train"


class PlannedShard(NamedTuple):
    """A shard of the plan: split, its number in the split, its run of positions in the dataset."""

    split: str
    number: int
    first_sample: int
    num_samples: int

    @property
    def stem(self) -> str:
        """File name without extension."""
        return f"{self.split}-{self.number:06d}"


class Plan(NamedTuple):
    """``rows[position]`` is the scan table's row of a sample; ``shards`` tile the positions,
    split by split.
    """

    rows: I64
    shards: list[PlannedShard]


def assign_splits(
    clips: Sequence[ClipInfo],
    recipe: Recipe,
    own_splits: Mapping[str, Sequence[str]] | None,
    present: Collection[int] | None = None,
) -> dict[str, list[int]]:
    """Return the clip numbers of each split, in the order of the splits; clips that no list names
    are left out.

    Without splits in the recipe the source's own count, and without those everything is ``train``.
    ``present`` are the numbers of the clips of which samples are selected (None: all); splits
    without any are left out. Raises ConfigError for a clip in two splits, an unknown clip in the
    user's own lists, more splits than clips, or a name of a split that is not allowed.
    """
    numbers = range(len(clips)) if present is None else sorted(present)
    if recipe.splits is None and own_splits is None:
        return {DEFAULT_SPLIT: list(numbers)}
    splits = recipe.splits or {}
    lists = {name: entry for name, entry in splits.items() if isinstance(entry, list)}
    if splits and not lists:
        ids = {number: clips[number].clip_id for number in numbers}
        return _assign_by_share(ids, splits, recipe.split_seed)
    listed = lists or own_splits or {}
    # Clip ids are unique in a source, the source's own names need not be; a list may use either.
    split_of: dict[str, str] = {}
    for split, names in listed.items():
        for name in names:
            if split_of.setdefault(name, split) != split:
                raise ConfigError(f"clip '{name}' is in two splits, {split_of[name]} and {split}")
    named: dict[str, list[int]] = {split: [] for split in listed}
    used: set[str] = set()
    for number, clip in enumerate(clips):
        splits_named = {
            name: split_of[name] for name in (clip.clip_id, clip.clip_name) if name in split_of
        }
        if len(set(splits_named.values())) > 1:
            raise ConfigError(
                f"clip '{clip.clip_name}' ({clip.clip_id}) is in two splits: "
                f"{', '.join(splits_named.values())}"
            )
        used |= splits_named.keys()
        if splits_named:
            named[next(iter(splits_named.values()))].append(number)
    unknown = [name for name in split_of if name not in used]
    if lists and unknown:
        raise ConfigError(
            f"the splits list names clip '{unknown[0]}', which is not in the source "
            f"({len(unknown)} such names)"
        )
    selected = set(numbers)
    clips_by_split = {}
    for split, clip_numbers in named.items():
        present_clips = [number for number in clip_numbers if number in selected]
        if present_clips:
            clips_by_split[split] = present_clips
    check_split_names(clips_by_split)
    if not clips_by_split:
        raise ConfigError(
            f"none of the {len(numbers)} clips is in one of the splits {', '.join(named)}"
        )
    return clips_by_split


def _assign_by_share(
    clips: Mapping[int, str],
    shares: Splits,
    seed: int,
) -> dict[str, list[int]]:
    """Clip number to clip id, by share.

    Largest remainders on clips in the order of a keyed hash of their ids; every split gets one clip
    at least.
    """
    if len(clips) < len(shares):
        raise ConfigError(
            f"{len(clips)} clips cannot be split into {', '.join(shares)}: a split needs a "
            "clip at least"
        )
    fractions = [share for share in shares.values() if isinstance(share, float)]
    exact = np.array(fractions) * len(clips)
    lowest = np.floor(exact + 1e-9).astype(np.int64)
    counts = np.maximum(lowest, 1)
    while (difference := len(clips) - int(counts.sum())) != 0:
        gap = exact - counts
        if difference > 0:
            counts[int(np.argmax(gap))] += 1
        else:
            # No split is left without a clip.
            gap_of_larger = np.where(counts > 1, gap, np.inf)
            counts[int(np.argmin(gap_of_larger))] -= 1

    def rank(number: int) -> bytes:
        text = f"split {seed} {clips[number]}"
        return hashlib.sha256(text.encode()).digest()

    ranked = sorted(clips, key=rank)
    ends = np.cumsum(counts).tolist()
    return {
        split: sorted(ranked[end - count : end])
        for split, end, count in zip(shares, ends, counts.tolist(), strict=True)
    }


def select_rows(table: ScanTable, clips: Sequence[ClipInfo], recipe: Recipe) -> I64:
    """Return the selected rows of the scan table, ascending; raises OrderError for an expression
    that is wrong.

    The expression sees the attributes and ``key``, ``clip_id``, ``frame`` and ``timestamp_ns``.
    """
    if recipe.select is None:
        return np.arange(len(table), dtype=np.int64)[: recipe.limit]
    ids = pa.array([clip.clip_id for clip in clips])
    parts: list[I64] = []
    first = 0
    for part in table.attribute_parts():
        ids_of_rows = ids.take(part[CLIP_NUMBER])
        named_part = part.append_column("clip_id", ids_of_rows)
        named_part = named_part.drop_columns([CLIP_NUMBER])
        row_filter = Filter(recipe.select, named_part.column_names)
        parts.append(first + row_filter.select(named_part, len(named_part)))
        first += len(part)
    rows = np.concatenate(parts)
    if not len(rows):
        raise ConfigError(
            f"none of the source's {len(table)} samples is selected by {recipe.select!r}"
        )
    return rows[: recipe.limit]


def make_plan(
    rows: I64,
    clip: I32,
    frame: I32,
    size_bytes: I64,
    clips_by_split: Mapping[str, Sequence[int]],
    recipe: Recipe,
) -> Plan:
    """Plan the dataset of some rows of the scan table, ascending; the columns have one entry for
    each of these rows.

    Clips are adjacent in the table, and their frames ascend. Every clip of ``clips_by_split`` has a
    row at least.
    """
    frames = unit_frames(recipe.order)
    parts: list[I64] = []
    shards: list[PlannedShard] = []
    position = 0
    for split, clips in clips_by_split.items():
        is_of_split = np.isin(clip, np.asarray(clips))
        split_rows = np.flatnonzero(is_of_split)
        split_clips = clip[split_rows]
        split_frames = frame[split_rows]
        if frames == 1:
            starts = np.arange(len(split_clips), dtype=np.int64)
        else:
            begins = np.empty(len(split_clips), bool)
            begins[0] = True
            begins[1:] = split_clips[1:] != split_clips[:-1]
            if frames:
                group = split_frames // frames
                begins[1:] |= group[1:] != group[:-1]
            starts = np.flatnonzero(begins)
        key = derive_key(f"shard order {split}", recipe.seed)
        permutation = KeyedPermutation(len(starts), key)
        units = permutation(np.arange(len(starts)))
        lengths = np.diff(starts, append=len(split_rows))[units]
        sizes = np.add.reduceat(size_bytes[split_rows], starts)[units]
        # The rows of each unit: start, start + 1, ...
        ends = np.cumsum(lengths)
        shifts = starts[units] - (ends - lengths)
        order = np.repeat(shifts, lengths) + np.arange(ends[-1])
        parts.append(rows[split_rows[order]])
        # As few shards as the target allows, of equal size to within a unit.
        before = np.cumsum(sizes) - sizes
        total = int(sizes.sum())
        num_shards = -(-total // recipe.shard_size_bytes)
        shard = before // -(-total // num_shards)
        num_samples = np.bincount(shard, weights=lengths, minlength=1)
        counts = num_samples.astype(np.int64)
        for number, count in enumerate(counts[counts > 0].tolist()):
            shards.append(PlannedShard(split, number, position, count))
            position += count
    return Plan(np.concatenate(parts), shards)


def selection(rows: I64, num_rows: int) -> Mask:
    """Mark the rows of the scan table that are in the plan."""
    mask = np.zeros(num_rows, np.bool_)
    mask[rows] = True
    return mask
