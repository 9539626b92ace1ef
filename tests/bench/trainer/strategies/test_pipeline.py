"""Stages of a pipeline: what they send is contiguous, which collectives ask for; see also `test_equality`."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from fuelrail.bench.trainer.strategies.pipeline import Stage


class Transpose(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.transpose(1, 2)


def test_a_stage_sends_contiguous_values_and_gradients():
    blocks = [nn.Identity(), Transpose(), nn.Identity()]
    model = SimpleNamespace(
        stem=nn.Identity(),
        blocks=blocks,
        head=nn.Identity(),
        loss=None,
        beside=dict,
        real_share=None,
    )
    hidden = torch.rand(2, 3, 4, requires_grad=True)
    sent = Stage(model, 1, 3)(hidden)
    assert sent.is_contiguous()
    # As schedules do that compute gradients of inputs and of weights apart: without .grad, whose layout torch chooses.
    (gradient,) = torch.autograd.grad(sent, hidden, torch.ones_like(sent))
    assert gradient.is_contiguous()
