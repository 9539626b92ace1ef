"""Poses over time against scipy, which knows slerp and quaternions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation, Slerp

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.poses import (
    Trajectory,
    nearest_rigid,
    pose,
    quaternions,
)


def random_poses(number, seed=0):
    rng = np.random.default_rng(seed)
    poses = np.tile(np.eye(4), (number, 1, 1))
    poses[:, :3, :3] = Rotation.random(number, random_state=seed).as_matrix()
    poses[:, :3, 3] = rng.uniform(-1e6, 1e6, (number, 3))
    return poses


def test_between_poses():
    poses = random_poses(20)
    times = np.arange(20) * 100_000_000 + 1_600_000_000_000_000_000
    moments = times[0] + np.linspace(0, int(times[-1] - times[0]), 301).astype(np.int64)
    interpolated = Trajectory(times, poses, "poses").at(moments)
    base = times[0]
    slerp = Slerp((times - base).astype(float), Rotation.from_matrix(poses[:, :3, :3]))
    np.testing.assert_allclose(
        interpolated[:, :3, :3],
        slerp((moments - base).astype(float)).as_matrix(),
        atol=1e-9,
    )
    for axis in range(3):
        moved = np.interp(
            (moments - base).astype(float),
            (times - base).astype(float),
            poses[:, axis, 3],
        )
        np.testing.assert_allclose(interpolated[:, axis, 3], moved, atol=1e-6)


def test_its_own_times_are_exact_and_nothing_is_extrapolated():
    poses = random_poses(5)
    times = np.array([10, 20, 30, 1_000_000_000, 1_000_000_010])
    trajectory = Trajectory(times, poses, "poses")
    np.testing.assert_allclose(trajectory.at(times), poses, atol=1e-12)
    assert np.isnan(trajectory.at([9, 1_000_000_011])).all(), "before and after"
    assert np.isnan(trajectory.at([500_000_000])).all(), "in a gap of a second"
    assert not np.isnan(trajectory.at([25, 1_000_000_005])).any()


def test_quaternions_of_rotations():
    wxyz = quaternions(random_poses(500)[:, :3, :3])
    expected = Rotation.from_matrix(random_poses(500)[:, :3, :3]).as_quat()[:, [3, 0, 1, 2]]
    np.testing.assert_allclose(np.abs(np.einsum("ni,ni->n", wxyz, expected)), 1, atol=1e-12)


def test_rounded_rotations_become_exact_and_others_are_none():
    rounded = np.round(random_poses(50), 6)
    nearest, sound = nearest_rigid(rounded)
    assert sound.all()
    products = nearest[:, :3, :3] @ nearest[:, :3, :3].transpose(0, 2, 1)
    np.testing.assert_allclose(products, np.tile(np.eye(3), (50, 1, 1)), atol=1e-12)
    np.testing.assert_allclose(nearest, rounded, atol=1e-5)
    spoiled = np.stack(
        [
            np.eye(4) * 2,
            np.diag([1.0, 1, -1, 1]),
            np.full((4, 4), np.nan),
            np.ones((4, 4)),
        ]
    )
    assert not nearest_rigid(spoiled)[1].any()


@pytest.mark.parametrize(
    ("rotation", "translation", "match"),
    [
        ([[1, 0, 0, 0], [2, 0, 0, 0]], np.zeros((2, 3)), "table: row 1"),
        ([[1, 0, 0, 0]], [[0, np.nan, 0]], "not finite"),
        (np.eye(3), np.zeros(3), "quaternions of 4"),
    ],
)
def test_bad_poses_are_named(rotation, translation, match):
    with pytest.raises(SourceError, match=match):
        pose(rotation, translation, "table")


@pytest.mark.parametrize(
    ("times", "match"),
    [
        ([0, 5, 5], "row 2 has the time 5, not later than 5"),
        ([0.0, 1.0, 2.0], "float64"),
    ],
)
def test_bad_times_are_named(times, match):
    with pytest.raises(SourceError, match=match):
        Trajectory(times, random_poses(3), "poses")
