"""One rank that trains the GPT on documents of several lengths, in packs and alone; rank 0 compares with torch's own.

The reference knows no rows, masks or weights: each document goes through an undivided model by itself, with plain
causal attention, and the loss of a step is the mean over all predicted tokens of all ranks and micro-batches.
Arguments: DATASET OUT CASES. Rank 0 writes, for each case, the largest difference of a loss and of a gradient.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fuelrail as fr
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.parallel import parallelise
from fuelrail.bench.trainer.strategies.step import named_parameters
from support.channels import tokens
from support.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

GPT = MODELS["gpt-tiny"]
TOKENS = tokens("tokens", dtype="uint16", words=64)
LENGTH = fr.Cost(linear={"timestamp_ns": 1}, constant=2 * 500_000_000, divisor=500_000_000)
"""Row r of the dataset has r + 2 tokens."""
PACK = fr.Pack(budget=33, cost=LENGTH, window=8)
PACKED = fr.OrderSpec(seed=3, pack=PACK)
ALONE = fr.OrderSpec(seed=3)
BALANCED = fr.OrderSpec(seed=3, pack=PACK, balance=fr.Balance(cost=LENGTH))
CASES = {
    "ddp": (PACKED, 2, {"strategy": "ddp"}),
    "ddp, documents alone": (ALONE, 1, {"strategy": "ddp"}),
    "ddp, balanced, clipped": (
        BALANCED,
        2,
        {"strategy": "ddp", "clip_norm": 1e9},
    ),
    "fsdp2": (PACKED, 1, {"strategy": "fsdp2", "recompute": "full"}),
    "tensor": (PACKED, 1, {"strategy": "tensor"}),
    "pipeline": (PACKED, 2, {"strategy": "pipeline", "micro_batches": 2}),
}
QUICK = ("ddp", "ddp, documents alone")
STEPS = 3


def largest(root: Path, out: Path, cases: Sequence[str]) -> dict[str, list[float]]:
    """Run cases on two ranks; return for each the largest difference of a loss and of a gradient."""
    run_ranks(2, __file__, root, out, *cases)
    case_differences: dict[str, list[float]] = json.loads(out.read_text())
    assert case_differences.keys() == set(cases)
    return case_differences


def words(row: int) -> np.ndarray:
    """The document of a row of the dataset."""
    return np.random.default_rng(row).integers(0, GPT.vocabulary, row + 2, np.uint16)


def reference(
    rows: list[int], state: dict[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of documents."""
    model = build_model(GPT)
    model.load_state_dict(state)
    total = torch.zeros(())
    count = 0
    for row in rows:
        tokens = torch.zeros(1, GPT.context + 1, dtype=torch.long)
        document = torch.from_numpy(words(row).astype(np.int64))[: GPT.context + 1]
        tokens[0, : len(document)] = document
        _, logits = model.predict(tokens, torch.ones(1))
        total = total + F.cross_entropy(
            logits[0, : len(document) - 1], document[1:], reduction="sum"
        )
        count += len(document) - 1
    (total / count).backward()
    return float(total.detach()) / count, {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; every rank must call this."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def differences(
    dataset: str,
    order: fr.OrderSpec,
    accumulation: int,
    options: dict[str, object],
) -> list[float]:
    """Train some steps; return the largest differences of the loss and of a gradient that this rank has."""
    from fuelrail.bench.trainer.strategies.parallel import make_mesh
    from fuelrail.bench.trainer.strategies.settings import (
        ParallelSettings,
        degrees_of,
    )

    settings = ParallelSettings(**{"optimiser": "sgd", "learning_rate": 0.1, **options})
    mesh = make_mesh(degrees_of(settings, dist.get_world_size()), "cpu")
    parallel = parallelise(partial(build_model, GPT), settings, mesh=mesh)
    rank_gradients: dict[str, torch.Tensor] = {}

    def note(*_: object) -> None:
        rank_gradients.update(
            {name: gather_tensor(tensor.grad) for name, tensor in named_parameters(parallel.models)}
        )

    parallel.optimiser.register_step_pre_hook(note)
    transforms = {"image": {"height": 16, "width": 16}, "select": ["tokens"]}
    worst_loss = worst_gradient = 0.0
    with fr.DataLoader(
        dataset,
        2,
        order=order,
        drop_last=True,
        transforms=transforms,
        num_workers=1,
        world=mesh,
    ) as loader:
        assert len(loader) >= accumulation
        batches = (batch for _ in range(9) for batch in loader)
        for _ in range(STEPS):
            parts = list(islice(batches, accumulation))
            states = [None] * dist.get_world_size()
            rank_state = {
                name: gather_tensor(tensor) for name, tensor in named_parameters(parallel.models)
            }
            rows = (
                [row for part in parts for row in part["global_index"].tolist()]
                if parallel.counts
                else []
            )
            dist.all_gather_object(states, (rank_state, rows))
            loss = parallel.over_ranks({"loss": float(parallel.step(parts))})["loss"]
            joined = {name: tensor for state, _ in states for name, tensor in state.items()}
            expected, gradients = reference(
                [row for _, rank_rows in states for row in rank_rows], joined
            )
            worst_loss = max(worst_loss, abs(loss - expected))
            assert rank_gradients.keys() <= gradients.keys() and rank_gradients
            worst_gradient = max(
                worst_gradient,
                *(
                    float((tensor - gradients[name]).abs().max())
                    for name, tensor in rank_gradients.items()
                ),
            )
    return [worst_loss, worst_gradient]


def main(dataset: str, out: str, *cases: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case_differences = {name: differences(dataset, *CASES[name]) for name in cases}
    of_ranks: list[dict[str, list[float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, case_differences)
    if dist.get_rank() == 0:
        worst = {
            name: np.max(
                [rank_differences[name] for rank_differences in of_ranks],
                axis=0,
            ).tolist()
            for name in case_differences
        }
        Path(out).write_text(json.dumps(worst))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
