"""Sizes of an own staged model that its strategy does not divide are refused in words."""

from __future__ import annotations

import json

import pytest

from support import undivided_ranks
from support.ranks import run_ranks

OF_2 = "tp=2 does not divide the "
TENSOR = {"strategy": "tensor"}
PIPELINE = {"strategy": "pipeline"}
CASES = {
    2: [
        (
            (7, 4, 32, TENSOR),
            OF_2 + "7 entries of axis 1 of what comes out of 'stem', of shape [4, 7, 24]; "
            "tp of 1, 7 would",
        ),
        (
            (8, 3, 32, TENSOR),
            OF_2 + "3 heads of 'blocks.0.attention.query'; tp of 1, 3 would",
        ),
        (
            (8, 4, 15, TENSOR),
            OF_2 + "15 outputs of 'blocks.0.mlp.0'; tp of 1, 3, 5, 15 would",
        ),
        (
            (8, 4, 32, {**PIPELINE, "micro_batches": 3}),
            (
                "micro_batches=3 does not divide the batch of 4 samples per rank; micro_batches of "
                "1, 2, 4 would"
            ),
        ),
        (
            (8, 4, 32, {**PIPELINE, "micro_batches": 1}),
            (
                "1F1B with pp=2 needs 2 micro-batches or more, and a rank's batch is cut into 1; use "
                "micro_batches=2, and a batch_size that it divides"
            ),
        ),
        (
            (
                8,
                4,
                32,
                {
                    **PIPELINE,
                    "micro_batches": 2,
                    "pipeline_schedule": "Interleaved1F1B",
                },
            ),
            (
                "4 stages (Interleaved1F1B, pp=2) are more than the model's 2 layers; use a model of "
                "more, or a smaller pp"
            ),
        ),
    ],
    4: [
        (
            (
                8,
                4,
                32,
                {
                    "mesh": "pp=2,dp_replicate=2",
                    "micro_batches": 2,
                    "pipeline_schedule": schedule,
                },
            ),
            (
                f"{schedule} loses gradients where data-parallel ranks share a pipeline (dp_shard=1, "
                "dp_replicate=2); use Interleaved1F1B, or pp and tp alone"
            ),
        )
        for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ],
}


@pytest.mark.process
@pytest.mark.parametrize("world", CASES)
def test_what_a_strategy_does_not_divide_is_refused_in_words(world, tmp_path):
    cases = [case for case, _ in CASES[world]]
    if world == 2:
        cases.append((8, 4, 32, TENSOR))
    run_ranks(
        world,
        undivided_ranks.__file__,
        tmp_path / "out.json",
        json.dumps(cases),
    )
    outcomes = json.loads((tmp_path / "out.json").read_text())
    refused = [text for _, text in CASES[world]]
    assert outcomes[: len(refused)] == refused
    assert all(float(loss) > 0 for loss in outcomes[len(refused) :])
