"""Megatron-Core's parallel state: ``torchrun --nproc-per-node 2 configs/trainers/megatron_core.py
DATASET``.

Once `initialize_model_parallel` has run, the loader asks Megatron for its data-parallel rank: the
ranks of a tensor-, pipeline- or context-parallel group get the same batches without a word.
`torch.save` writes a file for each rank, with the position. Needs ``pip install megatron-core``.
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
from megatron.core import parallel_state
from torch.nn.functional import mse_loss

from fuelrail import DataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None, tensor_parallel: int = 2) -> None:
    """Train on this rank; the process group is initialised."""
    options = arguments(argv)
    device = own_device()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    model = build_model().to(device)
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)
    group = parallel_state.get_data_parallel_group()
    checkpoints = Checkpoints(options, "megatron")
    first = 0
    with DataLoader(
        options.dataset,
        batch_size=2,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        seed=7,
        device=device,
        check_ranks=True,
    ) as loader:
        if folder := checkpoints.newest():
            saved = torch.load(folder / f"rank-{dist.get_rank()}.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimiser.load_state_dict(saved["optimiser"])
            loader.load_state_dict(saved["loader"])
            first = saved["step"]
        for step, batch in checkpoints.batches(loader, first):
            loss = mse_loss(model(inputs(batch)), targets(batch))
            optimiser.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= group.size()
            optimiser.step()
            report(step, loss.item(), batch)
            if checkpoints.due(step + 1):
                with checkpoints.saving(step + 1) as folder:
                    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
                    file = folder / f"rank-{dist.get_rank()}.pt"
                    torch.save({**state, "loader": loader.state_dict(), "step": step + 1}, file)
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    join_group()
    main()
    dist.destroy_process_group()
