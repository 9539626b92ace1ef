"""The checker of streams finds each kind of race, and nothing in what is right."""

from __future__ import annotations

import gc

import pytest
import torch

from support.fake_cuda import FakeCuda

DEVICE = "cuda:1"


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def test_a_read_on_another_stream_needs_an_edge(cuda):
    tensor = torch.zeros(4, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        total = tensor.sum()
    assert "sum on stream" in "".join(cuda.finish())
    assert total.device == torch.device(DEVICE)


@pytest.mark.parametrize(
    "edge",
    [
        "wait_stream",
        "wait_event",
        "event.wait",
        "synchronize",
        "event.synchronize",
        "item",
    ],
)
def test_every_kind_of_edge_is_one(cuda, edge):
    tensor = torch.zeros(4, device=DEVICE)
    made_on = torch.cuda.current_stream(DEVICE)
    reader = torch.cuda.Stream(DEVICE)
    if edge == "wait_stream":
        reader.wait_stream(made_on)
    elif edge == "wait_event":
        reader.wait_event(made_on.record_event())
    elif edge == "event.wait":
        made_on.record_event().wait(reader)
    elif edge == "synchronize":
        made_on.synchronize()
    elif edge == "event.synchronize":
        made_on.record_event().synchronize()
    else:
        assert tensor[0].item() == 0
    with torch.cuda.stream(reader):
        tensor.sum()
    tensor.record_stream(reader)
    del tensor
    assert cuda.finish() == []


def test_an_event_says_nothing_of_what_is_queued_after_it(cuda):
    tensor = torch.zeros(4, device=DEVICE)
    event = torch.cuda.current_stream(DEVICE).record_event()
    tensor.add_(1)
    reader = torch.cuda.Stream(DEVICE)
    reader.wait_event(event)
    with torch.cuda.stream(reader):
        tensor.sum()
    assert "reads torch.float32 [4] without waiting for add_" in "".join(cuda.finish())


def test_a_write_needs_an_edge_to_the_reads(cuda):
    tensor = torch.zeros(4, device=DEVICE)
    reader = torch.cuda.Stream(DEVICE)
    reader.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(reader):
        tensor.sum()
    tensor.view(2, 2)[0] = 1.0  # a view is the same memory
    assert "writes torch.float32 [4] without waiting for sum" in "".join(cuda.finish())


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_is_freed_under_a_reader_is_found(cuda, recorded):
    tensor = torch.zeros(4, device=DEVICE)
    reader = torch.cuda.Stream(DEVICE)
    reader.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(reader):
        tensor.sum()
    if recorded:
        tensor.record_stream(reader)
    del tensor
    gc.collect()
    assert ("was freed while sum on stream" in "".join(cuda.finish())) is not recorded


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_that_changes_under_its_copy_is_found(cuda, waits):
    source = torch.zeros(4, pin_memory=True)
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        moved = source.to(DEVICE, non_blocking=True)
    if waits:
        stream.synchronize()
    source.numpy()[0] = 1.0  # not an operation of torch's
    assert moved.is_cuda
    assert ("pinned memory changed" in "".join(cuda.finish())) is not waits


def test_devices_do_not_mix_and_values_are_right(cuda):
    tensor = torch.arange(6, device=DEVICE).view(2, 3)
    with pytest.raises(RuntimeError, match="same device"):
        tensor + torch.ones(2, 3)
    with pytest.raises(TypeError, match="numpy"):
        tensor.numpy()
    assert (tensor * 2).cpu().tolist() == [[0, 2, 4], [6, 8, 10]]
    tensor[[1]] = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    assert tensor.sum().item() == 3
    assert len(cuda.copies) == 1  # the index
