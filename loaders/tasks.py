"""The samples that a loader makes, in their order, each with its place in a batch.

An endless sequence from where the run stands: over the ends of epochs, for one rank's share of the steps.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

from torch.utils.data import get_worker_info

from fuelrail.loaders.assemble import BatchSlot
from fuelrail.loaders.lookahead import Due
from fuelrail.pipeline.world import Cursor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fuelrail.loaders.lookahead import Ahead
    from fuelrail.loaders.places import PlaceMap
    from fuelrail.loaders.slots import BufferPool
    from fuelrail.loaders.sources import Source
    from fuelrail.loaders.storage.protocol import PendingSpan
    from fuelrail.pipeline.index import IndexRow
    from fuelrail.pipeline.windows import FrameWindow
    from fuelrail.pipeline.world import Batching


class Share(NamedTuple):
    """Which steps a process makes of its rank's: every ``of``-th from ``first`` on."""

    first: int = 0
    of: int = 1

    def steps(self, batching: Batching) -> range:
        """The steps of these batches that are its own."""
        return range(self.first, batching.num_steps, self.of)

    def step(self, number: int, start: Cursor, whole: Batching) -> int:
        """Which step, counted from ``start`` on over the ends of epochs, is its own one of this number."""
        rest = start.rest(whole)
        own = self.steps(rest)
        if number < len(own):
            return own[number]
        own_in_epoch = self.steps(whole)
        epochs, at = divmod(number - len(own), len(own_in_epoch))
        return rest.num_steps + epochs * whole.num_steps + own_in_epoch[at]

    def warn_of_workers(self) -> None:
        """Warn where this process is one of several workers of torch's DataLoader, and the steps are not shared out."""
        worker = get_worker_info()
        if worker is not None and self.of < worker.num_workers:
            warnings.warn(
                f"a fuelrail DataLoader is iterated in worker {worker.id} of {worker.num_workers} of torch's "
                f"DataLoader: each worker gives every batch, {worker.num_workers} times in all; wrap it in "
                "fuelrail.loaders.IterableView, which shares the steps out, or use num_workers=0",
                stacklevel=3,
            )


class FrameTask(NamedTuple):
    """One frame of a sample to load: its row in its dataset's index."""

    row: int
    present: bool
    """False: it stands in for a frame that the clip has not got."""
    entry: IndexRow | None
    """The row's content; None where the index is damaged there, which ``take`` tells."""
    take: PendingSpan
    """Waits for the bytes."""


class Task(NamedTuple):
    """One sample to load: its place in a batch, and its frames (one without windows)."""

    slot: BatchSlot
    at: int
    source: Source
    """The dataset that it is of."""
    frames: tuple[FrameTask, ...]
    current: int
    """Which of the frames is the sample's own."""
    valid: bool
    position: int
    """In the epoch, over all ranks."""
    num_replaced: int = 0
    """Bad samples that it stands in for."""

    @property
    def row(self) -> int:
        """The sample's own row."""
        return self.frames[self.current].row

    @property
    def number(self) -> int:
        """The sample's number over all datasets: what its augmentation is drawn by."""
        return self.source.base + self.row

    def __str__(self) -> str:
        return f"row {self.row} (epoch {self.slot.epoch}, step {self.slot.step})"


def coming(where: PlaceMap, start: Cursor, whole: Batching, share: Share) -> Iterator[Due]:
    """The samples of this rank from ``start`` on, epoch after epoch without end."""
    while share.steps(whole):  # a share of nothing would never come to an end
        yield from _coming_in_epoch(where, start, start.rest(whole), share)
        start = Cursor(start.epoch + 1)


def _coming_in_epoch(where: PlaceMap, start: Cursor, rest: Batching, share: Share) -> Iterator[Due]:
    steps_done = start.samples_consumed // rest.global_batch
    for step in share.steps(rest):
        positions = rest.positions(step)
        parts, rows, present, valid, flags = where.places(start.epoch, positions)
        valid &= rest.valid(step)
        places = (positions, rows, valid, parts, present)
        for at, place in enumerate(zip(*[column.tolist() for column in places], strict=True)):
            position, row, ok, part, here = place
            yield Due(start.epoch, steps_done + step, at, position, row, ok, part, here, flags)


def tasks(
    asked_for: Iterator[Ahead], sources: Sequence[Source], buffers: BufferPool, window: FrameWindow | None = None
) -> Iterator[Task]:
    """The samples with their places in batches; a batch's buffer is taken when its first sample's turn comes."""
    slot: BatchSlot | None = None
    current = 0 if window is None else window.current
    for due, entries, takes in asked_for:
        if due.at == 0:
            slot = BatchSlot(due.epoch, due.step, buffers.take(), due.flags, window is not None)
        assert slot is not None, "a batch begins with its first sample"
        frames = frame_tasks(due.rows, due.present, entries, takes)
        yield Task(slot, due.at, sources[due.part], frames, current, due.valid, due.position)


def frame_tasks(
    rows: Sequence[int],
    present: Sequence[bool] | None,
    entries: Sequence[IndexRow],
    takes: Sequence[PendingSpan],
) -> tuple[FrameTask, ...]:
    """A sample's frames; without ``entries`` (the index could not tell) the only take says why, whichever is taken."""
    if not entries:
        return tuple(FrameTask(row, True, None, takes[0]) for row in rows)
    if present is None:
        return tuple(FrameTask(row, True, entry, take) for row, entry, take in zip(rows, entries, takes, strict=True))
    return tuple(map(FrameTask, rows, present, entries, takes))
