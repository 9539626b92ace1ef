"""Compute when each sample is used next, so that a full cache evicts the one whose next use is
farthest away.

Belady (IBM Systems Journal 5, 1966): evicting what is needed last gives the fewest misses of any
policy. A loader can do so because it knows its order for all epochs. Time here counts uses: time t
is the t-th sample that any rank of this host takes from the start of an iteration.

A sample that is needed later than everything in the cache is not admitted: that is the optimum,
too, when storage may be read past the cache.
"""

from __future__ import annotations

import collections
import heapq
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from fuelrail.pipeline.order.batching import EVERY_STEP, Walk, World

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I64


NEVER: Final = int(np.iinfo(np.int64).max)
"""Not used again within the horizon."""
MAX_HORIZON: Final = 1 << 22
"""Number of future uses held at most: 8 bytes each."""
FOREIGN: Final = -1
"""Row of a use of another dataset."""
_TIME_BITS: Final = 32
_TIME_MASK: Final = (1 << _TIME_BITS) - 1
_NUMBERS_KEPT: Final = 1 << 16


class RequestNumbers:
    """Map a dataset's k-th request to its number among the requests of all mixed datasets.

    `build_future_uses` and the sessions of layers need it. k must ascend: numbers before are
    dropped.
    """

    def __init__(self) -> None:
        self._first = 0
        self._numbers: collections.deque[int] = collections.deque()

    def note(self, number: int) -> None:
        """Record the number of this dataset's next request."""
        self._numbers.append(number)
        if len(self._numbers) > _NUMBERS_KEPT:  # none is looked up: all are found in the cache
            self._numbers.popleft()
            self._first += 1

    def __call__(self, k: int) -> int:
        """Return the number of the k-th request."""
        while self._first < k and len(self._numbers) > 1:
            self._numbers.popleft()
            self._first += 1
        return self._numbers[0]


class Coming(Protocol):
    """The coming samples: rows used at times ``first`` to ``first + count - 1``; fewer at the
    end of a sequence.
    """

    def __call__(self, first: int, count: int, /) -> I64:
        """Return rows, int64; FOREIGN for a use of another dataset."""


class FutureUses:
    """Next uses over a sliding horizon of the coming rows.

    ``horizon`` uses are held, sorted by row and time; when half of them are past, the next ones are
    looked up. Where it is twice an epoch (and up to 4 million uses it is) every sample's next use
    is always known. ``time_of(k)`` is the time of this rank's k-th sample, ``base`` the first time
    of the horizon.
    """

    def __init__(
        self,
        coming: Coming,
        horizon: int,
        time_of: Callable[[int], int] = lambda k: k,
    ) -> None:
        self._coming = coming
        self.time_of = time_of
        self._horizon = max(2, min(horizon, MAX_HORIZON))
        self.base = 0
        self._rows: I64 | None = None
        self._keys: I64 = np.empty(0, np.int64)

    def next_use(self, rows: I64, after: int) -> I64:
        """Time of each row's next use after time ``after``; NEVER where not within the horizon."""
        self._see(after)
        num_keys = len(self._keys)
        if not num_keys:
            return np.full(len(rows), NEVER)
        # Keys are (row, time) in one integer, sorted: the next one at or above (row, after + 1) is
        # the answer.
        earliest = (rows << _TIME_BITS) | (after + 1 - self.base)
        places = np.searchsorted(self._keys, earliest)
        keys = self._keys[np.minimum(places, num_keys - 1)]
        is_known = (places < num_keys) & (keys >> _TIME_BITS == rows)
        offsets = keys & _TIME_MASK
        times: I64 = np.where(is_known, self.base + offsets, NEVER)
        return times

    def used(self, first: int, end: int) -> I64:
        """Return the rows used at times ``first`` to ``end - 1``, without times before the
        horizon.
        """
        self._see(first)
        assert self._rows is not None
        start = max(0, first - self.base)
        stop = max(0, end - self.base)
        rows = self._rows[start:stop]
        rank_rows: I64 = rows[rows != FOREIGN]
        return rank_rows

    def of_other_rows(
        self,
        rows_of: Callable[[I64], I64],
        number_of: Callable[[int], int] | None,
    ) -> FutureUses:
        """Return the uses of the rows that go with these, at the same times; ``rows_of`` gives
        FOREIGN for none.

        ``number_of(k)`` is the number, among the requests for these rows, of the k-th one for the
        others; None: k.
        """

        def coming(first: int, count: int, /) -> I64:
            return rows_of(self._coming(first, count))

        return FutureUses(
            coming,
            self._horizon,
            self.time_of if number_of is None else lambda k: self.time_of(number_of(k)),
        )

    def _see(self, now: int) -> None:
        if self._rows is not None and now - self.base <= self._horizon // 2:
            return
        self.base = max(0, now)
        self._rows = self._coming(self.base, self._horizon)
        times = np.arange(len(self._rows))
        self._keys = np.sort((self._rows << _TIME_BITS) | times)


def coming_rows(
    rows_of: Callable[[int, I64], I64],
    walk: Walk,
    ranks: range,
    per_position: int = 1,
) -> tuple[Coming, int]:
    """Return the rows that ``ranks`` (of the data-parallel world, in step) take on a walk, and the
    number in each step.

    Step by step, and in each step rank by rank; epoch after epoch. ``rows_of`` gives the rows that
    are read for positions of an epoch, ``per_position`` of them for each, in the order of reading.
    """
    per_step = len(walk.batching.rows_of(ranks)) * per_position

    def coming(first: int, count: int, /) -> I64:
        step, skip = divmod(first, per_step)
        num_steps = -(-(skip + count) // per_step)
        parts = [np.empty(0, np.int64)]
        for epoch, positions in walk.positions(step, num_steps, ranks):
            parts.append(rows_of(epoch, positions))
        rows = np.concatenate(parts)
        return rows[skip : skip + count]

    return coming, per_step


class Range(NamedTuple):
    """The rows of one dataset among the rows of several, numbered together: ``base`` ..

    ``base + size - 1``.

    ``number_of(k)`` is the number, among all requests, of this dataset's k-th one on this rank.
    """

    base: int
    size: int
    number_of: Callable[[int], int]


def build_future_uses(
    rows_of: Callable[[int, I64], I64],
    walk: Walk,
    per_position: int = 1,
    only: Range | None = None,
) -> tuple[FutureUses, int]:
    """Return the uses of this host's ranks on a walk, and the number in each step; see
    :func:`coming_rows`.

    The uses of all processes that take turns at the rank's steps are included; ``walk.share`` is
    this one's. ``only`` restricts them to one dataset's rows among those of several, by its own
    numbers, at unchanged times.
    """
    batching = walk.batching
    ranks = ranks_on_host(batching.world)
    walk_of_all = replace(walk, share=EVERY_STEP)
    coming, uses_per_step = coming_rows(rows_of, walk_of_all, ranks, per_position)
    first_row = batching.rows_of(ranks).start
    begin = (batching.rows.start - first_row) * per_position
    own_per_step = batching.rank_batch * per_position

    def time_of(k: int) -> int:
        number = k if only is None else only.number_of(k)
        own_step, place = divmod(number, own_per_step)
        return walk.number(own_step) * uses_per_step + begin + place

    def own_rows(first: int, count: int, /) -> I64:
        assert only is not None
        rows = coming(first, count) - only.base
        rows[(rows < 0) | (rows >= only.size)] = FOREIGN
        return rows

    horizon = 2 * batching.epoch_length * per_position
    return FutureUses(coming if only is None else own_rows, horizon, time_of), uses_per_step


def ranks_on_host(world: World) -> range:
    """Return the data-parallel ranks that share this host, from the launcher's LOCAL_RANK and
    LOCAL_WORLD_SIZE.

    All ranks where these do not fit the world (model parallelism, no launcher): too many cost hits,
    not correctness.
    """
    try:
        size = int(os.environ["LOCAL_WORLD_SIZE"])
        rank = int(os.environ["LOCAL_RANK"])
        fits = int(os.environ["WORLD_SIZE"]) == world.size and 0 <= rank < size
    except (KeyError, ValueError):
        return range(world.size)
    first = world.rank - rank
    if fits and 0 <= first <= world.size - size:
        return range(first, first + size)
    return range(world.size)


class FarthestFirst:
    """The residents of a cache, the one with the farthest next use first.

    A use is one sample that a rank of this host takes; time counts uses. ``lag``: ranks run apart,
    so a use counts as made when the latest rank is that many uses further.

    The caller calls :meth:`rebuild` at first and when the horizon has moved, :meth:`add` for each
    sample admitted, and :meth:`advance` with time, because a resident's use moves its next use.
    ``now`` is the latest time given.
    """

    def __init__(
        self,
        future_uses: FutureUses,
        is_resident: Callable[[int], bool],
        lag: int = 0,
    ) -> None:
        self._future_uses = future_uses
        self._is_resident = is_resident
        self._lag = lag
        self.now = 0
        self._walked = 0
        self._stock_base = -1
        # The stock, nearest use first; only the first `_left` of it are still there.
        self._rows = self._times = np.empty(0, np.int64)
        self._left = 0
        self._heap: list[tuple[int, int]] = []

    @property
    def wants_stock(self) -> bool:
        """Whether :meth:`rebuild` is due: at first, and when the horizon has moved."""
        return self._stock_base != self._future_uses.base

    def rebuild(self, rows: I64, now: int) -> None:
        """Sort all residents by their next use after time ``now``."""
        self.now = self._walked = now
        times = self._future_uses.next_use(rows, self.now)
        nearest_first = np.argsort(times, kind="stable")
        self._rows = rows[nearest_first]
        self._times = times[nearest_first]
        self._left = len(rows)
        self._heap.clear()
        self._stock_base = self._future_uses.base

    def add(self, row: int, next_use: int) -> None:
        """Add a sample admitted, or a resident whose next use moved."""
        heapq.heappush(self._heap, (-next_use, row))

    def advance(self, now: int) -> None:
        """Move the time to ``now``.

        Residents that were used up to ``lag`` uses ago are used next at another time.
        """
        if now <= self.now:
            return
        self.now = now
        end = now + 1 - self._lag
        if end > self._walked:
            for row in self._future_uses.used(self._walked, end).tolist():
                if self._is_resident(row):
                    self.add(row, self.next_use(row))
            self._walked = end

    def next_use(self, row: int) -> int:
        """Return when a row is used next."""
        times = self._future_uses.next_use(np.array([row]), self.now)
        return int(times[0])

    def pop(self) -> tuple[int, int] | None:
        """Take out the resident with the farthest next use: (row, next use); None where no resident
        is known.

        One that was both admitted and used may come twice.
        """
        while self._left or self._heap:
            heap_time = -self._heap[0][0] if self._heap else -1
            is_in_stock = self._left > 0 and self._times[self._left - 1] >= heap_time
            if is_in_stock:
                self._left -= 1
                stated = int(self._times[self._left])
                row = int(self._rows[self._left])
            else:
                negative, row = heapq.heappop(self._heap)
                stated = -negative
            if not self._is_resident(row):
                continue
            actual = self.next_use(row)
            if actual == stated:
                return row, actual
            if actual < stated:  # it came into sight
                self.add(row, actual)
            # Else it was used since, and is in the heap with its new time.
        return None
