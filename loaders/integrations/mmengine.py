"""Fuelrail in MMEngine's runner: what a config gets.

::

    custom_imports = dict(imports=["fuelrail.loaders.integrations.mmengine"])
    custom_hooks = [dict(type="FuelrailStateHook")]
    default_hooks = dict(sampler_seed=None)
    train_dataloader = dict(
        dataset=dict(
            type="FuelrailDataset", dataset="DATASET", batch_size=8, shuffle=True, drop_last=True,
            seed=7
        ),
        batch_size=None, sampler=None, num_workers=0, collate_fn=dict(type="fuelrail_batch"),
    )

The hook keeps the loader's position in MMEngine's checkpoints; MMEngine's own hook for samplers
finds none here, and would fail. ``EpochBasedTrainLoop`` works as it is. MMEngine's
``IterBasedTrainLoop`` runs through all batches before the resumed one; ``train_cfg =
dict(type="FuelrailTrainLoop", max_iters=...)`` is the same loop without that. The batch reaches
``model.train_step`` and its data preprocessor as the dict that it is.

MMEngine 0.10 stores its log (``HistoryBuffer`` objects, which hold NumPy arrays) in its
checkpoints. Since 2.6, torch loads only types that it knows to be safe. Importing this module adds
these types to torch's list, so a run resumes with torch's safe loading. A checkpoint with any other
Python object is still refused.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.registry import DATASETS, FUNCTIONS, HOOKS, LOOPS
from mmengine.runner import IterBasedTrainLoop, Runner

from fuelrail.loaders.integrations.iterable import IterableView
from fuelrail.loaders.loader import DataLoader

_STATE = "fuelrail_loader"
_STATISTICS = ("min", "max", "current", "mean")

# The module that pickled arrays and scalars refer to is `numpy._core` in NumPy 2, `numpy.core` in
# NumPy 1.
_CORE: Any = getattr(np, "_core", None) or getattr(np, "core")  # noqa: B009
_NUMPY = _CORE.multiarray


def _statistic(owner: object, name: str) -> object:
    """Return what a checkpoint looks up by ``getattr``: the statistics of a HistoryBuffer, which
    it stores by name.
    """
    if owner is not HistoryBuffer or name not in _STATISTICS:
        raise AttributeError(
            f"a checkpoint asks for the attribute {name!r:.50}; allowed: {', '.join(_STATISTICS)}"
        )
    return getattr(HistoryBuffer, name)


torch.serialization.add_safe_globals(
    [
        HistoryBuffer,
        (_statistic, "builtins.getattr"),
        _NUMPY._reconstruct,  # noqa: SLF001
        _NUMPY.scalar,
        np.ndarray,
        np.dtype,
        *{type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"},
    ]
)


@DATASETS.register_module()  # type: ignore[untyped-decorator, unused-ignore]
class FuelrailDataset(IterableView):
    """A loader as the dataset of a config; its items are whole batches.

    The options are those of :class:`fuelrail.DataLoader`; settings are given as dicts.
    """

    def __init__(self, dataset: str, batch_size: int, **options: Any) -> None:
        super().__init__(DataLoader(dataset, batch_size, **options))


@FUNCTIONS.register_module()  # type: ignore[untyped-decorator, unused-ignore]
def fuelrail_batch(batch: Any) -> Any:
    """Return the batch as it is, where MMEngine would collate samples."""
    return batch


@HOOKS.register_module()  # type: ignore[untyped-decorator, unused-ignore]
class FuelrailStateHook(Hook):  # type: ignore[misc, unused-ignore]
    """Saves and restores the training loader's position with the checkpoint."""

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Add the position to the checkpoint."""
        checkpoint[_STATE] = runner.train_dataloader.dataset.state_dict()

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Restore it when training is resumed; a checkpoint that only gives weights leaves the
        loader alone.
        """
        if _STATE in checkpoint and getattr(runner, "_resume", False):
            runner.train_dataloader.dataset.load_state_dict(checkpoint[_STATE])


@LOOPS.register_module()  # type: ignore[untyped-decorator, unused-ignore]
class FuelrailTrainLoop(IterBasedTrainLoop):  # type: ignore[misc, unused-ignore]
    """MMEngine's loop of iterations, over a loader that knows its position: a resume loads
    nothing twice.
    """

    def run(self) -> Any:
        """Train to the last iteration."""
        # The base class asks for every batch before the resumed one, to throw it away.
        batches = itertools.chain.from_iterable(itertools.repeat(self.dataloader))
        self.dataloader_iterator = itertools.chain(itertools.repeat(None, self._iter), batches)
        return super().run()
