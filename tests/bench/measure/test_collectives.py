"""Collectives by kind and bytes, and the emulated link against a clock turned by hand."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.distributed as dist

from fuelrail.bench.measure.accelerator import EmulatedAccelerator
from fuelrail.bench.measure.collectives import collective_of, link_of
from support.bench_runs import MS, PROFILE, HandClock

# 1 MB lasts 1 ms, and every collective half a millisecond.
LINKED = msgspec.structs.replace(PROFILE, link_gb_per_s=1.0, link_latency_us=500.0)
MB = 1_000_000
TENSOR, LARGE, GROUP = torch.zeros(100), torch.zeros(400), object()


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_collective_lasts_its_bytes_and_latency():
    clock = HandClock()
    accelerator = EmulatedAccelerator(LINKED, clock)
    with link_of(accelerator), accelerator.forward(1, 1):
        dist.all_reduce(torch.zeros(MB // 4))
        torch.zeros(3) + 1  # no communication
    times = accelerator.finish_step()
    assert times.all_reduce_ns == pytest.approx(2.5 * MS)
    # Computing follows the communication: the phase itself is as long as ever, and nothing outlasted it.
    assert (times.forward_ns, times.overrun_ns) == (10 * MS, 0)
    assert clock.now == pytest.approx(1_000 + 12.5 * MS)


@pytest.mark.usefixtures("one_rank")
def test_without_a_link_nothing_waits():
    clock = HandClock()
    with link_of(EmulatedAccelerator(PROFILE, clock)):
        dist.all_reduce(torch.zeros(MB))
    assert clock.now == 1_000


def test_buckets_follow_each_other_on_the_link_and_overlap_computing():
    clock = HandClock()
    accelerator = EmulatedAccelerator(LINKED, clock)
    with accelerator.forward(1, 1):
        pass
    with accelerator.backward():
        accelerator.gradients_ready(0.5)
        accelerator.all_reduce_started(10 * MB)  # from 10 to 30.5 ms of the backward pass
        accelerator.gradients_ready(1.0)
        accelerator.all_reduce_started(MB)  # and to 33 ms
        accelerator.all_reduce_finished()
        accelerator.all_reduce_finished()
    times = accelerator.finish_step()
    assert times.backward_ns == 20 * MS
    assert times.all_reduce_ns == pytest.approx(13 * MS)
    assert times.all_reduce_total_ns == pytest.approx(23 * MS)


@pytest.mark.parametrize(
    ("operator", "arguments", "kind", "num_bytes"),
    [
        (torch.ops.c10d.allreduce_.default, ([TENSOR], GROUP), "all_reduce", 400),
        (torch.ops._c10d_functional.all_reduce.default, (TENSOR, "sum", "0"), "all_reduce", 400),
        (torch.ops.c10d._allgather_base_.default, (LARGE, TENSOR, GROUP), "all_gather", 1600),
        (torch.ops.c10d._reduce_scatter_base_.default, (TENSOR, LARGE, GROUP), "reduce_scatter", 1600),
        (torch.ops._c10d_functional.all_gather_into_tensor.default, (TENSOR, 4, "0"), "all_gather", 1600),
        (torch.ops._c10d_functional.reduce_scatter_tensor.default, (TENSOR, "sum", 4, "0"), "reduce_scatter", 400),
        (torch.ops.c10d.send.default, ([TENSOR], GROUP, 1, 0), "send", 400),
    ],
)
def test_bytes_are_those_of_a_large_ring(operator, arguments, kind, num_bytes):
    assert collective_of(operator, arguments) == (kind, num_bytes)
