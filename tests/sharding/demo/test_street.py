from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.sharding.demo.street import Road, corners, footprints_overlap


@given(st.sampled_from([0.0, 1 / 120, -1 / 150]), st.floats(-60, 140), st.floats(-20, 20), st.floats(-math.pi, math.pi))
def test_locate_finds_the_place_that_point_was_given(bend: float, along: float, left: float, heading: float) -> None:
    road = Road(500.0, 700.0, heading, bend)
    x, y = road.point(along, left)
    found = road.locate(np.array([x - road.x], np.float32), np.array([y - road.y], np.float32))
    assert found[0][0] == pytest.approx(along, abs=2e-3)
    assert found[1][0] == pytest.approx(left, abs=2e-3)


@pytest.mark.parametrize("bend", [0.0, 1 / 100, -1 / 100])
def test_heading_is_the_direction_of_travel(bend: float) -> None:
    road = Road(0.0, 0.0, 0.3, bend)
    (x0, y0), (x1, y1) = road.point(29.999, 0.0), road.point(30.001, 0.0)
    assert math.atan2(y1 - y0, x1 - x0) == pytest.approx(road.heading(30.0), abs=1e-6)
    assert math.hypot(x1 - x0, y1 - y0) == pytest.approx(0.002, rel=1e-6)


def test_corners_begin_at_the_front_left_and_run_counter_clockwise() -> None:
    found = corners(np.array(1.0), np.array(2.0), np.array(math.pi / 2), 4.0, 2.0)
    np.testing.assert_allclose(found, [[0, 4], [0, 0], [2, 0], [2, 4]], atol=1e-12)


@given(st.floats(0, 5), st.floats(-math.pi, math.pi))
def test_overlap_of_turned_rectangles_agrees_with_sampled_points(distance: float, yaw: float) -> None:
    first = corners(np.zeros(1), np.zeros(1), np.zeros(1), 4.0, 2.0)
    second = corners(np.full(1, distance), np.zeros(1), np.full(1, yaw), 3.0, 1.0)
    u, v = np.meshgrid(np.linspace(-0.499, 0.499, 60), np.linspace(-0.499, 0.499, 60))
    c, s = math.cos(yaw), math.sin(yaw)
    x, y = distance + c * u * 3.0 - s * v, s * u * 3.0 + c * v
    sampled = bool(((np.abs(x) < 2.0) & (np.abs(y) < 1.0)).any())
    if sampled:  # samples may miss the very edge, never the other way round
        assert footprints_overlap(first, second)
    elif not ((np.abs(x) < 2.1) & (np.abs(y) < 1.1)).any():
        assert not footprints_overlap(first, second)
