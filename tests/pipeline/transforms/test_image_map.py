from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.image_map import (
    ImageMap,
    apply_to_intrinsics,
    ida_mats,
    scaled_size,
)

K = np.array([[1266.4, 0.0, 816.3], [0.0, 1266.4, 491.5], [0.0, 0.0, 1.0]])
SOURCE = (1600, 900)

_size = st.integers(1, 60)
_straight = st.one_of(
    st.tuples(st.just("resize"), _size, _size),
    st.tuples(
        st.just("crop"),
        st.integers(-20, 50),
        st.integers(-20, 50),
        _size,
        _size,
    ),
    st.tuples(st.just("flip")),
)
_operation = _straight | st.tuples(st.just("rotate"), st.floats(-180, 180))


def build(wh: tuple[int, int], operations: list[tuple]) -> ImageMap:
    image_map = ImageMap.identity(wh)
    for name, *arguments in operations:
        image_map = getattr(image_map, name)(*arguments)
    return image_map


def translation(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])


def oracle(wh: tuple[int, int], operations: list[tuple]) -> np.ndarray:
    """The composition of the textbook matrices, edge-origin (3, 3)."""
    total = np.eye(3)
    (width, height) = wh
    for name, *arguments in operations:
        if name == "resize":
            step = np.diag([arguments[0] / width, arguments[1] / height, 1.0])
            width, height = arguments
        elif name == "crop":
            step = translation(-arguments[0], -arguments[1])
            width, height = arguments[2:]
        elif name == "flip":
            step = np.array([[-1.0, 0.0, width], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
        else:
            angle = math.radians(arguments[0])
            turn = np.array(
                [
                    [math.cos(angle), math.sin(angle), 0.0],
                    [-math.sin(angle), math.cos(angle), 0.0],
                    [0.0, 0.0, 1.0],
                ]
            )
            step = translation(width / 2, height / 2) @ turn @ translation(-width / 2, -height / 2)
        total = step @ total
    return total


@given(st.tuples(_size, _size), st.lists(_operation, max_size=6))
def test_operations_compose_as_matrices(wh, operations):
    image_map = build(wh, operations)
    edge = oracle(wh, operations)
    assert_allclose(image_map.matrix, edge[:2], rtol=1e-9, atol=1e-9)
    assert_allclose(
        image_map.centre_matrix(),
        translation(-0.5, -0.5) @ edge @ translation(0.5, 0.5),
        atol=1e-9,
    )
    a, b, tx, c, d, ty = image_map.inverse_coefficients()
    inverse = np.array([[a, b, tx], [c, d, ty], [0.0, 0.0, 1.0]])
    assert_allclose(inverse @ edge, np.eye(3), atol=1e-6)
    assert image_map.max_scale == pytest.approx(np.linalg.svd(edge[:2, :2])[1][0], rel=1e-9)
    sizes = [arguments[-2:] for name, *arguments in operations if name in ("resize", "crop")]
    assert image_map.out_wh == (tuple(sizes[-1]) if sizes else wh)
    assert image_map.source_wh == wh
    assert image_map.rotate(0.0) is image_map


@given(
    st.tuples(_size, _size),
    st.lists(_operation, max_size=4),
    st.lists(
        st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.floats(0.5, 80)),
        min_size=1,
        max_size=5,
    ),
)
def test_points_project_where_the_map_takes_their_pixel(wh, operations, points):
    image_map = build(wh, operations)
    ego2img = np.eye(4)
    ego2img[:3, :3] = K
    homogeneous = np.c_[np.array(points), np.ones(len(points))].T
    stored = ego2img @ homogeneous
    stored_uv = np.vstack((stored[:2] / stored[2], np.ones(len(points))))
    expected = image_map.centre_matrix() @ stored_uv
    augmented = image_map.ida_mat() @ ego2img @ homogeneous
    assert_allclose(augmented[:2] / augmented[2], expected[:2], rtol=1e-9, atol=1e-6)
    assert_allclose(augmented[2], homogeneous[2])  # depth is not touched
    k = apply_to_intrinsics(image_map.ida_mat(), K)
    through_k = k @ homogeneous[:3]
    assert_allclose(through_k[:2] / through_k[2], expected[:2], rtol=1e-9, atol=1e-6)


def test_matrices_of_a_rig_are_those_of_its_maps():
    maps = [
        ImageMap.identity(SOURCE),
        ImageMap.identity((1920, 886)).resize(704, 320).rotate(3),
    ]
    stacked = ida_mats(maps)
    assert stacked.shape == (2, 4, 4)
    assert stacked.dtype == np.float64
    for matrix, image_map in zip(stacked, maps, strict=True):
        assert np.array_equal(matrix, image_map.ida_mat())
        assert_allclose(matrix[:2, [0, 1, 2]], image_map.centre_matrix()[:2])
    assert ida_mats([]).shape == (0, 4, 4)


def sees(image_map: ImageMap) -> tuple[np.ndarray, np.ndarray]:
    """Return which output pixels surely see the source, and which surely do not. On the border neither may hold."""
    width, height = image_map.out_wh
    v, u = np.mgrid[:height, :width] + 0.5
    a, b, tx, c, d, ty = image_map.inverse_coefficients()
    x = a * u + b * v + tx
    y = c * u + d * v + ty
    left, top, right, bottom = image_map.visible
    depth = np.minimum.reduce([x - left, right - x, y - top, bottom - y]) * abs(image_map.max_scale)
    return depth > 1e-4, depth < -1e-4


@given(st.tuples(_size, _size), st.lists(_operation, max_size=5))
def test_visible_columns_are_the_pixels_that_see_the_source(wh, operations):
    image_map = build(wh, operations)
    surely, surely_not = sees(image_map)
    columns = image_map.visible_columns()
    if columns is None:
        assert not surely_not.any()
        return
    x = np.arange(image_map.out_wh[0])
    painted = (x >= columns[0][:, None]) & (x < columns[1][:, None])
    assert painted[surely].all()
    assert not painted[surely_not].any()


@given(st.tuples(_size, _size), st.lists(_straight, max_size=5))
def test_covered_output_is_the_pixels_that_see_the_source(wh, operations):
    image_map = build(wh, operations)
    assert image_map.is_axis_aligned
    left, top, right, bottom = image_map.covered_output()
    painted = np.zeros(image_map.out_wh[::-1], bool)
    painted[top:bottom, left:right] = True
    surely, surely_not = sees(image_map)
    assert painted[surely].all()
    assert not painted[surely_not].any()


@given(st.tuples(_size, _size), st.lists(_operation, max_size=5), st.floats(0, 4))
def test_the_source_region_holds_every_place_sampled(wh, operations, support):
    image_map = build(wh, operations)
    left, top, right, bottom = image_map.source_roi(support)
    assert 0 <= left <= right <= wh[0]
    assert 0 <= top <= bottom <= wh[1]
    width, height = image_map.out_wh
    v, u = np.mgrid[:height, :width] + 0.5
    a, b, tx, c, d, ty = image_map.inverse_coefficients()
    x = a * u + b * v + tx
    y = c * u + d * v + ty
    surely, _ = sees(image_map)
    for place, low, high, size in (
        (x, left, right, wh[0]),
        (y, top, bottom, wh[1]),
    ):
        reached = place[surely]
        if reached.size:
            assert low <= max(0.0, reached.min() - support) + 1e-6
            assert high >= min(size, reached.max() + support) - 1e-6


def test_a_crop_before_a_rotation_cuts_its_corners_off():
    # As PIL does: crop makes a new image; turning that one brings black in, not what was cut off.
    image_map = ImageMap.identity((100, 100)).crop(30, 30, 40, 40).rotate(45)
    assert image_map.visible == (30.0, 30.0, 70.0, 70.0)
    first, last = image_map.visible_columns()
    assert first[0] >= last[0] or last[0] - first[0] <= 40
    corners_seen = sees(image_map)[0][[0, 0, -1, -1], [0, -1, 0, -1]]
    assert not corners_seen.any()


def test_flips_and_alignment_are_reported():
    start = ImageMap.identity(SOURCE)
    assert start.flips == (False, False)
    assert start.flip().flips == (True, False)
    assert start.rotate(180.0).flips == (True, True)
    assert start.is_axis_aligned
    assert start.rotate(180.0).is_axis_aligned
    assert start.rotate(-540.0).is_axis_aligned
    assert not start.rotate(1e-3).is_axis_aligned


@pytest.mark.parametrize(
    ("size", "numerator", "denominator", "scaled"),
    [
        (1597, 1, 2, 799),
        (1597, 1, 8, 200),
        (8, 1, 8, 1),
        (9, 1, 8, 2),
        (900, 3, 8, 338),
    ],
)
def test_scaled_sizes_are_those_of_libjpeg(size, numerator, denominator, scaled):
    assert scaled_size(size, numerator, denominator) == scaled


def test_impossible_sizes_are_refused():
    start = ImageMap.identity(SOURCE)
    for make in (
        lambda: ImageMap.identity((0, 4)),
        lambda: start.resize(0, 10),
        lambda: start.crop(0, 0, 10, 0),
        lambda: start.resize(-3, 10),
    ):
        with pytest.raises(ConfigError, match="must be at least 1x1"):
            make()


def test_the_map_is_the_product_that_the_documents_state():
    """Resize, crop, flip u' = W - 1 - u, rotation about ((W - 1) / 2, (H - 1) / 2): pixel centres at whole numbers."""
    wide = 80
    high = 50
    left = 7
    top = 9
    settings = ImageAugment(height=32, width=64)
    matrix = settings._map(
        (160, 100),
        (0.5, 0.5),
        (wide, high),
        (left, top),
        flip=True,
        degrees=30.0,
    ).centre_matrix()
    u = 23.0
    v = 41.0
    u = (u + 0.5) * wide / 160 - 0.5 - left
    v = (v + 0.5) * high / 100 - 0.5 - top
    u = 64 - 1 - u
    x = u - (64 - 1) / 2
    y = v - (32 - 1) / 2
    angle = math.radians(30.0)
    # Counter-clockwise as seen: v points down, so what is right of the pivot comes to lie above it.
    right = x * math.cos(angle) + y * math.sin(angle)
    down = y * math.cos(angle) - x * math.sin(angle)
    assert_allclose(
        (matrix @ (23.0, 41.0, 1.0))[:2],
        ((64 - 1) / 2 + right, (32 - 1) / 2 + down),
        atol=1e-9,
    )
