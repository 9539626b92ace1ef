"""Packing: several samples in one row of a batch, up to a budget, computed from the order alone.

An epoch's order is cut into windows of ``window`` positions. Each window is packed by itself: as many packs are opened
as its total cost needs at least; its samples, dearest first, go each into the emptiest pack, and a new pack opens where
that one has no room. So packs of a window are about equally full and have about the same mix of short and long
samples. The packs of a window come in a shuffled order. A *position* is now a pack.

Packs depend on seed, epoch and the selected samples only: not on ranks, threads or buffers. How many packs an epoch has
is known when all of its windows are packed once, which is done before the epoch begins: for the first epoch when its
length is asked for, for each later one while the samples of the epoch before are read. Only the number of packs in
each window is kept.
"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.cost import MAX_COST, Cost, CostTable, name_of
from fuelrail.pipeline.order.epoch import EndlessOrder, Entries, Epoch, Shown
from fuelrail.pipeline.order.permutation import KeyedPermutation, as_positions, derive_key
from fuelrail.pipeline.settings import Settings, check_types

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

MAX_WINDOW: Final = 2**20
_EPOCHS_KEPT: Final = 4
_WINDOWS_KEPT: Final = 4


class Pack(Settings, frozen=True):
    """Pack samples into rows of a ``budget``, such as 32,768 tokens."""

    budget: int
    """The largest cost of a pack, in the unit of ``cost``."""
    cost: str | Cost
    """An attribute with whole numbers, such as ``num_tokens``, or a model of several (`Cost`)."""
    window: int = 4096
    """Positions of the order that are packed together. About 100 packs or more in a window leave 1 % unused."""
    truncate: bool = False
    """True: a sample above the budget counts as the budget, and the loader cuts its tokens; False: it is an error."""
    max_samples: int | None = None
    """The largest number of samples in a pack."""

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        if not 1 <= self.budget <= MAX_COST:
            raise OrderError(f"a pack's budget must be in 1 .. 2**40, got {self.budget}")
        if not 1 <= self.window <= MAX_WINDOW:
            raise OrderError(f"a pack's window must be in 1 .. 2**20 positions, got {self.window}")
        if self.max_samples is not None and self.max_samples < 1:
            raise OrderError(f"a pack's max_samples must be 1 or more, got {self.max_samples}")
        if self.truncate and not isinstance(self.cost, str):
            raise OrderError("truncate=True needs cost to be one attribute: a model does not say how much to cut")


def pack_window(costs: NDArray[np.int64], budget: int, max_samples: int | None = None) -> tuple[NDArray[np.int64], int]:
    """Return the pack of each sample (int64, same shape as ``costs`` (n,), each 1 .. budget), and how many there are.

    The dearest sample is first, those of equal cost come in their order. Each goes into the pack with the least cost so
    far, the one with the lowest number among equals, and into a new pack where that one has no room. At first there are
    as many packs as the total cost, and the number of samples, need at least. A full one of ``max_samples`` is closed.
    """
    by_cost = np.argsort(-costs, kind="stable")
    most = len(costs) if max_samples is None else max_samples
    num = max(-(-int(costs.sum()) // budget), -(-len(costs) // most))
    shift = len(costs).bit_length()
    # A heap of (cost << shift) + number: the least of it is the emptiest pack, the first one among equals.
    open_packs = list(range(num))
    room, mask, is_limited = (budget + 1) << shift, (1 << shift) - 1, most < len(costs)
    held = [0] * len(costs)
    filled: list[int] = []
    for cost in (costs[by_cost] << shift).tolist():
        pack = open_packs[0] + cost if open_packs else room
        if pack < room:
            heapq.heapreplace(open_packs, pack)
        else:
            pack, num = cost + num, num + 1
            heapq.heappush(open_packs, pack)
        filled.append(pack)
        if is_limited:
            held[pack & mask] += 1
            if held[pack & mask] == most:
                open_packs.remove(pack)
                heapq.heapify(open_packs)
    packs = np.empty_like(by_cost)
    packs[by_cost] = np.array(filled) & mask
    return packs, num


def fit(costs: NDArray[np.integer], pack: Pack, attributes: CostTable, rows: NDArray[np.int64] | None) -> None:
    """Cut costs to the budget in place; raise OrderError, naming a sample of ``rows``, for one that fits no pack."""
    selected = np.arange(len(costs)) if rows is None else rows
    over = selected[costs[selected] > (MAX_COST if pack.truncate else pack.budget)]
    free = selected[costs[selected] < 1]
    for wrong, what, fix in (
        (over, f"above the budget of {pack.budget}", "truncate=True, a larger budget"),
        (free, "and a pack could hold any number of those", "a Cost with a constant of 1 or more"),
    ):
        if len(wrong):
            raise OrderError(
                f"{name_of(int(wrong[0]), attributes)} costs {costs[wrong[0]]}, {what}; so do {len(wrong) - 1} others "
                f"of {len(selected)}: take {fix}, or leave them out by a filter"
            )
    np.minimum(costs, min(pack.budget, np.iinfo(costs.dtype).max), out=costs)


class PackedOrder:
    """The epochs of ``base``, an order of samples, in packs. Positions are packs, and epochs differ in length.

    ``costs`` are those of each sample of each dataset of a mix, or of the one dataset (``base``'s entries count both),
    1 .. budget. Safe to call from any number of threads.
    """

    def __init__(self, base: EndlessOrder, pack: Pack, costs: Sequence[NDArray[np.integer]], seed: int) -> None:
        self.base, self.pack, self.costs, self.seed = base, pack, tuple(costs), seed
        self.identity = {**base.identity, "in_packs": True}
        self._counts: OrderedDict[int, _Count] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedOrder, (self.base, self.pack, self.costs, self.seed)

    @property
    def num_windows(self) -> int:
        """Windows in each epoch."""
        return -(-self.base.epoch_length // self.pack.window)

    @property
    def epoch_length(self) -> int:
        """Packs in epoch 0; :meth:`length` knows the others."""
        return self.length(0)

    @property
    def num_selected(self) -> int:
        """Number of selected samples."""
        return self.base.num_selected

    def length(self, epoch: int) -> int:
        """Return the number of packs in an epoch; the first call packs all of its windows once."""
        return self.starts(epoch)[-1]

    def starts(self, epoch: int) -> list[int]:
        """Return the number of packs before each window of an epoch, and last the number of all."""
        return list(accumulate(self._count(epoch, self.num_windows), initial=0))

    def count_ahead(self, epoch: int, windows_left: int) -> None:
        """Pack a share of an epoch's windows: all are packed once the ``windows_left`` of the one before are read."""
        known = len(self._count(epoch, 0))
        self._count(epoch, known - (known - self.num_windows) // max(1, windows_left))

    def selected(self) -> NDArray[np.int64]:
        """Return the selected samples, ascending: int64 (num_selected,)."""
        return self.base.selected()

    def expected_counts(self) -> NDArray[np.float64]:
        """Return how often each selected sample occurs in an epoch, averaged over epochs: float64 (num_selected,)."""
        return self.base.expected_counts()

    def epoch(self, epoch: int, /) -> PackedEpoch:
        """Return one epoch; raise OrderError for an epoch out of range."""
        return PackedEpoch(self, epoch, self.base.epoch(epoch))

    def window(self, in_order: Epoch, number: int) -> tuple[Entries, NDArray[np.int64], int]:
        """Return the samples of a window of an epoch of ``base``, the pack of each, and the number of packs."""
        first = number * self.pack.window
        entries = in_order.entries(np.arange(first, min(first + self.pack.window, len(in_order))))
        costs = costs_of(self.costs, entries)
        return entries, *pack_window(costs, self.pack.budget, self.pack.max_samples)

    def _count(self, epoch: int, num_windows: int) -> list[int]:
        """Return the packs of each window of an epoch that is packed, ``num_windows`` of them or more."""
        with self._lock:
            count = self._counts.get(epoch)
            if count is None:
                count = self._counts[epoch] = _Count(self.base.epoch(epoch), [])
                if len(self._counts) > _EPOCHS_KEPT:
                    self._counts.popitem(last=False)
            self._counts.move_to_end(epoch)
            for number in range(len(count.packs), num_windows):
                count.packs.append(self.window(count.in_order, number)[2])
            return count.packs


class _Count(NamedTuple):
    """An epoch of samples, and the packs of its first windows."""

    in_order: Epoch
    packs: list[int]


def costs_of(costs: Sequence[NDArray[np.integer]], entries: Entries) -> NDArray[np.int64]:
    """Return the cost of each entry: int64, the shape of the entries."""
    if len(costs) == 1:
        return costs[0][entries.samples].astype(np.int64)
    found = np.empty(entries.samples.shape, np.int64)
    for part, of_part in enumerate(costs):
        here = entries.parts == part
        found[here] = of_part[entries.samples[here]]
    return found


class _Window(NamedTuple):
    """The samples of a window, pack by pack as they are shown; those of pack q are ``bounds[q] .. bounds[q + 1]``."""

    parts: NDArray[np.int64]
    samples: NDArray[np.int64]
    valid: NDArray[np.bool_]
    bounds: NDArray[np.int64]
    place: NDArray[np.int64]
    """The pack of each position of the window, as they are shown."""


class PackedEpoch:
    """One epoch in packs. The entries at some positions are all samples of these packs, so they may be more."""

    num_lanes: Final = 1

    def __init__(self, order: PackedOrder, epoch: int, in_order: Epoch) -> None:
        self._order, self._epoch, self._in_order = order, epoch, in_order
        self._starts = np.array(order.starts(epoch))
        self._window = lru_cache(maxsize=_WINDOWS_KEPT)(self._packed)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __call__(self, positions: ArrayLike, /) -> NDArray[np.int64]:
        """Return the samples of the packs at ``positions``, pack by pack: int64 (samples,)."""
        return self.entries(positions).samples

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return the entries of the packs at ``positions`` (B,), pack by pack, each in the order of the epoch.

        The flag ``pack`` is the number of the pack among ``positions``. Raises OrderError for positions outside.
        """
        wanted = as_positions(positions, len(self)).reshape(-1)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        found = []
        for number, at in zip(numbers.tolist(), (wanted - self._starts[numbers]).tolist(), strict=True):
            window = self._window(number)
            inside = slice(int(window.bounds[at]), int(window.bounds[at + 1]))
            found.append((window.parts[inside], window.samples[inside], window.valid[inside]))
        if not found:
            nothing = np.empty(0, np.int64)
            return Entries(nothing, nothing, nothing.astype(bool), {"pack": nothing})
        parts, samples, valid = (np.concatenate(column) for column in zip(*found, strict=True))
        packs = np.repeat(np.arange(len(found)), [len(one[0]) for one in found])
        return Entries(parts, samples, valid, {"pack": packs})

    def find(self, samples: ArrayLike, part: int = 0, /) -> Shown:
        """Return the packs that hold ``samples`` (n,) of a part, a position for each time one is shown.

        It packs the windows that hold them. Raises OrderError as the order of the samples does.
        """
        which, positions = self._in_order.find(samples, part)
        numbers, at = np.divmod(positions, self._order.pack.window)
        packs = np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            packs[here] = self._starts[number] + self._window(number).place[at[here]]
        return Shown.sorted(which, packs)

    def _packed(self, number: int) -> _Window:
        order = self._order
        entries, packs, num = order.window(self._in_order, number)
        permutation = KeyedPermutation(num, derive_key("order packs", order.seed, self._epoch, number))
        shown = np.empty(num, np.int64)
        shown[permutation(np.arange(num))] = np.arange(num)
        place = shown[packs]
        by_place = np.argsort(place, kind="stable")
        order.count_ahead(self._epoch + 1, order.num_windows - number)
        return _Window(
            entries.parts[by_place],
            entries.samples[by_place],
            entries.valid[by_place],
            np.searchsorted(place[by_place], np.arange(num + 1)),
            place,
        )
