"""torchelastic: nodes die and join, and torchrun starts all workers again on those that are left.

On each node ``torchrun --nnodes=1:4 --nproc-per-node=1 --max-restarts=99 --rdzv-backend=c10d
--rdzv-endpoint=HOST:PORT configs/trainers/torchelastic_ddp.py DATASET``.

Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: else torch 2.13 tells a node that joins no address.

The workers continue from the newest checkpoint on any number of ranks: the loader is made for the
global batch, which stays the same, and reshaped to the ranks that there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from example import (
    TRANSFORMS,
    Checkpoints,
    arguments,
    build_model,
    inputs,
    join_group,
    own_device,
    report,
    targets,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from fuelrail import DataLoader, World, rank_weight

if TYPE_CHECKING:
    from collections.abc import Sequence

GLOBAL_BATCH = 6


def main(argv: Sequence[str] | None = None) -> None:
    """Train on this rank; the process group is initialised."""
    options = arguments(argv)
    device = own_device()
    model = DistributedDataParallel(build_model().to(device))
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    checkpoints = Checkpoints(options, "torchelastic")
    first = 0
    with DataLoader(
        options.dataset,
        GLOBAL_BATCH,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        seed=7,
        device=device,
        world=World(),  # as one rank, of the whole batch
    ) as loader:
        loader.reshape(World(dist.get_rank(), dist.get_world_size()))
        if folder := checkpoints.newest():
            saved = torch.load(folder / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimiser.load_state_dict(saved["optimiser"])
            loader.load_state_dict(saved["loader"])
            first = saved["step"]
        for step, batch in checkpoints.batches(loader, first):
            loss = mse_loss(model(inputs(batch)), targets(batch))
            optimiser.zero_grad()
            (loss * rank_weight(batch)).backward()  # ranks may differ by a row
            optimiser.step()
            report(step, loss.item(), batch)
            if checkpoints.due(step + 1):
                with checkpoints.saving(step + 1) as folder:
                    if dist.get_rank() == 0:
                        state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
                        torch.save(
                            {**state, "loader": loader.state_dict(), "step": step + 1},
                            folder / "state.pt",
                        )


if __name__ == "__main__":
    join_group()
    main()
    dist.destroy_process_group()
