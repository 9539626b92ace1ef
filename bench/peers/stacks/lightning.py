"""Lightning's Trainer, whose loop is its own, with torch's loader or torchdata's."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytorch_lightning as lightning
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import EPOCHS, Job, NotRun, Stack
from fuelrail.bench.peers.stacks.torch_loader import distributed_loader


class LightningModel(lightning.LightningModule):  # type: ignore[misc]
    """A layer that tells which rows it is trained on, and saves checkpoints."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.job = job

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.job.see(self.current_epoch, batch["index"].tolist())
        outputs = self.layer(batch["x"])
        loss: torch.Tensor = outputs.square().mean()
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.layer(batch["x"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class LightningSave(lightning.Callback):  # type: ignore[misc]
    """Saves where ModelCheckpoint does."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.job.is_saving and not self.job.is_border:
            path = self.job.folder / f"step-{trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            self.job.save(trainer.current_epoch, self.job.step, path)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if self.job.is_saving:
            path = self.job.folder / f"step-{trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            self.job.save(trainer.current_epoch + 1, 0, path)


class LightningStack(Stack):
    """`ckpt_path` with torch's DataLoader."""

    packages: ClassVar[tuple[str, ...]] = ("pytorch-lightning", "torch")
    way = "Trainer.fit(ckpt_path=...) with torch's DataLoader"

    def loader(self, *, shuffle: bool = True) -> Any:
        setup = self.setup
        return DataLoader(
            Rows(range(setup.rows)),
            setup.batch,
            shuffle=shuffle,
            num_workers=setup.workers,
            drop_last=setup.drop_last,
        )

    def train(self) -> None:
        job = self.job
        setup = self.setup
        if job.leaves_loop:
            raise NotRun("the loop is the Trainer's")
        os.environ |= {"TORCHELASTIC_RUN_ID": "run", "GROUP_RANK": "0"}
        lightning.seed_everything(3)
        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            devices=setup.ranks,
            strategy="ddp",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            val_check_interval=setup.evaluation or None,
            limit_val_batches=None if setup.evaluation else 0,
            default_root_dir=job.folder,
            callbacks=[LightningSave(job)],
        )
        evaluation_rows = Rows(range(setup.rows))
        trainer.fit(
            LightningModel(job),
            train_dataloaders=self.loader(),
            val_dataloaders=DataLoader(evaluation_rows, setup.batch),
            ckpt_path=job.states[0] if job.states else None,
            weights_only=False,
        )


class LightningStateful(LightningStack):
    """`ckpt_path` with torchdata's loader, whose state is in the checkpoint."""

    packages = ("pytorch-lightning", "torchdata", "torch")
    way = "Trainer.fit(ckpt_path=...) with StatefulDataLoader and DistributedSampler"

    def loader(self, *, shuffle: bool = True) -> Any:
        return distributed_loader(self.setup, self.rank, StatefulDataLoader, shuffle=shuffle)
