"""Mix datasets, or parts of one, by ratio: exact in every block, each in its own order and through
its own epochs.

With ratios 4:2:1 each block of 7 consecutive positions holds 4, 2 and 1 samples of the three, in an
arrangement that is shuffled for each block; a global batch that is a multiple of 7 always holds the
same shares. A dataset's samples come in the order that it would have alone. When its epoch ends,
its next one begins in the middle of the mix's, and the mix's next epoch continues it: over time
every sample of a dataset comes equally often, for any sizes. All of it is arithmetic, so any
position is known without the ones before.

Ratios can follow a schedule: stages of a run, with linear ramps between them
(:class:`MixSchedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import isqrt, lcm
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.epoch import (
    EndlessOrder,
    Entries,
    Epoch,
    Occurrences,
)
from fuelrail.pipeline.order.permutation import (
    CHUNK,
    MAX_LENGTH,
    KeyedPermutation,
    as_positions,
    derive_key,
)
from fuelrail.pipeline.settings import Settings, check_types

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fuelrail.pipeline.dtypes import I64

MAX_BLOCK: Final = 1024
"""Largest sum of the ratios: finding a place in a block costs time in proportion to it."""
_FIND_CHUNK: Final = CHUNK // 16


class Mix(Settings, frozen=True):
    """Parts of a dataset, one for each value of an attribute, mixed by ratio: ``{"true": 1,
    "false": 3}``.

    Values are written as text; samples with others, or with none, are left out.
    """

    attribute: str
    ratios: dict[str, int]
    """Samples of each value in a block, 1 or more; at most ``MAX_BLOCK`` in sum."""

    def __post_init__(self) -> None:
        check_types(self, OrderError)


class MixStage(Settings, frozen=True):
    """Ratios of a mix for a part of a run."""

    ratios: dict[str, int]
    """Samples of each dataset in a block, 0 or more."""
    until: int | None = None
    """The stage's end, in positions of the run: of all ranks and epochs, also those that drop_last
    leaves out.

    None: the last stage.
    """
    ramp: bool = False
    """True: the ratios change linearly, over the whole stage, to those of the next one."""

    def __post_init__(self) -> None:
        check_types(self, OrderError)


class MixSchedule:
    """The samples of each dataset in every block of a run, and in all blocks before it: exact, from
    arithmetic alone.

    The block is as long as the least common multiple of the stages' sums. Without a ramp each block
    of a stage has its ratios. Over a ramp of n blocks, D samples of a block have to change from
    datasets with a falling ratio to others; before its block b, floor(D b b / (2 n)) changes were
    made in all, in turns that are spread evenly.

    Raises OrderError for stages that do not name all datasets, do not end in turn or at a block's
    end, and for ramps with D n n above 2**62.
    """

    def __init__(self, stages: Sequence[MixStage], names: Sequence[str]) -> None:
        for number, stage in enumerate(stages):
            if not isinstance(stage, MixStage):
                raise OrderError(
                    f"stage {number} of the mix is {stage!r}, a MixStage(ratios, until, "
                    "ramp) is needed"
                )
            values = stage.ratios.values()
            has_all = stage.ratios.keys() == set(names)
            if not has_all or min(values) < 0 or not any(values):
                raise OrderError(
                    f"stage {number} of the mix has {stage.ratios}, it needs integers >= 0 "
                    f"for {list(names)}"
                )
        if not stages or stages[-1].until is not None or stages[-1].ramp:
            raise OrderError(
                "the last stage of a mix has no end and no ramp: until=None, ramp=False"
            )
        totals = [sum(stage.ratios.values()) for stage in stages]
        self.block = lcm(*totals)
        if self.block > MAX_BLOCK:
            raise OrderError(
                f"the stages' ratios need a block of {self.block}; at most {MAX_BLOCK} are allowed"
            )
        ends = [0 if stage.until is None else stage.until for stage in stages[:-1]]
        for start, end in pairwise([0, *ends]):
            if end % self.block or end <= start:
                raise OrderError(
                    "stages of a mix must end in turn, at multiples of the block of "
                    f"{self.block}, got {ends}"
                )
        ratios = []
        for stage, total in zip(stages, totals, strict=True):
            factor = self.block // total
            ratios.append([stage.ratios[name] * factor for name in names])
        self._ratios = np.array(ratios)
        starts = [end // self.block for end in ends]
        self._starts = np.array([0, *starts])
        no_change = np.zeros((1, len(names)), np.int64)
        self._changes: list[I64] = []
        for number, stage in enumerate(stages):
            changes = no_change
            if stage.ramp:
                changes = _changes(self._ratios[number], self._ratios[number + 1])
            self._changes.append(changes)
        self._before = np.zeros_like(self._ratios)
        for number, length in enumerate(np.diff(self._starts).tolist()):
            num_changes = len(self._changes[number]) - 1
            if num_changes and num_changes * length**2 > MAX_LENGTH:
                max_blocks = isqrt(MAX_LENGTH // num_changes)
                raise OrderError(
                    f"a ramp has {length} blocks of {self.block}, and may have "
                    f"{max_blocks}; end it earlier, or make it of several stages"
                )
            samples = self._within(number, np.array([length]))
            self._before[number + 1] = samples[0]

    @property
    def final(self) -> tuple[int, ...]:
        """Samples of each dataset in a block once all stages but the last are over."""
        return tuple(self._ratios[-1].tolist())

    def blocks(self, blocks: I64) -> tuple[I64, I64]:
        """Return the samples of each dataset before some blocks (n,) of a run, and in them:
        int64 (n, datasets).
        """
        num_datasets = self._ratios.shape[1]
        before = np.empty((len(blocks), num_datasets), np.int64)
        after = np.empty_like(before)
        stages = np.searchsorted(self._starts, blocks, side="right") - 1
        for stage in np.unique(stages).tolist():
            mask = stages == stage
            inside = blocks[mask] - self._starts[stage]
            before[mask] = self._within(stage, inside)
            after[mask] = self._within(stage, inside + 1)
        return before, after - before

    def _within(self, stage: int, blocks: I64) -> I64:
        """Return the samples of each dataset in a run up to some blocks, counted from the
        beginning of a stage.
        """
        counts: I64 = self._before[stage] + blocks[:, None] * self._ratios[stage]
        changes = self._changes[stage]
        changes_per_block = len(changes) - 1
        if changes_per_block:
            length = self._starts[stage + 1] - self._starts[stage]
            num_changes = changes_per_block * blocks * blocks // (2 * length)
            rounds, rest = np.divmod(num_changes, changes_per_block)
            counts += rounds[:, None] * changes[-1]
            counts += changes[rest]
        return counts


def _changes(old: I64, new: I64) -> I64:
    """Return what the first k changes from one block to another add to each dataset: (changes +
    1, datasets).
    """
    falls = np.maximum(old - new, 0)
    rises = np.maximum(new - old, 0)
    turns = []
    for samples in (falls, rises):
        datasets = np.repeat(np.arange(len(samples)), samples)
        firsts = np.cumsum(samples) - samples
        number = np.arange(len(datasets)) - firsts[datasets]
        place = (number * 2 + 1) / samples[datasets]
        by_place = np.lexsort((datasets, place))
        turns.append(datasets[by_place])
    num_changes = len(turns[0])
    steps = np.zeros((num_changes + 1, len(old)), np.int64)
    for number, (falling, rising) in enumerate(zip(*turns, strict=True), 1):
        steps[number, falling] = -1
        steps[number, rising] = 1
    return np.cumsum(steps, axis=0)


class MixedOrder:
    """The epochs of a mix of ``orders`` by whole-number ``ratios``.

    ``epoch_length`` is rounded up to whole blocks; None: as long as it takes until every sample of
    every order has come once. ``is_one_split``: the orders are of parts of one dataset's split, so
    the part of every entry is 0. With a ``schedule`` the ratios are its final ones, which decide
    the epoch's length; its blocks count through epochs. Raises OrderError for ratios that are not 1
    or more, or whose sum is over ``MAX_BLOCK``.
    """

    def __init__(
        self,
        orders: Sequence[EndlessOrder],
        ratios: Sequence[int],
        *,
        seed: int = 0,
        epoch_length: int | None = None,
        is_one_split: bool = False,
        schedule: MixSchedule | None = None,
    ) -> None:
        min_ratio = 1 if schedule is None else 0
        if not ratios or min(ratios) < min_ratio or sum(ratios) > MAX_BLOCK:
            raise OrderError(
                f"ratios must be integers >= 1, at most {MAX_BLOCK} in sum, got {list(ratios)}"
            )
        self.orders = tuple(orders)
        self.ratios = tuple(map(int, ratios))
        self.seed = seed
        self.block = sum(self.ratios)
        self.is_one_split = is_one_split
        self.schedule = schedule
        if epoch_length is None:
            blocks_of_epochs = []
            for order, ratio in zip(self.orders, self.ratios, strict=True):
                if ratio:
                    blocks_of_epochs.append(-(-order.epoch_length // ratio))
            num_blocks = max(blocks_of_epochs)
        else:
            num_blocks = -(-epoch_length // self.block)
        self.num_blocks = num_blocks
        self.epoch_length = num_blocks * self.block
        self.identity: dict[str, Any] = {
            "kind": "mix",
            "seed": seed,
            "ratios": list(self.ratios),
            "epoch_length": self.epoch_length,
            "parts": [order.identity for order in self.orders],
        }

    @property
    def num_selected(self) -> int:
        """Number of selected samples of all orders."""
        if self.is_one_split:
            return len(self.selected())
        return sum(order.num_selected for order in self.orders)

    def selected(self) -> I64:
        """Return the selected samples of parts of one split, ascending, each once: int64
        (num_selected,).
        """
        samples = [order.selected() for order in self.orders]
        return np.unique(np.concatenate(samples))

    def epoch(self, epoch: int, /) -> MixedEpoch:
        """Return one epoch; raise OrderError for a negative epoch, or one whose samples are too
        many to count.
        """
        if epoch < 0 or (epoch + 1) * self.epoch_length > MAX_LENGTH:
            raise OrderError(
                f"epoch must be 0 or more and end before position 2**62 of the mix, got {epoch}"
            )
        return MixedEpoch(self, epoch)


class MixedEpoch(Epoch):
    """One epoch of a mix: :meth:`entries` maps positions to datasets and samples."""

    __slots__ = ("_epoch_of", "_first_block", "_mix", "_words")

    def __init__(self, mix: MixedOrder, epoch: int) -> None:
        self._mix = mix
        self._first_block = epoch * mix.num_blocks
        # Distinct random-looking words, one for each place of each block: sorting a block's
        # shuffles it.
        self._words = KeyedPermutation(MAX_LENGTH, derive_key("order mix", mix.seed))
        # Positions come in runs: of each dataset one epoch or two at a time.
        memory = lru_cache(maxsize=2 * len(mix.orders))
        self._epoch_of: Callable[[int, int], Epoch] = memory(
            lambda part, number: mix.orders[part].epoch(number)
        )

    def __len__(self) -> int:
        return self._mix.epoch_length

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return parts and samples at ``positions``, all valid; raise OrderError for positions
        outside.
        """
        mix = self._mix
        places = as_positions(positions, len(self))
        flat = places.reshape(-1)
        parts = np.empty_like(flat)
        samples = np.empty_like(flat)
        for first in range(0, flat.size, CHUNK):
            chunk = slice(first, first + CHUNK)
            block, place = np.divmod(flat[chunk], mix.block)
            blocks, block_index = _distinct(block + self._first_block)
            before = self._before(blocks)
            arranged = self._arranged(blocks)
            arranged_place = block_index * mix.block + place
            parts[chunk] = arranged.reshape(-1)[arranged_place]
            for part, order in enumerate(mix.orders):
                indices = np.flatnonzero(parts[chunk] == part)
                if not indices.size:
                    continue
                counts = np.cumsum(arranged == part, axis=1).reshape(-1)
                within = counts[arranged_place[indices]] - 1
                # How many samples of this dataset came before, ever.
                turns = before[block_index[indices], part] + within
                epochs, places_in_epoch = np.divmod(turns, order.epoch_length)
                distinct_epochs, _ = _distinct(epochs)
                for epoch in distinct_epochs.tolist():
                    mask = epochs == epoch
                    part_epoch = self._epoch_of(part, epoch)
                    rows = first + indices[mask]
                    samples[rows] = part_epoch(places_in_epoch[mask])
        if mix.is_one_split:
            parts[:] = 0
        shape = places.shape
        return Entries(
            parts.reshape(shape),
            samples.reshape(shape),
            valid=np.ones(shape, dtype=bool),
        )

    def _before(self, blocks: I64) -> I64:
        """Return how many samples of each dataset come in a run before some blocks (n,): int64
        (n, datasets).
        """
        mix = self._mix
        if mix.schedule is not None:
            before, _ = mix.schedule.blocks(blocks)
            return before
        constant: I64 = blocks[:, None] * np.array(mix.ratios)
        return constant

    def _arranged(self, blocks: I64) -> I64:
        """Return the dataset at each place of some blocks (n,) of a run: int64 (n, places)."""
        mix = self._mix
        entries = blocks[:, None] * mix.block + np.arange(mix.block)
        by_word = np.zeros_like(entries)
        if mix.block > 1:
            words = self._words(entries)
            by_word = np.argsort(words, axis=1)
        arranged: I64
        if mix.schedule is None:
            datasets = np.repeat(np.arange(len(mix.ratios)), mix.ratios)
            arranged = datasets[by_word]
        else:
            _, counts = mix.schedule.blocks(blocks)
            ends = np.cumsum(counts, axis=1)
            is_behind = by_word[:, :, None] >= ends[:, None, :]
            arranged = is_behind.sum(axis=2)
        return arranged

    def find(self, samples: ArrayLike, part: int = 0, /) -> Occurrences:
        """Return where ``samples`` (n,) of a part are shown; raises OrderError for numbers
        outside its split.
        """
        mix = self._mix
        num_datasets = 1 if mix.is_one_split else len(mix.orders)
        if not 0 <= part < num_datasets:
            raise OrderError(f"the mix has no dataset {part}")
        order_numbers = range(len(mix.orders)) if mix.is_one_split else (part,)
        borders = np.array([0, mix.num_blocks]) + self._first_block
        first_turns, end_turns = self._before(borders).tolist()
        indices = [np.zeros(0, np.int64)]
        positions = [np.zeros(0, np.int64)]
        for number in order_numbers:
            first = first_turns[number]
            end = end_turns[number]
            length = mix.orders[number].epoch_length
            for epoch in range(first // length, -(-end // length)):
                matches, places = self._epoch_of(number, epoch).find(samples)
                turns = epoch * length + places
                inside = np.flatnonzero((turns >= first) & (turns < end))
                for start in range(0, len(inside), _FIND_CHUNK):
                    chunk = inside[start : start + _FIND_CHUNK]
                    indices.append(matches[chunk])
                    positions.append(self._places(number, turns[chunk]))
        return Occurrences.sorted(
            np.concatenate(indices),
            np.concatenate(positions),
        )

    def _places(self, part: int, turns: I64) -> I64:
        """Return the positions of some turns (n,) of a dataset, which are of this epoch."""
        mix = self._mix
        low = np.full_like(turns, self._first_block)
        # The last block with no more samples before it than `turns`, by bisection.
        high = low + mix.num_blocks
        while (high - low > 1).any():
            middle = (low + high) // 2
            is_later = self._before(middle)[:, part] > turns
            low = np.where(is_later, low, middle)
            high = np.where(is_later, middle, high)
        blocks, block_index = np.unique(low, return_inverse=True)
        number = turns - self._before(low)[:, part]
        # Its places in each block, in order.
        is_foreign = self._arranged(blocks) != part
        part_places = np.argsort(is_foreign, axis=1, kind="stable")
        block_starts = (low - self._first_block) * mix.block
        places: I64 = block_starts + part_places[block_index, number]
        return places


def _distinct(values: I64) -> tuple[I64, I64]:
    """Return the distinct values, ascending, and which of them each value (n,) is; sorts only if
    needed.
    """
    steps = np.diff(values)
    if (steps < 0).any():
        distinct, inverse = np.unique(values, return_inverse=True)
        return distinct, inverse
    is_new = np.concatenate(([True], steps > 0))
    return values[is_new], np.cumsum(is_new) - 1
