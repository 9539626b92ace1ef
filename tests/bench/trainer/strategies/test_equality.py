"""A small part of ``bench/micro/trainer/parallel_equality.py``: strategies against one process, on real ranks.

Each strategy, each option and each model's own way to be divided is here once. The whole matrix is that command's, on
2, 4 and 8 ranks; its result is ``bench/results/parallel_equality.json``.
"""

from __future__ import annotations

import pytest

from fuelrail.bench.micro.trainer.parallel_equality import Case, measure
from fuelrail.bench.trainer.strategies.settings import ParallelSettings

pytestmark = [pytest.mark.process, pytest.mark.slow]


def case(model, precision="fp32", **options):
    return Case(model=f"{model}-tiny", parallel=ParallelSettings(**options), precision=precision, steps=5)


TWO_RANKS = [
    case("resnet", strategy="ddp"),
    case("gpt", strategy="ddp", compile="aot_eager"),
    case("bev", strategy="zero1"),
    case("gpt", strategy="zero2"),
    case("vit", strategy="fsdp2", recompute="selective", clip_norm=0.1),
    case("gpt", strategy="fsdp2", offload=True, recompute="full"),
    case("gpt", strategy="fsdp2", precision="bf16"),
    case("bev", strategy="tensor"),
    case("resnet", strategy="tensor"),
    case("gpt", strategy="tensor", optimiser="sgd", clip_norm=0.1),
    case("resnet", strategy="pipeline", micro_batches=4),
    case("vit", strategy="pipeline", pipeline_schedule="ZBVZeroBubble", micro_batches=4),
    case("gpt", strategy="pipeline", micro_batches=4, precision="fp16"),
]
FOUR_RANKS = [
    case("gpt", mesh="pp=2,tp=2", micro_batches=4, clip_norm=0.1),
    case("vit", mesh="dp_shard=2,tp=2", clip_norm=0.1),
    case("bev", mesh="pp=2,dp_replicate=2", micro_batches=4),
    case("resnet", strategy="hsdp"),
]


def test_ranks_train_as_one_process(tmp_path):
    compared = measure({2: TWO_RANKS, 4: FOUR_RANKS}, tmp_path)
    assert [(one.case, one.difference) for one in compared if not one.holds] == []
    assert len(compared) == len(TWO_RANKS) + len(FOUR_RANKS)
    assert all(one.first_loss != one.last_loss for one in compared)
