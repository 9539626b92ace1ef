"""Many small tensors in one block of host memory, copied to a device as one and cut into views there.

A copy of its own costs a tensor a call, an allocation and, from pageable memory, a staged copy: some 10 us, of which a
batch of 16 samples with labels had 95.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from fuelrail.loaders.batch.buffer_pool import BufferPool

ALIGNMENT: Final = 64
"""Bytes: of a cache line, and a multiple of every element's size."""
_LARGE_BYTES: Final = 1 << 20
"""Page-locked tensors from this size on are copied from where they lie."""


class _Piece(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    """The place in the arena, in elements."""


class Packed(NamedTuple):
    """A block of bytes, uint8 (n,), and where each tensor lies in it. The next `Arena.pack` overwrites it."""

    block: torch.Tensor
    pieces: list[_Piece]

    def cut(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views of a copy of the block, in the order in which they were packed."""
        typed = {dtype: block.view(dtype) for dtype in {piece.dtype for piece in self.pieces}}
        return [typed[dtype].as_strided(shape, strides, offset) for dtype, shape, strides, offset in self.pieces]


class Arena:
    """A block of host memory, page-locked at choice, that only grows; for one thread."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)

    def pack(self, tensors: Sequence[torch.Tensor]) -> Packed:
        """Copy tensors (of any dtype, shape and dense layout; see `is_packed`) behind one another, each aligned.

        Raises ConfigError where there is no memory for them.
        """
        dense = [tensor if _is_dense(tensor) else tensor.contiguous() for tensor in tensors]
        pieces: list[_Piece] = []
        num_bytes = 0
        for tensor in dense:
            pieces.append(_Piece(tensor.dtype, tensor.shape, tensor.stride(), num_bytes // tensor.itemsize))
            num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if num_bytes > len(self._memory):
            # A quarter more, so that batches that grow a little do not each take new memory.
            room = -(-num_bytes * 5 // 4 // ALIGNMENT) * ALIGNMENT
            self._memory = torch.from_numpy(BufferPool((room,), pinned=self._pinned, keep=0).take())
        start = self._memory.data_ptr()
        for tensor, piece in zip(dense, pieces, strict=True):
            ctypes.memmove(start + piece.offset * tensor.itemsize, tensor.data_ptr(), tensor.nbytes)
        return Packed(self._memory[:num_bytes], pieces)


def is_packed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor goes through an arena: plain ones in host memory, except large page-locked ones."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and (tensor.nbytes < _LARGE_BYTES or not tensor.is_pinned())
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill the memory from the first to the last, in any order of the axes."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
