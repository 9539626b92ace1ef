"""Megatron Energon over a prepared webdataset."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import webdataset
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
from megatron.energon.flavors import BaseWebdatasetFactory

from fuelrail.bench.peers.stacks.stack import NotRun, Setup, Stack

TYPE = """\
sample_type:
  __module__: megatron.energon
  __class__: TextSample
field_map:
  text: txt
"""


class EnergonStack(Stack):
    """Each rank's state; the training dataset has no end, so steps are counted."""

    packages = ("megatron-energon", "torch")
    way = "save_state_rank() and restore_state_rank() of the savable loader"
    offers = frozenset({"buffer"})

    @staticmethod
    def store(setup: Setup, folder: Path) -> None:
        names = []
        for shard, rows in enumerate(setup.shards(range(setup.rows))):
            name = f"{shard:03d}.tar"
            names.append(name)
            with webdataset.TarWriter(str(folder / name)) as writer:
                for row in rows:
                    sample = {"__key__": f"{row:05d}", "txt": str(row)}
                    writer.write(sample)
        BaseWebdatasetFactory.prepare_dataset(
            folder,
            names,
            split_parts_ratio=[("train", 1.0)],
            workers=1,
        )
        description = folder / ".nv-meta" / "dataset.yaml"
        description.write_text(TYPE)

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        config = WorkerConfig(
            rank=self.rank,
            world_size=setup.ranks,
            num_workers=setup.workers,
            seed_offset=3,
        )
        rows = get_train_dataset(
            self.job.folder,
            worker_config=config,
            batch_size=setup.batch,
            batch_drop_last=setup.drop_last,
            shuffle_buffer_size=(shuffle and setup.buffer) or None,
            max_samples_per_sequence=None,
        )
        return get_savable_loader(rows)

    def open(self) -> None:
        super().open()
        self.iterator = iter(self.train_loader)

    def restore(self) -> None:
        if len(self.job.states) != self.setup.ranks:
            raise NotRun("only by a tool, `energon checkpoint redist`, which was not run")
        self.train_loader.restore_state_rank(self.job.state)

    def epoch(self, _epoch: int) -> Iterable[Any]:
        for batch in itertools.islice(self.iterator, self.job.steps_left):
            yield [int(text) for text in batch.text]

    def state(self) -> Any:
        return self.train_loader.save_state_rank()

    def evaluate(self) -> None:
        for _ in itertools.islice(self.loader(), 5):
            pass
