"""Grain's datasets, and its iterator for another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grain
from grain.experimental import ElasticIterator

from fuelrail.bench.peers.stacks.stack import Stack


def read_row(row: int) -> int:
    """Return a row; workers find it by its name."""
    return int(row)


class GrainStack(Stack):
    """A MapDataset in slices of the ranks, with worker processes."""

    packages = ("grain",)
    way = "get_state() and set_state() of the iterator of each rank"
    offers = frozenset({"mix"})

    def rows(self, epoch: int) -> Any:
        """Return the rows of all ranks, shuffled."""
        setup = self.setup
        parts = setup.parts if setup.is_mixed else [range(setup.rows)]
        datasets = []
        for part in parts:
            dataset = grain.MapDataset.source(list(part))
            dataset = dataset.shuffle(seed=3 + epoch).map(read_row)
            datasets.append(dataset)
        if setup.is_mixed:
            return grain.MapDataset.mix(datasets, [2, 1])
        return datasets[0]

    def processes(self) -> Any:
        """Return the options of worker processes; None: there are none."""
        num_workers = self.setup.workers
        if not num_workers:
            return None
        return grain.MultiprocessingOptions(num_workers=num_workers)

    def batches(self, epoch: int) -> Any:
        """Return this rank's batches of an epoch."""
        setup = self.setup
        rows = self.rows(epoch)[self.rank :: setup.ranks]
        batches = rows.to_iter_dataset()
        batches = batches.batch(setup.batch, drop_remainder=setup.drop_last)
        processes = self.processes()
        if processes is not None:
            batches = batches.mp_prefetch(processes)
        return batches

    def open(self) -> None: ...

    def epoch(self, epoch: int) -> Iterable[Any]:
        self.iterator = iter(self.batches(epoch))
        if self.job.step:
            self.iterator.set_state(self.saved)
        return self.iterator  # type: ignore[no-any-return]

    def state(self) -> Any:
        return self.iterator.get_state()

    def evaluate(self) -> None:
        for _ in self.batches(1000):
            pass


class GrainElastic(GrainStack):
    """ElasticIterator, which divides a global batch."""

    way = "get_state() and set_state() of ElasticIterator, any rank's state for all"
    is_shared = True

    def batches(self, epoch: int) -> Any:
        """Return this rank's batches of an epoch."""
        setup = self.setup
        share = grain.sharding.ShardOptions(shard_index=self.rank, shard_count=setup.ranks)
        return ElasticIterator(
            self.rows(epoch),
            setup.global_batch,
            share,
            multiprocessing_options=self.processes(),
        )
