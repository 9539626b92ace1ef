"""A model from outside the trainer: ragged boxes, several outputs, two losses; and one rank that trains it.

The rank trains under each strategy of its world, on the same global batches as one process that adds up the gradients
of the ranks' batches; BatchNorm sees the same samples together. Arguments: DATASET OUT STEPS, and for an example of
configs/trainers in place of the model here its name, a type of numbers and a kind of batch norm, of which frozen ones
train by SGD. Rank 0 writes the differences of the losses, relative where they are above 1.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fuelrail as fr
from fuelrail import bench
from fuelrail.bench.trainer.strategies.step import local

sys.path.insert(0, str(Path(__file__).parents[2] / "configs" / "trainers"))
GLOBAL_BATCH = 8
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp2", "hsdp")
TRANSFORMS = {"image": {"height": 32, "width": 48}}


class Layer(nn.Module):
    """A decoder layer of two inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, queries: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.attention(queries, memory, memory, need_weights=False)
        return self.mlp(queries + mixed) + queries


class Detector(nn.Module):
    """Images to the centres of up to eight boxes and whether there is one, and the losses of both."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 8, 8),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )
        self.queries = nn.Parameter(torch.randn(8, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.centre = nn.Linear(width, 2)
        self.there = nn.Linear(width, 1)
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
        return {
            "centre": self.centre(queries),
            "there": self.there(queries).squeeze(-1),
        }


def losses(outputs, batch):
    """Two losses of ragged boxes."""
    centre = outputs["centre"]
    presence = outputs["there"]
    expected = torch.zeros_like(presence)
    distance = centre.new_zeros(())
    for row, boxes in enumerate(batch["gt_boxes_3d"]):
        count = min(len(boxes), presence.shape[1])
        expected[row, :count] = 1
        distance = distance + (centre[row, :count] - boxes[:count, :2] / 50).square().sum() / len(
            presence
        )
    return {
        "centre": distance,
        "there": nn.functional.binary_cross_entropy_with_logits(presence, expected),
    }


def score(outputs, batch):
    """For each sample the largest logit, and its boxes."""
    return {
        "best": outputs["there"].max(dim=1).values,
        "boxes": list(outputs["centre"]),
        "frame": batch["frame"],
    }


def divided(**options):
    return bench.parallelise(
        Detector,
        wrap=[Layer],
        loss=losses,
        optimiser=partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=5),
        **options,
    )


def example(name: str, **options):
    """An example of configs/trainers, small and without dropout, divided with its own optimiser."""
    module = importlib.import_module(name)
    small = {
        "classes": 2,
        "width": 8,
        "blocks": (1, 1, 1, 1),
        "grid": 16,
        "channels": 16,
    }
    build = (
        partial(module.Detector, **small)
        if name == "detector"
        else partial(module.Vla, dropout=0.0)
    )
    return module.divide(build, **options)


def load(dataset: str, **options):
    return fr.DataLoader(dataset, **{"transforms": TRANSFORMS, "num_workers": 1, **options})


def train_alone(divide, read, steps: int, parts: int) -> list[float]:
    """Losses of one process that takes the batches of the ranks one after another."""
    alone = divide(alone=True)
    options = {
        "shuffle": True,
        "drop_last": True,
        "seed": 3,
        "world": fr.World(0, 1),
    }
    with read(batch_size=GLOBAL_BATCH // parts, **options) as loader:
        batches = forever(loader)
        return [float(alone.step(islice(batches, parts))) for _ in range(steps)]


def forever(loader):
    while True:
        yield from loader


def alike(scores, expected) -> bool:
    """Whether scores are of the same samples in the same order, and numbers equal but for rounding errors."""
    numbers = [
        name
        for name, values in expected.items()
        if isinstance(values, torch.Tensor) and values.is_floating_point()
    ]
    close = [torch.allclose(scores[name], expected[name], rtol=1e-6, atol=1e-5) for name in numbers]
    return scores["sample_key"] == expected["sample_key"] and all(close)


def main(
    dataset: str,
    out: str,
    steps: str,
    name: str = "",
    kind: str = "float32",
    batch_norm: str = "local",
) -> None:
    torch.set_num_threads(1)
    if kind == "float64":
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = (
            torch.Tensor.double
        )  # what the examples want in at least single precision
    dist.init_process_group("gloo")
    divide = divided
    read = partial(load, dataset)
    scored = score
    if name:
        module = importlib.import_module(name)
        divide = partial(example, name, batch_norm=batch_norm)
        if batch_norm == "frozen":
            divide = partial(
                divide,
                optimiser=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
            )
        read = partial(read, **module.SAMPLES)
        scored = module.score
    world = dist.get_world_size()
    differences = {}
    expected = train_alone(divide, read, int(steps), world) if dist.get_rank() == 0 else []
    with read(split="val", batch_size=3, world=fr.World(0, 1)) as loader:
        expected_scores = (
            bench.evaluate(divide(alone=True), loader, scored) if dist.get_rank() == 0 else {}
        )
    for strategy in STRATEGIES:
        parallel = divide(strategy=strategy)
        actual_losses = []
        with read(split="val", batch_size=2, world=parallel.mesh) as loader:
            scores = bench.evaluate(parallel, loader, scored)
        file = Path(f"{out}.safetensors")
        bench.save_weights(parallel, file)
        restored = divide(strategy=strategy, seed=9)
        bench.load_weights(restored, file)
        equal = all(
            map(
                torch.equal,
                *(
                    [local(parameter) for parameter in parts.models[0].parameters()]
                    for parts in (parallel, restored)
                ),
            )
        )
        assert equal, f"{strategy}: weights are not those that were saved"
        if dist.get_rank() == 0:
            differences[f"{strategy} evaluated"] = alike(scores, expected_scores)
        rows = GLOBAL_BATCH // world
        with read(
            batch_size=rows,
            shuffle=True,
            drop_last=True,
            seed=3,
            world=parallel.mesh,
        ) as loader:
            for batch in islice(forever(loader), int(steps)):
                loss = float(parallel.step([batch]))
                actual_losses.append(parallel.over_ranks({"loss": loss})["loss"])
        pairs = zip(expected, actual_losses, strict=False)
        differences[strategy] = max(
            (abs(loss - actual) / max(1, abs(loss)) for loss, actual in pairs),
            default=0.0,
        )
        differences[f"{strategy} moved"] = actual_losses[0] - actual_losses[-1]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(differences))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
