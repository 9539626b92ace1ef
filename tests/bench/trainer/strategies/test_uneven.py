"""Staged models train over a last batch that is not full as a plain loop does over its samples."""

from __future__ import annotations

import json

import pytest

from support import uneven_ranks
from support.ranks import run_ranks

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Three samples in the last batch of two ranks, or one: then a rank has only rows that fill it up.
SAMPLES = {2: (7, 5), 4: (9,), 1: (5,)}
PIPELINE = {"strategy": "pipeline", "micro_batches": 2, "pipeline_schedule": "1F1B"}
CASES = {
    1: [{"strategy": "ddp"}],
    2: [
        {"strategy": "ddp"},
        {"strategy": "zero1"},
        {"strategy": "zero2"},
        {"strategy": "fsdp2"},
        {"strategy": "tensor"},
        PIPELINE,
    ],
    4: [{"strategy": "hsdp"}, {"mesh": "pp=2,dp_shard=2", "micro_batches": 2}],
}


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
        found = json.loads(out.read_text())
        wrong = [(case, pair) for case, pair in zip(cases, found, strict=True) if max(pair) > 1e-6]
        assert wrong == []
