"""A witness in others' trainers, in a line.

::

    pytorch_lightning.Trainer(callbacks=[watch_lightning(expected=len(dataset))])
    transformers.Trainer(..., callbacks=[watch_transformers(expected=len(dataset))])
    loader = watch_accelerate(accelerator, accelerator.prepare(loader))

Options are those of :class:`~fuelrail.loaders.witness.witness.Witness`. Batches, losses and random
numbers stay as they are. The witness's state is in the trainer's own checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fuelrail.loaders.witness.witness import Witness
from fuelrail.pipeline.errors import needs


def watch_lightning(**options: Any) -> Any:
    """Return a callback for Lightning's trainer, which counts the batches of the training.

    Its attribute ``witness`` has the reports.
    """
    with needs("watch_lightning", "fuelrail[trainers]"):
        try:
            from lightning.pytorch import Callback
        except ImportError:
            from pytorch_lightning import Callback

    class LightningWitness(Callback):  # type: ignore[misc, unused-ignore]
        witness: Witness
        state: dict[str, Any] | None = None

        def on_train_start(self, *_: Any) -> None:
            self.witness = Witness((), **options)
            if self.state:
                self.witness.load_state_dict(self.state)

        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            self.witness.set_epoch(trainer.current_epoch)

        def on_train_batch_start(self, _: Any, __: Any, batch: Any, *___: Any) -> None:
            self.witness.note(batch)

        def on_train_epoch_end(self, *_: Any) -> None:
            self.witness.end_epoch()

        def state_dict(self) -> dict[str, Any]:
            if hasattr(self, "witness"):
                return self.witness.state_dict(gather=True)
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.state = state_dict

    return LightningWitness()


def watch_transformers(**options: Any) -> Any:
    """Return a callback for the Trainer of Hugging Face, which counts what the model is given.

    That is without the columns that the Trainer removes, so rows are known by their content, unless
    ``key`` finds ids among the model's arguments. Its attribute ``witness`` has the reports.
    """
    with needs("watch_transformers", "fuelrail[trainers]"):
        from transformers import TrainerCallback

    class TransformersWitness(TrainerCallback):  # type: ignore[misc, unused-ignore]
        witness: Witness

        def on_train_begin(self, args: Any, state: Any, *_: Any, **parts: Any) -> None:
            self.witness = Witness((), **options)
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            files = sorted(folder.glob("witness.rank*.json"))
            states = [msgspec.json.decode(file.read_bytes()) for file in files]
            if states:
                self.witness.load_state_dict(states)
            model = parts["model"]
            self.hook = model.register_forward_pre_hook(self.note, with_kwargs=True)

        def note(self, model: Any, inputs: Any, named: Any) -> None:
            if model.training:
                self.witness.note(named or inputs[0])

        def on_epoch_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            self.witness.set_epoch(int((state.epoch or 0) + 1e-3))

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.witness.end_epoch()

        def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"witness.rank{args.process_index:05d}.json"
            own_state = self.witness.state_dict()
            file.write_bytes(msgspec.json.encode(own_state))

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.hook.remove()

    return TransformersWitness()


class AccelerateWitness(Witness):
    """A witness whose state is of all ranks, for Accelerate saves that of its main process."""

    def state_dict(self, *, gather: bool = True) -> dict[str, Any]:
        """Return what all ranks saw of the epoch so far; every rank calls this."""
        return super().state_dict(gather=gather)


def watch_accelerate(accelerator: Any, loader: Any, **options: Any) -> Witness:
    """Return a witness of a prepared loader whose state is in Accelerate's checkpoints.

    After ``load_state`` in the middle of an epoch, its ``loader`` is replaced for the rest of it:
    ``watched.loader = accelerator.skip_first_batches(loader, batches)``.
    """
    watched = AccelerateWitness(loader, **options)
    accelerator.register_for_checkpointing(watched)
    return watched
