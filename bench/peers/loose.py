"""torch's DataLoader over loose JPEG files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fuelrail.bench.peers.peer import Batch, Sample, Work, new_sample
from fuelrail.bench.peers.torch_workers import endless, stack, worker_options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Loose:
    """One file an image, named by sample and camera."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """Write the files."""
        for sample in samples:
            for camera, image in zip(work.cameras, sample.images, strict=True):
                path = folder / f"{sample.number:06d}.{camera}.jpg"
                path.write_bytes(image)

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """Return batches of a map-style dataset with one sample an item."""
        dataset = _Files(folder, work, recipe)
        generator = torch.Generator().manual_seed(work.seed)
        loader = torch.utils.data.DataLoader(
            dataset,
            work.batch_size,
            shuffle=True,
            generator=generator,
            drop_last=True,
            collate_fn=stack,
            **worker_options(work.num_workers),
        )
        return endless(loader)


class _Files(torch.utils.data.Dataset[tuple[int, "NDArray[np.uint8]"]]):
    def __init__(self, folder: Path, work: Work, recipe: str) -> None:
        self._folder = folder
        self._work = work
        self._recipe = recipe

    def __len__(self) -> int:
        return self._work.num_samples

    def __getitem__(self, number: int) -> tuple[int, NDArray[np.uint8]]:
        images = []
        for camera in self._work.cameras:
            path = self._folder / f"{number:06d}.{camera}.jpg"
            images.append(path.read_bytes())
        return number, new_sample(images, self._recipe, self._work)


PEER = Loose()
