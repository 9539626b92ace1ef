from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.transforms.ego import IDENTITY, BevAugment, BevMap

BEVDET = BevAugment(
    train=True,
    rotate_deg=(-22.5, 22.5),
    scale=(0.95, 1.05),
    flip_x_prob=0.5,
    flip_y_prob=0.5,
)
BEVFUSION = BevAugment(
    train=True,
    rotate_deg=(-45, 45),
    scale=(0.9, 1.1),
    flip_x_prob=0.5,
    translate_std_m=0.5,
)

maps = st.builds(
    BevMap,
    rotation_rad=st.floats(-4, 4),
    scale=st.floats(0.5, 2),
    flip_x=st.booleans(),
    flip_y=st.booleans(),
    translation_m=st.tuples(*[st.floats(-5, 5)] * 3),
)
boxes = st.lists(
    st.tuples(
        *[st.floats(-60, 60)] * 3,
        *[st.floats(0.2, 12)] * 3,
        st.floats(-3.1, 3.1),
    ),
    min_size=1,
    max_size=4,
).map(lambda rows: np.array(rows, np.float32))


def homogeneous(points: np.ndarray) -> np.ndarray:
    return np.c_[points, np.ones(len(points))]


def rigid(yaw: float, pitch: float, place: tuple[float, float, float]) -> np.ndarray:
    matrix = np.eye(4)
    cy = math.cos(yaw)
    sy = math.sin(yaw)
    cp = math.cos(pitch)
    sp = math.sin(pitch)
    matrix[:3, :3] = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]]) @ np.array(
        [[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]]
    )
    matrix[:3, 3] = place
    return matrix


@given(maps)
def test_the_matrix_is_rotation_then_scale_then_flip_then_translation(
    bev: BevMap,
) -> None:
    cos = math.cos(bev.rotation_rad)
    sin = math.sin(bev.rotation_rad)
    rotation = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    flip = np.diag([-1.0 if bev.flip_x else 1.0, -1.0 if bev.flip_y else 1.0, 1.0])
    assert_allclose(
        bev.matrix[:3, :3],
        flip @ (bev.scale * np.eye(3)) @ rotation,
        atol=1e-12,
    )
    assert tuple(bev.matrix[:3, 3]) == bev.translation_m
    assert_allclose(bev.inverse @ bev.matrix, np.eye(4), atol=1e-9)


@given(maps, boxes, st.tuples(*[st.floats(-20, 20)] * 3))
def test_velocities_are_the_motion_of_moved_points(
    bev: BevMap, rows: np.ndarray, velocity: tuple
) -> None:
    step_s = 0.5
    before = rows[:, :3].astype(np.float64)
    later = before + np.array(velocity) * step_s
    moved = (homogeneous(later) @ bev.matrix.T - homogeneous(before) @ bev.matrix.T)[:, :3] / step_s
    got = bev.vectors(np.tile(np.array(velocity, np.float32), (len(rows), 1)))
    assert_allclose(got, moved, atol=2e-4)


def test_unknown_velocities_stay_unknown() -> None:
    assert np.isnan(
        BEVDET.draw(seed=0, epoch=0, sample=0).vectors(np.full((2, 3), np.nan, np.float32))
    ).all()


@given(
    maps,
    st.floats(-3, 3),
    st.floats(-0.2, 0.2),
    st.tuples(*[st.floats(-3, 3)] * 3),
)
def test_points_stay_in_the_lidars_frame_and_meet_the_boxes(
    bev: BevMap, yaw: float, pitch: float, place
) -> None:
    lidar2ego = rigid(yaw, pitch, place)
    points = np.random.default_rng(0).uniform(-50, 50, (20, 5)).astype(np.float32)
    moved = bev.points(points, lidar2ego)
    assert np.array_equal(moved[:, 3:], points[:, 3:])
    in_ego = homogeneous(moved[:, :3].astype(np.float64)) @ lidar2ego.T
    expected = homogeneous(points[:, :3].astype(np.float64)) @ (bev.matrix @ lidar2ego).T
    assert_allclose(in_ego, expected, atol=1e-3)
    assert not np.shares_memory(points, moved)


@given(maps)
def test_pixels_do_not_move_when_the_world_does(bev: BevMap) -> None:
    # ego2img' = ego2img B^-1 sees a moved point on the same pixel, and at the same depth.
    ego2img = np.array(
        [
            [816.0, -1266.0, 0, 4],
            [491.0, 0, -1266.0, 9],
            [1.0, 0, 0, -1.7],
            [0, 0, 0, 1],
        ]
    )
    points = homogeneous(np.random.default_rng(0).uniform((5, -10, -2), (60, 10, 3), (9, 3)))
    assert_allclose(
        (points @ bev.matrix.T) @ (ego2img @ bev.inverse).T,
        points @ ego2img.T,
        atol=1e-6,
    )


def test_draws_depend_on_their_address_alone() -> None:
    assert BEVDET.draw(seed=1, epoch=2, sample=3) == BEVDET.draw(seed=1, epoch=2, sample=3)
    drawn = {
        BEVDET.draw(seed=s, epoch=e, sample=n) for s in range(2) for e in range(2) for n in range(5)
    }
    assert len(drawn) == 20
    assert BEVDET.evaluation().draw(seed=1, epoch=2, sample=3) is IDENTITY
    assert np.array_equal(IDENTITY.matrix, np.eye(4))


def test_golden_draw() -> None:
    # Frozen with the random stream.
    bev = BEVFUSION.draw(seed=7, epoch=3, sample=12345)
    assert_allclose((bev.rotation_rad, bev.scale, *bev.translation_m), GOLDEN, atol=1e-12)


GOLDEN = (
    0.5620387287347193,
    0.9126701224883373,
    0.15163613568344697,
    0.3731408149327013,
    -0.5071918509166676,
)


def test_draws_cover_their_ranges() -> None:
    drawn = [BEVFUSION.draw(seed=0, epoch=0, sample=n) for n in range(3000)]
    angles = np.degrees([m.rotation_rad for m in drawn])
    assert -45 <= angles.min() < -44.5
    assert 44.5 < angles.max() <= 45
    scales = [m.scale for m in drawn]
    assert 0.9 <= min(scales) < 0.901
    assert 1.099 < max(scales) <= 1.1
    assert 0.46 < np.mean([m.flip_x for m in drawn]) < 0.54
    assert not any(m.flip_y for m in drawn)
    moves = np.array([m.translation_m for m in drawn])
    assert_allclose(moves.std(axis=0), 0.5, atol=0.03)
    assert_allclose(moves.mean(axis=0), 0.0, atol=0.03)
    assert np.abs(np.corrcoef(moves.T) - np.eye(3)).max() < 0.06


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"rotate_deg": (5.0, -5.0)},
            r"rotate_deg=\[5.0, -5.0\] must be \[low, high\]",
        ),
        ({"rotate_deg": (0.0, float("inf"))}, "rotate_deg"),
        ({"scale": (0.0, 1.0)}, r"scale=\[0.0, 1.0\] must be factors above 0"),
        ({"flip_x_prob": 1.1}, "flip_x_prob=1.1 must be a probability"),
        ({"flip_y_prob": -0.1}, "flip_y_prob"),
        ({"translate_std_m": -1.0}, "translate_std_m=-1.0 must be 0 or more"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BevAugment(**wrong)
