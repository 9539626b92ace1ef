"""Batch buffers: reused when free, never while any view of them lives."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from fuelrail.loaders.batch.buffer_pool import page_locked
from fuelrail.loaders.storage.buffers import Buffers, pageable, rounded_up
from fuelrail.pipeline.errors import ConfigError

SHAPE = (2, 3, 4)


SIZE = 24


class Shaped(Buffers):
    """Buffers of one shape, of which a number is kept."""

    def __init__(self, memory=pageable, keep: int = 4) -> None:
        super().__init__(memory, keep_bytes=keep * SIZE, rounded=int)

    def take(self) -> np.ndarray:
        return super().take(SIZE).reshape(SHAPE)


def pool(keep: int = 4) -> Shaped:
    return Shaped(keep=keep)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_buffers_are_writable_and_of_the_stated_shape() -> None:
    lent = pool().take()
    assert (lent.shape, lent.dtype) == (SHAPE, np.uint8)
    assert lent.flags.c_contiguous
    lent[...] = 7
    assert lent.sum() == 7 * 24


@pytest.mark.parametrize("count", [1 << 45, 1 << 62])
def test_a_buffer_that_no_memory_holds_is_refused_with_its_size(
    count: int,
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"a buffer of {count} bytes: take a smaller batch_size",
    ):
        Buffers(keep_bytes=1, rounded=int).take(count)


def test_buffer_sizes_waste_an_eighth_at_most():
    for length in [1, 4096, 4097, 70_000, 1 << 20, (1 << 20) + 1, 12_345_678]:
        assert length <= rounded_up(length) <= max(4096, length * 9 // 8 + 1)
    buffers = Buffers(keep_bytes=1 << 20)
    views = [buffers.take(500_000) for _ in range(4)]
    del views
    assert len(buffers.take(3)) == 3
    assert 0 < buffers._free_bytes <= 1 << 20


def test_a_free_buffer_is_lent_again_and_a_lent_one_is_not() -> None:
    buffers = pool()
    first = buffers.take()
    second = buffers.take()
    assert not np.shares_memory(first, second)
    where = address(first)
    del first
    assert address(buffers.take()) == where
    assert address(second) != where


# Ways to hold a buffer when the array that take() returned is gone.
VIEWS = {
    "tensor": torch.from_numpy,
    "slice of a tensor": lambda a: torch.from_numpy(a)[1, :, 2:],
    "numpy of a tensor": lambda a: torch.from_numpy(a).numpy(),
    "numpy of a slice of a tensor": lambda a: torch.from_numpy(a)[0].numpy()[1],
    "row": lambda a: a[1],
    "view of a view": lambda a: a[1][2][1:],
    "reshaped": lambda a: a.reshape(-1)[5:],
    "transposed": lambda a: a.T,
    "of another dtype": lambda a: a.view("<u4")[0],
    "tensor of a row": lambda a: torch.from_numpy(a[1]),
    "memoryview": memoryview,
    "in a dict": lambda a: {"img": torch.from_numpy(a)},
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_any_view_keeps_the_buffer(view) -> None:
    buffers = pool()
    lent = buffers.take()
    where = address(lent)
    held = view(lent)
    del lent
    further = [buffers.take() for _ in range(3)]
    assert where not in [address(buffer) for buffer in further]
    del held
    gc.collect()
    assert address(buffers.take()) == where


def test_a_view_in_another_thread_keeps_the_buffer() -> None:
    """A decoder that still writes when its batch has been given up must not write into the next one."""
    buffers = pool()
    lent = buffers.take()
    where = address(lent)
    started = threading.Event()
    go = threading.Event()

    def write(out: np.ndarray) -> None:
        started.set()
        go.wait(200)
        out[...] = 255

    writer = threading.Thread(target=write, args=(lent[0],))
    writer.start()
    started.wait(200)
    del lent
    following = buffers.take()
    following[...] = 1
    go.set()
    writer.join()
    assert address(following) != where
    assert (following == 1).all()


def test_no_more_than_the_stated_number_is_kept() -> None:
    buffers = pool(keep=2)
    lent = [buffers.take() for _ in range(5)]
    del lent
    gc.collect()
    held = buffers.take()
    assert len(buffers._free[SIZE]) == 1
    assert len(buffers._lent) == 1, "what was beyond it is let go of"
    assert held.shape == SHAPE


def test_threads_never_share_a_buffer() -> None:
    buffers = pool(keep=3)
    failures: list[str] = []

    def work(number: int) -> None:
        for _ in range(300):
            lent = buffers.take()
            lent[...] = number
            tensor = torch.from_numpy(lent)
            del lent
            if not bool((tensor == number).all()):
                failures.append("overwritten")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_pool_may_go_before_what_it_lent() -> None:
    lent = pool().take()
    gc.collect()
    lent[...] = 3
    assert (lent == 3).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device")
def test_pinned_buffers_are_pinned() -> None:
    buffers = Shaped(page_locked, keep=1)
    assert torch.from_numpy(buffers.take()).is_pinned()
