"""One rank that trains staged models over epochs whose last batch is not full; see `test_uneven`.

The reference is a plain loop of torch in one process: the mean loss over the real samples of a
step, whatever rank or micro-batch has them. Arguments: DATASET OUT CASES as JSON, each a kind of
model, a number of micro-batches in a step and the fields of `ParallelSettings`. Rank 0 writes for
each case the largest difference of a loss and of a parameter.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import fuelrail as fr
from fuelrail import bench
from fuelrail.bench.trainer.distill.student import Distilled
from fuelrail.bench.trainer.distill.teacher import Source
from fuelrail.bench.trainer.models.staged import StagedModel
from fuelrail.bench.trainer.strategies.step import named_parameters

BATCH = 2
STEPS = 5
RATE = 0.05
TRANSFORMS = {"image": {"height": 16, "width": 16}}


class First(nn.Linear):
    """A linear map of the first of several inputs."""

    def forward(self, hidden, *_):
        return super().forward(hidden)


class Points(StagedModel):
    """Images to a point for each sample, whose loss is the squared distance from another."""

    plan: ClassVar = {
        "blocks.*.0": ColwiseParallel(),
        "blocks.*.2": RowwiseParallel(),
    }

    def __init__(self) -> None:
        super().__init__(None)
        self.stem = First(48, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)
        )
        self.head = First(8, 2)

    def inputs(self, batch):
        return features(batch), targets(batch), batch["valid"].float()

    def losses(self, logits, *inputs):
        return (logits - inputs[1]).square()


class OwnLoss(Points):
    """The same with a loss of its own, over the rows that are real."""

    def loss(self, logits, *inputs):
        real = inputs[-1] > 0
        if not real.any():
            return logits.sum() * 0
        return (logits[real] - inputs[1][real]).square().mean()


class NothingSaid(Source):
    """A teacher whose predictions are a layer's; the student's own loss is all that is trained."""

    def of_batch(self, batch):
        return (targets(batch),)


def distilled() -> StagedModel:
    return Distilled(Points(), NothingSaid(("targets",), 0), {"labels": 1.0}, 1.0)


MODELS = {"points": Points, "own loss": OwnLoss, "distilled": distilled}


def features(batch):
    images = batch["img"].float().flatten(0, 1)
    pooled = F.adaptive_avg_pool2d(images, 4).unflatten(0, batch["img"].shape[:2])
    return pooled.mean(1).flatten(1) / 128 - 1


def targets(batch):
    numbers = batch["global_index"].float()
    return torch.stack((numbers, -numbers * numbers / 8), 1)


def load(dataset: str, batch_size: int, world):
    return fr.DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        seed=3,
        transforms=TRANSFORMS,
        num_workers=1,
        world=world,
    )


def forever(loader):
    while True:
        yield from loader


def train_alone(dataset: str, global_batch: int, accumulation: int, clip_norm: float | None):
    """Losses and parameters of a plain loop."""
    torch.manual_seed(0)
    model = Points()
    optimiser = torch.optim.SGD(model.parameters(), RATE, 0.9)
    losses = []
    was_uneven = False
    with load(dataset, global_batch, fr.World(0, 1)) as loader:
        batches = forever(loader)
        for _ in range(STEPS):
            total = torch.zeros(())
            count = 0
            for batch in islice(batches, accumulation):
                hidden = model.stem(features(batch)[batch["valid"]])
                for block in model.blocks:
                    hidden = block(hidden)
                distance = (model.head(hidden) - targets(batch)[batch["valid"]]).square()
                total = total + distance.mean(1).sum()
                count += len(distance)
            was_uneven |= count < accumulation * global_batch
            (total / count).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimiser.step()
            optimiser.zero_grad()
            losses.append(float(total.detach()) / count)
    assert was_uneven
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def gather_tensor(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def differences(dataset: str, kind: str, accumulation: int, options: dict[str, object]):
    parallel = bench.parallelise(MODELS[kind], optimiser="sgd", learning_rate=RATE, **options)
    num_data = dist.get_world_size()
    if parallel.mesh is not None:
        sizes = dict(zip(parallel.mesh.mesh_dim_names, parallel.mesh.shape, strict=True))
        num_data = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
    expected, parameters = train_alone(
        dataset, num_data * BATCH, accumulation, options.get("clip_norm")
    )
    losses = []
    with load(dataset, BATCH, parallel.mesh) as loader:
        batches = forever(loader)
        for _ in range(STEPS):
            loss = float(parallel.step(islice(batches, accumulation)))
            losses.append(parallel.over_ranks({"loss": loss})["loss"])
    pairs = zip(losses, expected, strict=True)
    worst_loss = max(
        abs(rank_loss - reference) / max(1, abs(reference)) for rank_loss, reference in pairs
    )
    worst_parameter = max(
        float((gather_tensor(value) - parameters[name]).abs().max())
        for name, value in named_parameters(parallel.models)
    )
    return [worst_loss, worst_parameter]


def main(dataset: str, out: str, cases: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case_differences = [differences(dataset, *case) for case in json.loads(cases)]
    of_ranks: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, case_differences)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(torch.tensor(of_ranks).amax(0).tolist()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
