from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.data_parallel import data_parallel
from fuelrail.bench.trainer.strategies.parallel import parallelise
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from support.models import build


class Listener:
    """An accelerator that writes down what the communication hook tells it."""

    torch_device = "cpu"

    def __init__(self):
        self.heard = []

    def gradients_ready(self, share):
        self.heard.append(share)

    def all_reduce_started(self):
        self.heard.append("start")

    def all_reduce_finished(self):
        self.heard.append("finish")


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.ReLU())])


@pytest.mark.usefixtures("one_rank")
def test_gradients_are_those_of_the_plain_model_and_buckets_are_reported_in_order():
    plain = network()
    listener = Listener()
    wrapped = data_parallel(network(), listener, ParallelSettings(bucket_mib=0.01))
    inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    for number in range(3):
        listener.heard.clear()
        for model in (plain, wrapped):
            model.zero_grad()
            model(inputs).square().sum().backward()
        for expected, parameter in zip(plain.parameters(), wrapped.parameters(), strict=True):
            assert torch.equal(expected.grad, parameter.grad)
        shares = [entry for entry in listener.heard if isinstance(entry, float)]
        assert (
            len(shares) > 1 or number == 0
        )  # DDP makes its buckets again after the first backward
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        assert listener.heard.count("start") == listener.heard.count("finish") == len(shares)


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_reduced_while_gradients_accumulate():
    listener = Listener()
    wrapped = data_parallel(network(), listener, ParallelSettings())
    for reduces in (False, True):
        with nullcontext() if reduces else wrapped.no_sync():
            wrapped(torch.ones(2, 32)).sum().backward()
        assert bool(listener.heard) == reduces


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_block_that_is_computed_again_drops_the_same_values(recompute):
    def gradients(recompute):
        model = build(MODELS["gpt-tiny"], "cpu", 0)
        for block in model.blocks:
            block.mlp.append(nn.Dropout(0.5))
        parallel = parallelise(model, recompute=recompute)
        torch.manual_seed(1)
        parallel.forward_backward((torch.arange(66).view(2, 33) % 64, torch.ones(2)))
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients("none"), gradients(recompute)))
