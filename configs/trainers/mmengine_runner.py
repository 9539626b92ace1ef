"""MMEngine's runner: ``torchrun --nproc-per-node 2 configs/trainers/mmengine_runner.py DATASET``.

A config of the BEVDet kind: beside the imports, Fuelrail changes its `train_dataloader` and its
hooks: one keeps the position in the checkpoints, and there is no sampler to be seeded. `SaveHook`
stands for MMEngine's own, which writes a checkpoint under the name that it is found by. Needs ``pip
install mmengine``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from example import Checkpoints, arguments, build_model, inputs, report, targets
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch.nn.functional import mse_loss

if TYPE_CHECKING:
    from collections.abc import Sequence


@MODELS.register_module(force=True)
class ExampleModel(BaseModel):
    """The example's model, where a BEV detector would be."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def forward(self, mode: str = "loss", **batch: Any) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Return the losses of a batch."""
        loss = mse_loss(self.model(inputs(batch)), targets(batch))
        report(MessageHub.get_current_instance().get_info("iter"), loss.item(), batch)
        return {"loss": loss}


class SaveHook(Hook):
    """Saves while the model trains."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def before_train_iter(self, runner: Runner, *_: object, **__: object) -> None:  # noqa: ARG002 - MMEngine's
        """Continue with the random numbers of the checkpoint."""
        self.checkpoints.restore_generators()

    def after_train_iter(self, runner: Runner, *_: object, **__: object) -> None:
        """Save, and stop if that was asked for."""
        if self.checkpoints.due(runner.iter + 1):
            with self.checkpoints.saving(runner.iter + 1) as folder:
                runner.save_checkpoint(str(folder), "state.pth", by_epoch=False)
            runner.train_loop.stop_training = self.checkpoints.stopped


def make_config(dataset: str, steps: int, folder: str) -> dict[str, Any]:
    """Return the runner's config."""
    return {
        "experiment_name": f"example-{steps}",
        "work_dir": folder,
        "model": {"type": "ExampleModel"},
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3}},
        "train_cfg": {"type": "FuelrailTrainLoop", "max_iters": steps},
        "train_dataloader": {
            "dataset": {
                "type": "FuelrailDataset",
                "dataset": dataset,
                "batch_size": 2,
                "shuffle": True,
                "drop_last": True,
                "seed": 7,
                "transforms": {"image": {"height": 64, "width": 176}},
            },
            "batch_size": None,
            "sampler": None,
            "num_workers": 0,
            "collate_fn": {"type": "fuelrail_batch"},
        },
        "custom_hooks": [{"type": "FuelrailStateHook"}],
        "default_hooks": {"checkpoint": None, "sampler_seed": None},
        "launcher": "pytorch" if "RANK" in os.environ else "none",
        # MMEngine's own choice names a GPU.
        "model_wrapper_cfg": None if torch.cuda.is_available() else {"device_ids": None},
        "default_scope": "mmengine",
        "log_level": "ERROR",
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Train, from the last checkpoint in the folder if there is one."""
    import fuelrail.loaders.integrations.mmengine  # noqa: F401 - registers; a config file says custom_imports

    options = arguments(argv)
    if "RANK" in os.environ and not torch.cuda.is_available() and not dist.is_initialized():
        dist.init_process_group("gloo")  # MMEngine would look for a GPU
    checkpoints = Checkpoints(options, "mmengine")
    config = make_config(options.dataset, options.steps, str(options.checkpoint))
    if saved := checkpoints.newest():
        config["load_from"] = str(saved / "state.pth")
        config["resume"] = True
    runner = Runner.from_cfg(Config(config))
    runner.register_hook(SaveHook(checkpoints))
    runner.train()


if __name__ == "__main__":
    main()
