"""LitData over its own chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuelrail.bench.peers.peer import Batch, Sample, Work, new_sample
from fuelrail.bench.peers.torch_workers import endless, stack, worker_options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Lit:
    """Chunks of LitData's default size."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """Chunks by the library's own writer, the JPEGs as they are; one process, in which its cache is filled."""
        cache = import_module("litdata.streaming.cache").Cache(str(folder), chunk_bytes="64MB")
        for count, sample in enumerate(samples):
            cache[count] = {"number": sample.number, **dict(zip(work.cameras, sample.images, strict=True))}
        cache.done()
        cache.merge()

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """Its dataset and its own DataLoader."""
        litdata = import_module("litdata")
        dataset = _dataset_class()(str(folder), shuffle=True, seed=work.seed, drop_last=True)
        dataset.work, dataset.recipe = work, recipe
        options = worker_options(work.num_workers)
        return endless(litdata.StreamingDataLoader(dataset, batch_size=work.batch_size, collate_fn=stack, **options))


def _dataset_class() -> Any:  # noqa: ANN401 - a class whose base is imported here
    litdata = import_module("litdata")

    class Samples(litdata.StreamingDataset):  # type: ignore[name-defined, misc]
        work: Work
        recipe: str

        def __getitem__(self, at: int) -> tuple[int, NDArray[np.uint8]]:
            stored = super().__getitem__(at)
            images = [stored[camera] for camera in self.work.cameras]
            return int(stored["number"]), new_sample(images, self.recipe, self.work)

    globals()["Samples"] = Samples
    Samples.__qualname__ = "Samples"
    return Samples


PEER = Lit()
