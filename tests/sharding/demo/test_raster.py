from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.sharding.demo.picture.raster import Window, blend, clip_depth, convex_hull, coverage, window_of


@given(st.floats(20.0, 60.0), st.floats(20.0, 60.0), st.floats(0.0, math.pi), st.floats(8.0, 30.0))
def test_coverage_sums_to_the_area(x: float, y: float, turn: float, size: float) -> None:
    angles = turn + np.arange(4) * math.pi / 2
    square = np.column_stack([x + size / math.sqrt(2) * np.cos(angles), y + size / math.sqrt(2) * np.sin(angles)])
    window = window_of(square, 100, 100)
    assert window is not None
    # Within a twentieth of a pixel along the sides, and a pixel at each corner.
    assert coverage(square, window).sum() == pytest.approx(size * size, abs=0.05 * 4 * size + 4)
    assert coverage(square[::-1], window).sum() == pytest.approx(size * size, abs=0.05 * 4 * size + 4)


def test_coverage_of_an_axis_aligned_square_is_exact() -> None:
    # From pixel edge 9.5 to 19.5: pixels 10 to 19 are covered wholly and no others.
    square = np.array([[9.5, 9.5], [19.5, 9.5], [19.5, 19.5], [9.5, 19.5]])
    found = coverage(square, Window(0, 0, 30, 30))
    expected = np.zeros((30, 30), np.float32)
    expected[10:20, 10:20] = 1.0
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_clip_depth_cuts_where_the_plane_is() -> None:
    square = np.array([[0.0, 0, -1], [2.0, 0, -1], [2.0, 0, 3], [0.0, 0, 3]])
    kept = clip_depth(square, 1.0)
    assert kept[:, 2].min() == pytest.approx(1.0)
    assert sorted(kept[np.isclose(kept[:, 2], 1.0)][:, 0]) == pytest.approx([0.0, 2.0])
    assert len(clip_depth(square, 5.0)) == 0
    np.testing.assert_array_equal(clip_depth(square, -2.0), square)


def test_hull_leaves_inner_points_out() -> None:
    points = np.array([[0.0, 0], [4, 0], [4, 4], [0, 4], [2, 2], [1, 3]])
    assert {tuple(point) for point in convex_hull(points)} == {(0, 0), (4, 0), (4, 4), (0, 4)}


def test_window_is_none_outside_the_image() -> None:
    assert window_of(np.array([[-9.0, 5], [-4, 5], [-4, 9]]), 20, 20) is None
    assert window_of(np.array([[-9.0, 5], [3, 5], [3, 9]]), 20, 20) == Window(4, 0, 11, 5)


def test_blend_mixes_by_weight() -> None:
    image = np.full((4, 4, 3), 100, np.uint8)
    alpha = np.array([[0.0, 0.5], [1.0, 0.25]], np.float32)
    blend(image, Window(1, 1, 3, 3), np.full((2, 2, 3), 200, np.uint8), alpha)
    np.testing.assert_allclose(image[1:3, 1:3, 0], [[100, 150], [200, 125]], atol=1)
    assert (image[0] == 100).all()
