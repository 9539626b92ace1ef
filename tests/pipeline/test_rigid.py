from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fuelrail.pipeline.rigid import (
    homogeneous,
    invert_rigid,
    rigid,
    rotation_matrices,
)

QUATERNIONS = hnp.arrays("f8", 4, elements=st.floats(-1, 1)).filter(
    lambda q: np.linalg.norm(q) > 1e-3
)
TRANSLATIONS = hnp.arrays("f8", 3, elements=st.floats(-1e6, 1e6))
RIGIDS = st.builds(rigid, QUATERNIONS, TRANSLATIONS)


@given(RIGIDS)
def test_inverse_undoes(matrix) -> None:
    scale = 1 + np.abs(matrix).max()
    for product in (
        invert_rigid(matrix) @ matrix,
        matrix @ invert_rigid(matrix),
    ):
        np.testing.assert_allclose(product, np.eye(4), atol=1e-14 * scale)
    np.testing.assert_allclose(
        invert_rigid(matrix), np.linalg.inv(matrix), rtol=0, atol=1e-9 * scale
    )


@given(QUATERNIONS)
def test_rotations_are_rotations(quaternion) -> None:
    rotation = rotation_matrices(quaternion)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-14)
    assert np.linalg.det(rotation) == pytest.approx(1)
    np.testing.assert_allclose(rotation_matrices(-3 * quaternion), rotation, atol=1e-14)


@given(QUATERNIONS, hnp.arrays("f8", 3, elements=st.floats(-10, 10)))
def test_rotation_is_the_quaternion_product(q, v) -> None:
    """q v q*, by Hamilton's rule, which the matrix formula stands for."""
    q = q / np.linalg.norm(q)
    w = q[0]
    u = q[1:]
    expected = 2 * (u @ v) * u + (w * w - u @ u) * v + 2 * w * np.cross(u, v)
    np.testing.assert_allclose(rotation_matrices(q) @ v, expected, atol=1e-12)


def test_a_quarter_turn_about_z_is_counter_clockwise() -> None:
    half = np.sqrt(0.5)
    np.testing.assert_allclose(
        rotation_matrices(np.array([half, 0, 0, half])) @ [1, 0, 0],
        [0, 1, 0],
        atol=1e-15,
    )


@given(st.lists(RIGIDS, min_size=1, max_size=4))
def test_stacks_are_done_one_by_one(matrices) -> None:
    stack = np.stack(matrices)
    np.testing.assert_array_equal(
        invert_rigid(stack), np.stack([invert_rigid(m) for m in matrices])
    )
    np.testing.assert_array_equal(homogeneous(stack[:, :3, :3])[:, :3, :3], stack[:, :3, :3])


def test_homogeneous_pads_with_the_identity() -> None:
    padded = homogeneous(np.full((2, 3, 3), 7.0))
    np.testing.assert_array_equal(padded[:, 3], np.tile([0, 0, 0, 1.0], (2, 1)))
    np.testing.assert_array_equal(padded[:, :3, 3], 0)
