"""torchdata's StatefulDataLoader, with torch's DistributedSampler or with its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import Stack


class Torchdata(Stack):
    """The loader's state goes into the checkpoint."""

    packages = ("torchdata", "torch")
    way = "state_dict() and load_state_dict() of StatefulDataLoader with DistributedSampler"
    sampler: ClassVar[Any] = DistributedSampler

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        rows = Rows(range(setup.rows))
        sampler = self.sampler(
            rows,
            setup.ranks,
            self.rank,
            shuffle=shuffle,
            seed=3,
            drop_last=setup.drop_last,
        )
        return StatefulDataLoader(
            rows,
            setup.batch,
            sampler=sampler,
            num_workers=setup.workers,
            drop_last=setup.drop_last,
        )

    def epoch(self, epoch: int) -> Iterable[Any]:
        self.train_loader.sampler.set_epoch(epoch)
        return self.train_loader  # type: ignore[no-any-return]


class TorchdataSampler(Torchdata):
    """The sampler is torchdata's too."""

    way = "the same with StatefulDistributedSampler"
    sampler = StatefulDistributedSampler
