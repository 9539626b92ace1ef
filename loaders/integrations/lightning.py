"""Checkpoints of Lightning that have whole optimiser steps.

::

    trainer = pytorch_lightning.Trainer(accumulate_grad_batches=4, callbacks=[whole_steps()])
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from fuelrail.pipeline.errors import needs


def whole_steps() -> Any:
    """Return a callback for checkpoints that Lightning saves while gradients are accumulated.

    Lightning does not save the gradients, and goes on after the batches that they came from: those
    batches are lost. It saves so where ``val_check_interval`` is no multiple of
    ``accumulate_grad_batches``, and after the first batch of each resumed run. With this callback
    the checkpoint is that of the last optimiser step, and the batches come again. The loader is a
    `fuelrail.DataLoader` or what `BatchSampler.count` returns.
    """
    with needs("whole_steps", "fuelrail[trainers]"):
        try:
            from lightning.pytorch import Callback
        except ImportError:
            from pytorch_lightning import Callback

    class WholeSteps(Callback):  # type: ignore[misc, unused-ignore]
        loop: dict[str, Any] | None = None
        """The progress after the last optimiser step, with the loader's state."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.accumulate_grad_batches > 1 and not trainer.fit_loop._should_accumulate():
                self.loop = deepcopy(trainer.fit_loop.state_dict())

        def on_save_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
            if self.loop is not None and trainer.fit_loop._should_accumulate():
                checkpoint["loops"]["fit_loop"] = self.loop

        def on_load_checkpoint(self, _: Any, __: Any, checkpoint: dict[str, Any]) -> None:
            self.loop = deepcopy(checkpoint["loops"]["fit_loop"])

    return WholeSteps()
