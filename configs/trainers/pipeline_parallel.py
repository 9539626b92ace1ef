"""Pipeline parallelism: ``torchrun --nproc-per-node 2 configs/trainers/pipeline_parallel.py
DATASET``.

The first stage needs the images, the last one the labels of the same samples. Both take them from
loaders of their own, which the mesh's axis "pp" tells to yield the same batches. `torch.save`
writes a file for each stage, with the position.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss

from fuelrail import DataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Train on this rank; the process group is initialised."""
    options = arguments(argv)
    device = own_device()
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("pp",))
    rank = mesh.get_local_rank()
    model = build_model().to(device)
    part = model[:1] if rank == 0 else model[1:]
    stage = PipelineStage(
        part, stage_index=rank, num_stages=2, device=device, group=mesh.get_group()
    )
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=mse_loss)
    optimiser = torch.optim.SGD(part.parameters(), 1e-3)
    checkpoints = Checkpoints(options, "pipeline_parallel")
    first = 0
    with DataLoader(
        options.dataset,
        batch_size=2,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        seed=7,
        device=device,
        world=mesh,
    ) as loader:
        if folder := checkpoints.newest():
            saved = torch.load(folder / f"stage-{rank}.pt", weights_only=True)
            part.load_state_dict(saved["model"])
            optimiser.load_state_dict(saved["optimiser"])
            loader.load_state_dict(saved["loader"])
            first = saved["step"]
        for step, batch in checkpoints.batches(loader, first):
            optimiser.zero_grad()
            losses: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(inputs(batch))
            else:
                schedule.step(target=targets(batch), losses=losses)
            optimiser.step()
            report(step, torch.stack(losses).mean().item() if losses else None, batch)
            if checkpoints.due(step + 1):
                with checkpoints.saving(step + 1) as folder:
                    state = {"model": part.state_dict(), "optimiser": optimiser.state_dict()}
                    file = folder / f"stage-{rank}.pt"
                    torch.save({**state, "loader": loader.state_dict(), "step": step + 1}, file)


if __name__ == "__main__":
    join_group()
    main()
    dist.destroy_process_group()
