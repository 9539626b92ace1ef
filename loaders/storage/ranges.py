"""Plan byte ranges so that all wanted spans come with few requests. Pure: no I/O, no clock.

A request of any length costs a round trip, so spans that lie close together in a shard are fetched
as one range, gap included. Two numbers decide: the largest gap worth fetching along
(``max_gap_bytes``: what the connection moves in about one round trip), and the longest range
(``max_range_bytes``: longer ones share better when split over several connections, and the first
sample of a range waits for its last byte).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fuelrail.pipeline.errors import ConfigError

MAX_GAP_BYTES: Final = 256 << 10
MAX_RANGE_BYTES: Final = 8 << 20


class WantedSpan(NamedTuple):
    """Bytes ``offset`` to ``offset + length`` of shard number ``shard``."""

    shard: int
    offset: int
    length: int


class PlannedRange(NamedTuple):
    """One request: bytes ``start`` to ``end - 1`` of a shard, which hold the wanted spans
    ``members`` (positions in the list that was asked for).
    """

    shard: int
    start: int
    end: int
    members: tuple[int, ...]


def plan_ranges(
    spans: Sequence[WantedSpan],
    *,
    max_gap_bytes: int = MAX_GAP_BYTES,
    max_range_bytes: int = MAX_RANGE_BYTES,
) -> list[PlannedRange]:
    """Merge wanted spans into ranges, in the order in which their first members are needed.

    Every span lies wholly in exactly one range. A range begins and ends with a wanted span, has no
    gap over ``max_gap_bytes``, and is no longer than ``max_range_bytes`` unless a single span is.
    Spans may repeat and overlap. Raises ConfigError for a negative gap or a range limit under 1.
    """
    if max_gap_bytes < 0 or max_range_bytes < 1:
        raise ConfigError(
            f"max_gap_bytes={max_gap_bytes} must be 0 or more, and "
            f"max_range_bytes={max_range_bytes} 1 or more"
        )
    ranges: list[PlannedRange] = []
    members: list[int] = []
    shard = start = end = -1
    for number in sorted(range(len(spans)), key=spans.__getitem__):
        span = spans[number]
        far = max(end, span.offset + span.length)
        if (
            members
            and span.shard == shard
            and span.offset - end <= max_gap_bytes
            and far - start <= max_range_bytes
        ):
            members.append(number)
            end = far
            continue
        if members:
            ranges.append(PlannedRange(shard, start, end, tuple(members)))
        members = [number]
        shard = span.shard
        start = span.offset
        end = span.offset + span.length
    if members:
        ranges.append(PlannedRange(shard, start, end, tuple(members)))
    return sorted(ranges, key=lambda planned: min(planned.members))
