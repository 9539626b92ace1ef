"""Batches to their device: an own copy stream on CUDA, nothing on the CPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from fuelrail.loaders.batch.buffer_pool import page_locked
from fuelrail.loaders.decode.protocol import wait_on_host
from fuelrail.loaders.storage.buffers import Buffers, Memory, pageable
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8


ALIGNMENT: Final = 64
"""Bytes: of a cache line, and a multiple of every element's size."""
_LARGE_BYTES: Final = 1 << 20
"""Page-locked tensors from this size on are copied from where they lie."""


def require_cuda(argument: str) -> None:
    """Raise ConfigError unless torch finds a CUDA device, for which ``argument`` asks."""
    if torch.cuda.is_available():
        return
    built = torch.version.cuda
    reason = (
        "this torch was built without CUDA"
        if built is None
        else f"torch (CUDA {built}) finds no usable GPU"
    )
    raise ConfigError(
        f"{argument} needs CUDA, but {reason}; leave it out to keep batches in host memory"
    )


def make_transfer(
    device: torch.device | str | int | None, *, pinned: bool = True
) -> CudaTransfer | None:
    """Make what brings batches to a device: None for None or the CPU.

    Raise ConfigError for any but CPU and CUDA.

    ``pinned`` is whether what is copied together is put together in page-locked memory.
    """
    try:
        target = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"torch does not know device={device!r}: use 'cpu', 'cuda' or 'cuda:N'"
        ) from error
    if target.type == "cpu":
        return None
    if target.type != "cuda":
        raise ConfigError(
            f"device={device!r} is not served: use 'cpu', 'cuda' or 'cuda:N', and move "
            "batches yourself"
        )
    require_cuda(f"device={device!r}")
    if target.index is not None and target.index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={device!r}: torch finds {torch.cuda.device_count()} CUDA devices, "
            "numbered from 0"
        )
    if str(target) == "cuda":
        # Now, not when a batch is handed over: that is in another thread, or on another device.
        target = torch.device("cuda", torch.cuda.current_device())
    return CudaTransfer(target, pinned=pinned)


class Moved(NamedTuple):
    """A batch on its device, before it is handed over.

    ``arena`` is the memory that its small tensors are views of, ``owners`` one tensor for each
    memory of the batch.
    """

    batch: Any
    arena: torch.Tensor | None
    owners: list[torch.Tensor]


class CudaTransfer:
    """Copies batches to a CUDA device on a stream of its own; one thread calls it, ahead of the
    trainer.

    What lies in page-locked memory in large pieces, which is the images, is copied from there. All
    other tensors are put together in one block (`Arena`) and copied as one, so that a batch is
    always two copies.

    The call returns when the copy is complete, so a pinned buffer can go back to its pool, and the
    stage's busy time is the host-to-device time. :meth:`hand_over` must then be called on the
    consumer's thread: it ties the memory to the consumer's stream, so that the allocator does not
    give it away while kernels queued there still read it.
    """

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self.device = device
        self._arena = Arena(pinned=pinned)
        # A high priority: a copy that is ready is started before kernels that are queued.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._local = threading.local()

    def __call__(self, batch: Any, function: Callable[[Any], Any] | None = None) -> Moved:
        """Copy every tensor of the batch, those in dicts, lists and tuples included.

        ``function`` is called with the batch on the device, on the copy's stream; its result is
        handed on.
        """
        small: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            if is_packed(tensor):
                small.append(tensor)
            return tensor

        map_tensors(batch, collect)
        arena: torch.Tensor | None = None
        views: Iterator[torch.Tensor] = iter(())

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if is_packed(tensor):
                return next(views)
            return tensor.to(self.device, non_blocking=True)

        with torch.cuda.stream(self._stream):
            try:
                if small:
                    packed = self._arena.pack(small)
                    arena = packed.block.to(self.device, non_blocking=True)
                    views = iter(packed.cut(arena))
                moved = map_tensors(batch, move)
                if function is not None:
                    moved = function(moved)
            finally:
                wait_on_host(self._stream)
        owners: dict[int, torch.Tensor] = {}
        map_tensors(
            moved,
            lambda tensor: owners.setdefault(tensor.untyped_storage().data_ptr(), tensor),
        )
        return Moved(moved, arena, list(owners.values()))

    def hand_over(self, moved: Moved) -> Any:
        """Return the batch, with the consumer's current stream recorded on its memory.

        No wait is needed: the copy was complete before the batch left :meth:`__call__`.
        """
        current = torch.cuda.current_stream(self.device)
        for tensor in moved.owners:
            tensor.record_stream(current)
        return moved.batch

    def on_own_stream(self, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``work`` with a stream of the calling thread's as the current one, complete when
        it returns.

        For the user's functions. On the default stream, where the trainer's kernels queue, theirs
        would wait for whole steps, and memory of other streams that they read could be given away
        meanwhile. What they get is complete, and so is what they make: no later stage, nor the
        allocator, has to know their stream.
        """

        new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream

        def streamed(item: Any) -> Any:
            stream = getattr(self._local, "stream", None)
            if stream is None:
                stream = new_stream(self.device)
                self._local.stream = stream
            with torch.cuda.stream(stream):
                try:
                    return work(item)
                finally:
                    wait_on_host(stream)

        return streamed


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``change`` to each tensor of a batch, in dicts, lists and tuples to any depth;
    everything else stays.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: map_tensors(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


class Piece(NamedTuple):
    """A tensor's form, and its place in a block of memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """The place in the block, in elements."""


class Packed(NamedTuple):
    """A block of bytes, uint8 (n,), and where each tensor lies in it.

    The next `Arena.pack` overwrites it.
    """

    block: torch.Tensor
    pieces: list[Piece]

    def cut(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views of a copy of the block, in the order in which they were
        packed.
        """
        dtypes = {piece.dtype for piece in self.pieces}
        typed = {dtype: block.view(dtype) for dtype in dtypes}
        return [
            typed[dtype].as_strided(shape, strides, offset)
            for dtype, shape, strides, offset in self.pieces
        ]


class Arena:
    """A block of host memory, page-locked at choice, that only grows, for many small tensors; for
    one thread.

    They are copied to a device as one and cut into views there. A copy of its own costs a tensor a
    call, an allocation and, from pageable memory, a staged copy: some 10 us, of which a batch of 16
    samples with labels had 95.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._buffers = Buffers(page_locked if pinned else pageable, keep_bytes=0)
        self._memory = np.empty(0, np.uint8)

    def pack(self, tensors: Sequence[torch.Tensor]) -> Packed:
        """Copy tensors (of any dtype, shape and dense layout; see `is_packed`) behind one another,
        each aligned.

        Raises ConfigError where there is no memory for them.
        """
        return pack(tensors, self._take_memory)

    def _take_memory(self, num_bytes: int) -> U8:
        if num_bytes > len(self._memory):
            # A quarter more, so that batches that grow a little do not each take new memory.
            num_units = -(-num_bytes * 5 // 4 // ALIGNMENT)
            self._memory = self._buffers.take(num_units * ALIGNMENT)
        return self._memory


def pack(tensors: Sequence[torch.Tensor], room: Memory) -> Packed:
    """Copy tensors behind one another, each aligned, into memory that ``room`` returns."""
    dense = []
    for tensor in tensors:
        # The elements fill the memory from the first to the last, in any order of the axes.
        is_dense = tensor.is_contiguous()
        is_dense = is_dense or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        dense.append(tensor if is_dense else tensor.contiguous())
    pieces: list[Piece] = []
    num_bytes = 0
    for tensor in dense:
        piece = Piece(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            offset=num_bytes // tensor.itemsize,
        )
        pieces.append(piece)
        num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    memory = torch.from_numpy(room(num_bytes))[:num_bytes]
    start = memory.data_ptr()
    for tensor, piece in zip(dense, pieces, strict=True):
        ctypes.memmove(
            start + piece.offset * tensor.itemsize,
            tensor.data_ptr(),
            tensor.nbytes,
        )
    return Packed(memory, pieces)


def is_packed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor goes through an arena: plain ones, except large page-locked ones."""
    return is_plain(tensor) and (tensor.nbytes < _LARGE_BYTES or not tensor.is_pinned())


def is_plain(value: object) -> bool:
    """Return whether a value is a tensor in host memory that is nothing but its elements."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not (value.is_conj() or value.is_neg() or value.is_quantized)
    )
