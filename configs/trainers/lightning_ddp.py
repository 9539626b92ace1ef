"""PyTorch Lightning: ``torchrun --nproc-per-node 2 configs/trainers/lightning_ddp.py DATASET``.

The loader is made in `train_dataloader`, where the process group is initialised. Lightning's checkpoints hold its
state, and ``ckpt_path`` restores it, in the middle of an epoch too. Needs ``pip install lightning``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from example import TRANSFORMS, arguments, build_model, inputs, report, targets
from torch.nn.functional import mse_loss

from fuelrail.loaders import DataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence


class Counter(pl.LightningModule):
    """The example's model."""

    def __init__(self, dataset: str) -> None:
        super().__init__()
        self.model, self.dataset = build_model(), dataset

    def train_dataloader(self) -> DataLoader:
        """One rank's loader; Lightning moves its batches to the device."""
        return DataLoader(self.dataset, batch_size=2, shuffle=True, drop_last=True, transforms=TRANSFORMS, seed=7)

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        """One batch."""
        loss = mse_loss(self.model(inputs(batch)), targets(batch))
        report(self.global_step, loss.item(), batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, from the checkpoint if there is one."""
    options = arguments(argv)
    file = options.checkpoint / "lightning.ckpt"
    trainer = pl.Trainer(
        max_steps=options.steps, strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Counter(options.dataset), ckpt_path=file if file.exists() else None, weights_only=True)
    trainer.save_checkpoint(file)


if __name__ == "__main__":
    main()
