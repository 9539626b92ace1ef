"""The samples that a loader makes, in their order, each with its place in a batch.

An endless sequence from where the run stands: over the ends of epochs, for one rank's share of the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.loaders.records import Due
from fuelrail.pipeline.order.batching import Cursor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuelrail.loaders.schedule.positions import PlaceMap
    from fuelrail.pipeline.order.batching import Batching, Share


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
