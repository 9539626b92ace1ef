"""Plain DistributedDataParallel: ``torchrun --nproc-per-node 2 configs/trainers/ddp.py DATASET``.

The loader finds its rank by itself. Its state is the same on every rank, so one file for all of
them is enough, and that file also restores a run on more or fewer ranks.
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

from fuelrail import DataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Train on this rank; the process group is initialised."""
    options = arguments(argv)
    device = own_device()
    model = DistributedDataParallel(build_model().to(device))
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    checkpoints = Checkpoints(options, "ddp")
    first = 0
    with DataLoader(
        options.dataset,
        batch_size=2,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        seed=7,
        device=device,
    ) as loader:
        if folder := checkpoints.newest():
            saved = torch.load(folder / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimiser.load_state_dict(saved["optimiser"])
            loader.load_state_dict(saved["loader"])
            first = saved["step"]
        for step, batch in checkpoints.batches(loader, first):
            loss = mse_loss(model(inputs(batch)), targets(batch))
            optimiser.zero_grad()
            loss.backward()
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
