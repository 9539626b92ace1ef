"""Buckets: each global batch has samples of one bucket, such as texts of about one length, or one
rig.

A bucket's samples come in the order of the epoch, and each ``global_batch`` of them are a batch.
The batches that are complete at the end of a window of the epoch come in a shuffled order, then
those of the next window. At the end of an epoch each bucket's rest makes a batch, filled up with
samples of its own that are flagged as not valid.

Batches depend on seed, epoch, the selected samples and the global batch only. Of each window the
number of samples in each bucket is kept (:mod:`fuelrail.pipeline.order.regroup`), so any batch is
found without those before it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.cost import Cost
from fuelrail.pipeline.order.epoch import Entries, Occurrences
from fuelrail.pipeline.order.pack import WindowLength
from fuelrail.pipeline.order.permutation import as_positions
from fuelrail.pipeline.order.regroup import (
    RegroupedEpoch,
    WindowedOrder,
    costs_of,
    joined,
)
from fuelrail.pipeline.settings import Settings, check_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.dtypes import I64
    from fuelrail.pipeline.order.epoch import EndlessOrder

MAX_BUCKETS: Final = 1024
_BATCHES_KEPT: Final = 4


class Bucket(Settings, frozen=True):
    """Make each global batch of samples of one bucket, so that they have one shape, or are
    padded by little.
    """

    by: str | Cost
    """An attribute with whole numbers or texts, or a model of several (`Cost`)."""
    bounds: tuple[int, ...] = ()
    """The largest value in each bucket, ascending; a sample above the last one is an error.

    (): a bucket a value.
    """
    window: WindowLength = 4096
    """Positions of the order whose batches are shuffled among each other."""

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        is_ascending = all(low < high for low, high in pairwise((-1, *self.bounds)))
        if not is_ascending or len(self.bounds) > MAX_BUCKETS:
            raise OrderError(
                f"a bucket's bounds ascend from 0 or more, at most {MAX_BUCKETS}, got {self.bounds}"
            )


class BucketedOrder(WindowedOrder):
    """The epochs of ``base``, an order of samples, in batches of ``global_batch`` samples of one
    bucket.

    Epochs may differ in length: all have whole batches. Raises OrderError for more than 1,024
    buckets.
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
            raise OrderError(
                "an order in buckets needs the global batch: it has samples of one bucket"
            )
        bounds = np.array(bucket.bounds, np.int64)
        if not bucket.bounds:
            values_of_parts = [np.unique(part_costs) for part_costs in costs]
            values = np.unique(np.concatenate(values_of_parts))
            bounds = values[values >= 0]
        if len(bounds) > MAX_BUCKETS:
            raise OrderError(
                f"{bucket.by} has {len(bounds)} values, and {MAX_BUCKETS} buckets are "
                "allowed: set bounds"
            )
        super().__init__(
            base,
            costs,
            window=bucket.window,
            seed=seed,
            num_kept=len(bounds),
        )
        self.bucket = bucket
        self.global_batch = global_batch
        self.num_buckets = len(bounds)
        self._buckets = []
        for part_costs in costs:
            buckets = np.searchsorted(bounds, part_costs)
            self._buckets.append(buckets.astype(np.uint16))
        self.identity["global_batch"] = global_batch

    def positions_of(self, totals: I64) -> int:
        """Return the number of positions: whole batches, given the samples in each bucket."""
        num_batches = -(-totals // self.global_batch)
        return int(num_batches.sum()) * self.global_batch

    def count(self, groups: I64, num_groups: int) -> I64:
        """Return the number of samples in each bucket."""
        return np.bincount(groups, minlength=num_groups)

    def groups(self, entries: Entries) -> tuple[I64, int]:
        """Return the bucket of each entry, counted in the order of the bounds, or values, and
        how many there are.
        """
        buckets = costs_of(self._buckets, entries)
        return buckets, self.num_buckets

    def epoch(self, epoch: int, /) -> BucketedEpoch:
        """Return one epoch; raise OrderError for an epoch out of range."""
        return BucketedEpoch(self, epoch)


class BucketedEpoch(RegroupedEpoch):
    """One epoch in buckets."""

    def __init__(self, order: BucketedOrder, epoch: int) -> None:
        self._size = order.global_batch
        self._before = order.sums(epoch)  # samples of each bucket before each window
        self._batches = self._before // self._size  # its complete batches
        self._batches[-1] = -(-self._before[-1] // self._size)
        super().__init__(order, epoch, self._batches.sum(1))
        self._batch = lru_cache(maxsize=_BATCHES_KEPT)(self._make)

    def __len__(self) -> int:
        return int(self._starts[-1]) * self._size

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return entries at ``positions``, with the flag ``bucket``: its number.

        Raises OrderError for others.

        Not valid: a sample that fills up its bucket's last batch.
        """
        places = as_positions(positions, len(self))
        numbers, batch_rows = np.divmod(places, self._size)
        parts = np.empty_like(places)
        samples = np.empty_like(places)
        buckets = np.empty_like(places)
        valid = np.empty(places.shape, bool)
        for number in np.unique(numbers).tolist():
            mask = numbers == number
            bucket, batch = self._batch(number)
            buckets[mask] = bucket
            rows = batch_rows[mask]
            index = rows % len(batch.samples)
            parts[mask] = batch.parts[index]
            samples[mask] = batch.samples[index]
            valid[mask] = batch.valid[index] & (index == rows)
        return Entries(
            parts,
            samples,
            valid,
            flags={"bucket": buckets},
        )

    def find(self, _samples: ArrayLike, _part: int = 0, /) -> Occurrences:
        """Raise OrderError: it is for runs with a ledger, which refuses buckets."""
        raise OrderError("an order in buckets does not look up where samples are shown")

    def _make(self, batch: int) -> tuple[int, Entries]:
        """Return the bucket of a batch, and its samples."""
        window, number = self._locate(batch)
        batches_before = self._batches[window + 1]
        ends = np.cumsum(batches_before - self._batches[window])
        bucket = int(np.searchsorted(ends, number, side="right"))
        number_in_bucket = int(batches_before[bucket] - ends[bucket]) + number
        # The batch's places among the samples of its bucket.
        before = self._before[:, bucket]
        start = number_in_bucket * self._size
        end = min(start + self._size, int(before[-1]))
        places = np.arange(start, end)
        windows = np.searchsorted(before, places, side="right") - 1
        pieces = []
        for window_number in np.unique(windows).tolist():
            members, bounds = self._members(window_number)
            places_in_window = places[windows == window_number] - before[window_number]
            pieces.append((members, bounds[bucket] + places_in_window))
        return bucket, joined(pieces)
