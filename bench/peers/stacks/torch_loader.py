"""torch's DataLoader with its DistributedSampler, whose state is the number of the epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import Setup, Stateless


def distributed_loader(
    setup: Setup,
    rank: int,
    kind: Any = DataLoader,
    *,
    shuffle: bool = True,
    **options: Any,
) -> Any:
    """Return a loader of this rank's rows."""
    rows: Any = Rows(range(setup.rows))
    if setup.is_mixed:
        rows = ConcatDataset([Rows(part) for part in setup.parts])
    sampler: Any = DistributedSampler(
        rows,
        setup.ranks,
        rank,
        shuffle=shuffle,
        seed=3,
        drop_last=setup.drop_last,
    )
    return kind(
        rows,
        setup.batch,
        sampler=sampler,
        num_workers=setup.workers,
        drop_last=setup.drop_last,
        **options,
    )


class TorchEpochs(Stateless):
    """The epoch begins again."""

    packages = ("torch",)
    way = "no state of its own; the epoch begins again, as in PyTorch's ImageNet example"

    def loader(self, *, shuffle: bool = True) -> Any:
        return distributed_loader(self.setup, self.rank, shuffle=shuffle)

    def epoch(self, epoch: int) -> Iterable[Any]:
        self.train_loader.sampler.set_epoch(epoch)
        return self.train_loader  # type: ignore[no-any-return]


class TorchSkip(TorchEpochs):
    """The batches that were trained on are read and passed over."""

    way = "no state of its own; the script iterates past as many batches as were trained on"

    def epoch(self, epoch: int) -> Iterable[Any]:
        return itertools.islice(super().epoch(epoch), self.job.step, None)
