"""Base of the peers on torch's DataLoader: worker processes that build whole batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fuelrail.bench.peers.peer import Batch, prepare_worker


def start_worker(_worker: int) -> None:
    """Set up a worker process: no threads within it."""
    prepare_worker()
    torch.set_num_threads(1)


def worker_options(num_workers: int) -> dict[str, Any]:
    """Return the arguments of torch's DataLoader: workers that outlive the epoch, two batches
    ahead.
    """
    return {
        "num_workers": num_workers,
        "prefetch_factor": 2,
        "persistent_workers": True,
        "worker_init_fn": start_worker,
    }


def stack(
    samples: Sequence[tuple[int, NDArray[np.uint8]]],
) -> tuple[list[int], torch.Tensor]:
    """Collate samples, in a worker straight into shared memory, as torch's own does."""
    numbers = [number for number, _ in samples]
    tensors = [torch.from_numpy(images) for _, images in samples]
    out = None
    if torch.utils.data.get_worker_info() is not None:
        shape = (len(tensors), *tensors[0].shape)
        # torch's default_collate: a copy within the worker is saved.
        storage_type: Any = torch.UntypedStorage
        out = torch.empty(0, dtype=torch.uint8)
        set_memory: Any = out.set_
        set_memory(
            storage_type._new_shared(int(np.prod(shape)), device="cpu"),  # noqa: SLF001
            0,
            shape,
        )
    return numbers, torch.stack(tensors, out=out)


def endless(
    loader: Iterable[tuple[list[int], torch.Tensor]],
) -> Iterator[Batch]:
    """Yield a loader's batches, epoch after epoch."""
    while True:
        for numbers, images in loader:
            yield Batch(numbers, images.numpy())
