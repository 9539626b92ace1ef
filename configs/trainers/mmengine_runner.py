"""MMEngine's runner: ``torchrun --nproc-per-node 2 configs/trainers/mmengine_runner.py DATASET``.

A config of the BEVDet kind: beside the imports, Fuelrail changes its `train_dataloader` and its hooks: one
keeps the position in the checkpoints, and there is no sampler to be seeded. Needs ``pip install mmengine``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from example import arguments, build_model, inputs, report, targets
from mmengine.config import Config
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

    def forward(self, mode: str = "loss", **batch: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401, ARG002
        """The losses of a batch."""
        loss = mse_loss(self.model(inputs(batch)), targets(batch))
        report(MessageHub.get_current_instance().get_info("iter"), loss.item(), batch)
        return {"loss": loss}


def config(dataset: str, steps: int, folder: str) -> dict[str, Any]:
    """The runner's config."""
    return {
        "experiment_name": f"example-{steps}",
        "work_dir": folder,
        "model": {"type": "ExampleModel"},
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3}},
        "train_cfg": {"type": "FuelrailTrainLoop", "max_iters": steps},
        "train_dataloader": {
            "dataset": {
                "type": "FuelrailDataset", "dataset": dataset, "batch_size": 2,
                "shuffle": True, "drop_last": True, "seed": 7,
                "transforms": {"image": {"height": 64, "width": 176}},
            },
            "batch_size": None, "sampler": None, "num_workers": 0, "collate_fn": {"type": "fuelrail_batch"},
        },
        "custom_hooks": [{"type": "FuelrailStateHook"}],
        "default_hooks": {
            "checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 1},
            "sampler_seed": None,
        },
        "resume": True,
        "launcher": "pytorch" if "RANK" in os.environ else "none",
        # MMEngine's own choice names a GPU.
        "model_wrapper_cfg": None if torch.cuda.is_available() else {"device_ids": None},
        "default_scope": "mmengine",
        "log_level": "ERROR",
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Train, from the last checkpoint in the folder if there is one."""
    import fuelrail.loaders.integrations.mmengine  # noqa: F401 - registers; a config file says custom_imports

    options = arguments(argv)
    if "RANK" in os.environ and not torch.cuda.is_available() and not dist.is_initialized():
        dist.init_process_group("gloo")  # MMEngine would look for a GPU
    Runner.from_cfg(Config(config(options.dataset, options.steps, str(options.checkpoint)))).train()


if __name__ == "__main__":
    main()
