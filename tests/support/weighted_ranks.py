"""One rank of a job on gloo whose ranks share batches unevenly: its weighted gradients, averaged, beside the whole's.

Prints the largest difference between the average over the ranks and the gradient of the global batch's mean loss, of
all steps, with the weights and without them.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from fuelrail import OrderSpec, World, rank_weight
from fuelrail.order import BatchSampler

NUM_ROWS = 60


def gradient(model: nn.Module, rows: list[int], weight: float) -> torch.Tensor:
    """The gradient of the weighted mean loss of some rows."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_ROWS, 7, dtype=torch.float64, generator=generator)
    targets = torch.randn(NUM_ROWS, 1, dtype=torch.float64, generator=generator)
    model.zero_grad()
    (weight * (model(inputs[rows]) - targets[rows]).square().mean()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    world = World(dist.get_rank(), dist.get_world_size())
    worst = {"weighted": 0.0, "plain": 0.0}
    for global_batch in (10, 11, 12, 4):
        sampler = BatchSampler(NUM_ROWS, OrderSpec(seed=3), global_batch=global_batch, world=world)
        alone = BatchSampler(NUM_ROWS, OrderSpec(seed=3), global_batch=global_batch, world=World())
        for rows, all_rows in zip(sampler, alone, strict=True):
            expected = gradient(model, all_rows, 1.0)
            batch = {"weight": sampler.rank_weight}
            for name, weight in (("weighted", rank_weight(batch)), ("plain", rank_weight({}))):
                average = gradient(model, rows, weight)
                dist.all_reduce(average)
                average /= world.size
                worst[name] = max(worst[name], float((average - expected).abs().max()))
    if world.rank == 0:
        sys.stdout.write(f"{worst['weighted']} {worst['plain']}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
