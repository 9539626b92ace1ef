"""Staged models train over a last batch that is not full as a plain loop does over its samples."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from fuelrail import bench
from support import uneven_ranks
from support.ranks import run_ranks

# Three samples in the last batch of two ranks, or one: then a rank has only rows that fill it up.
SAMPLES = {2: (7, 5), 4: (9,), 1: (5,)}
PIPELINE = {
    "strategy": "pipeline",
    "micro_batches": 2,
    "pipeline_schedule": "1F1B",
}
CASES = {
    1: [{"strategy": "ddp"}],
    2: [
        {"strategy": "ddp"},
        {"strategy": "zero1"},
        {"strategy": "zero2"},
        {"strategy": "fsdp2"},
        {"strategy": "tensor", "clip_norm": 0.5},
        PIPELINE,
    ],
    4: [
        {"strategy": "hsdp", "clip_norm": 0.5},
        {"mesh": "pp=2,dp_shard=2", "micro_batches": 2, "clip_norm": 0.5},
        {"mesh": "dp_replicate=2,tp=2"},
    ],
}


def test_micro_batches_of_several_sizes_weigh_each_sample_alike():
    parallel = bench.parallelise(uneven_ranks.Points, optimiser="sgd", learning_rate=0.1)
    undivided = copy.deepcopy(parallel.models[0])
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 255, (9, 1, 3, 16, 16), generator=generator, dtype=torch.uint8)
    batch = {
        "img": images,
        "global_index": torch.arange(9),
        "valid": torch.ones(9, dtype=bool),
    }
    batch["valid"][5] = False
    parts = [
        {name: value[first:end] for name, value in batch.items()}
        for first, end in ((0, 4), (4, 6), (6, 9))
    ]
    loss = float(parallel.step(parts))
    real = {name: value[batch["valid"]] for name, value in batch.items()}
    expected = undivided(*undivided.inputs(real))
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for ours, theirs in zip(parallel.models[0].parameters(), undivided.parameters(), strict=True):
        assert torch.allclose(ours, theirs - 0.1 * theirs.grad, rtol=0, atol=1e-6)


def test_a_step_of_padding_alone_changes_nothing():
    parallel = bench.parallelise(uneven_ranks.Points, optimiser="sgd")
    before = copy.deepcopy(list(parallel.models[0].parameters()))
    batch = {
        "img": torch.ones(2, 1, 3, 16, 16),
        "global_index": torch.arange(2),
        "valid": torch.zeros(2, dtype=bool),
    }
    assert float(parallel.step([batch])) == 0
    assert all(map(torch.equal, before, parallel.models[0].parameters()))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_real_sample_counts_the_same(world, tiny_dataset, tmp_path):
    cases = [
        (kind, accumulation, options)
        for options in CASES[world]
        for accumulation in (1, 2)
        for kind in (["points"] if world == 4 else uneven_ranks.MODELS)
        if kind == "points" or options in ({"strategy": "ddp"}, PIPELINE)
    ]
    for number, samples in enumerate(SAMPLES[world]):
        root = tiny_dataset({"train": (samples,)}, size=(16, 16)).root
        out = tmp_path / f"{number}.json"
        run_ranks(world, uneven_ranks.__file__, root, out, json.dumps(cases))
        pairs = json.loads(out.read_text())
        wrong = [(case, pair) for case, pair in zip(cases, pairs, strict=True) if max(pair) > 1e-6]
        assert wrong == []
