"""Where other packages load batches, save checkpoints and log, for a watch that is told nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fuelrail.bench.studies.watch.startup.sitecustomize import AfterImport

if TYPE_CHECKING:
    from fuelrail.bench.measure.hooks import Hooks

_TORCHDATA: Final = "torchdata.stateful_dataloader.stateful_dataloader"
_CALLS: Final = [
    (_TORCHDATA, "StatefulDataLoader.__iter__", "iterator"),
    (_TORCHDATA, "_StatefulBaseDataLoaderIter.__next__", "batch"),
    ("fuelrail.loaders.loader", "DataLoader.__iter__", "batches"),
    ("webdataset.compat", "WebLoader.__iter__", "batches"),
    ("grain._src.python.data_loader", "DataLoaderIterator.__next__", "batch"),
    ("datasets.iterable_dataset", "IterableDataset.__iter__", "batches"),
    ("torch.distributed.checkpoint", "save", "checkpoint"),
    ("safetensors.torch", "save_file", "checkpoint"),
    ("transformers.trainer", "Trainer._save_checkpoint", "checkpoint"),
    ("pytorch_lightning.trainer.trainer", "Trainer.save_checkpoint", "checkpoint"),
    ("lightning.pytorch.trainer.trainer", "Trainer.save_checkpoint", "checkpoint"),
    ("accelerate.accelerator", "Accelerator.save_state", "checkpoint"),
    ("mmengine.runner.runner", "Runner.save_checkpoint", "checkpoint"),
    ("torch.utils.tensorboard.writer", "SummaryWriter.add_scalar", "logging"),
    ("tensorboardX.writer", "SummaryWriter.add_scalar", "logging"),
    ("wandb.sdk.wandb_run", "Run.log", "logging"),
]
"""Modules, functions or methods of them, and their role; see `Hooks.listen`."""


def watch_packages(hooks: Hooks) -> None:
    """Have these functions watched, of each package once it is imported."""
    for module_name, path, role in _CALLS:

        def listen(module: Any, path: str = path, role: str = role) -> None:
            kind, _, name = path.rpartition(".")
            hooks.listen(getattr(module, kind) if kind else module, name, role)

        hooks.removals.callback(AfterImport(module_name, listen).remove)
