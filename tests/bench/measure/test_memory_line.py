"""Memory over a step, by kind: against bytes counted by hand, and against torch's profiler."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fuelrail.bench.measure.memory import KINDS, TRACKED, following_memory, memory_line, points_of_snapshot
from support.allocator import peak_of

MOVED = (
    "torch {version} has moved or renamed `{name}`, a private part that bench/measure/memory.py uses for the memory "
    "time line: change the import there, and TRACKED for new kinds"
)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed._tools.mem_tracker", "MemTracker.get_tracker_snapshot"),
        ("torch.distributed._tools.mem_tracker", "MemTracker.track_external"),
        ("torch.distributed._tools.mem_tracker", "MemTracker._update_and_maybe_create_winfos"),
        ("torch.distributed._tools.mem_tracker", "MemTracker._pre_fw_hook"),
        ("torch.distributed._tools.mem_tracker", "_MemRefType"),
        ("torch.distributed._tools.fsdp2_mem_tracker", "FSDPMemTracker"),
        ("torch.distributed._tools.fsdp2_mem_tracker", "_FSDPRefType"),
        ("torch.cuda.memory", "_record_memory_history"),
        ("torch.cuda.memory", "_snapshot"),
    ],
)
def test_the_private_parts_of_torch_are_where_they_were(module, name):
    sentence = MOVED.format(version=torch.__version__, name=f"{module}.{name}")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        pytest.fail(sentence)
    if name.endswith("RefType"):
        assert {kind.value for kind in found} <= TRACKED.keys(), sentence


def training(width, device="cpu"):
    """A perceptron of four times the width, its optimiser, and a step of them."""
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(device)
    optimiser = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, width, device=device)

    def step():
        model(batch).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    return model, optimiser, step


def test_kinds_have_the_bytes_that_they_must_have():
    model, optimiser, step = training(256)
    lines = []
    step()
    with memory_line(1, [model], optimiser, lines.append):
        step()
    (line,) = lines
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert (line.step, line.source, line.reserved) == (1, "tracker", None)
    assert set(line.allocated["parameters"]) == {num_bytes}
    assert max(line.allocated["gradients"]) == num_bytes
    assert line.allocated["gradients"][0] == 0
    # Two moments a parameter, and a counter of steps a tensor.
    assert min(line.allocated["optimiser"]) == 2 * num_bytes + 4 * 4
    # Saved for backward: two hidden layers of 1024, in and out of the GELU.
    assert max(line.allocated["activations"]) >= 2 * 64 * 1024 * 4
    assert line.at_ms == sorted(line.at_ms)
    assert line.at_ms[0] >= 0

    before = 3 * num_bytes + 4 * 4
    assert line.peak_bytes == pytest.approx(before + peak_of(step), rel=0.01)


def test_ddps_buckets_and_the_batch_count_from_start_to_end():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimiser = torch.optim.SGD(wrapped.parameters())
        batch = torch.randn(64, 256)

        def steps():
            for number in range(4):
                wrapped(batch).square().mean().backward()
                optimiser.step()
                optimiser.zero_grad()
                yield SimpleNamespace(step=number)

        lines = []
        list(following_memory(steps(), [wrapped], optimiser, SimpleNamespace(write=lines.append)))
    finally:
        dist.destroy_process_group()
    (line,) = lines
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert line.step == 2
    assert min(line.allocated["gradients"]) == num_bytes
    assert line.allocated["other"][-1] == batch.nbytes
    assert line.allocated["activations"][-1] == 0


def test_an_allocators_snapshot_is_read_forwards_from_what_was_there_before():
    def event(action, addr, size, time_us):
        return {"action": action, "addr": addr, "size": size, "time_us": time_us}

    mib = 2**20
    blocks = [(100, 4 * mib, "active_allocated"), (200, mib, "active_allocated"), (300, mib, "inactive")]
    blocks = [dict(zip(("address", "size", "state"), block, strict=True)) for block in blocks]
    snapshot = {
        "segments": [
            {"device": 0, "total_size": 20 * mib, "blocks": blocks},
            {"device": 1, "total_size": mib, "blocks": [{"address": 1, "size": mib, "state": "active_allocated"}]},
        ],
        "device_traces": [
            [
                event("segment_alloc", 300, 10 * mib, 1),
                event("alloc", 300, 6 * mib, 2),  # an activation
                event("free_requested", 300, 6 * mib, 3),
                event("free_completed", 300, 6 * mib, 4),
                event("alloc", 300, 2 * mib, 5),  # at the same place a gradient
                event("free_completed", 200, mib, 6),  # was there before
                event("alloc", 200, mib, 7),
                event("free_completed", 300, 2 * mib, 8),
            ],
            [],
        ],
    }
    points, reserved = points_of_snapshot(snapshot, 0, {100: "parameters", 300: "gradients", 200: "optimiser"})
    shown = [(ns // 1000, {kind: size // mib for kind, size in kinds.items() if size}) for ns, kinds in points]
    assert shown == [
        (1, {"parameters": 4, "other": 1}),
        (2, {"parameters": 4, "other": 1, "activations": 6}),
        (4, {"parameters": 4, "other": 1}),
        (5, {"parameters": 4, "other": 1, "gradients": 2}),
        (6, {"parameters": 4, "gradients": 2}),
        (7, {"parameters": 4, "gradients": 2, "optimiser": 1}),
        (8, {"parameters": 4, "optimiser": 1}),
    ]
    assert [size // mib for size in reserved] == [20] * 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
def test_on_a_gpu_the_allocators_peak_is_the_lines():
    model, optimiser, step = training(1024, "cuda")
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    lines = []
    with memory_line(1, [model], optimiser, lines.append):
        step()
        torch.cuda.synchronize()
    (line,) = lines
    assert line.source == "allocator"
    assert line.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.01)
    assert max(line.reserved) >= line.peak_bytes
    assert set(line.allocated) <= set(KINDS)
    assert max(line.allocated["gradients"]) == pytest.approx(sum(p.nbytes for p in model.parameters()), rel=0.01)
