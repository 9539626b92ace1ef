"""The samples that a loader makes, in order, each with its place in a batch.

The sequence is endless: it starts at the run's position and crosses the ends of epochs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.loaders.records import Scheduled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuelrail.loaders.schedule.positions import PositionIndex
    from fuelrail.pipeline.order.batching import Walk


def coming(where: PositionIndex, walk: Walk) -> Iterator[Scheduled]:
    """Yield the samples of this rank and share, step by step, epoch after epoch."""
    for epoch, step in walk:
        batches = walk.batches(epoch)
        positions = batches.positions(step)
        parts, rows, present, valid, flags = where.places(epoch, positions)
        valid &= batches.valid(step)
        step += batches.start // batches.global_batch
        places = (positions, rows, valid, parts, present)
        for at, place in enumerate(zip(*[column.tolist() for column in places], strict=True)):
            position, row, is_valid, part, exists = place
            yield Scheduled(epoch, step, at, position, row, is_valid, part, exists, flags)
