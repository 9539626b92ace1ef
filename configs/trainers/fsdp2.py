"""FSDP2 (``fully_shard``): ``torchrun --nproc-per-node 2 configs/trainers/fsdp2.py DATASET``.

The mesh goes to `fully_shard` and to the loader, which reads from its axes' names that every rank
gets samples of its own; a mesh with the axes ("dp_replicate", "dp_shard") makes it HSDP.
torch.distributed.checkpoint saves the loader with the rest, as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from fuelrail import DataLoader, RemoteWorkers

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Train on this rank; the process group is initialised."""
    options = arguments(argv, takes_actors=True)
    device = own_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = build_model().to(device)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    checkpoints = Checkpoints(options, "fsdp2")
    with DataLoader(
        options.dataset,
        batch_size=2,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        seed=7,
        device=device,
        world=mesh,
        where=RemoteWorkers("auto", num_workers=options.actors) if options.actors else None,
    ) as loader:
        progress: dict[str, Any] = {"step": 0}
        if saved := checkpoints.newest():
            weights, moments = get_state_dict(model, optimiser)
            state = {"model": weights, "optimiser": moments, "loader": loader, "progress": progress}
            dcp.load(state, checkpoint_id=saved)
            set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=moments)
            progress = state["progress"]
        for step, batch in checkpoints.batches(loader, progress["step"]):
            loss = mse_loss(model(inputs(batch)), targets(batch))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            report(step, loss.item(), batch)
            if checkpoints.due(step + 1):
                with checkpoints.saving(step + 1) as folder:
                    weights, moments = get_state_dict(model, optimiser)
                    progress = {"step": step + 1}
                    state = {
                        "model": weights,
                        "optimiser": moments,
                        "loader": loader,
                        "progress": progress,
                    }
                    dcp.save(state, checkpoint_id=folder)


if __name__ == "__main__":
    join_group()
    main()
    dist.destroy_process_group()
