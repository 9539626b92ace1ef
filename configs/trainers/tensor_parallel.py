"""Tensor parallelism (DTensor): ``torchrun --nproc-per-node 2 configs/trainers/tensor_parallel.py
DATASET``.

The ranks of a tensor-parallel group hold parts of the same layers, so they must see the same
samples. The loader knows that from the mesh: along "tp" all ranks get the same batches, along "dp"
each its own. ``check_ranks`` makes sure. torch.distributed.checkpoint saves the loader with the
rest.
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

from fuelrail import DataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Train on this rank; the process group is initialised."""
    options = arguments(argv)
    device = own_device()
    mesh = init_device_mesh(
        device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp")
    )
    model = build_model().to(device)
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    # Plain SGD keeps this short: with more than one rank along "dp" add fully_shard(model,
    # mesh=mesh["dp"]).
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)
    checkpoints = Checkpoints(options, "tensor_parallel")
    with DataLoader(
        options.dataset,
        batch_size=2,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        seed=7,
        device=device,
        world=mesh,
        check_ranks=True,
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
