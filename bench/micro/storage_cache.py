"""Hit rates of the span cache over shuffled epochs, beside the optimum and LRU in a simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.bench.micro.blank_dataset import make_dataset
from fuelrail.loaders.foresight import FarthestFirst, Foresight
from fuelrail.loaders.storage import open_storage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """Hits over reads from the second epoch on."""

    capacity_of_dataset: float
    epochs: int
    run: float
    optimum: float
    lru: float


def measure_cache(folder: Path, num_samples: int, num_epochs: int = 5) -> HitRates:
    """Hit rates of a cache of a quarter of the samples over shuffled epochs."""
    dataset = make_dataset(folder / "source", num_samples, 50, scale=0.02)
    rng = np.random.default_rng(3)
    sequence = np.concatenate([rng.permutation(num_samples) for _ in range(num_epochs)])
    capacity = num_samples // 4
    budget = int(dataset.index.column("length").mean() * capacity)
    storage = open_storage(dataset, cache_dir=folder / "cache", cache_size=budget)
    session = storage.session(Foresight(lambda first, count: sequence[first : first + count], 2 * num_samples), 1)
    warm = storage.stats()
    for number, index in enumerate(sequence.tolist()):
        session.request([(index, dataset.index.row(index))])[0]()
        if number == num_samples - 1:
            warm = storage.stats()
    done = storage.stats()
    later = len(sequence) - num_samples
    return HitRates(
        capacity_of_dataset=capacity / num_samples,
        epochs=num_epochs,
        run=(done.cache_hits - warm.cache_hits) / later,
        optimum=1 - (farthest_first_misses(sequence.tolist(), capacity) - num_samples) / later,
        lru=1 - (lru_misses(sequence.tolist(), capacity) - num_samples) / later,
    )


def farthest_first_misses(sequence: Sequence[int], capacity: int) -> int:
    """Misses of one that evicts and admits by our foresight."""
    resident: set[int] = set()
    rows = np.array(sequence)
    foresight = Foresight(lambda first, count: rows[first : first + count], len(sequence) * 2)
    policy = FarthestFirst(foresight, resident.__contains__)
    policy.rebuild(rows[:0], 0)
    misses = 0
    for now, row in enumerate(sequence):
        policy.advance(now)
        if row in resident:
            continue
        misses += 1
        after = policy.next_use(row)
        if len(resident) == capacity:
            victim = policy.pop()
            assert victim is not None
            if victim[1] <= after:
                policy.add(*victim)
                continue
            resident.remove(victim[0])
        resident.add(row)
        policy.add(row, after)
    return misses


def lru_misses(sequence: Sequence[int], capacity: int) -> int:
    """Misses of a cache of so many equal samples that evicts what was used longest ago."""
    resident: dict[int, None] = {}
    misses = 0
    for row in sequence:
        if row in resident:
            del resident[row]
        else:
            misses += 1
            if len(resident) == capacity:
                del resident[next(iter(resident))]
        resident[row] = None
    return misses
