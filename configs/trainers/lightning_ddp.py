"""PyTorch Lightning: ``torchrun --nproc-per-node 2 configs/trainers/lightning_ddp.py DATASET``.

The loader is made in `train_dataloader`, where the process group is initialised. Lightning's
checkpoints hold its state, and ``ckpt_path`` restores it, in the middle of an epoch too. A callback
saves them, since Lightning's own writes a checkpoint under the name that it is found by. Needs
``pip install lightning``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from example import TRANSFORMS, Checkpoints, arguments, build_model, inputs, report, targets
from torch.nn.functional import mse_loss

from fuelrail import DataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence


class Counter(pl.LightningModule):
    """The example's model."""

    def __init__(self, dataset: str) -> None:
        super().__init__()
        self.model = build_model()
        self.dataset = dataset

    def train_dataloader(self) -> DataLoader:
        """Return one rank's loader; Lightning moves its batches to the device."""
        loader = DataLoader(
            self.dataset,
            batch_size=2,
            shuffle=True,
            drop_last=True,
            transforms=TRANSFORMS,
            seed=7,
        )
        loader.set_epoch(self.current_epoch)  # all that Lightning restores at an epoch's end
        return loader

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of one batch."""
        loss = mse_loss(self.model(inputs(batch)), targets(batch))
        report(self.global_step, loss.item(), batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Save(pl.Callback):
    """Saves while the model trains."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def on_train_start(self, *_: object) -> None:
        """Take SIGTERM back: Lightning stops without a save."""
        self.checkpoints.listen()

    def on_train_batch_start(self, *_: object) -> None:
        """Continue with the random numbers of the checkpoint."""
        self.checkpoints.restore_generators()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Save, and stop if that was asked for."""
        if self.checkpoints.due(trainer.global_step):
            with self.checkpoints.saving(trainer.global_step) as folder:
                trainer.save_checkpoint(folder / "lightning.ckpt")
            trainer.should_stop = self.checkpoints.stopped


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, from the checkpoint if there is one."""
    options = arguments(argv)
    checkpoints = Checkpoints(options, "lightning")
    saved = checkpoints.newest()
    trainer = pl.Trainer(
        max_steps=options.steps,
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=Save(checkpoints),
    )
    trainer.fit(
        Counter(options.dataset),
        ckpt_path=None if saved is None else saved / "lightning.ckpt",
        weights_only=True,
    )


if __name__ == "__main__":
    main()
