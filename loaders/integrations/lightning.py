"""Checkpoints of Lightning that a run continues exactly, on any number of ranks.

::

    trainer = pytorch_lightning.Trainer(accumulate_grad_batches=4, callbacks=[exact_checkpoints()])

The loader is a `fuelrail.DataLoader`, or what `BatchSampler.count` returns.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from fuelrail.pipeline.errors import needs


def exact_checkpoints() -> Any:
    """Return a callback that mends three faults of Lightning's own resume (2.6).

    - A checkpoint of an epoch's end has the loader's state, and Lightning does not load it: the
      callback does.
    - A run that was resumed from an epoch's last batch counts no new epoch, so that the states of
      its own checkpoints are not loaded: the callback counts it.
    - While gradients are accumulated a checkpoint has no gradients, and their batches are lost. It
      is saved where ``val_check_interval`` is no multiple of ``accumulate_grad_batches``, and after
      the first batch of each resumed run. The callback saves the last optimiser step in its place,
      so that the batches come again.
    """
    with needs("exact_checkpoints", "fuelrail[trainers]"):
        try:
            from lightning.pytorch import Callback
        except ImportError:
            from pytorch_lightning import Callback

    class ExactCheckpoints(Callback):  # type: ignore[misc, unused-ignore]
        progress: dict[str, Any] | None = None
        """The loops' state after the last optimiser step, with the loader's."""

        def on_load_checkpoint(self, _: Any, __: Any, checkpoint: dict[str, Any]) -> None:
            self.progress = deepcopy(checkpoint["loops"]["fit_loop"])

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            loop = trainer.fit_loop
            epochs = loop.epoch_progress
            is_at_end = epochs.current.ready == epochs.current.processed
            if loop.restarted_mid_epoch and is_at_end:
                epochs.increment_ready()
                epochs.increment_started()
            states = loop._combined_loader_states_to_load  # noqa: SLF001 - Lightning leaves them
            if states:
                loop._combined_loader._load_state_dicts(states)  # noqa: SLF001
                loop._combined_loader_states_to_load = []  # noqa: SLF001
                # The iterator was made before the states were loaded: make it again.
                iter(loop._data_fetcher)  # noqa: SLF001

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.accumulate_grad_batches > 1 and not self.accumulates(trainer):
                self.progress = deepcopy(trainer.fit_loop.state_dict())

        def on_save_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
            if self.progress is not None and self.accumulates(trainer):
                checkpoint["loops"]["fit_loop"] = self.progress

        @staticmethod
        def accumulates(trainer: Any) -> bool:
            return bool(trainer.fit_loop._should_accumulate())  # noqa: SLF001

    return ExactCheckpoints()
