"""One rank that makes staged models whose sizes tensor parallel of two ranks may not divide.

Arguments: OUT CASES as JSON, each tokens of a sample, heads and channels inside of a perceptron, and
the fields of `ParallelSettings`. Rank 0 writes the error of each, or the loss of a batch of four.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

import fuelrail as fr
from fuelrail import bench
from fuelrail.bench.trainer.models.staged import (
    TRANSFORMER_PLAN,
    Block,
    StagedModel,
    perceptron,
)

WIDTH = 24


class First(nn.Linear):
    """A linear map of the first of several inputs."""

    def forward(self, hidden, *_):
        return super().forward(hidden)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Linear(WIDTH, 1)

    def forward(self, tokens, *_):
        return self.scale(self.norm(tokens).mean(1))


class Tokens(StagedModel):
    """Tokens to a number for each sample."""

    plan: ClassVar = {
        **TRANSFORMER_PLAN,
        "head.norm": PrepareModuleInput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_output=True,
        ),
    }

    def __init__(self, heads: int, inner: int) -> None:
        super().__init__(None)
        block = Block(WIDTH, heads, causal=False, mlp=perceptron(WIDTH, inner))
        self.stem = First(4, WIDTH)
        self.blocks = nn.ModuleList([block, nn.Identity()])
        self.head = Head()

    def inputs(self, batch):
        return batch["tokens"], batch["score"], torch.ones(len(batch["tokens"]))

    def losses(self, logits, *inputs):
        return (logits - inputs[1]).square()


def outcome(tokens: int, heads: int, inner: int, options: dict[str, object]) -> str:
    try:
        parallel = bench.parallelise(lambda: Tokens(heads, inner), **options)
        batch = {"tokens": torch.ones(4, tokens, 4), "score": torch.ones(4, 1)}
        return str(float(parallel.step([batch])))
    except fr.errors.ConfigError as error:
        return str(error)


def main(out: str, cases: str) -> None:
    dist.init_process_group("gloo")
    outcomes = [outcome(*case) for case in json.loads(cases)]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
