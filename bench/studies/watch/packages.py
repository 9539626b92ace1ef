"""Where other packages load batches, save checkpoints and log, for a watch that is told nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fuelrail.bench.studies.watch.startup._fuelrail_after_import import AfterImport

if TYPE_CHECKING:
    from fuelrail.bench.measure.hooks import Hooks

_TORCHDATA: Final = "torchdata.stateful_dataloader.stateful_dataloader"
_LOADERS: Final = [
    (_TORCHDATA, "StatefulDataLoader", "__iter__"),
    (_TORCHDATA, "_StatefulBaseDataLoaderIter", "__next__"),
    ("fuelrail.loaders.loader", "DataLoader", "iter"),
    ("webdataset.compat", "WebLoader", "iter"),
    ("grain._src.python.data_loader", "DataLoaderIterator", "__next__"),
    ("datasets.iterable_dataset", "IterableDataset", "iter"),
]
"""Modules, their classes, and what of these is watched; see `Hooks.watch_loader`."""

_CALLS: Final = [
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
"""Modules, functions or methods of them, and the phase that these are."""


def watch_packages(hooks: Hooks, *, has_loaders: bool) -> list[AfterImport]:
    """Have these functions watched, of each package once it is imported; return what waits."""
    waiting = []
    for module_name, path, phase in _CALLS:

        def time_calls(module: Any, path: str = path, phase: str = phase) -> None:
            kind, _, name = path.rpartition(".")
            hooks.time_calls(getattr(module, kind) if kind else module, name, phase)

        waiting.append(AfterImport(module_name, time_calls))
    for module_name, kind, name in _LOADERS if has_loaders else ():

        def watch_loader(module: Any, kind: str = kind, name: str = name) -> None:
            hooks.watch_loader(getattr(module, kind), name)

        waiting.append(AfterImport(module_name, watch_loader))
    return waiting
