"""A small part of ``tests/slow/test_parallel_equality.py``: strategies against one process, on real ranks.

Each strategy, each option and each model's own way to be divided is here once. Compilation takes longest:
``tests/gpu/test_training.py`` compares it in one process.
"""

from __future__ import annotations

import msgspec
import pytest
import torch.distributed as dist

from support import parallel_equality
from support.cameras import write_cameras
from support.parallel_equality import (
    EXACT,
    GLOBAL_BATCH,
    TINY,
    Case,
    Comparison,
    cases_of,
    divided,
    measure,
)

pytestmark = [pytest.mark.process, pytest.mark.slow]


def case(model, precision="fp32", **options):
    return Case(
        model=f"{model}-tiny",
        parallel=divided(**options),
        precision=precision,
        steps=3,
    )


TWO_RANKS = [
    case("resnet", strategy="ddp"),
    case("bev", strategy="zero1"),
    case("bev", strategy="zero1", optimiser="adamw"),
    case("gpt", strategy="zero2"),
    case("vit", strategy="fsdp2", recompute="selective", clip_norm=0.1),
    case("gpt", strategy="fsdp2", offload=True, recompute="full"),
    case("gpt", strategy="fsdp2", precision="bf16"),
    case("bev", strategy="tensor"),
    case("resnet", strategy="tensor"),
    case("gpt", strategy="tensor", optimiser="adamw", clip_norm=0.1),
    case("resnet", strategy="pipeline", micro_batches=4),
    case(
        "vit",
        strategy="pipeline",
        pipeline_schedule="ZBVZeroBubble",
        micro_batches=4,
    ),
    case("gpt", strategy="pipeline", micro_batches=4, precision="fp16"),
]
FOUR_RANKS = [
    case("gpt", mesh="pp=2,tp=2", micro_batches=4, clip_norm=0.1),
    case("vit", mesh="dp_shard=2,tp=2", clip_norm=0.1),
    case("bev", mesh="pp=2,dp_replicate=2", micro_batches=4),
    case("resnet", strategy="hsdp"),
]


@pytest.mark.parametrize(("world", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_ranks_train_as_one_process(world, cases, tmp_path):
    compared = measure(world, cases, tmp_path)
    assert [
        (comparison.case, comparison.difference) for comparison in compared if not comparison.holds
    ] == []
    assert len(compared) == len(cases)
    assert all(comparison.first_loss != comparison.last_loss for comparison in compared)
    if world == 4:
        said = (tmp_path / "ranks.log").read_text()
        assert "Warning" not in said, (
            "gradients over two axes are clipped without a warning of torch"
        )


def test_gradients_that_are_added_and_not_averaged_are_seen_in_every_model(tmp_path, monkeypatch):
    """The plain case of each model, with the gradients that two equal ranks give without their mean."""

    def add_up(parallel, batch):
        loss = parallel.forward_backward(parallel.inputs(batch))
        for parameter in parallel.models[0].parameters():
            parameter.grad *= 2
        parallel.update()
        return float(loss)

    write_cameras(
        tmp_path / "cameras",
        2 * GLOBAL_BATCH,
        channels=("cam_front", "cam_front_right"),
    )
    of_ddp = [
        case
        for case in cases_of(2)
        if case.parallel == divided(strategy="ddp") and case.precision == "fp32"
    ]
    cases = [msgspec.structs.replace(case, steps=5) for case in of_ddp]
    assert [case.model for case in cases] == list(TINY)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        comparison = Comparison(str(tmp_path / "cameras"), 2)
        assert [comparison.compare(case).holds for case in cases] == [True] * len(TINY)
        monkeypatch.setattr(parallel_equality, "train_step", add_up)
        assert min(comparison.compare(case).difference for case in cases) > 100 * EXACT
    finally:
        dist.destroy_process_group()
