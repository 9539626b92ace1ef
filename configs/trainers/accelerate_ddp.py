"""Hugging Face Accelerate: ``torchrun --nproc-per-node 2 configs/trainers/accelerate_ddp.py
DATASET``.

Model and optimiser go through `prepare`, the loader does not need to: it knows its rank, and
``device`` makes it bring the batches there. `register_for_checkpointing` puts its position into
Accelerate's own checkpoints. Needs ``pip install accelerate``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from example import TRANSFORMS, Checkpoints, arguments, build_model, inputs, report, targets
from torch.nn.functional import mse_loss

from fuelrail import DataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence


class Progress:
    """How many steps are done; saved with the rest."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the count."""
        self.step = state["step"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train on this rank."""
    options = arguments(argv)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = build_model()
    model, optimiser = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    checkpoints = Checkpoints(options, "accelerate")
    progress = Progress()
    with DataLoader(
        options.dataset,
        batch_size=2,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        seed=7,
        device=accelerator.device,
    ) as loader:
        accelerator.register_for_checkpointing(loader, progress)
        if folder := checkpoints.newest():
            accelerator.load_state(str(folder))
        for step, batch in checkpoints.batches(loader, progress.step):
            loss = mse_loss(model(inputs(batch)), targets(batch))
            optimiser.zero_grad()
            accelerator.backward(loss)
            optimiser.step()
            report(step, loss.item(), batch)
            progress.step = step + 1
            if checkpoints.due(progress.step):
                with checkpoints.saving(progress.step) as folder:
                    accelerator.save_state(str(folder))


if __name__ == "__main__":
    main()
