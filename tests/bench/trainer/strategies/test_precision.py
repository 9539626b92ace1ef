"""Loss scaling: a step with a gradient that is not finite is skipped, and too many of them end the run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fuelrail.bench.trainer.strategies.optimiser import SharedGradScaler
from fuelrail.bench.trainer.strategies.step import Parallel
from fuelrail.pipeline.errors import FuelrailError


def scaled(max_skipped=3):
    model = nn.Linear(2, 1, bias=False)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = Parallel([model], optimiser, lambda batch: (batch,))
    parallel.scaler = SharedGradScaler("cpu", max_skipped)
    return parallel


def step(parallel, value):
    parallel.forward_backward((torch.full((1, 2), value),))
    parallel.update()


def test_a_finite_step_is_the_one_without_scaling():
    parallel = scaled()
    before = parallel.models[0].weight.detach().clone()
    step(parallel, 2.0)
    assert torch.equal(parallel.models[0].weight, before - 0.1 * 2.0)
    assert not parallel.scaler.num_skipped


def test_a_step_that_overflows_is_skipped_and_halves_the_scale():
    parallel = scaled()
    before = parallel.models[0].weight.detach().clone()
    scale = parallel.scaler.get_scale()
    step(parallel, float("inf"))
    assert torch.equal(parallel.models[0].weight, before)
    assert parallel.scaler.num_skipped == 1
    assert parallel.scaler.get_scale() == scale / 2
    step(parallel, 1.0)
    assert not parallel.scaler.num_skipped


def test_too_many_skipped_steps_end_the_run_with_the_scalers_state():
    parallel = scaled(max_skipped=3)
    for _ in range(2):
        step(parallel, float("nan"))
    with pytest.raises(
        FuelrailError,
        match=r"3 steps in a row .* loss scale is 1024 by now; lower the learning rate",
    ):
        step(parallel, float("nan"))
