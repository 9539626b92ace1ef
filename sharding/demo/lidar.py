"""The roof lidar: 32 beams cast against the ground and the blocks of everything near.

A sweep is given as if taken at one instant, its reference time (that is, motion-compensated).
Points are float32 ``x, y, z, intensity, ring`` in the lidar frame, as in nuScenes' ``.pcd.bin``
files; ring 0 is the lowest beam.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.demo.rig import stream
from fuelrail.sharding.demo.shapes import meet

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32, F64
    from fuelrail.sharding.demo.shapes import Solid
    from fuelrail.sharding.demo.world import SynthClip

NUM_RINGS: Final = 32
NUM_COLUMNS: Final = 1084
POINT_COLUMNS: Final = 5
_LOWEST_DEG = -30.67
_HIGHEST_DEG = 10.67
_NEAREST_M = 1.0
_FARTHEST_M = 75.0
# stays below the room that objects have in their boxes
_NOISE_M = 0.008
_MOST_NOISE_M = 0.015
# The lidar turns clockwise from the rear left.
_AZIMUTH_RAD: Final = -np.pi / 2.0 - 2.0 * np.pi * np.arange(NUM_COLUMNS) / NUM_COLUMNS


def cast(clip: SynthClip, solids: list[Solid], capture_us: int) -> F32:
    """Return the points (N, 5) of the sweep with this reference time."""
    lidar2global = clip.ego2global(capture_us) @ clip.rig.lidar.sensor2ego
    global2lidar = invert_rigid(lidar2global)
    angles = np.radians(np.linspace(_LOWEST_DEG, _HIGHEST_DEG, NUM_RINGS))
    elevation = angles[:, None]
    flat = np.cos(elevation)
    level = np.zeros(NUM_COLUMNS)
    rays = np.stack(
        [
            flat * np.cos(_AZIMUTH_RAD),
            flat * np.sin(_AZIMUTH_RAD),
            np.sin(elevation) + level,
        ]
    )
    down = np.tensordot(lidar2global[2, :3], rays, 1)
    with np.errstate(divide="ignore"):
        ground_ranges = -lidar2global[2, 3] / down
        ranges = np.where(down < -1e-6, ground_ranges, np.inf)
    reflectance = np.full(ranges.shape, 11.0)
    for solid in solids:
        turn = global2lidar[:3, :3]
        x, y, _ = turn @ solid.centre + global2lidar[:3, 3]
        distance = np.hypot(x, y)
        reach = np.linalg.norm(solid.size_lwh) / 2.0
        if distance - reach > _FARTHEST_M:
            continue
        bearing = np.arctan2(y, x)
        aside = np.angle(np.exp(1j * (_AZIMUTH_RAD - bearing)))
        half_angle = np.arcsin(min(1.0, reach / distance))
        # Only these columns have rays that can meet it.
        columns = np.flatnonzero(np.abs(aside) <= half_angle)
        lidar2unit = np.linalg.inv(global2lidar @ solid.unit2global())
        rays_near = rays[:, :, columns]
        for block in solid.blocks:
            hits, _ = meet(block, lidar2unit, rays_near)
            is_nearer = (hits > _NEAREST_M) & (hits < ranges[:, columns])
            ring, near_column = np.nonzero(is_nearer)
            column = columns[near_column]
            ranges[ring, column] = hits[ring, near_column]
            brightness = sum(solid.colour) / 765.0
            reflectance[ring, column] = 14.0 + 26.0 * brightness
    draw = stream("lidar", clip.name, capture_us)
    shape = ranges.shape
    noise = draw.normal(0.0, _NOISE_M, shape)
    noisy = ranges + np.clip(noise, -_MOST_NOISE_M, _MOST_NOISE_M)
    speckle = draw.uniform(0.5, 1.6, shape)
    intensity = np.clip(np.rint(reflectance * speckle), 0, 255)
    mask = (ranges > _NEAREST_M) & (ranges < _FARTHEST_M)
    mask &= draw.random(shape) > 0.02 * (1.0 + ranges / _FARTHEST_M)
    # As a spinning lidar writes them: all rings of a column, then the next column.
    column, ring = np.nonzero(mask.T)
    points = np.empty((len(ring), POINT_COLUMNS), np.float32)
    places = rays[:, ring, column] * noisy[ring, column]
    points[:, :3] = places.T
    points[:, 3] = intensity[ring, column]
    points[:, 4] = ring
    return points


def points_in_box(points: F64, solid: Solid) -> int:
    """Return how many of the points (N, 3), in global coordinates, are in an object's box, its
    faces included.
    """
    c = np.cos(solid.yaw_rad)
    s = np.sin(solid.yaw_rad)
    box2global = np.array(
        [
            [c, -s, 0.0],
            [s, c, 0.0],
            [0.0, 0.0, 1.0],
        ]
    )
    offset = (points - solid.centre) @ box2global
    half = np.array(solid.size_lwh) / 2.0
    is_inside = (np.abs(offset) <= half).all(1)
    return int(is_inside.sum())
