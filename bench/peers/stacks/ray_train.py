"""Ray Train: the training function of a TorchTrainer, with torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader
from torch.utils.data import DataLoader

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import Stateless


class RayTrainStack(Stateless):
    """Ray puts its sampler into the loader; the epoch begins again."""

    packages = ("ray", "torch")
    way = (
        "prepare_data_loader(), set_epoch(); a checkpoint holds the script's epoch, which begins "
        "again"
    )

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        loader: Any = DataLoader(
            Rows(range(setup.rows)),
            setup.batch,
            shuffle=shuffle,
            num_workers=setup.workers,
            drop_last=setup.drop_last,
        )
        return prepare_data_loader(loader)

    def epoch(self, epoch: int) -> Iterable[Any]:
        if self.setup.ranks > 1:
            self.train_loader.sampler.set_epoch(epoch)
        return self.train_loader  # type: ignore[no-any-return]

    def train(self) -> None:
        # Without workers of its own, Ray takes the ranks that torchrun's variables name.
        TorchTrainer(super().train, scaling_config=ScalingConfig(num_workers=0)).fit()
