"""The best that any cache of equal samples can do, by plain search."""

from __future__ import annotations


def belady_misses(sequence, capacity):
    """Evict what is used last, or do not admit it; by plain search."""
    resident: set[int] = set()
    misses = 0

    def next_use(row, now):
        return next((t for t in range(now + 1, len(sequence)) if sequence[t] == row), len(sequence))

    for now, row in enumerate(sequence):
        if row in resident:
            continue
        misses += 1
        resident.add(row)
        if len(resident) > capacity:
            resident.remove(max(resident, key=lambda other: (next_use(other, now), other == row)))
    return misses
