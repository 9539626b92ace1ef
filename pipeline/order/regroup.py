"""What packs, buckets and balance have in common: samples of an order that come together in another
way.

Packs and buckets cut an epoch into windows. What an epoch comes to is known when all of its windows
are counted once, which is done before the epoch begins: for the first epoch when its length is
asked for, for each later one while the samples of the epoch before are read. Only a few numbers of
each window are kept.
"""

from __future__ import annotations

import heapq
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.order.epoch import Entries, Epoch
from fuelrail.pipeline.order.permutation import KeyedPermutation, derive_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.dtypes import I64
    from fuelrail.pipeline.order.epoch import EndlessOrder

_EPOCHS_KEPT: Final = 4
_WINDOWS_KEPT: Final = 64
_NOTHING: Final = (
    np.zeros(0, np.int64),
    np.zeros(0, np.int64),
    np.zeros(0, bool),
)
"""Parts, samples and valid flags of no entry: what is joined to none has the right types."""


class RegroupedOrder:
    """An order of the samples of ``base``.

    ``costs`` are those of each sample of each dataset of a mix, or of the one dataset: ``base``'s
    entries count both.
    """

    use: ClassVar[str]
    """The field of an order's specification that asks for it."""

    def __init__(
        self,
        base: EndlessOrder,
        costs: Sequence[NDArray[np.integer]],
    ) -> None:
        self.base = base
        self.costs = tuple(costs)
        self.identity: dict[str, Any] = {
            **base.identity,
            f"has_{self.use}": True,
        }

    @property
    def num_selected(self) -> int:
        """Number of selected samples."""
        return self.base.num_selected

    def selected(self) -> I64:
        """Return the selected samples, ascending: int64 (num_selected,)."""
        return self.base.selected()


class WindowedOrder(RegroupedOrder, ABC):
    """An order whose epochs are counted in windows of ``window`` positions of ``base``, and may
    differ in length.

    Safe to call from any number of threads.
    """

    def __init__(
        self,
        base: EndlessOrder,
        costs: Sequence[NDArray[np.integer]],
        window: int,
        seed: int,
        num_kept: int = 1,
    ) -> None:
        """Count in ``window`` positions, and keep ``num_kept`` numbers of each."""
        super().__init__(base, costs)
        self.window = window
        self.seed = seed
        self._num_kept = num_kept
        self._counts: OrderedDict[int, _Count] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_counts": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_lock": threading.Lock()}

    @property
    def num_windows(self) -> int:
        """Windows in each epoch."""
        return -(-self.base.epoch_length // self.window)

    @property
    def epoch_length(self) -> int:
        """Positions in epoch 0; :meth:`length` knows the others."""
        return self.length(0)

    def length(self, epoch: int) -> int:
        """Return the number of positions in an epoch; the first call counts all of its windows
        once.
        """
        sums = self._count(epoch, self.num_windows)
        return self.positions_of(sums[-1])

    @abstractmethod
    def positions_of(self, totals: I64) -> int:
        """Return the number of positions in an epoch with such ``totals`` (num_kept,) of all
        windows.
        """

    @abstractmethod
    def groups(self, entries: Entries) -> tuple[I64, int]:
        """Return the group of each sample of a window, int64 (n,), and how many groups there
        are.
        """

    @abstractmethod
    def count(self, groups: I64, num_groups: int) -> I64:
        """Return the numbers (num_kept,) that are kept of a window with such groups."""

    def sums(self, epoch: int) -> I64:
        """Return the sums of the numbers kept before each window of an epoch, and last of all.

        That is int64 (num_windows + 1, num_kept).
        """
        return np.array(self._count(epoch, self.num_windows))

    def entries_of(self, in_order: Epoch, number: int) -> Entries:
        """Return the samples of a window of an epoch of the order below."""
        start = number * self.window
        end = min(start + self.window, len(in_order))
        positions = np.arange(start, end)
        return in_order.entries(positions)

    def count_ahead(self, epoch: int, windows_left: int) -> None:
        """Count a share of an epoch's windows: all are counted once ``windows_left`` of the one
        before are read.
        """
        num_counted = len(self._count(epoch, 0)) - 1
        num_uncounted = self.num_windows - num_counted
        share = -(-num_uncounted // max(1, windows_left))
        self._count(epoch, num_counted + share)

    def _count(self, epoch: int, num_windows: int) -> list[I64]:
        """Return the sums before and after each window that is counted, ``num_windows`` of them
        or more.
        """
        with self._lock:
            count = self._counts.get(epoch)
            if count is None:
                zeros = np.zeros(self._num_kept, np.int64)
                count = self._counts[epoch] = _Count(self.base.epoch(epoch), [zeros])
                if len(self._counts) > _EPOCHS_KEPT:
                    self._counts.popitem(last=False)
            self._counts.move_to_end(epoch)
            for number in range(len(count.sums) - 1, num_windows):
                entries = self.entries_of(count.in_order, number)
                groups, num_groups = self.groups(entries)
                numbers = self.count(groups, num_groups)
                count.sums.append(count.sums[-1] + numbers)
            return count.sums


class RegroupedEpoch(Epoch):
    """An epoch in packs or in buckets."""

    def __init__(self, order: WindowedOrder, epoch: int, starts: I64) -> None:
        """Take the number of packs, or of batches, before each window, and last of all
        (num_windows + 1,).
        """
        self._order = order
        self._epoch = epoch
        self._starts = starts
        self._in_order = order.base.epoch(epoch)
        self._members = lru_cache(_WINDOWS_KEPT)(self._grouped)
        self._order_shown = lru_cache(_WINDOWS_KEPT)(self._shuffled)

    def _locate(self, place: int) -> tuple[int, int]:
        """Return the window of a pack, or batch, of the epoch, and its number there: those of a
        window are shuffled.
        """
        window = int(np.searchsorted(self._starts, place, side="right")) - 1
        offset = place - self._starts[window]
        number = self._order_shown(window)[offset]
        return window, int(number)

    def _shuffled(self, window: int) -> I64:
        start, end = self._starts[window : window + 2].tolist()
        num_groups = end - start
        key = derive_key(
            f"order {self._order.use}s",
            self._order.seed,
            self._epoch,
            window,
        )
        permutation = KeyedPermutation(num_groups, key)
        return permutation(np.arange(num_groups))

    def _grouped(self, window: int) -> tuple[Entries, I64]:
        """Return the samples of a window, group by group, and where each begins among them, and the
        end.

        Group g has those at ``bounds[g] .. bounds[g + 1] - 1``.
        """
        order = self._order
        order.count_ahead(self._epoch + 1, order.num_windows - window)
        entries = order.entries_of(self._in_order, window)
        groups, num_groups = order.groups(entries)
        by_group = np.argsort(groups, kind="stable")
        bounds = np.searchsorted(groups[by_group], np.arange(num_groups + 1))
        members = joined([(entries, by_group)])
        return members, bounds


def joined(pieces: Sequence[tuple[Entries, I64 | slice]]) -> Entries:
    """Return some samples of several entries, one after the other, without flags."""
    rows_of_pieces = [_NOTHING]
    for entries, rows in pieces:
        parts = entries.parts[rows]
        samples = entries.samples[rows]
        valid = entries.valid[rows]
        rows_of_pieces.append((parts, samples, valid))
    columns = zip(*rows_of_pieces, strict=True)
    parts, samples, valid = map(np.concatenate, columns)
    return Entries(parts, samples, valid)


class _Count(NamedTuple):
    """An epoch of samples, and the sums of what its first windows come to."""

    in_order: Epoch
    sums: list[I64]


def costs_of(costs: Sequence[NDArray[np.integer]], entries: Entries) -> I64:
    """Return the cost of each entry, given those of the samples of each dataset: int64, the
    shape of the entries.
    """
    samples = entries.samples
    if len(costs) == 1:
        return costs[0][samples].astype(np.int64)
    entry_costs = np.empty(samples.shape, np.int64)
    for part, part_costs in enumerate(costs):
        mask = entries.parts == part
        entry_costs[mask] = part_costs[samples[mask]]
    return entry_costs


def groups_of(costs: I64, sizes: Sequence[int]) -> I64:
    """Return the group of each row (int64, same shape as ``costs`` (n,)), of about one cost.

    Group g has at most ``sizes[g]`` rows, 1 or more.

    The dearest row is first, those of equal cost come in their order. Each goes to the group with
    the least cost so far that is not full, the one with the lowest number among equals. The method
    is Graham's, longest processing time first ("Bounds on Multiprocessing Timing Anomalies", 1969:
    within 4/3 of the best), with groups of a limited size.
    """
    by_cost = np.argsort(-costs, kind="stable")
    groups = [(0, group) for group in range(len(sizes))]
    held = [0] * len(sizes)
    chosen = []
    for cost in costs[by_cost].tolist():
        load, group = groups[0]
        held[group] += 1
        chosen.append(group)
        if held[group] < sizes[group]:
            heapq.heapreplace(groups, (load + cost, group))
        else:
            heapq.heappop(groups)
    group_of = np.empty(len(costs), np.int64)
    group_of[by_cost] = chosen
    return group_of
