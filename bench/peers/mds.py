"""MosaicML Streaming over MDS shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fuelrail.bench.peers.peer import Batch, Sample, Work, new_sample
from fuelrail.bench.peers.torch_workers import endless, stack, worker_options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Mds:
    """MDS shards of the default size."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """Write shards by the library's own writer, the JPEGs as they are."""
        columns = {"number": "int", **dict.fromkeys(work.cameras, "bytes")}
        with import_module("streaming").MDSWriter(
            out=str(folder),
            columns=columns,
            exist_ok=True,
        ) as writer:
            for sample in samples:
                images = dict(zip(work.cameras, sample.images, strict=True))
                writer.write({"number": sample.number, **images})

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """Return the batches of its dataset with its default shuffle; decode in ``__getitem__``,
        as its examples do.
        """
        import_module("streaming.base.util").clean_stale_shared_memory()
        dataset = _dataset_class()(folder, work, recipe)
        loader = torch.utils.data.DataLoader(
            dataset,
            work.batch_size,
            drop_last=True,
            collate_fn=stack,
            **worker_options(work.num_workers),
        )
        return endless(loader)


def _dataset_class() -> Any:
    streaming = import_module("streaming")

    class Samples(streaming.StreamingDataset):  # type: ignore[name-defined, misc]
        def __init__(self, folder: Path, work: Work, recipe: str) -> None:
            super().__init__(
                local=str(folder),
                shuffle=True,
                shuffle_seed=work.seed,
                batch_size=work.batch_size,
            )
            self._work = work
            self._recipe = recipe

        def __getitem__(self, index: int) -> tuple[int, NDArray[np.uint8]]:
            stored = super().__getitem__(index)
            images = [stored[camera] for camera in self._work.cameras]
            return int(stored["number"]), new_sample(images, self._recipe, self._work)

    # Workers find a class by its name in its module.
    globals()["Samples"] = Samples
    Samples.__qualname__ = "Samples"
    return Samples


PEER = Mds()
