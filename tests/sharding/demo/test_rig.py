from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.rigid import rotation_matrices
from fuelrail.sharding.demo.rig import stream, yaw_quaternion

ANGLES = st.floats(-math.pi, math.pi)


@given(ANGLES)
def test_yaw_quaternion_turns_x_towards_y(yaw: float) -> None:
    turned = rotation_matrices(np.array(yaw_quaternion(yaw))) @ [1.0, 0.0, 0.0]
    np.testing.assert_allclose(turned, [math.cos(yaw), math.sin(yaw), 0.0], atol=1e-9)


def test_streams_differ_by_path_and_repeat() -> None:
    assert stream(1, "a").random() == stream(1, "a").random()
    assert len({stream(*path).random() for path in [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0)]}) == 4
