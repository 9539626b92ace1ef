"""Buckets: each global batch has samples of one bucket, such as texts of about one length, or one rig.

A bucket's samples come in the order of the epoch, and each ``global_batch`` of them are a batch. The batches that are
complete at the end of a window of the epoch come in a shuffled order, then those of the next window. At the end of an
epoch each bucket's rest makes a batch, filled up with samples of its own that are flagged as not valid.

Batches depend on seed, epoch, the selected samples and the global batch only. Of each window the number of samples in
each bucket is kept (:mod:`fuelrail.pipeline.order.regroup`), so any batch is found without those before it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.errors import OrderError, WorldError
from fuelrail.pipeline.order.cost import Cost
from fuelrail.pipeline.order.epoch import Entries, Shown
from fuelrail.pipeline.order.pack import MAX_WINDOW
from fuelrail.pipeline.order.permutation import KeyedPermutation, as_positions, derive_key
from fuelrail.pipeline.order.regroup import WindowedOrder, costs_of
from fuelrail.pipeline.settings import Settings, check_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.order.epoch import EndlessOrder, Epoch

MAX_BUCKETS: Final = 1024
_WINDOWS_KEPT: Final = 64
_BATCHES_KEPT: Final = 4


class Bucket(Settings, frozen=True):
    """Make each global batch of samples of one bucket, so that they have one shape, or are padded by little."""

    by: str | Cost
    """An attribute with whole numbers or texts, or a model of several (`Cost`)."""
    bounds: tuple[int, ...] = ()
    """The largest value in each bucket, ascending; a sample above the last one is an error. (): a bucket a value."""
    window: int = 4096
    """Positions of the order whose batches are shuffled among each other."""

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        if any(low >= high for low, high in pairwise((-1, *self.bounds))) or len(self.bounds) > MAX_BUCKETS:
            raise OrderError(f"a bucket's bounds ascend from 0 or more, at most {MAX_BUCKETS}, got {self.bounds}")
        if not 1 <= self.window <= MAX_WINDOW:
            raise OrderError(f"a bucket's window must be in 1 .. 2**20 positions, got {self.window}")


class BucketedOrder(WindowedOrder):
    """The epochs of ``base``, an order of samples, in batches of ``global_batch`` samples of one bucket.

    Epochs may differ in length: all have whole batches. Raises OrderError for more than 1,024 buckets.
    """

    use = "bucket"

    def __init__(
        self,
        base: EndlessOrder,
        bucket: Bucket,
        costs: Sequence[NDArray[np.integer]],
        seed: int,
        global_batch: int | None,
    ) -> None:
        if global_batch is None:
            raise OrderError("an order in buckets needs the global batch: it has samples of one bucket")
        bounds = np.array(bucket.bounds, np.int64)
        if not bucket.bounds:
            values = np.unique(np.concatenate([np.unique(each) for each in costs]))
            bounds = values[values >= 0]
        if len(bounds) > MAX_BUCKETS:
            raise OrderError(f"{bucket.by} has {len(bounds)} values, and {MAX_BUCKETS} buckets are allowed: set bounds")
        super().__init__(base, costs, bucket.window, seed, len(bounds))
        self.bucket, self.global_batch, self.num_buckets = bucket, global_batch, len(bounds)
        self._numbers = tuple(np.searchsorted(bounds, each).astype(np.uint16) for each in costs)
        self.identity["global_batch"] = global_batch

    def positions_of(self, totals: NDArray[np.int64]) -> int:
        """Return the number of positions: whole batches, given the samples in each bucket."""
        return int((-(-totals // self.global_batch)).sum()) * self.global_batch

    def count(self, entries: Entries) -> NDArray[np.int64]:
        """Return the number of samples in each bucket."""
        return np.bincount(self.numbers_of(entries), minlength=self.num_buckets)

    def numbers_of(self, entries: Entries) -> NDArray[np.int64]:
        """Return the bucket of each entry, counted in the order of the bounds, or values: int64, shape of entries."""
        return costs_of(self._numbers, entries)

    def epoch(self, epoch: int, /) -> BucketedEpoch:
        """Return one epoch; raise OrderError for an epoch out of range."""
        return BucketedEpoch(self, epoch, self.base.epoch(epoch))

    def check_batch(self, global_batch: int) -> None:
        """Raise WorldError for another global batch than that of the order."""
        if global_batch != self.global_batch:
            raise WorldError(f"an order in buckets of {self.global_batch} has no batches of {global_batch}")


class BucketedEpoch:
    """One epoch in buckets. ``find`` includes the samples that fill up a bucket's last batch."""

    num_lanes: Final = 1

    def __init__(self, order: BucketedOrder, epoch: int, in_order: Epoch) -> None:
        self._order, self._epoch, self._in_order = order, epoch, in_order
        self._before = order.sums(epoch)  # samples of each bucket before each window
        self._batches = self._before // order.global_batch  # its complete batches
        self._batches[-1] = -(-self._before[-1] // order.global_batch)
        self._starts = self._batches.sum(1)
        self._sorted = lru_cache(maxsize=_WINDOWS_KEPT)(self._sort)
        self._batch = lru_cache(maxsize=_BATCHES_KEPT)(self._make)

    def __len__(self) -> int:
        return int(self._starts[-1]) * self._order.global_batch

    def __call__(self, positions: ArrayLike, /) -> NDArray[np.int64]:
        """Return the samples (int64, same shape) at ``positions``; raises OrderError for positions outside."""
        return self.entries(positions).samples

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return entries at ``positions``, with the flag ``bucket``: its number. Raises OrderError for others.

        Not valid: a sample that fills up its bucket's last batch.
        """
        wanted = as_positions(positions, len(self))
        numbers, at = np.divmod(wanted, self._order.global_batch)
        parts, samples, buckets = np.zeros((3, *wanted.shape), np.int64)
        valid = np.zeros(wanted.shape, bool)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            batch = self._batch(number)
            parts[here], samples[here], valid[here] = (column[at[here]] for column in batch[:3])
            buckets[here] = batch.flags["bucket"][0]
        return Entries(parts, samples, valid, {"bucket": buckets})

    def find(self, samples: ArrayLike, part: int = 0, /) -> Shown:
        """Return where ``samples`` (n,) of a part are shown; raises OrderError as the order of the samples does."""
        which, positions = self._in_order.find(samples, part)
        size, found, shown = self._order.global_batch, [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for asked, position in zip(which.tolist(), positions.tolist(), strict=True):
            window, at = divmod(position, self._order.window)
            by_bucket, bounds = self._sorted(window)
            place = int(np.flatnonzero(by_bucket == position)[0])
            bucket = int(np.searchsorted(bounds, place, side="right")) - 1
            number, row = divmod(int(self._before[window, bucket]) + place - int(bounds[bucket]), size)
            window = int(np.searchsorted(self._batches[:, bucket], number, side="right")) - 1
            own = self._batches[window : window + 2]
            at = int(own[1, :bucket].sum() - own[0, :bucket].sum()) + number - int(own[0, bucket])
            batch = int(self._starts[window]) + int(self._shuffle(window).inverse(np.array(at)))
            rows = np.arange(row, size, min(size, int(self._before[-1, bucket]) - number * size))
            found.append(np.full(len(rows), asked))
            shown.append(batch * size + rows)
        return Shown.sorted(np.concatenate(found), np.concatenate(shown))

    def _shuffle(self, window: int) -> KeyedPermutation:
        """Return the order in which the batches of a window are shown: place to number, bucket by bucket."""
        num = int(self._starts[window + 1] - self._starts[window])
        return KeyedPermutation(num, derive_key("order buckets", self._order.seed, self._epoch, window))

    def _sort(self, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions of ``base`` in a window, bucket by bucket, and where each bucket begins among them."""
        order = self._order
        order.count_ahead(self._epoch + 1, order.num_windows - window)
        buckets = order.numbers_of(order.entries_of(self._in_order, window))
        by_bucket = np.argsort(buckets, kind="stable")
        bounds = np.searchsorted(buckets[by_bucket], np.arange(order.num_buckets + 1))
        return by_bucket + window * order.window, bounds

    def _make(self, batch: int) -> Entries:
        """Return the entries of a batch: each column (global_batch,)."""
        size = self._order.global_batch
        window = int(np.searchsorted(self._starts, batch, side="right")) - 1
        number = int(self._shuffle(window)(np.array(batch - self._starts[window])))
        ends = np.cumsum(self._batches[window + 1] - self._batches[window])
        bucket = int(np.searchsorted(ends, number, side="right"))
        first = (int(self._batches[window + 1, bucket]) - int(ends[bucket]) + number) * size
        before = self._before[:, bucket]
        end = min(first + size, int(before[-1]))
        positions = []
        for at in range(int(np.searchsorted(before, first, side="right")) - 1, int(np.searchsorted(before, end))):
            by_bucket, bounds = self._sorted(at)
            start = int(bounds[bucket]) - int(before[at])
            positions.append(by_bucket[max(first, int(before[at])) + start : min(end, int(before[at + 1])) + start])
        parts, samples, valid, _ = self._in_order.entries(np.resize(np.concatenate(positions), size))
        return Entries(parts, samples, valid & (np.arange(size) < end - first), {"bucket": np.full(size, bucket)})
