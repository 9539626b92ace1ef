"""The nearest measurement in time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.sharding.sources.tables.matching import match_times


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 1000), max_size=30, unique=True).map(sorted),
    st.lists(st.integers(0, 1000), max_size=30, unique=True).map(sorted),
    st.integers(0, 200),
)
def test_nearest_takes_each_once_and_none_that_is_too_far(frames, sensor, tolerance):
    matches = match_times(
        np.array(frames, np.int64), np.array(sensor, np.int64), tolerance
    ).tolist()
    assert len(matches) == len(frames)
    sensor_indices = [sensor_index for sensor_index in matches if sensor_index >= 0]
    assert sensor_indices == sorted(set(sensor_indices))
    for frame, sensor_index in zip(frames, matches, strict=True):
        distances = [abs(time - frame) for time in sensor]
        if sensor_index >= 0:
            assert distances[sensor_index] == min(distances) <= tolerance
        elif distances and min(distances) <= tolerance:
            closest = sensor[distances.index(min(distances))]
            assert min(
                abs(closest - neighbour) for neighbour in frames if neighbour != frame
            ) <= min(distances)
