"""Which message of a sensor belongs to which frame, and where a log is cut into clips."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fuelrail.sharding.sources.shared.times import nearest

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import I64

_STEADY = 0.7
"""Length of the mean direction of offsets [0, 1] from which on a sensor counts as triggered with
the reference.
"""


def estimated_offset_ns(reference_ns: I64, stamps_ns: I64) -> int:
    """Return how long after the reference a sensor exposes [ns], modulo its period nearest to 0; 0
    if it runs free.

    Offsets are angles of the sensor's period, so that one near half a period does not jump between
    its two signs: their direction is the circular mean (Mardia and Jupp 2000, 2.2), refined by the
    median of what is left.
    """
    if len(stamps_ns) < 2 or not len(reference_ns):
        return 0
    period = float(np.median(np.diff(stamps_ns)))
    first = stamps_ns[0] - period
    last = stamps_ns[-1] + period
    inside = reference_ns[(reference_ns >= first) & (reference_ns <= last)]
    if not len(inside) or period <= 0:
        return 0
    differences = stamps_ns[nearest(stamps_ns, inside)] - inside
    differences = differences.astype(np.float64)
    turns = np.exp(2j * np.pi * differences / period)
    mean = turns.mean()
    if abs(mean) < _STEADY:
        return 0
    share = float(np.angle(mean)) / (2 * np.pi)
    offset = share * period
    rest = differences - offset
    rest -= np.round(rest / period) * period
    return round(offset + float(np.median(rest)))


def matched(
    reference_ns: I64,
    stamps_ns: I64,
    offset_ns: int,
    tolerance_ns: int,
) -> NDArray[np.intp]:
    """Return for each reference time the row of the message nearest to it plus the offset; -1
    beyond the tolerance.

    A message belongs to one frame, the nearer one.
    """
    rows_matched = np.full(len(reference_ns), -1, np.intp)
    if not len(stamps_ns):
        return rows_matched
    rows = nearest(stamps_ns, reference_ns + offset_ns)
    distance = np.abs(stamps_ns[rows] - reference_ns - offset_ns)
    near = np.flatnonzero(distance <= tolerance_ns)
    by_row = np.lexsort((distance[near], rows[near]))
    near = near[by_row]
    is_nearest = np.diff(rows[near], prepend=-1) != 0
    one_each = near[is_nearest]
    rows_matched[one_each] = rows[one_each]
    return rows_matched


def cuts(reference_ns: I64, max_gap_ns: float, most_ns: float) -> list[I64]:
    """Return the reference times of each clip: cut at gaps, and after ``most_ns`` (0: never)."""
    clips: list[list[int]] = []
    for time in reference_ns.tolist():
        new = (
            not clips
            or time - clips[-1][-1] > max_gap_ns
            or (most_ns and time - clips[-1][0] >= most_ns)
        )
        if new:
            clips.append([])
        clips[-1].append(time)
    return [np.array(clip, np.int64) for clip in clips]
