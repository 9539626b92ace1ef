"""Shapes by arithmetic from small runs against the whole model's."""

from __future__ import annotations

import pytest

from fuelrail.bench.planner.choice import stages
from fuelrail.bench.planner.quick import can_be_quick, quick_stages
from fuelrail.bench.planner.shape import Inputs
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.settings import ParallelSettings, degrees_of

pytestmark = pytest.mark.slow  # each shape takes about a second


@pytest.mark.parametrize(
    ("world", "parallel", "rows", "count"),
    [
        (8, ParallelSettings(strategy="fsdp2"), 8, 3),
        (4, ParallelSettings(strategy="zero1", recompute="full"), 1, 2),
        (8, ParallelSettings(mesh="pp=2,dp_shard=2,tp=2", micro_batches=4), 4, 4),
        (32, ParallelSettings(mesh="pp=4,dp_replicate=2,dp_shard=2,tp=2", micro_batches=8, recompute="full"), 4, 8),
    ],
    ids=["sharded", "copies", "stages", "all of them"],
)
def test_a_scaled_shape_is_the_whole_models(world, parallel, rows, count):
    model, degrees = MODELS["gpt-tiny"], degrees_of(parallel, world)
    inputs = Inputs(micro_batch=rows, micro_batches=count)
    whole = stages(model, parallel, degrees, inputs, "fp32")
    found = quick_stages(model, parallel, degrees, inputs, "fp32")
    for quick, exact in ((found[0], whole[0]), (found[-1], whole[-1])):
        assert (quick.flop, quick.parameters, quick.in_flight) == (exact.flop, exact.parameters, exact.in_flight)
        assert quick.collectives == exact.collectives
        assert quick.kept_bytes == pytest.approx(exact.kept_bytes, rel=0.01)
        # Sharded gradients are taken at the size that the small runs have.
        assert quick.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.01)
    assert not can_be_quick(MODELS["resnet50"])
