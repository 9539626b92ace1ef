"""Packing: several samples in one row of a batch, up to a budget, computed from the order alone.

An epoch's order is cut into windows of ``window`` positions. Each window is packed by itself: as
many packs are opened as its total cost needs at least; its samples, dearest first, go each into the
emptiest pack, and a new pack opens where that one has no room. So packs of a window are about
equally full and have about the same mix of short and long samples. The packs of a window come in a
shuffled order. A *position* is now a pack.

Packs depend on seed, epoch and the selected samples only: not on ranks, threads or buffers. Of each
window only the number of its packs is kept (:mod:`fuelrail.pipeline.order.regroup`).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.cost import MAX_COST, Cost
from fuelrail.pipeline.order.epoch import Occurrences
from fuelrail.pipeline.order.permutation import as_positions
from fuelrail.pipeline.order.regroup import (
    RegroupedEpoch,
    WindowedOrder,
    costs_of,
    joined,
)
from fuelrail.pipeline.settings import Positive, Settings, check_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.dtypes import I64
    from fuelrail.pipeline.order.epoch import EndlessOrder, Entries

WindowLength = Annotated[int, Meta(ge=1, le=2**20)]
"""Positions of an order that are regrouped together."""


class Pack(Settings, frozen=True):
    """Pack samples into rows of a ``budget``, such as 32,768 tokens."""

    budget: Annotated[int, Meta(ge=1, le=MAX_COST)]
    """The largest cost of a pack, in the unit of ``cost``."""
    cost: str | Cost
    """An attribute with whole numbers, such as ``num_tokens``, or a model of several (`Cost`)."""
    window: WindowLength = 4096
    """Positions of the order that are packed together.

    About 100 packs or more in a window leave 1 % unused.
    """
    truncate: bool = False
    """True: a sample above the budget counts as the budget, and the loader cuts its tokens;
    False: it is an error.
    """
    max_samples: Positive | None = None
    """The largest number of samples in a pack."""

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        if self.truncate and not isinstance(self.cost, str):
            raise OrderError(
                "truncate=True needs cost to be one attribute: a model does not say how much to cut"
            )


def pack_window(
    costs: I64,
    budget: int,
    max_samples: int | None = None,
) -> tuple[I64, int]:
    """Return the pack of each sample (int64, same shape as ``costs`` (n,), which are at least 1
    and at most the budget), and how many there are.

    The dearest sample is first, those of equal cost come in their order. Each goes into the pack
    with the least cost so far, the one with the lowest number among equals, and into a new pack
    where that one has no room. At first there are as many packs as the total cost, and the number
    of samples, need at least. A full one of ``max_samples`` is closed.
    """
    num_samples = len(costs)
    by_cost = np.argsort(-costs, kind="stable")
    limit = num_samples if max_samples is None else max_samples
    num_by_cost = -(-int(costs.sum()) // budget)
    num_by_samples = -(-num_samples // limit)
    num_packs = max(num_by_cost, num_by_samples)
    shift = num_samples.bit_length()
    # A heap of (cost << shift) + number: the least of it is the emptiest pack, the first one among
    # equals.
    open_packs = list(range(num_packs))
    room = (budget + 1) << shift
    mask = (1 << shift) - 1
    is_limited = limit < num_samples
    counts = [0] * num_samples
    filled: list[int] = []
    shifted_costs = costs[by_cost] << shift
    for cost in shifted_costs.tolist():
        pack = open_packs[0] + cost if open_packs else room
        if pack < room:
            heapq.heapreplace(open_packs, pack)
        else:
            pack = cost + num_packs
            num_packs += 1
            heapq.heappush(open_packs, pack)
        filled.append(pack)
        if is_limited:
            number = pack & mask
            counts[number] += 1
            if counts[number] == limit:
                open_packs.remove(pack)
                heapq.heapify(open_packs)
    packs = np.empty_like(by_cost)
    packs[by_cost] = np.array(filled) & mask
    return packs, num_packs


class PackedOrder(WindowedOrder):
    """The epochs of ``base``, an order of samples, in packs.

    Positions are packs, and epochs differ in length.

    ``costs`` are 1 .. budget.
    """

    use = "pack"

    def __init__(
        self,
        base: EndlessOrder,
        pack: Pack,
        costs: Sequence[NDArray[np.integer]],
        seed: int,
    ) -> None:
        super().__init__(base, costs, pack.window, seed)
        self.pack = pack

    def positions_of(self, totals: I64) -> int:
        """Return the number of packs, which is all that is kept of a window."""
        return int(totals[0])

    def count(self, _: I64, num_groups: int) -> I64:
        """Return the number of packs of a window."""
        return np.array([num_groups])

    def groups(self, entries: Entries) -> tuple[I64, int]:
        """Return the pack of each sample of a window, and how many there are; see `pack_window`."""
        costs = costs_of(self.costs, entries)
        return pack_window(costs, self.pack.budget, self.pack.max_samples)

    def epoch(self, epoch: int, /) -> PackedEpoch:
        """Return one epoch; raise OrderError for an epoch out of range."""
        packs_before_window = self.sums(epoch)[:, 0]
        return PackedEpoch(self, epoch, packs_before_window)


class PackedEpoch(RegroupedEpoch):
    """One epoch in packs.

    The entries at some positions are all samples of these packs, so they may be more.
    """

    def __len__(self) -> int:
        return int(self._starts[-1])

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return the entries of the packs at ``positions`` (B,), pack by pack, each in the order of
        the epoch.

        The flag ``pack`` is the number of the pack among ``positions``. Raises OrderError for
        positions outside.
        """
        places = as_positions(positions, len(self)).reshape(-1)
        pieces = []
        sizes = []
        for place in places.tolist():
            window, pack = self._locate(place)
            members, bounds = self._members(window)
            start, end = bounds[pack : pack + 2].tolist()
            pieces.append((members, slice(start, end)))
            sizes.append(end - start)
        packs = np.repeat(np.arange(len(pieces)), np.array(sizes, np.int64))
        return joined(pieces)._replace(flags={"pack": packs})

    def find(self, samples: ArrayLike, part: int = 0, /) -> Occurrences:
        """Return the packs that hold ``samples`` (n,) of a part, a position for each time one is
        shown.

        It packs the windows that hold them. Raises OrderError as the order of the samples does.
        """
        indices, positions = self._in_order.find(samples, part)
        numbers, offsets = np.divmod(positions, self._order.window)
        places = np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            mask = numbers == number
            entries = self._order.entries_of(self._in_order, number)
            pack_of_sample, _ = self._order.groups(entries)
            packs = pack_of_sample[offsets[mask]]
            place_of_pack = np.argsort(self._order_shown(number))
            places[mask] = self._starts[number] + place_of_pack[packs]
        return Occurrences.sorted(indices, places)
