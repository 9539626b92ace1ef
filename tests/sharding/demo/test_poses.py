from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.sharding.demo.poses import (
    inverse,
    quaternion_from_rotation,
    rigid,
    rotation_about,
    rotation_from_quaternion,
    stream,
    yaw_quaternion,
)

ANGLES = st.floats(-math.pi, math.pi)


@given(ANGLES, ANGLES, ANGLES)
def test_quaternion_and_rotation_are_inverse_to_each_other(roll: float, pitch: float, yaw: float) -> None:
    rotation = rotation_about("z", yaw) @ rotation_about("y", pitch) @ rotation_about("x", roll)
    quaternion = quaternion_from_rotation(rotation)
    assert math.isclose(math.fsum(q * q for q in quaternion), 1.0, abs_tol=1e-9)
    np.testing.assert_allclose(rotation_from_quaternion(quaternion), rotation, atol=1e-10)


@given(ANGLES)
def test_yaw_quaternion_turns_x_towards_y(yaw: float) -> None:
    turned = rotation_from_quaternion(yaw_quaternion(yaw)) @ [1.0, 0.0, 0.0]
    np.testing.assert_allclose(turned, [math.cos(yaw), math.sin(yaw), 0.0], atol=1e-9)


def test_inverse_of_a_rigid_transform() -> None:
    a2b = rigid(rotation_about("y", 0.7) @ rotation_about("z", -2.0), (1.0, -20.0, 3.0))
    np.testing.assert_allclose(inverse(a2b) @ a2b, np.eye(4), atol=1e-12)


def test_streams_differ_by_path_and_repeat() -> None:
    assert stream(1, "a").random() == stream(1, "a").random()
    assert len({stream(*path).random() for path in [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0)]}) == 4
