"""Many tensors as one block: every dtype, shape and dense layout comes out as it went in."""

from __future__ import annotations

import pytest
import torch

from fuelrail.loaders.batch.arena import ALIGNMENT, Arena, is_packed

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
    found = [torch.arange(number + 3).to(dtype) for number, dtype in enumerate(DTYPES)]
    return [
        *found,
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
    again = arena.pack([torch.ones(99_000)])
    assert small.data_ptr() != large.data_ptr()
    assert again.block.data_ptr() == large.data_ptr()
    assert torch.equal(again.cut(again.block)[0], torch.ones(99_000))


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
