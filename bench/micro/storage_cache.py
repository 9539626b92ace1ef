"""Hit rates of the span cache over shuffled epochs, and of the same cache when it evicts as LRU does.

Both in a run (spans fetched, files written, evicted and read) and in a simulation of the same budget and lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.bench.micro.datasets import make_dataset
from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.cache.future_uses import NEVER, FarthestFirst, FutureUses

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from fuelrail.pipeline.format.dataset import Dataset


class HitRate(msgspec.Struct, frozen=True, kw_only=True):
    """Hits over reads, counted in samples and in bytes."""

    by_samples: float
    by_bytes: float


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """From the second epoch on. ``bound_by_bytes`` is what no policy exceeds.

    In shuffled epochs every sample is read once an epoch, so a hit must have lain in the cache when the epoch began;
    and all that lay there is no more than its capacity. By samples the bound is higher: many small ones fit.
    """

    capacity_bytes: int
    epochs: int
    bound_by_bytes: float
    run: HitRate
    simulated: HitRate
    lru_run: HitRate
    lru_simulated: HitRate


class Hindsight(FutureUses):
    """What LRU goes by, given to the cache as future uses: the longer ago the last use, the later the next one."""

    def __init__(self, sequence: NDArray[np.int64]) -> None:
        super().__init__(lambda first, count: sequence[first : first + count], 2 * len(sequence))
        self._uses = {row: np.flatnonzero(sequence == row) for row in np.unique(sequence).tolist()}

    def next_use(self, rows: NDArray[np.int64], after: int) -> NDArray[np.int64]:
        """Before NEVER by the time of the last use up to ``after``."""
        self._see(after)
        last = [int(self._uses[row][np.searchsorted(self._uses[row], after, "right") - 1]) for row in rows.tolist()]
        return NEVER - 1 - np.array(last, np.int64)


def measure_cache(folder: Path, num_samples: int, num_epochs: int = 5) -> HitRates:
    """Hit rates of a cache of a quarter of the dataset's bytes over shuffled epochs."""
    dataset = make_dataset(folder / "source", num_samples, 50, scale=0.02)
    lengths = dataset.index.column("length").astype(np.int64)
    rng = np.random.default_rng(3)
    sequence = np.concatenate([rng.permutation(num_samples) for _ in range(num_epochs)])
    capacity = int(lengths.sum()) // 4

    def sees(first: int, count: int, /) -> NDArray[np.int64]:
        return sequence[first : first + count]

    def rate(hits: NDArray[np.bool_]) -> HitRate:
        later, sizes = hits[num_samples:], lengths[sequence[num_samples:]]
        return HitRate(by_samples=float(later.mean()), by_bytes=float(sizes[later].sum() / sizes.sum()))

    return HitRates(
        capacity_bytes=capacity,
        epochs=num_epochs,
        bound_by_bytes=capacity / int(lengths.sum()),
        run=rate(_run_hits(dataset, sequence, FutureUses(sees, 2 * num_samples), folder / "cache", capacity)),
        simulated=rate(farthest_first_hits(sequence, lengths, capacity)),
        lru_run=rate(_run_hits(dataset, sequence, Hindsight(sequence), folder / "lru", capacity)),
        lru_simulated=rate(lru_hits(sequence, lengths, capacity)),
    )


def _run_hits(
    dataset: Dataset, sequence: NDArray[np.int64], future_uses: FutureUses, cache_dir: Path, capacity: int
) -> NDArray[np.bool_]:
    """Which reads the cache answered."""
    storage = open_storage(dataset, cache_dir=cache_dir, cache_size=capacity)
    session = storage.session(future_uses, 1)
    hits = [0]
    for index in sequence.tolist():
        session.request([(index, dataset.index.row(index))])[0]()
        hits.append(storage.stats().cache_hits)
    storage.close()
    return np.diff(hits).astype(bool)


def farthest_first_hits(sequence: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int) -> NDArray[np.bool_]:
    """Which reads hit in a cache of this number of bytes that evicts and admits by all future uses."""
    resident: set[int] = set()
    future_uses = FutureUses(lambda first, count: sequence[first : first + count], len(sequence) * 2)
    policy = FarthestFirst(future_uses, resident.__contains__)
    policy.rebuild(sequence[:0], 0)
    hits = np.zeros(len(sequence), bool)
    room = capacity
    for now, row in enumerate(sequence.tolist()):
        policy.advance(now)
        hits[now] = row in resident
        if hits[now]:
            continue
        after, wanted = policy.next_use(row), int(lengths[row]) - room
        victims: dict[int, int] = {}
        while wanted > 0 and (victim := policy.pop()) is not None:
            wanted -= 0 if victim[0] in victims else int(lengths[victim[0]])
            victims[victim[0]] = victim[1]
            if victim[1] <= after:
                break
        if wanted > 0 or any(use <= after for use in victims.values()):
            for gone, use in victims.items():
                policy.add(gone, use)
            continue
        resident.difference_update(victims)
        room += sum(int(lengths[gone]) for gone in victims) - int(lengths[row])
        resident.add(row)
        policy.add(row, after)
    return hits


def lru_hits(sequence: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int) -> NDArray[np.bool_]:
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
