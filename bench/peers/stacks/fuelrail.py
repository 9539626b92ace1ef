"""Fuelrail's order as a sampler of torch's DataLoader, and its own DataLoader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import fuelrail as fr
from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import Setup, Stack

_MIX: Final = {"first": 2, "second": 1}
"""The weights of the datasets of a mix."""


class OrderStack(Stack):
    """`fr.order.BatchSampler` in torch's DataLoader."""

    packages = ("fuelrail", "torch")
    way = "state_dict() and load_state_dict() of the counted loader (docs/guides/your-dataset.md)"
    offers = frozenset({"mix"})
    is_shared = True

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        sizes: Any = setup.rows
        weights = None
        if setup.is_mixed:
            first, second = setup.parts
            sizes = {"first": len(first), "second": len(second)}
            weights = _MIX
        order = fr.OrderSpec(kind="shuffled" if shuffle else "sequential", seed=3)
        sampler = fr.order.BatchSampler(
            sizes,
            order,
            global_batch=setup.global_batch,
            world=fr.World(self.rank, setup.ranks),
            drop_last=setup.drop_last,
            mix=weights,
        )
        loader = torch.utils.data.DataLoader(
            Rows(range(setup.rows)),
            batch_sampler=sampler,
            num_workers=setup.workers,
        )
        return sampler.count(loader)

    def restore(self) -> None:
        super().restore()
        state = self.train_loader.state_dict()
        self.job.epoch = state["epoch"]


class LoaderStack(OrderStack):
    """`fr.DataLoader` on a Fuelrail dataset of small images."""

    way = "state_dict() and load_state_dict() of the loader (docs/guides/quickstart.md)"

    @staticmethod
    def store(setup: Setup, folder: Path) -> None:
        from PIL import Image

        datasets = {"all": range(setup.rows)}
        if setup.is_mixed:
            datasets = dict(zip(_MIX, setup.parts, strict=True))
        for name, rows in datasets.items():
            images = folder / f"{name}-images"
            images_of_class = images / "class"
            images_of_class.mkdir(parents=True)
            for row in rows:
                pixels = np.full((16, 16, 3), row % 256, np.uint8)
                image = Image.fromarray(pixels)
                image.save(images_of_class / f"{row:05d}.jpg")
            fr.shard(f"imagefolder:{images}", out=folder / name)

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        folder = self.job.folder
        dataset: Any = folder / "all"
        weights = None
        if setup.is_mixed:
            dataset = {name: folder / name for name in _MIX}
            weights = _MIX
        return fr.DataLoader(
            dataset,
            setup.batch,
            shuffle=shuffle,
            seed=3,
            drop_last=setup.drop_last,
            num_workers=max(setup.workers, 1),
            mix=weights,
            world=fr.World(self.rank, setup.ranks),
        )

    def epoch(self, epoch: int) -> Iterable[Any]:
        for batch in super().epoch(epoch):
            keys = batch["sample_key"]
            yield [int(key.split("-")[1]) for key in keys]
