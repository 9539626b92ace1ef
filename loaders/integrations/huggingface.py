"""Fuelrail's loaders in loops of Hugging Face Accelerate, and in the Trainer of transformers.

::

    loader = prepare_loader(accelerator, sampler.count(torch_loader))  # or a fuelrail.DataLoader
    set_train_loader(trainer, sampler.count(torch_loader))

The trainers' checkpoints then have the position of the data, valid on any number of ranks. Nothing
is skipped: no ``skip_first_batches``, no ``ignore_data_skip``. ``dispatch_batches``,
``split_batches``, ``even_batches`` change nothing, for each rank has its own batches already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import send_to_device
from torch.utils.data import IterableDataset

from fuelrail.pipeline.errors import ConfigError, OrderError


def prepare_loader(accelerator: Any, loader: Any) -> PreparedLoader:
    """Return a loader for a loop of Accelerate; ``save_state`` and ``load_state`` have its
    position.

    ``loader`` is a `fuelrail.DataLoader`, or what `BatchSampler.count` returns.
    ``accelerator.prepare`` leaves the result as it is.
    """
    prepared = PreparedLoader(accelerator, loader)
    accelerator.register_for_checkpointing(prepared)
    return prepared


def set_train_loader(trainer: Any, loader: Any) -> None:
    """Let a Trainer of transformers train from a loader, and keep its position in checkpoints.

    ``trainer.train(resume_from_checkpoint=...)`` restores it. ``loader`` is a
    `fuelrail.DataLoader`, or what `BatchSampler.count` returns. Raises ConfigError for arguments of
    the Trainer that cannot hold.

    The Trainer raises OrderError for a checkpoint without a position, for one that its own count of
    steps does not agree with, and for epochs of other lengths.
    """
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    if trainer.args.ignore_data_skip:
        raise ConfigError(
            "ignore_data_skip=True takes the rest of an epoch for a whole one, so that gradients "
            "at its end are accumulated wrongly; leave it out: nothing is skipped by reading it"
        )
    if trainer.args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True changes the batch size, and the order has its batches "
            "already; leave it out"
        )
    prepared = PreparedLoader(trainer.accelerator, loader)

    class OrderPosition(TrainerCallback, ExportableState):  # type: ignore[misc, unused-ignore]
        """Has the position in ``trainer_state.json``."""

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"position": prepared.state_dict()}}

        def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step > 0:
                saved = state.stateful_callbacks.get("OrderPosition")
                if saved is None:
                    raise OrderError(
                        f"the checkpoint of step {state.global_step} has no position of this "
                        "loader; resume from one that was saved after set_train_loader"
                    )
                prepared.load_state_dict(saved["attributes"]["position"])
            prepared.expect(state.global_step, args.gradient_accumulation_steps)

    trainer.get_train_dataloader = prepared.begin_training
    trainer.add_callback(OrderPosition())


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc, unused-ignore]
    """A loader as Accelerate knows its own: batches come on its device, and gradients are
    synchronised at an epoch's end.

    The state is the position after the last optimiser step: batches whose gradients were still
    being accumulated come again.
    """

    batch_size = None
    drop_last = False
    prefetch_factor = None
    _drop_last = True  # for Accelerate: no row of the last batch is to be cut

    def __init__(self, accelerator: Any, loader: Any) -> None:
        self.loader = loader
        self.gradient_state = accelerator.gradient_state
        self._accelerator = accelerator
        self._order = getattr(loader, "sampler", loader)
        self._epoch_length: int | None = None
        """Batches that the Trainer takes for an epoch; None: a loop of Accelerate asks nobody."""
        self._num_trained = 0
        """Batches of the resumed epoch that the Trainer is about to skip."""

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch."""
        self._commit()
        self.begin()
        try:
            for batch in self.loader:
                self.end_of_dataloader = self._order.steps_left == 0
                if self._epoch_length not in (None, len(self)):
                    raise OrderError(
                        f"this epoch has {len(self)} batches, and the Trainer counts "
                        f"{self._epoch_length} in each; train packs with Accelerate"
                    )
                yield send_to_device(batch, self._accelerator.device)
                self._commit()
        finally:
            self.end()

    def _commit(self) -> None:
        """Make the batches received so far final, unless gradients are being accumulated."""
        if self.gradient_state.sync_gradients:
            self._order.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last optimiser step; the same on every rank."""
        self._commit()
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, on any number of ranks, with an accumulation that begins."""
        self.loader.load_state_dict(state)
        self._accelerator.step = 0
        self._accelerator.sync_gradients = True

    def begin_training(self) -> PreparedLoader:
        """Return this loader to a Trainer, which takes all epochs to be as long as this one."""
        self._epoch_length = len(self)
        return self

    def expect(self, num_updates: int, num_accumulated: int) -> None:
        """Compare the position with what the Trainer is about to skip at its number of steps.

        Raises OrderError where they differ.
        """
        length = self._epoch_length or len(self)
        updates_of_epoch = num_updates % math.ceil(length / num_accumulated)
        self._num_trained = len(self) - (self._order.steps_left or len(self))
        if self._num_trained != updates_of_epoch * num_accumulated:
            raise OrderError(
                f"the loader is {self._num_trained} batches into its epoch of {len(self)}, and the "
                f"Trainer, at step {num_updates} with gradient_accumulation_steps="
                f"{num_accumulated}, {updates_of_epoch * num_accumulated} into one of {length}; "
                "resume with the global batch and the accumulation of the checkpoint, on any "
                "number of ranks"
            )

    @property
    def dataset(self) -> IterableDataset[Any]:
        """What a Trainer makes a loader of in a resumed epoch, whose first batches it skips.

        Raises AttributeError outside of a Trainer.
        """
        if self._epoch_length is None:
            raise AttributeError(
                "this loader has no dataset, and no batches to skip: load_state has restored its "
                "position; leave skip_first_batches out"
            )
        return RestOfEpoch(self, self._num_trained)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Leave a batch as it is."""
        return batch


class RestOfEpoch(IterableDataset[Any]):
    """As many empty items as the Trainer skips, then the batches of a loader."""

    def __init__(self, loader: PreparedLoader, num_skipped: int) -> None:
        self._loader = loader
        self._num_skipped = num_skipped

    def __iter__(self) -> Iterator[Any]:
        yield from repeat(None, self._num_skipped)
        yield from self._loader
