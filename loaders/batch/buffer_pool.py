"""Reused batch buffers that nobody can overwrite while somebody still looks at them."""

from __future__ import annotations

import collections
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fuelrail.loaders.records import BatchSlot, CameraImages, FrameTask, Images, Requested, Scheduled, Source, Task
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.order.windows import has_frames

if TYPE_CHECKING:
    from fuelrail.pipeline.order.windows import Window


Memory: TypeAlias = Callable[[int], NDArray[np.uint8]]
"""Returns new memory of a number of bytes, uint8 (n,)."""


def pageable(num_bytes: int) -> NDArray[np.uint8]:
    """Return plain host memory."""
    return np.empty(num_bytes, np.uint8)


def page_locked(num_bytes: int) -> NDArray[np.uint8]:
    """Return page-locked host memory, from which a GPU copies without the CPU."""
    pinned: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return pinned


class BufferPool:
    """uint8 buffers of one shape, handed out as arrays and taken back when the last view is gone.

    Taking fresh memory for each batch costs a page fault every 4 KiB. Here a buffer comes back when the array dies
    that every view and tensor refers to, so a batch that the user keeps is simply not reused. The pool keeps at most
    ``keep`` free buffers. Thread-safe.
    """

    def __init__(self, shape: tuple[int, ...], *, memory: Memory, keep: int) -> None:
        self._shape, self._memory, self._keep = shape, memory, keep
        self._free: list[NDArray[np.uint8]] = []
        self._lent: dict[int, tuple[weakref.ref[NDArray[np.uint8]], NDArray[np.uint8]]] = {}
        self._returned: collections.deque[weakref.ref[NDArray[np.uint8]]] = collections.deque()
        self._lock = threading.Lock()

    def take(self) -> NDArray[np.uint8]:
        """Return a buffer with undefined content.

        It is free again when the returned array and all views of it, numpy's and torch's, are gone.
        """
        with self._lock:
            self._take_back()
            base = self._free.pop() if self._free else self._new()
            # numpy lets a view of a view refer to the array that owns the memory, which would be `base`. An array on a
            # memoryview ends that chain: all views of it refer to it.
            lent = np.frombuffer(base.data, np.uint8)
            # The callback is C code on purpose. Batches die in the training loop, and a Ctrl-C that struck at the start
            # of a Python function called from there would be printed and dropped.
            ref = weakref.ref(lent, self._returned.append)
            self._lent[id(ref)] = ref, base
        return lent.reshape(self._shape)

    def _take_back(self) -> None:
        """Move the buffers whose arrays died since the last call to the free ones."""
        while self._returned:
            _, base = self._lent.pop(id(self._returned.popleft()))
            if len(self._free) < self._keep:
                self._free.append(base)

    def _new(self) -> NDArray[np.uint8]:
        try:
            return self._memory(math.prod(self._shape))
        except (MemoryError, RuntimeError, ValueError) as error:  # numpy's, torch's, and numpy's beyond all addresses
            raise ConfigError(
                f"no memory for a batch of images of shape {list(self._shape)}, {math.prod(self._shape)} bytes: take a "
                f"smaller batch_size, prefetch_factor or image size, or fewer frames ({error})"
            ) from error


class ImageBuffers:
    """Memory for the images of batches, planes of uint8, in one array or in one for each group of cameras.

    ``on_device``: a decoder takes the memory on its own device, so there are only shapes, tensors of torch's device
    ``meta``. ``varies``: batches differ in their number of rows; those of up to a power of two share a `BufferPool`.
    """

    def __init__(
        self, images: Sequence[CameraImages], *, varies: bool, on_device: bool, memory: Memory, keep: int
    ) -> None:
        self._images, self._varies, self._on_device = images, varies, on_device
        self._memory, self._keep = memory, keep
        self._pools: dict[int, BufferPool] = {}

    def take(self, axes: tuple[int, ...]) -> Images | tuple[Images, ...]:
        """Return memory for images with these axes before the cameras'; it is free again when all views are gone."""
        rows, is_grouped = axes[0], self._images[0].name is not None
        if self._on_device:
            shapes = image_shapes(self._images, axes)
            made = tuple(torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes)
            return made if is_grouped else made[0]
        room = 1 << (rows - 1).bit_length() if self._varies else rows
        shapes = image_shapes(self._images, (room, *axes[1:]))
        sizes = [math.prod(shape) for shape in shapes]
        if room not in self._pools:
            shape = (sum(sizes),) if is_grouped else shapes[0]
            self._pools[room] = BufferPool(shape, memory=self._memory, keep=self._keep)
        taken = self._pools[room].take()
        if not is_grouped:
            return taken[:rows]
        parts = np.split(taken, np.cumsum(sizes)[:-1])
        return tuple(part.reshape(shape)[:rows] for part, shape in zip(parts, shapes, strict=True))


def image_shapes(images: Sequence[CameraImages], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shape of each group's images, planes of uint8."""
    return [(*axes, len(one.cameras), 3, one.augment.height, one.augment.width) for one in images]


def tasks(
    requested: Iterator[Requested],
    sources: Sequence[Source],
    take: Callable[[Scheduled], Images | tuple[Images, ...]],
    window: Window | None = None,
    groups: tuple[CameraImages, ...] = (),
) -> Iterator[Task]:
    """Yield the samples with their places in batches; ``take`` gives a batch's buffer at its first sample's turn."""
    slot: BatchSlot | None = None
    current = 0 if window is None else window.current
    for scheduled, entries, reads in requested:
        if scheduled.at == 0:
            flags = scheduled.flags
            slot = BatchSlot(
                scheduled.epoch, scheduled.step, take(scheduled), flags, has_frames(window), groups, scheduled.position
            )
        assert slot is not None, "a batch begins with its first sample"
        if entries:
            facts = zip(scheduled.rows, scheduled.present, entries, reads, strict=True)
            frames = tuple([FrameTask(*one) for one in facts])
        else:  # the index is damaged there: the only read raises why
            frames = tuple([FrameTask(row, True, None, reads[0]) for row in scheduled.rows])
        yield Task(slot, scheduled.at, sources[scheduled.part], frames, current, scheduled.valid, scheduled.position)
