"""webdataset, which has no state."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import webdataset

from fuelrail.bench.peers.stacks.stack import Setup, Stateless


class WebdatasetStack(Stateless):
    """Tar shards, split by node and worker."""

    packages = ("webdataset", "torch")
    way = "no state, and no number of the epoch; it begins again, with detshuffle=True"
    offers = frozenset({"buffer", "mix"})

    @staticmethod
    def store(setup: Setup, folder: Path) -> None:
        for number, part in enumerate(setup.parts):
            for shard, rows in enumerate(setup.shards(part)):
                path = folder / f"{number}-{shard:03d}.tar"
                with webdataset.TarWriter(str(path)) as writer:
                    for row in rows:
                        sample = {"__key__": f"{row:05d}", "txt": str(row)}
                        writer.write(sample)

    def dataset(self, pattern: str, *, shuffle: bool = True) -> Any:
        """Return a dataset of some shards."""
        files = sorted(map(str, self.job.folder.glob(pattern)))
        rows = webdataset.WebDataset(
            files,
            nodesplitter=webdataset.split_by_node,
            shardshuffle=len(files) if shuffle else False,
            detshuffle=shuffle,
            seed=3,
        )
        if shuffle and self.setup.buffer:
            rows = rows.shuffle(self.setup.buffer)
        return rows

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        rows = self.dataset("*.tar", shuffle=shuffle)
        if setup.is_mixed:
            random.seed(3)  # which RandomMix draws from
            parts = [self.dataset("0-*.tar"), self.dataset("1-*.tar")]
            mix = webdataset.RandomMix(parts, [2 / 3, 1 / 3])
            rows = webdataset.DataPipeline(mix)
        batching = webdataset.batched(
            setup.batch,
            collation_fn=list,
            partial=not setup.drop_last,
        )
        batches = rows.compose(batching)
        return webdataset.WebLoader(batches, batch_size=None, num_workers=setup.workers)

    def epoch(self, _epoch: int) -> Iterable[Any]:
        for batch in self.train_loader:
            yield [int(sample["__key__"]) for sample in batch]
