"""A model from outside the trainer: ragged boxes, several outputs, two losses; and one rank that trains it.

The rank trains under each strategy of its world, on the same global batches as one process that adds up the gradients
of the ranks' batches; BatchNorm sees the same samples together. Arguments: DATASET OUT STEPS. Rank 0 writes the
differences of the losses.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fuelrail as fr
from fuelrail.bench.trainer.strategies.step import local

GLOBAL_BATCH = 8
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp2", "hsdp")
TRANSFORMS = {"image": {"height": 32, "width": 48}}


class Layer(nn.Module):
    """A decoder layer of two inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, queries: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.attention(queries, memory, memory, need_weights=False)
        return self.mlp(queries + mixed) + queries


class Detector(nn.Module):
    """Images to the centres of up to eight boxes and whether there is one, and the losses of both."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 8, 8), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1)
        )
        self.queries = nn.Parameter(torch.randn(8, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.centre, self.there = nn.Linear(width, 2), nn.Linear(width, 1)
        self.frozen = nn.Linear(width, width).requires_grad_(requires_grad=False)
        nn.init.zeros_(self.there.bias)  # after the module has it as a part

    def forward(self, batch):
        images = batch["img"].float() / 255 - 0.5
        maps = self.backbone(images.flatten(0, 1))
        memory = maps.flatten(2).transpose(1, 2).reshape(len(images), -1, maps.shape[1])
        queries = self.queries.expand(len(images), -1, -1)
        for layer in self.layers:
            queries = layer(queries, memory)
        queries = queries + self.frozen(queries)
        return {"centre": self.centre(queries), "there": self.there(queries).squeeze(-1)}


def losses(outputs, batch):
    """Two losses of ragged boxes."""
    centre, there = outputs["centre"], outputs["there"]
    wanted = torch.zeros_like(there)
    distance = centre.new_zeros(())
    for row, boxes in enumerate(batch["gt_boxes_3d"]):
        count = min(len(boxes), there.shape[1])
        wanted[row, :count] = 1
        distance = distance + (centre[row, :count] - boxes[:count, :2] / 50).square().sum() / len(there)
    return {"centre": distance, "there": nn.functional.binary_cross_entropy_with_logits(there, wanted)}


def score(outputs, batch):
    """For each sample the largest logit, and its boxes."""
    return {"best": outputs["there"].max(dim=1).values, "boxes": list(outputs["centre"]), "frame": batch["frame"]}


def divided(**options):
    return fr.parallelise(
        Detector,
        wrap=[Layer],
        loss=losses,
        optimiser=partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=5),
        **options,
    )


def load(dataset: str, **options):
    return fr.DataLoader(dataset, transforms=TRANSFORMS, num_workers=1, **options)


def train_alone(dataset: str, steps: int, parts: int) -> list[float]:
    """Losses of one process that takes the batches of the ranks one after another."""
    alone = divided(alone=True)
    rows = GLOBAL_BATCH // parts
    with load(dataset, batch_size=rows, shuffle=True, drop_last=True, seed=3, world=fr.World(0, 1)) as loader:
        batches = forever(loader)
        return [float(alone.step(islice(batches, parts))) for _ in range(steps)]


def forever(loader):
    while True:
        yield from loader


def main(dataset: str, out: str, steps: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, differences = dist.get_world_size(), {}
    expected = train_alone(dataset, int(steps), world) if dist.get_rank() == 0 else []
    with load(dataset, split="val", batch_size=3, world=fr.World(0, 1)) as loader:
        once = fr.evaluate(divided(alone=True), loader, score) if dist.get_rank() == 0 else {}
    for strategy in STRATEGIES:
        parallel = divided(strategy=strategy)
        found = []
        with load(dataset, split="val", batch_size=2, world=parallel.mesh) as loader:
            scores = fr.evaluate(parallel, loader, score)
        file = Path(f"{out}.safetensors")
        fr.save_weights(parallel, file)
        other = divided(strategy=strategy, seed=9)
        fr.load_weights(other, file)
        equal = all(
            map(torch.equal, *([local(one) for one in made.models[0].parameters()] for made in (parallel, other)))
        )
        assert equal, f"{strategy}: weights are not those that were saved"
        if dist.get_rank() == 0:
            differences[f"{strategy} evaluated"] = scores["sample_key"] == once["sample_key"] and bool(
                torch.allclose(scores["best"], once["best"], rtol=0, atol=1e-6)
            )
        rows = GLOBAL_BATCH // world
        with load(dataset, batch_size=rows, shuffle=True, drop_last=True, seed=3, world=parallel.mesh) as loader:
            for batch in islice(forever(loader), int(steps)):
                loss = float(parallel.step([batch]))
                found.append(parallel.over_ranks({"loss": loss})["loss"])
        pairs = zip(expected, found, strict=False)
        differences[strategy] = max((abs(one - other) for one, other in pairs), default=0.0)
        differences[f"{strategy} moved"] = found[0] - found[-1]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(differences))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
