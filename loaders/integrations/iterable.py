"""A loader as a dataset, for code that insists on torch's own DataLoader, or torchdata's, around
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Never

import torch
from torch.utils.data import IterableDataset, get_worker_info

from fuelrail.pipeline.order.batching import Cursor

if TYPE_CHECKING:
    from fuelrail.loaders.loader import DataLoader

_MAX_WORKERS: Final = 4096


class IterableView(IterableDataset[Any]):
    """Yields a loader's batches, as torch's ``IterableDataset``.

    ::

        view = IterableView(fuelrail.DataLoader("DATASET", batch_size=8, shuffle=True,
        drop_last=True)) outer = torch.utils.data.DataLoader(view, batch_size=None)
        for epoch in range(epochs):
            for batch in outer:
                ...

    The items are whole batches, so the outer loader must not batch again: ``batch_size=None``. Its
    ``num_workers`` can stay 0, the loader has threads of its own. With worker processes, worker w
    of n makes the steps w, w + n, ..., so that the outer loader, which takes from them in turn,
    gives the same batches in the same order; each process gets its part of the decoding threads.
    New worker processes begin at the position of the main process's loader, or else with the epoch
    after that of the workers before them. Persistent ones continue by themselves, and do not hear
    of a later `set_epoch`.

    State is that of the loader in this process: torchdata's StatefulDataLoader keeps each worker's.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        # By worker, the epoch after its last one; -1: none yet. In memory that workers of any start
        # method share, for those of the next iteration are new, and the loader of the main process
        # has not moved.
        following: Any = torch.full((_MAX_WORKERS,), -1)
        self._following: torch.Tensor = following.share_memory_()
        self._is_new = True

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return iter(self._loader)
        if self._is_new:
            self._is_new = False
            self._loader.take_share(worker.id, worker.num_workers)
            epoch = int(self._following[worker.id])
            if epoch >= 0:
                self._loader.__setstate__((Cursor(epoch), Cursor(epoch), False))
        iterator = iter(self._loader)
        self._following[worker.id] = self._loader.state_dict()["epoch"] + 1
        return iterator

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, over all workers."""
        return len(self._loader)

    def __getitem__(self, _: object) -> Never:
        """Refuse to give batches by number, as Subset asks for them."""
        raise TypeError(
            "an IterableView gives whole batches in its loader's order, and none by number: "
            "give it to torch's DataLoader with batch_size=None; Subset, random_split and "
            "samplers take a MapView(dataset)"
        )

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next iteration runs; to be called before each, in the
        main process.
        """
        self._forget()
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this process's loader, after the last batch that it handed out."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue after a saved state; in worker processes with as many workers as saved it."""
        self._forget()
        self._loader.load_state_dict(state, strict=strict)

    def _forget(self) -> None:
        """Let the loader itself say where new workers begin: in a worker process its own."""
        worker = get_worker_info()
        self._following[slice(None) if worker is None else worker.id] = -1
