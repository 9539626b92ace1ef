"""What a span cache hits in a simulation, by all future uses and by LRU, and LRU given to a cache as future uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fuelrail.loaders.storage.cache.future_uses import (
    NEVER,
    FarthestFirst,
    FutureUses,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Hindsight(FutureUses):
    """What LRU goes by, given to the cache as future uses: the longer ago the last use, the later the next one."""

    def __init__(self, sequence: NDArray[np.int64]) -> None:
        super().__init__(
            lambda first, count: sequence[first : first + count],
            2 * len(sequence),
        )
        self._uses = {row: np.flatnonzero(sequence == row) for row in np.unique(sequence).tolist()}

    def next_use(self, rows: NDArray[np.int64], after: int) -> NDArray[np.int64]:
        """Before NEVER by the time of the last use up to ``after``."""
        self._see(after)
        last = [
            int(self._uses[row][np.searchsorted(self._uses[row], after, "right") - 1])
            for row in rows.tolist()
        ]
        return NEVER - 1 - np.array(last, np.int64)


def farthest_first_hits(
    sequence: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int
) -> NDArray[np.bool_]:
    """Which reads hit in a cache of this number of bytes that evicts and admits by all future uses."""
    resident: set[int] = set()
    future_uses = FutureUses(
        lambda first, count: sequence[first : first + count], len(sequence) * 2
    )
    policy = FarthestFirst(future_uses, resident.__contains__)
    policy.rebuild(sequence[:0], 0)
    hits = np.zeros(len(sequence), bool)
    room = capacity
    for now, row in enumerate(sequence.tolist()):
        policy.advance(now)
        hits[now] = row in resident
        if hits[now]:
            continue
        after = policy.next_use(row)
        missing = int(lengths[row]) - room
        victims: dict[int, int] = {}
        while missing > 0 and (victim := policy.pop()) is not None:
            missing -= 0 if victim[0] in victims else int(lengths[victim[0]])
            victims[victim[0]] = victim[1]
            if victim[1] <= after:
                break
        if missing > 0 or any(use <= after for use in victims.values()):
            for gone, use in victims.items():
                policy.add(gone, use)
            continue
        resident.difference_update(victims)
        room += sum(int(lengths[gone]) for gone in victims) - int(lengths[row])
        resident.add(row)
        policy.add(row, after)
    return hits


def lru_hits(
    sequence: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int
) -> NDArray[np.bool_]:
    """Which reads hit in a cache of this number of bytes that evicts what was used longest ago."""
    resident: dict[int, None] = {}
    hits = np.zeros(len(sequence), bool)
    room = capacity
    for now, row in enumerate(sequence.tolist()):
        hits[now] = row in resident
        if hits[now]:
            del resident[row]
        else:
            room -= int(lengths[row])
            while room < 0:
                gone = next(iter(resident))
                del resident[gone]
                room += int(lengths[gone])
        resident[row] = None
    return hits
