"""Moving batches: what is visited, what is said where there is no such device, and many tensors as one block."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from fuelrail.loaders.batch.transfer import (
    ALIGNMENT,
    Arena,
    Moved,
    is_packed,
    make_transfer,
    map_tensors,
    require_cuda,
)
from fuelrail.pipeline.errors import ConfigError


class Pair(NamedTuple):
    first: object
    second: object


def test_tensors_are_found_at_any_depth_and_nothing_else_changes():
    batch = {
        "a": torch.ones(2),
        "b": [torch.ones(1), {"c": (torch.ones(3), "x")}],
        "d": Pair(torch.ones(4), 5),
    }
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert doubled["a"].tolist() == [2, 2]
    assert doubled["b"][1]["c"][0].tolist() == [2, 2, 2]
    assert doubled["b"][1]["c"][1] == "x"
    assert isinstance(doubled["d"], Pair)
    assert doubled["d"].first.sum() == 8
    assert doubled["d"].second == 5
    assert batch["a"].tolist() == [1, 1]


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_cpu_needs_no_transfer(device):
    assert make_transfer(device) is None


@pytest.mark.parametrize("device", ["gpu", "meta", "mps"])
def test_other_devices_are_refused(device):
    with pytest.raises(ConfigError, match=f"device='{device}'"):
        make_transfer(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_missing_cuda_is_said_with_the_argument_that_asks_for_it():
    with pytest.raises(ConfigError, match="device='cuda' needs CUDA, but "):
        make_transfer("cuda")
    with pytest.raises(ConfigError, match="pin_memory=True needs CUDA"):
        require_cuda("pin_memory=True")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
def test_a_batch_on_cuda_is_equal_and_its_number_is_checked():
    transfer = make_transfer("cuda")
    batch = {
        "img": torch.arange(24, dtype=torch.uint8).view(2, 12).pin_memory(),
        "points": [torch.ones(5)],
    }
    moved = transfer.hand_over(transfer(batch))
    assert moved["img"].is_cuda
    assert torch.equal(moved["img"].cpu(), batch["img"])
    with pytest.raises(ConfigError, match="numbered from 0"):
        make_transfer(f"cuda:{torch.cuda.device_count()}")


def test_a_transfer_keeps_the_device_that_was_current_when_it_was_made(
    monkeypatch,
):
    current = [1]
    recorded = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    transfer = make_transfer("cuda")
    current[0] = 0

    class OnDevice(torch.Tensor):
        def record_stream(self, stream):
            recorded.append(stream)

    on_device = torch.zeros(1).as_subclass(OnDevice)
    transfer.hand_over(Moved({"img": on_device}, None, [on_device]))
    assert recorded == ["stream of cuda:1"]


DTYPES = [
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def some_tensors() -> list[torch.Tensor]:
    tensors = [torch.arange(number + 3).to(dtype) for number, dtype in enumerate(DTYPES)]
    return [
        *tensors,
        torch.zeros((0, 7)),
        torch.tensor(5),
        torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.arange(12).view(3, 4).t(),
        torch.arange(12)[::2],
        torch.ones(3).expand(4, 3),
        torch.ones(6, dtype=torch.complex128),
    ]


def test_tensors_of_any_kind_are_views_of_one_block():
    tensors = some_tensors()
    arena = Arena(pinned=False)
    for order, channels_last in ((tensors, 10), (tensors[::-1], -11)):
        packed = arena.pack(order)
        copied = packed.block.clone()
        for view, tensor in zip(packed.cut(copied), order, strict=True):
            assert view.dtype == tensor.dtype
            assert view.shape == tensor.shape
            assert torch.equal(view, tensor)
            if tensor.numel():
                assert view.untyped_storage().data_ptr() == copied.data_ptr()
                assert (view.data_ptr() - copied.data_ptr()) % ALIGNMENT == 0
        assert packed.cut(copied)[channels_last].is_contiguous(memory_format=torch.channels_last)


def test_the_block_grows_and_is_reused():
    arena = Arena(pinned=False)
    small = arena.pack([torch.zeros(10)]).block
    large = arena.pack([torch.zeros(100_000)]).block
    reused = arena.pack([torch.ones(99_000)])
    assert small.data_ptr() != large.data_ptr()
    assert reused.block.data_ptr() == large.data_ptr()
    assert torch.equal(reused.cut(reused.block)[0], torch.ones(99_000))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(3, dtype=torch.complex64).conj(),
    ],
)
def test_what_is_more_than_plain_bytes_stays_out(tensor):
    assert not is_packed(tensor)


def test_large_tensors_stay_out_only_where_they_are_pinned(monkeypatch):
    large = torch.zeros(2 << 20, dtype=torch.uint8)
    assert is_packed(large)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    assert not is_packed(large)
    assert is_packed(large[:10])
