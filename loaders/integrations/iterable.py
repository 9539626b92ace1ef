"""A loader as a dataset, for code that insists on torch's own DataLoader, or torchdata's, around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    from fuelrail.loaders.loader import DataLoader


class IterableView(IterableDataset[Any]):
    """Yields a loader's batches, as torch's ``IterableDataset``.

    ::

        view = IterableView(fuelrail.loaders.DataLoader("DATASET", batch_size=8, seed=7))
        for epoch in range(epochs):
            view.set_epoch(epoch)
            for batch in torch.utils.data.DataLoader(view, batch_size=None):
                ...

    The items are whole batches, so the outer loader must not batch again: ``batch_size=None``. Its ``num_workers`` can
    stay 0, the loader has threads of its own. With worker processes, worker w of n makes the steps w, w + n, ..., so
    that the outer loader, which takes from them in turn, gives the same batches in the same order; each process gets
    its part of the decoding threads. Worker processes are made from the loader as it stands in the main process,
    before its first iteration there, and do not hear of a later `set_epoch` if they are persistent: those
    continue with the next epoch by themselves.

    State is that of the loader in this process: torchdata's StatefulDataLoader keeps each worker's.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None:
            self._loader.take_share(worker.id, worker.num_workers)
        return iter(self._loader)

    def __len__(self) -> int:
        """Batches in a whole epoch, over all workers."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next iteration runs; to be called before each, in the main process."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this process's loader stands, after the last batch that it handed out."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue after a saved state; in worker processes with as many workers as saved it."""
        self._loader.load_state_dict(state, strict=strict)
