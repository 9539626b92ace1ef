"""The nearest measurement in time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.sharding.sources.tables.matching import nearest


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 1000), max_size=30, unique=True).map(sorted),
    st.lists(st.integers(0, 1000), max_size=30, unique=True).map(sorted),
    st.integers(0, 200),
)
def test_nearest_takes_each_once_and_none_that_is_too_far(frames, sensor, tolerance):
    matches = nearest(np.array(frames, np.int64), np.array(sensor, np.int64), tolerance).tolist()
    assert len(matches) == len(frames)
    readings = [reading for reading in matches if reading >= 0]
    assert readings == sorted(set(readings))
    for frame, reading in zip(frames, matches, strict=True):
        distances = [abs(time - frame) for time in sensor]
        if reading >= 0:
            assert distances[reading] == min(distances) <= tolerance
        elif distances and min(distances) <= tolerance:
            closest = sensor[distances.index(min(distances))]
            assert min(
                abs(closest - neighbour) for neighbour in frames if neighbour != frame
            ) <= min(distances)
