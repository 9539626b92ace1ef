from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from fuelrail.sharding.demo.lidar import (
    NUM_COLUMNS,
    NUM_RINGS,
    cast,
    points_in_box,
)
from fuelrail.sharding.demo.options import SynthOptions
from fuelrail.sharding.demo.world import SynthClip, captures, make_clip
from support.synth_rays import first_met

if TYPE_CHECKING:
    from fuelrail.sharding.demo.shapes import Solid

pytestmark = pytest.mark.slow

SPEC = SynthOptions(seed=9, frames=2)


def _sweep(index: int) -> tuple[SynthClip, list[Solid], int]:
    clip = make_clip(SPEC, index)
    capture_us = captures(SPEC, clip)[0].timestamp_us
    return clip, clip.solids(capture_us), capture_us


def _global(clip: SynthClip, capture_us: int, points: np.ndarray) -> np.ndarray:
    lidar2global = clip.ego2global(capture_us) @ clip.rig.lidar.sensor2ego
    return points[:, :3].astype(np.float64) @ lidar2global[:3, :3].T + lidar2global[:3, 3]


@pytest.mark.parametrize("index", [0, 3])
def test_points_lie_on_the_ground_or_on_something(index: int) -> None:
    clip, solids, capture_us = _sweep(index)
    points = cast(clip, solids, capture_us)
    assert points.dtype == np.float32
    assert 15_000 < len(points) <= NUM_RINGS * NUM_COLUMNS
    assert np.isfinite(points).all()
    assert set(np.unique(points[:, 4])) <= set(range(NUM_RINGS))
    assert (
        (points[:, 3] >= 0) & (points[:, 3] <= 255) & (points[:, 3] == np.rint(points[:, 3]))
    ).all()
    places = _global(clip, capture_us, points)
    explained = np.abs(places[:, 2]) < 0.03
    assert 0.3 < explained.mean() < 0.95
    for solid in solids:
        for block in solid.blocks:
            # Inside the block in unit coordinates, up to the range noise.
            unit = np.c_[places, np.ones(len(places))] @ np.linalg.inv(solid.unit2global()).T
            slack = 0.03 / np.array(solid.size_lwh)
            low = block.low - slack
            high = block.high + slack
            explained |= ((unit[:, :3] >= low) & (unit[:, :3] <= high)).all(1)
    assert explained.all()


def test_casting_agrees_with_a_ray_at_a_time() -> None:
    clip, solids, capture_us = _sweep(0)
    points = cast(clip, solids, capture_us)
    lidar2global = clip.ego2global(capture_us) @ clip.rig.lidar.sensor2ego
    for point in points[:: len(points) // 25].astype(np.float64):
        distance = np.linalg.norm(point[:3])
        ray = lidar2global[:3, :3] @ point[:3] / distance
        ground = -lidar2global[2, 3] / ray[2] if ray[2] < 0 else np.inf
        nearest, _ = first_met(
            lidar2global[:3, 3],
            ray=ray,
            solids=solids,
            nearest=1.0,
            farthest=ground,
        )
        assert distance == pytest.approx(nearest, abs=0.02)


def test_nobody_near_has_its_points_outside_its_box() -> None:
    # Taking one car away takes exactly the points in its box away (others may appear behind it).
    clip, solids, capture_us = _sweep(0)
    places = _global(clip, capture_us, cast(clip, solids, capture_us))
    counted = [
        (points_in_box(places, solid), solid) for solid in solids if solid.kind == "vehicle.car"
    ]
    count, solid = max(counted, key=lambda pair: pair[0])
    assert count > 100
    without = _global(
        clip,
        capture_us,
        cast(
            clip,
            [neighbour for neighbour in solids if neighbour is not solid],
            capture_us,
        ),
    )
    assert points_in_box(without, solid) == 0
    remaining = {tuple(place) for place in without}
    assert sum(tuple(place) not in remaining for place in places) == count
