"""What packs, buckets and balance have in common: samples of an order that come together in another way.

Packs and buckets cut an epoch into windows. What an epoch comes to is known when all of its windows are counted once,
which is done before the epoch begins: for the first epoch when its length is asked for, for each later one while the
samples of the epoch before are read. Only a few numbers of each window are kept.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.order.epoch import EndlessOrder, Entries, Epoch

_EPOCHS_KEPT: Final = 4


class RegroupedOrder:
    """An order of the samples of ``base``.

    ``costs`` are those of each sample of each dataset of a mix, or of the one dataset: ``base``'s entries count both.
    """

    use: ClassVar[str]
    """The field of an order's specification that asks for it."""

    def __init__(self, base: EndlessOrder, costs: Sequence[NDArray[np.integer]]) -> None:
        self.base, self.costs = base, tuple(costs)
        self.identity: dict[str, Any] = {**base.identity, f"has_{self.use}": True}

    @property
    def num_selected(self) -> int:
        """Number of selected samples."""
        return self.base.num_selected

    def selected(self) -> NDArray[np.int64]:
        """Return the selected samples, ascending: int64 (num_selected,)."""
        return self.base.selected()

    def expected_counts(self) -> NDArray[np.float64]:
        """Return how often each selected sample occurs in an epoch, averaged over epochs: float64 (num_selected,)."""
        return self.base.expected_counts()


class WindowedOrder(RegroupedOrder, ABC):
    """An order whose epochs are counted in windows of ``window`` positions of ``base``, and may differ in length.

    Safe to call from any number of threads.
    """

    def __init__(
        self, base: EndlessOrder, costs: Sequence[NDArray[np.integer]], window: int, seed: int, num_kept: int = 1
    ) -> None:
        """Count in ``window`` positions, and keep ``num_kept`` numbers of each."""
        super().__init__(base, costs)
        self.window, self.seed, self._num_kept = window, seed, num_kept
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
        """Return the number of positions in an epoch; the first call counts all of its windows once."""
        return self.positions_of(self._count(epoch, self.num_windows)[-1])

    @abstractmethod
    def positions_of(self, totals: NDArray[np.int64]) -> int:
        """Return the number of positions in an epoch with such ``totals`` (num_kept,) of all windows."""

    @abstractmethod
    def count(self, entries: Entries) -> NDArray[np.int64]:
        """Return the numbers (num_kept,) that are kept of a window."""

    def sums(self, epoch: int) -> NDArray[np.int64]:
        """Return the sums of the numbers kept before each window of an epoch, and last of all.

        That is int64 (num_windows + 1, num_kept).
        """
        return np.array(self._count(epoch, self.num_windows))

    def entries_of(self, in_order: Epoch, number: int) -> Entries:
        """Return the samples of a window of an epoch of ``base``."""
        first = number * self.window
        return in_order.entries(np.arange(first, min(first + self.window, len(in_order))))

    def count_ahead(self, epoch: int, windows_left: int) -> None:
        """Count a share of an epoch's windows: all are counted once ``windows_left`` of the one before are read."""
        known = len(self._count(epoch, 0)) - 1
        self._count(epoch, known - (known - self.num_windows) // max(1, windows_left))

    def _count(self, epoch: int, num_windows: int) -> list[NDArray[np.int64]]:
        """Return the sums before and after each window that is counted, ``num_windows`` of them or more."""
        with self._lock:
            count = self._counts.get(epoch)
            if count is None:
                zeros = np.zeros(self._num_kept, np.int64)
                count = self._counts[epoch] = _Count(self.base.epoch(epoch), [zeros])
                if len(self._counts) > _EPOCHS_KEPT:
                    self._counts.popitem(last=False)
            self._counts.move_to_end(epoch)
            for number in range(len(count.sums) - 1, num_windows):
                count.sums.append(count.sums[-1] + self.count(self.entries_of(count.in_order, number)))
            return count.sums


class _Count(NamedTuple):
    """An epoch of samples, and the sums of what its first windows come to."""

    in_order: Epoch
    sums: list[NDArray[np.int64]]


def costs_of(costs: Sequence[NDArray[np.integer]], entries: Entries) -> NDArray[np.int64]:
    """Return the cost of each entry, given those of the samples of each dataset: int64, the shape of the entries."""
    if len(costs) == 1:
        return costs[0][entries.samples].astype(np.int64)
    found = np.empty(entries.samples.shape, np.int64)
    for part, of_part in enumerate(costs):
        here = entries.parts == part
        found[here] = of_part[entries.samples[here]]
    return found
