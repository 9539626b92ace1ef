"""Map positions to samples: the order of an epoch as a pure function, in constant memory.

``position_map(spec, shard_lengths, epoch)`` maps positions 0 .. len - 1 of the epoch to samples. It
depends on the specification, the shards and the epoch alone: not on world size, ranks, batch,
workers or caches. Which rank reads which positions is decided in
`fuelrail.pipeline.order.batching`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fuelrail.pipeline.errors import ConfigError, OrderError
from fuelrail.pipeline.order.balance import Balance
from fuelrail.pipeline.order.bucket import Bucket
from fuelrail.pipeline.order.cost import Cost, cost_columns
from fuelrail.pipeline.order.epoch import CopyMap, MappedEpoch, SelectedSamples
from fuelrail.pipeline.order.mix import Mix
from fuelrail.pipeline.order.pack import Pack
from fuelrail.pipeline.order.permutation import (
    CHUNK,
    KeyedPermutation,
    PositionMap,
    as_positions,
    derive_key,
)
from fuelrail.pipeline.order.weights import SystematicSampling, Weighting, columns_of
from fuelrail.pipeline.settings import Positive, Settings, check_types, flag

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.dtypes import I64

ORDER_VERSION: Final = 1
"""Increases when any order changes for the same arguments; a saved position is valid for one
version only.
"""

_MAX_RUNS: Final = 4096  # of a window's table: 32 KiB

Kind = Literal["shuffled", "windowed", "sequential", "lanes"]


class OrderStage(Settings, frozen=True):
    """A filter and weights for a part of a run, besides those of the order; its order begins with
    its first position.

    A curriculum has a stage for each version of a column, such as the losses ``v1.loss`` and
    ``v2.loss`` of two layers.
    """

    filter: str | None = None
    weights: tuple[Weighting, ...] = ()
    until: int | None = None
    """The stage's end, in positions of the run as of a `MixStage`: its steps times the global
    batch. None: the last.
    """
    ramp: bool = False
    """True: the share of positions that follow the next stage grows linearly, over the whole
    stage, from 0 to 1.
    """

    def __post_init__(self) -> None:
        check_types(self, OrderError)


class OrderSpec(Settings, frozen=True):
    """Which samples an epoch has, how often, and in which order.

    * ``shuffled``: every sample anywhere, another permutation each epoch.
    * ``windowed``: shards permuted, cut into windows of at most ``window`` shards, samples permuted
      within each window; for storage that likes long reads. Windows hold about as many shards each,
      so that no small one is left over.
    * ``sequential``: as stored; seed and epoch change nothing, save for ``weights``.
    * ``lanes``: each row of the global batch follows clips through time
      (`fuelrail.pipeline.order.lanes`).

    ``filter``, ``subset``, ``weights`` and ``mix`` look at a dataset:
    `fuelrail.pipeline.order.compile` applies them.
    """

    kind: Annotated[Kind | None, flag("kind of order (default: shuffled)")] = None
    """None: ``shuffled``, or what a loader's ``shuffle`` says."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1), flag("random seed of the order")] = 0
    window: Annotated[Positive | None, flag("shards in a window, for --kind windowed")] = None
    """Shards in a window; with kind ``windowed`` only, and needed there."""
    filter: Annotated[
        str | None,
        flag(
            'only samples that match, such as "night and num_car >= 3"',
            metavar="EXPRESSION",
        ),
    ] = None
    """Only samples for which an expression over attributes holds
    (`fuelrail.pipeline.order.select`).
    """
    subset: Annotated[
        str | None,
        flag("only samples whose keys are in the file", metavar="FILE"),
    ] = None
    """Only samples whose keys a file lists: one a line, or column ``key`` of a ``.parquet`` or
    ``.csv`` file.
    """
    without: tuple[str | tuple[str, ...], ...] = ()
    """Keys and clips that are left out of the order in its place
    (`fuelrail.pipeline.order.without`).

    Each entry is a tuple of them, or a file as of ``subset``. A run may continue with further
    entries at the end.
    """
    weights: tuple[Weighting, ...] = ()
    """How often samples come, as the product of these (`fuelrail.pipeline.order.weights`); not
    with ``lanes``.
    """
    mix: Mix | None = None
    """Parts of the selected samples by ratio, exact in every block (`fuelrail.pipeline.order.mix`).

    Not with ``lanes``.
    """
    stages: tuple[OrderStage, ...] = ()
    """Filters and weights as functions of the step, one stage after the other; not with
    ``lanes`` and mixes.
    """
    epoch_length: Positive | None = None
    """Positions in a weighted, mixed or staged epoch.

    None: weighted, class balance's own number, else as many as there are selected samples; mixed,
    as many as it takes for all of them to come; staged, that of the first stage alone.
    """
    pieces_per_clip: Annotated[
        Positive | None,
        flag("pieces that a clip is cut into, for --kind lanes"),
    ] = None
    """The number of equal pieces into which clips are cut, with kind ``lanes`` only; None: 1."""
    pack: Pack | None = None
    """Several samples in each row of a batch, up to a budget (`fuelrail.pipeline.order.pack`);
    not with ``lanes``.
    """
    balance: Balance | None = None
    """Rows of a global batch dealt to ranks by cost (`fuelrail.pipeline.order.balance`); not
    with ``lanes``.
    """
    bucket: Bucket | None = None
    """Global batches of one bucket each (`fuelrail.pipeline.order.bucket`); not with ``lanes``
    and ``pack``.
    """

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        if self.kind == "windowed" and self.window is None:
            raise OrderError("order kind 'windowed' needs window >= 1 (in shards), got None")
        if self.kind != "windowed" and self.window is not None:
            raise OrderError(
                f"window={self.window} requires order kind 'windowed', got "
                f"{self.kind or 'shuffled'!r}"
            )
        if self.kind == "lanes" and (self.weights or self.mix or self.stages):
            raise OrderError(
                "lanes show each frame once, so they take no weights, no mix and no stages; "
                "filter or subset instead"
            )
        if self.mix and self.stages:
            raise OrderError(
                "an order has a mix or stages, not both; weights of the stages can do what "
                "ratios do"
            )
        if self.kind == "lanes" and (self.pack or self.bucket or self.balance):
            raise OrderError(
                "each row of a batch follows its lane, so lanes take no pack, no bucket and "
                "no balance"
            )
        if self.stages and (self.pack or self.bucket):
            raise OrderError(
                "stages count positions of samples: no packs and no buckets, which have others"
            )
        if self.pack and self.bucket:
            raise OrderError(
                "packs are of about one cost, so they need no bucket: take pack or bucket, not both"
            )
        if self.kind != "lanes" and self.pieces_per_clip is not None:
            raise OrderError(
                f"pieces_per_clip={self.pieces_per_clip} requires order kind 'lanes', got "
                f"{self.kind or 'shuffled'!r}"
            )

    @property
    def costs(self) -> dict[str, str | Cost]:
        """What the cost of a sample is, by what it is for: an attribute, or a model of several."""
        costs: dict[str, str | Cost] = {}
        if self.pack is not None:
            costs["pack"] = self.pack.cost
        if self.bucket is not None:
            costs["bucket"] = self.bucket.by
        if self.balance is not None:
            costs["balance"] = self.balance.cost
        return costs

    @property
    def columns(self) -> tuple[str, ...]:
        """The attributes that weights, costs and the mix depend on, each once."""
        names = [*columns_of(self.weights)]
        for stage in self.stages:
            names += columns_of(stage.weights)
        for cost in self.costs.values():
            names += cost_columns(cost)
        if self.mix is not None:
            names.append(self.mix.attribute)
        return tuple(dict.fromkeys(names))

    def resolved(self, *, shuffle: bool | None = None) -> OrderSpec:
        """Return the order with its kind stated; one without a kind follows ``shuffle`` (None:
        shuffled).

        Raises ConfigError where kind and ``shuffle`` contradict each other.
        """
        if self.kind is None:
            kind: Kind = "sequential" if shuffle is False else "shuffled"
            return msgspec.structs.replace(self, kind=kind)
        if shuffle is not None and shuffle == (self.kind == "sequential"):
            order = "the stored order" if shuffle else "a random order"
            raise ConfigError(
                f"shuffle={shuffle} and order kind {self.kind!r}, which is {order}, "
                "contradict each other: leave one of them out"
            )
        return self


def position_map(
    spec: OrderSpec,
    shard_lengths: Sequence[int],
    epoch: int,
) -> PositionMap:
    """Return the map of the positions of an epoch to the samples of shards of these lengths, each 1
    or more.

    Kind, seed and window of ``spec`` decide it, and only ``windowed`` looks at the single shards;
    what else there is in ``spec`` needs a dataset (`fuelrail.pipeline.order.compile`). Maps are
    immutable, and safe to call from any number of threads. Raises OrderError for an epoch out of
    range, for no samples, and for more than 2**62.
    """
    if not 0 <= epoch < 2**63:
        raise OrderError(f"epoch must be in 0 .. 2**63 - 1, got {epoch}")
    num_samples = sum(shard_lengths)
    if spec.kind in (None, "shuffled"):
        key = derive_key("order shuffled", spec.seed, epoch)
        return KeyedPermutation(num_samples, key)
    if spec.window is not None:
        return _Windowed(
            shard_lengths,
            window=spec.window,
            seed=spec.seed,
            epoch=epoch,
        )
    assert spec.kind == "sequential", "lanes need the clips of a dataset"
    return _Sequential(num_samples)


class CompiledOrder:
    """The epochs of an order over one split. Immutable; safe to call from any number of threads.

    ``identity`` is what a saved position depends on, in plain JSON types: the specification, and
    digests of what its filter, keys and weights came to.
    """

    def __init__(
        self,
        spec: OrderSpec,
        identity: dict[str, Any],
        shard_lengths: Sequence[int],
        selected: I64 | None = None,
        sampling: SystematicSampling | None = None,
    ) -> None:
        """Take ``selected`` samples of the split, ascending, each once (None: all), and their
        ``sampling``.
        """
        self.spec = spec
        self.identity = identity
        self._sampling = sampling
        self._bounds = np.cumsum([0, *shard_lengths])
        self.num_selected = int(self._bounds[-1])
        self._selected: NDArray[np.integer] | None = None
        if selected is not None:
            self._bounds = np.searchsorted(selected, self._bounds)
            self.num_selected = len(selected)
            last = int(selected[-1])
            dtype = np.int32 if last <= np.iinfo(np.int32).max else np.int64
            self._selected = selected.astype(dtype)
        self.epoch_length = self.num_selected
        if sampling is not None:
            self.epoch_length = sampling.length

    def selected(self) -> I64:
        """Return the selected samples, ascending: int64 (num_selected,)."""
        if self._selected is None:
            return np.arange(self.num_selected)
        return self._selected.astype(np.int64)

    def epoch(self, epoch: int, /) -> MappedEpoch:
        """Return the order of one epoch: positions in [0, epoch_length) to samples of the split."""
        bounds = self._bounds
        copy_maps: list[CopyMap] = []
        if self._sampling is not None:
            phase_key = derive_key("order weights", self.spec.seed, epoch)
            copies = self._sampling.epoch(phase_key)
            bounds = np.array(copies.first_copies(bounds.tolist()))
            copy_maps.append(copies)
        if self._selected is not None:
            copy_maps.append(SelectedSamples(self._selected))
        lengths = np.diff(bounds)
        shard_lengths = lengths[lengths > 0].tolist()
        positions = position_map(self.spec, shard_lengths, epoch)
        return MappedEpoch(positions, *copy_maps)


class _Sequential:
    """The samples as stored."""

    __slots__ = ("_num_samples",)

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __call__(self, positions: ArrayLike, /) -> I64:
        return as_positions(positions, self._num_samples).copy()

    def inverse(self, samples: ArrayLike, /) -> I64:
        return as_positions(samples, self._num_samples, "sample").copy()


class _Windowed:
    """Shards permuted, samples permuted within windows of consecutive permuted shards.

    Memory: four integers a shard. A position's window is found by bisection of the windows' starts.
    """

    __slots__ = (
        "_first_slots",
        "_num_samples",
        "_shard_offsets",
        "_shard_starts",
        "_slot_of",
        "_slot_starts",
        "_window",
        "_window_starts",
    )

    def __init__(
        self,
        shard_lengths: Sequence[int],
        window: int,
        seed: int,
        epoch: int,
    ) -> None:
        stored = np.array(shard_lengths, dtype=np.int64)
        num_shards = len(stored)
        shard_key = derive_key("order windowed shards", seed, epoch)
        permutation = KeyedPermutation(num_shards, shard_key)
        shards = permutation(np.arange(num_shards))
        lengths = stored[shards]
        # Slot i of the epoch holds shard shards[i]; its samples are slot_starts[i] ..
        # slot_starts[i] + length - 1 before the permutation within the window, and shard_offsets[i]
        # more as stored.
        self._slot_starts = np.cumsum(lengths) - lengths
        self._shard_starts = np.cumsum(stored) - stored
        self._slot_of = np.empty_like(shards)
        self._slot_of[shards] = np.arange(num_shards)
        self._shard_offsets = self._shard_starts[shards] - self._slot_starts
        self._num_samples = int(stored.sum())
        num_windows = -(-num_shards // window)
        self._first_slots = np.arange(num_windows + 1) * num_shards // num_windows
        slot_bounds = np.append(self._slot_starts, self._num_samples)
        self._window_starts = slot_bounds[self._first_slots]

        def make(number: int) -> _Window:
            first_slot, end_slot = self._first_slots[number : number + 2].tolist()
            start, end = self._window_starts[number : number + 2].tolist()
            window_key = derive_key("order windowed samples", seed, epoch, number)
            return _Window(
                permutation=KeyedPermutation(end - start, window_key),
                start=start,
                starts=self._slot_starts[first_slot:end_slot] - start,
                offsets=self._shard_offsets[first_slot:end_slot] + start,
            )

        # Positions come in runs: a reader is in one window, looks ahead into the next, and rarely
        # elsewhere.
        self._window: Callable[[int], _Window] = lru_cache(maxsize=8)(make)

    def __len__(self) -> int:
        return self._num_samples

    def __call__(self, positions: ArrayLike, /) -> I64:
        places = as_positions(positions, self._num_samples)
        flat = places.reshape(-1)
        samples = np.empty_like(flat)
        for first in range(0, flat.size, CHUNK):
            chunk = slice(first, first + CHUNK)
            part = flat[chunk]
            extremes = np.array((part.min(), part.max()))
            windows = np.searchsorted(self._window_starts, extremes, side="right") - 1
            lowest, highest = windows.tolist()
            if lowest == highest:  # as nearly always for positions in a row
                window = self._window(lowest)
                samples[chunk] = window(part)
                continue
            windows = np.searchsorted(self._window_starts, part, side="right") - 1
            by_window = np.argsort(windows, kind="stable")
            ascending = windows[by_window]
            is_bound = np.diff(ascending, prepend=-1, append=-1)
            bounds = np.flatnonzero(is_bound)
            for start, end in pairwise(bounds.tolist()):
                window = self._window(int(ascending[start]))
                window_places = by_window[start:end]
                samples[first + window_places] = window(part[window_places])
        return samples.reshape(places.shape)

    def inverse(self, samples: ArrayLike, /) -> I64:
        numbers = as_positions(samples, self._num_samples, "sample")
        flat = numbers.reshape(-1)
        shard = np.searchsorted(self._shard_starts, flat, side="right") - 1
        slot = self._slot_of[shard]
        unshuffled = flat - self._shard_offsets[slot]
        window = np.searchsorted(self._first_slots, slot, side="right") - 1
        positions = np.empty_like(flat)
        for number in np.unique(window).tolist():
            mask = window == number
            positions[mask] = self._window(number).inverse(unshuffled[mask])
        return positions.reshape(numbers.shape)


class _Window:
    """The samples of one window at positions inside it.

    A table gives for each run of 2**shift values the slot of its first value. No slot is shorter
    than a run, so a value is in that slot or in the next: cheaper than bisection, whose branches
    cannot be predicted here.
    """

    __slots__ = (
        "_guide",
        "_next_starts",
        "_offsets",
        "_permutation",
        "_shift",
        "_start",
        "_starts",
    )

    def __init__(
        self,
        permutation: KeyedPermutation,
        start: int,
        starts: I64,
        offsets: I64,
    ) -> None:
        """Take the slots' first positions (``starts``, from 0), and ``offsets`` from there to
        stored samples.
        """
        self._permutation = permutation
        self._start = start
        self._starts = starts
        self._offsets = offsets
        num_samples = len(permutation)
        self._next_starts = np.append(starts[1:], num_samples)
        lengths = self._next_starts - starts
        self._shift = int(lengths.min()).bit_length() - 1
        num_runs = (num_samples >> self._shift) + 1
        self._guide: I64 | None = None
        if num_runs <= _MAX_RUNS:
            runs = np.arange(num_runs) << self._shift
            self._guide = np.searchsorted(starts, runs, side="right") - 1

    def __call__(self, positions: I64) -> I64:
        shuffled = self._permutation(positions - self._start)
        if self._guide is None:  # a slot that is very short beside the others
            slot = np.searchsorted(self._starts, shuffled, side="right") - 1
        else:
            slot = self._guide.take(shuffled >> self._shift)
            slot += shuffled >= self._next_starts.take(slot)
        shuffled += self._offsets.take(slot)
        return shuffled

    def inverse(self, unshuffled: I64) -> I64:
        """Return positions of places in the epoch's slots laid end to end."""
        return self._permutation.inverse(unshuffled - self._start) + self._start
