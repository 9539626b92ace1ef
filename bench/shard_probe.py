"""Whether reads of different shards add up: each file by itself may be what is slow, and then more files help."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fuelrail.loaders.storage import open_storage
from fuelrail.pipeline.dataset import open_dataset

if TYPE_CHECKING:
    from fuelrail.loaders.storage import Storage
    from fuelrail.pipeline.dataset import Dataset

_NUM_THREADS = 8


def shard_scaling(location: str, split: str, *, storage: str = "auto", seconds: float = 1.5) -> float | None:
    """How many times as fast 8 readers are on all shards of a split as on one of them; None with a single shard.

    It reads past any cache of ours; raises what reading raises.
    """
    dataset = open_dataset(location)
    entry = dataset.split(split)
    if entry.num_shards < 2:
        return None
    rows = range(entry.first_sample, entry.first_sample + entry.num_samples)
    shard_of = dataset.index.column("shard", rows.start, rows.stop)
    one = [row for row, shard in zip(rows, shard_of.tolist(), strict=True) if shard == shard_of[0]]
    # A sample of each shard in turns.
    stride = max(1, len(rows) // entry.num_shards)
    spread = [rows[at] for first in range(stride) for at in range(first, len(rows), stride)]
    backend = open_storage(dataset, storage, verify=False)
    try:
        alone = _rate(dataset, backend, one, seconds)
        return _rate(dataset, backend, spread, seconds) / alone
    finally:
        backend.close()


def _rate(dataset: Dataset, storage: Storage, rows: list[int], seconds: float) -> float:
    """Bytes a second."""
    numbers, started_s = itertools.cycle(rows), time.perf_counter()

    def read() -> int:
        num_bytes = 0
        while time.perf_counter() - started_s < seconds:
            row = next(numbers)
            num_bytes += len(storage.span(row, dataset.index.row(row)))
        return num_bytes

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        total = sum(future.result() for future in [pool.submit(read) for _ in range(_NUM_THREADS)])
    return total / (time.perf_counter() - started_s)
