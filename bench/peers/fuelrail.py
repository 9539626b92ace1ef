"""Fuelrail's own DataLoader, as any training script makes it.

Its batches hold matrices and boxes besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fuelrail.bench.peers.peer import Batch, Sample, Work
from fuelrail.loaders.config import Transforms
from fuelrail.loaders.loader import DataLoader
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.transforms.image import ImageAugment


class Fuelrail:
    """``turbo`` and ``pillow`` decode the dataset itself, ``restart`` its copy with restart
    markers.
    """

    def write(self, _samples: Iterable[Sample], _folder: Path, _work: Work, /) -> None:
        """Do nothing: the others are written from this dataset."""
        raise AssertionError

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """Yield shuffled, full batches, with defaults but for seed, size and threads."""
        dataset = open_dataset(folder)
        (split,) = dataset.manifest.splits
        index = dataset.index
        # A sample is numbered by its key: the copy with restart markers has an order of its own.
        numbers = {
            key: number
            for number, key in enumerate(sorted(index.row(row).key for row in range(len(index))))
        }
        loader = DataLoader(
            dataset,
            work.batch_size,
            shuffle=True,
            drop_last=True,
            split=split,
            transforms=Transforms(
                image=ImageAugment(height=work.height, width=work.width),
                decoder="pillow" if recipe == "pillow" else "turbo",
            ),
            seed=work.seed,
            num_workers=work.num_workers,
            world=World(rank=0, size=1),
        )
        with loader:
            while True:
                for batch in loader:
                    yield Batch(
                        [numbers[key] for key in batch["sample_key"]],
                        batch["img"].numpy(),
                    )


PEER = Fuelrail()
