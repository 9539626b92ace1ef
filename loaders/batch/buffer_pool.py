"""The memory that images are decoded into, and the samples' places in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fuelrail.loaders.records import (
    BatchSlot,
    CameraImages,
    FrameTask,
    Images,
    Requested,
    Scheduled,
    Source,
    Task,
)
from fuelrail.loaders.storage.buffers import Buffers, Memory
from fuelrail.pipeline.order.windows import has_frames

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.order.windows import Window


def page_locked(num_bytes: int) -> U8:
    """Return page-locked host memory, from which a GPU copies without the CPU."""
    pinned: U8 = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return pinned


class ImageBuffers:
    """Memory for the images of batches, planes of uint8, in one array or in one for each group of
    cameras.

    ``on_device``: a decoder takes the memory on its own device, so there are only shapes, tensors
    of torch's device ``meta``. ``varies``: batches differ in their number of rows; those of up to a
    power of two share `Buffers`.
    """

    def __init__(
        self,
        images: Sequence[CameraImages],
        *,
        varies: bool,
        on_device: bool,
        memory: Memory,
        keep: int,
    ) -> None:
        self._images = images
        self._varies = varies
        self._on_device = on_device
        self._memory = memory
        self._keep = keep
        self._pools: dict[int, Buffers] = {}

    def take(self, axes: tuple[int, ...]) -> Images | tuple[Images, ...]:
        """Return memory for images with these axes before the cameras'; it is free again when
        all views are gone.
        """
        rows = axes[0]
        is_grouped = self._images[0].name is not None
        if self._on_device:
            shapes = image_shapes(self._images, axes)
            placeholders = tuple(
                torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes
            )
            return placeholders if is_grouped else placeholders[0]
        room = 1 << (rows - 1).bit_length() if self._varies else rows
        shapes = image_shapes(self._images, (room, *axes[1:]))
        sizes = [math.prod(shape) for shape in shapes]
        size = sum(sizes)
        if room not in self._pools:
            self._pools[room] = Buffers(self._memory, keep_bytes=self._keep * size, rounded=int)
        memory = self._pools[room].take(size)
        parts = np.split(memory, np.cumsum(sizes)[:-1])
        images = tuple(
            part.reshape(shape)[:rows] for part, shape in zip(parts, shapes, strict=True)
        )
        return images if is_grouped else images[0]


def image_shapes(images: Sequence[CameraImages], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shape of each group's images, planes of uint8."""
    return [
        (
            *axes,
            len(group.cameras),
            3,
            group.augment.height,
            group.augment.width,
        )
        for group in images
    ]


def tasks(
    requested: Iterator[Requested],
    sources: Sequence[Source],
    take: Callable[[Scheduled], Images | tuple[Images, ...]],
    window: Window | None = None,
    groups: tuple[CameraImages, ...] = (),
) -> Iterator[Task]:
    """Yield the samples with their places in batches; ``take`` gives a batch's buffer at its
    first sample's turn.
    """
    slot: BatchSlot | None = None
    current = 0 if window is None else window.current
    for scheduled, entries, reads in requested:
        if scheduled.batch_row == 0:
            flags = scheduled.flags
            slot = BatchSlot(
                epoch=scheduled.epoch,
                step=scheduled.step,
                images=take(scheduled),
                flags=flags,
                has_windows=has_frames(window),
                groups=groups,
                position=scheduled.position,
            )
        assert slot is not None, "a batch begins with its first sample"
        if entries:
            facts = zip(scheduled.rows, scheduled.present, entries, reads, strict=True)
            frames = tuple([FrameTask(*frame_facts) for frame_facts in facts])
        else:  # the index is damaged there: the only read raises why
            frames = tuple([FrameTask(row, True, None, reads[0]) for row in scheduled.rows])
        yield Task(
            slot=slot,
            batch_row=scheduled.batch_row,
            source=sources[scheduled.part],
            frames=frames,
            current=current,
            valid=scheduled.valid,
            position=scheduled.position,
        )
