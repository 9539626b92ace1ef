"""Batches in memory that processes share: written once, by the process that makes them, and viewed
by all others.

A block of memory is an anonymous file (``memfd_create``). It has no name, so nothing is left in
/dev/shm whichever process is killed: the kernel frees it with the last process that has it open.
Its size is not limited by the size of /dev/shm either, but by the memory of the container.

The image buffers of a batch are decoded into such a block; all other tensors are packed into one
more. What remains of the batch, its structure and whatever is not a plain tensor, travels as a
pickle that names tensors by their numbers.
"""

from __future__ import annotations

import bisect
import collections
import io
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from fuelrail.loaders.batch.transfer import ALIGNMENT, Piece, is_plain, pack
from fuelrail.loaders.storage.buffers import Buffers
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8


KEEP_BYTES: Final = 1 << 30
"""Buffers that may lie ready."""


class Exported(NamedTuple):
    """A batch in shared memory: a pickle with a persistent id for each tensor, and where each
    tensor is.
    """

    payload: bytes
    tensors: list[tuple[int, Piece]]
    """The number of the block, and the place in it."""

    def blocks(self) -> set[int]:
        """Return the numbers of the blocks that the batch is in."""
        return {number for number, _ in self.tensors}


class _Pickler(pickle.Pickler):
    """Pickles everything but plain tensors, which it collects."""

    def __init__(self, out: io.BytesIO, protocol: int) -> None:
        super().__init__(out, protocol)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not is_plain(value):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        payload: io.BytesIO,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(payload)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


def dump(batch: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle a batch without its plain tensors, and return these; raise ConfigError for what
    cannot be pickled.
    """
    out = io.BytesIO()
    pickler = _Pickler(out, pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(batch)
    except Exception as error:
        raise ConfigError(
            f"a batch holds what cannot be pickled, which where= needs: {error}"
        ) from error
    return out.getvalue(), pickler.tensors


def load_with(payload: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the batch that `dump` pickled, with these tensors."""
    return _Unpickler(io.BytesIO(payload), tensors).load()


class SharedMemory:
    """Blocks of this process's memory that others can map, up to ``limit_bytes`` together.

    Thread-safe.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._total = 0
        self._count = 0
        self.files: dict[int, tuple[int, int]] = {}
        """File descriptor and bytes of each block, by its number."""
        self._starts: list[tuple[int, int, int]] = []
        """Address, end and number of each block, by address."""
        self._lock = threading.RLock()  # a block may be collected while another is made
        self._buffers = Buffers(self.new, keep_bytes=KEEP_BYTES)

    def new(self, num_bytes: int) -> U8:
        """Return a new block, uint8 (n,), which is given back when the array is collected.

        Raises ConfigError where the limit does not allow it.
        """
        num_units = max(1, -(-num_bytes // ALIGNMENT))
        size = num_units * ALIGNMENT
        with self._lock:
            if self._total + size > self.limit_bytes:
                raise ConfigError(
                    f"batches in shared memory take {self._total} bytes, and {size} more "
                    f"are over the limit of {self.limit_bytes}, a quarter of the free "
                    "memory for each rank of this host: take a smaller batch_size, "
                    "prefetch_factor or image size, or keep fewer batches"
                )
            file = os.memfd_create("fuelrail-batches", os.MFD_CLOEXEC)
            os.ftruncate(file, size)
            block = np.frombuffer(mmap.mmap(file, size), np.uint8)
            self._count += 1
            self._total += size
            self.files[self._count] = file, size
            address = block.ctypes.data
            bisect.insort(self._starts, (address, address + size, self._count))
        finalizer = weakref.finalize(block, self._forget, address, self._count)
        finalizer.atexit = False
        return block[:num_bytes]

    def _forget(self, address: int, number: int) -> None:
        with self._lock:
            file, size = self.files.pop(number)
            self._starts.remove((address, address + size, number))
            self._total -= size
        os.close(file)

    def find(self, tensor: torch.Tensor) -> tuple[int, Piece] | None:
        """Return where a tensor is in a block; None for memory of other kinds."""
        address = tensor.data_ptr()
        with self._lock:
            num_before = bisect.bisect_right(self._starts, (address, 2**64, 0))
            if not num_before:
                return None
            start, end, number = self._starts[num_before - 1]
        if not tensor.nbytes or not start <= address < end:
            return None
        piece = Piece(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            offset=(address - start) // tensor.itemsize,
        )
        return number, piece

    def export(self, batch: Any) -> tuple[Exported, dict[int, torch.Tensor]]:
        """Return a batch for other processes, and what keeps each of its blocks from being used
        again.

        Raises ConfigError for a batch that cannot be pickled.
        """
        payload, tensors = dump(batch)
        places: dict[int, tuple[int, Piece]] = {}
        small: dict[int, torch.Tensor] = {}
        held: dict[int, torch.Tensor] = {}
        for index, tensor in enumerate(tensors):
            place = self.find(tensor)
            if place is None:
                small[index] = tensor
                continue
            number, _ = place
            held[number] = tensor
            places[index] = place
        if small:
            packed = pack(list(small.values()), self._buffers.take)
            place = self.find(packed.block)
            assert place is not None, "a block of a pool"
            number, _ = place
            held[number] = packed.block
            for index, piece in zip(small, packed.pieces, strict=True):
                places[index] = number, piece
        return Exported(payload, [places[index] for index in range(len(tensors))]), held


class MappedMemory:
    """Blocks of another process's memory, mapped into this one; for one thread.

    With ``pinned`` they are page-locked here, so that a GPU copies from them without the CPU.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._bases: dict[int, U8] = {}
        self._lent: dict[int, tuple[weakref.ref[U8], int]] = {}
        self._returned: collections.deque[weakref.ref[U8]] = collections.deque()

    def add(self, number: int, file: int, num_bytes: int) -> None:
        """Map a block; the file descriptor is closed."""
        base = np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
        os.close(file)
        if self._pinned:
            lock_pages(base)
        self._bases[number] = base

    def forget(self, numbers: list[int]) -> None:
        """Unmap blocks that are no longer used, when the last view of each is gone."""
        for number in numbers:
            del self._bases[number]

    def open(self, exported: Exported) -> Any:
        """Return a batch whose tensors are views of the blocks."""
        blocks = {}
        for number in exported.blocks():
            # An array on a memoryview for each batch: all views of it refer to it, so its end is
            # the last view's.
            array = np.frombuffer(self._bases[number].data, np.uint8)
            ref = weakref.ref(array, self._returned.append)
            self._lent[id(ref)] = ref, number
            blocks[number] = torch.from_numpy(array)
        views = []
        for number, piece in exported.tensors:
            elements = blocks[number].view(piece.dtype)
            views.append(elements.as_strided(piece.shape, piece.strides, piece.offset))
        return load_with(exported.payload, views)

    def returned(self) -> list[int]:
        """Return the numbers of the blocks whose views have all gone since the last call."""
        numbers: list[int] = []
        while self._returned:
            ref = self._returned.popleft()
            _, number = self._lent.pop(id(ref))
            numbers.append(number)
        return numbers


def lock_pages(base: U8) -> None:
    """Page-lock memory for CUDA until the array is collected."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = base.ctypes.data
    code = cuda.cudaHostRegister(address, base.nbytes, 0)
    if code:
        raise ConfigError(
            f"CUDA cannot page-lock {base.nbytes} bytes of shared memory (error "
            f"{int(code)}): raise the limit of locked memory (ulimit -l), or pass pin_memory=False"
        )
    finalizer = weakref.finalize(base, cuda.cudaHostUnregister, address)
    finalizer.atexit = False
