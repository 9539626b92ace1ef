"""Hugging Face Accelerate: a prepared loader, and the accelerator's own checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import Stack


class AccelerateSkip(Stack):
    """What was trained on is left out by `skip_first_batches`."""

    packages: ClassVar[tuple[str, ...]] = ("accelerate", "torch")
    way = "save_state(), load_state(), skip_first_batches(), set_epoch(); use_seedable_sampler=True"
    is_stateful: ClassVar[bool] = False

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        loader = DataLoader(
            Rows(range(setup.rows)),
            setup.batch,
            shuffle=shuffle,
            num_workers=setup.workers,
            drop_last=setup.drop_last,
        )
        return self.accelerator.prepare(loader)

    def open(self) -> None:
        set_seed(3)
        config = DataLoaderConfiguration(
            use_seedable_sampler=True,
            use_stateful_dataloader=self.is_stateful,
        )
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        super().open()

    def restore(self) -> None:
        self.accelerator.load_state(self.job.states[0])
        # As its examples compute it: after an epoch's last batch the next one begins.
        epochs, self.job.step = divmod(self.job.step, len(self.train_loader))
        self.job.epoch += epochs

    def epoch(self, epoch: int) -> Iterable[Any]:
        self.train_loader.set_epoch(epoch)
        if self.job.step and not self.is_stateful:
            return self.accelerator.skip_first_batches(self.train_loader, self.job.step)  # type: ignore[no-any-return]
        return self.train_loader  # type: ignore[no-any-return]

    def state(self) -> Any:
        path = str(self.job.folder / f"checkpoint-{self.job.epoch}-{self.job.step}")
        self.accelerator.save_state(path)
        return path


class AccelerateStateful(AccelerateSkip):
    """The loader is torchdata's."""

    packages = ("accelerate", "torchdata", "torch")
    way = "save_state(), load_state(), set_epoch(); use_stateful_dataloader=True"
    is_stateful = True
