"""Hugging Face datasets, streamed from Parquet files through torchdata's loader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from fuelrail.bench.peers.stacks.stack import Setup, Stack


class HubStreaming(Stack):
    """An IterableDataset whose state is in that of the loader."""

    packages = ("datasets", "torchdata", "torch")
    way = (
        "state_dict() and load_state_dict() of StatefulDataLoader, set_epoch(); in stored order "
        "without a buffer"
    )
    offers = frozenset({"buffer", "mix"})

    @staticmethod
    def store(setup: Setup, folder: Path) -> None:
        for number, part in enumerate(setup.parts):
            for shard, rows in enumerate(setup.shards(part)):
                table = pa.table({"index": list(rows)})
                pq.write_table(table, folder / f"{number}-{shard:03d}.parquet")

    def dataset(self, pattern: str) -> Any:
        """Return a streamed dataset of some files."""
        files = sorted(map(str, self.job.folder.glob(pattern)))
        return datasets.load_dataset(
            "parquet",
            data_files=files,
            split="train",
            streaming=True,
            cache_dir=str(self.job.folder / "cache"),
        )

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        if setup.is_mixed:
            parts = [self.dataset("0-*.parquet"), self.dataset("1-*.parquet")]
            rows = datasets.interleave_datasets(parts, probabilities=[2 / 3, 1 / 3], seed=3)
        else:
            rows = self.dataset("*.parquet")
        if shuffle and setup.buffer:
            rows = rows.shuffle(seed=3, buffer_size=setup.buffer)
        self.rows = split_dataset_by_node(rows, self.rank, setup.ranks)
        return StatefulDataLoader(
            self.rows,
            setup.batch,
            num_workers=setup.workers,
            drop_last=setup.drop_last,
        )

    def epoch(self, epoch: int) -> Iterable[Any]:
        self.train_loader.dataset.set_epoch(epoch)
        return self.train_loader  # type: ignore[no-any-return]
