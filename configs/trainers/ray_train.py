"""Ray Train: ``python configs/trainers/ray_train.py DATASET``.

Each worker of `TorchTrainer` makes its loader for the global batch, which stays the same, and
reshapes it to the process group that Ray has set up. The state goes into Ray's checkpoints. When a
worker dies, Ray starts one or two again, as many as the cluster has room for, and they continue
with the next rows. Needs ``pip install "ray[train]"``, 2.53 or newer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from example import TRANSFORMS, arguments, build_model, forever, inputs, report, targets
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.nn.functional import mse_loss

from fuelrail import DataLoader, World, rank_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GLOBAL_BATCH = 4


def train_worker(config: dict[str, Any]) -> None:
    """One worker."""
    model = prepare_model(build_model())
    network = getattr(model, "module", model)  # Ray wraps it where there are several workers
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    first = 0
    device = train.torch.get_device()
    with DataLoader(
        config["dataset"],
        GLOBAL_BATCH,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        seed=7,
        device=device,
        world=World(),  # as one rank, of the whole batch
    ) as loader:
        loader.reshape(World(dist.get_rank(), dist.get_world_size()))
        checkpoint = train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                saved = torch.load(Path(folder, "state.pt"), weights_only=True)
            network.load_state_dict(saved["model"])
            optimiser.load_state_dict(saved["optimiser"])
            torch.set_rng_state(saved["generators"][dist.get_rank() % len(saved["generators"])])
            loader.load_state_dict(saved["loader"])
            first = saved["step"]
        for step, batch in zip(range(first, config["steps"]), forever(loader), strict=False):
            loss = mse_loss(model(inputs(batch)), targets(batch))
            optimiser.zero_grad()
            (loss * rank_weight(batch)).backward()  # ranks may differ by a row
            optimiser.step()
            report(step, loss.item(), batch)
            if config["after_step"] is not None:
                config["after_step"](step)
            metrics = {"step": step, "rank": dist.get_rank(), "samples": batch["sample_key"]}
            generators: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(generators, torch.get_rng_state())
            with tempfile.TemporaryDirectory() as folder:
                # The rest of the state is the same on every rank: rank 0's is enough.
                state = {
                    "model": network.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "generators": generators,
                }
                torch.save(
                    {**state, "loader": loader.state_dict(), "step": step + 1},
                    Path(folder, "state.pt"),
                )
                train.report(
                    metrics, checkpoint=Checkpoint(folder) if dist.get_rank() == 0 else None
                )


def main(
    argv: Sequence[str] | None = None, after_step: Callable[[int], None] | None = None
) -> None:
    """Train with up to two workers, each of which calls ``after_step`` with the number of a step."""
    options = arguments(argv)
    TorchTrainer(
        train_worker,
        train_loop_config={
            "dataset": str(Path(options.dataset).resolve()),
            "steps": options.steps,
            "after_step": after_step,
        },
        scaling_config=ScalingConfig(num_workers=(1, 2)),
        run_config=RunConfig(
            storage_path=str(options.checkpoint.resolve()),
            name="ray",
            failure_config=train.FailureConfig(max_failures=1),
        ),
    ).fit()


if __name__ == "__main__":
    main()
