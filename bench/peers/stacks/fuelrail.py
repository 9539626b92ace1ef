"""Fuelrail's order as a sampler of torch's DataLoader, and its own DataLoader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fuelrail as fr
from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import Setup, Stack


class OrderStack(Stack):
    """`fr.order.BatchSampler` in torch's DataLoader."""

    packages = ("fuelrail", "torch")
    way = "state_dict() and load_state_dict() of the counted loader (docs/guides/your-dataset.md)"
    offers = frozenset({"mix"})
    is_shared = True

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        first, second = setup.parts
        sampler = fr.order.BatchSampler(
            {"first": len(first), "second": len(second)} if setup.is_mixed else setup.rows,
            fr.OrderSpec(kind="shuffled" if shuffle else "sequential", seed=3),
            global_batch=setup.global_batch,
            world=fr.World(self.rank, setup.ranks),
            drop_last=setup.drop_last,
            mix={"first": 2, "second": 1} if setup.is_mixed else None,
        )
        rows = Rows(range(setup.rows))
        return sampler.count(
            torch.utils.data.DataLoader(rows, batch_sampler=sampler, num_workers=setup.workers)
        )

    def restore(self) -> None:
        super().restore()
        self.job.epoch = self.train_loader.state_dict()["epoch"]


class LoaderStack(OrderStack):
    """`fr.DataLoader` on a Fuelrail dataset of small images."""

    way = "state_dict() and load_state_dict() of the loader (docs/guides/quickstart.md)"

    @staticmethod
    def store(setup: Setup, folder: Path) -> None:
        from PIL import Image

        parts = zip(("first", "second"), setup.parts, strict=True)
        for name, rows in parts if setup.is_mixed else [("all", range(setup.rows))]:
            images = folder / f"{name}-images"
            (images / "class").mkdir(parents=True)
            for row in rows:
                picture = np.full((16, 16, 3), row % 256, np.uint8)
                Image.fromarray(picture).save(images / "class" / f"{row:05d}.jpg")
            fr.shard(f"imagefolder:{images}", out=folder / name)

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        folder = self.job.folder
        mixed = {name: folder / name for name in ("first", "second")}
        return fr.DataLoader(
            mixed if setup.is_mixed else folder / "all",
            setup.batch,
            shuffle=shuffle,
            seed=3,
            drop_last=setup.drop_last,
            num_workers=max(setup.workers, 1),
            mix={"first": 2, "second": 1} if setup.is_mixed else None,
            world=fr.World(self.rank, setup.ranks),
        )

    def epoch(self, epoch: int) -> Iterable[Any]:
        for batch in super().epoch(epoch):
            yield [int(key.split("-")[1]) for key in batch["sample_key"]]
