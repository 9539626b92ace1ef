"""The webdataset library over tar shards, in torch's DataLoader; its recommended form: batches
made in the workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fuelrail.bench.peers.peer import (
    Batch,
    Sample,
    Work,
    new_sample,
    pack_number,
    unpack_number,
)
from fuelrail.bench.peers.torch_workers import endless, stack, worker_options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


NUMBER = "number"
_SHUFFLE_BUFFER = 100


class Webdataset:
    """Tar shards, one group of members a sample."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """Write shards by the library's own writer."""
        import webdataset

        pattern = str(folder / "train-%06d.tar")
        with webdataset.ShardWriter(
            pattern,
            maxcount=work.samples_per_shard,
            encoder=False,
            verbose=0,
        ) as writer:
            for sample in samples:
                members = {
                    "__key__": f"{sample.number:06d}",
                    NUMBER: pack_number(sample.number),
                }
                for camera, image in zip(work.cameras, sample.images, strict=True):
                    members[f"{camera}.jpg"] = image
                writer.write(members)

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """Return batches of shards that are shuffled and divided among workers, samples through
        a shuffle buffer.
        """
        import webdataset

        dataset = (
            webdataset.WebDataset(
                sorted(map(str, folder.glob("*.tar"))),
                shardshuffle=1000,
                seed=work.seed,
            )
            .shuffle(_SHUFFLE_BUFFER, initial=_SHUFFLE_BUFFER // 2)
            .map(partial(_decode, work, recipe))
            .batched(work.batch_size, collation_fn=stack, partial=False)
        )
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=None,
            **worker_options(work.num_workers),
        )
        return endless(loader)


def _decode(
    work: Work,
    recipe: str,
    sample: dict[str, Any],
) -> tuple[int, NDArray[np.uint8]]:
    number = unpack_number(sample[NUMBER])
    images = [sample[f"{camera}.jpg"] for camera in work.cameras]
    return number, new_sample(images, recipe, work)


PEER = Webdataset()
