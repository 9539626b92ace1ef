"""A small part of ``bench/micro/parallel_equality.py``: strategies against one process, on real ranks."""

from __future__ import annotations

import pytest

from fuelrail.bench.micro.parallel_equality import TINY, Case, measure
from fuelrail.bench.trainer.strategies.settings import ParallelSettings

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 6


def case(model, precision="fp32", **options):
    return Case(model=model, parallel=ParallelSettings(**options), precision=precision, steps=STEPS)


def check(compared):
    assert [(one.case, one.difference) for one in compared if not one.holds] == []
    assert all(one.first_loss != one.last_loss for one in compared)


def test_two_ranks_train_as_one_process(tmp_path):
    cases = [case("gpt-tiny", strategy=name) for name in ("zero1", "zero2", "fsdp2")]
    cases += [case(model, strategy=name) for model in TINY for name in ("ddp", "tensor")]
    cases += [case(model, strategy="pipeline", micro_batches=4) for model in TINY]
    cases += [
        case("vit-tiny", strategy="pipeline", pipeline_schedule="ZBVZeroBubble", micro_batches=4),
        case("gpt-tiny", strategy="fsdp2", recompute="selective", clip_norm=0.1),
        case("gpt-tiny", strategy="fsdp2", offload=True, recompute="full"),
        case("gpt-tiny", strategy="tensor", optimiser="sgd", clip_norm=0.1),
        case("gpt-tiny", strategy="ddp", compile="aot_eager"),
        case("gpt-tiny", strategy="fsdp2", precision="bf16"),
        case("gpt-tiny", strategy="pipeline", micro_batches=4, precision="fp16"),
    ]
    check(measure({2: cases}, tmp_path))


def test_composed_strategies_train_as_one_process(tmp_path):
    check(
        measure(
            {
                4: [
                    case("gpt-tiny", mesh="pp=2,tp=2", micro_batches=4, clip_norm=0.1),
                    case("vit-tiny", mesh="dp_shard=2,tp=2", clip_norm=0.1),
                    case("bev-tiny", mesh="pp=2,dp_replicate=2", micro_batches=4),
                    case("resnet-tiny", strategy="hsdp"),
                ]
            },
            tmp_path,
        )
    )
