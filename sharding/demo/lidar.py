"""The roof lidar: 32 beams cast against the ground and the bodies of everything near.

A sweep is given as if taken at one instant, its reference time (that is, motion-compensated). Points are float32
``x, y, z, intensity, ring`` in the lidar frame, as in nuScenes' ``.pcd.bin`` files; ring 0 is the lowest beam.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.demo.rig import stream
from fuelrail.sharding.demo.shapes import SIDES, shape_of

if TYPE_CHECKING:
    from fuelrail.sharding.demo.solids import Solid
    from fuelrail.sharding.demo.world import SynthClip

NUM_RINGS: Final = 32
NUM_COLUMNS: Final = 1084
POINT_COLUMNS: Final = 5
_LOWEST_DEG, _HIGHEST_DEG = -30.67, 10.67
_NEAREST_M, _FARTHEST_M = 1.0, 75.0
_NOISE_M, _MOST_NOISE_M = 0.008, 0.015  # stays below the room that objects have in their boxes
_REFLECTANCE: Final = {"building": 18.0, "tree": 9.0, "crown": 7.0, "post": 30.0}


def cast(clip: SynthClip, solids: list[Solid], capture_us: int) -> NDArray[np.float32]:
    """Return the points (N, 5) of the sweep with this reference time."""
    lidar2global = clip.ego2global(capture_us) @ clip.rig.lidar.sensor2ego
    global2lidar = invert_rigid(lidar2global)
    rays = _rays()
    down = lidar2global[2, :3] @ rays.reshape(3, -1)
    with np.errstate(divide="ignore"):
        ranges = np.where(down < -1e-6, -lidar2global[2, 3] / down, np.inf).reshape(NUM_RINGS, NUM_COLUMNS)
    draw = stream("lidar", clip.name, capture_us)
    reflectance = np.full(ranges.shape, 11.0)
    for solid in solids:
        base = _REFLECTANCE.get(solid.kind, 14.0 + 26.0 * (sum(solid.colour) / 765.0))
        unit2lidar = global2lidar @ solid.unit2global()
        for part in shape_of(solid.kind):
            vertices = part.vertices @ unit2lidar[:3, :3].T + unit2lidar[:3, 3]
            if np.hypot(vertices[:, 0], vertices[:, 1]).min() > _FARTHEST_M:
                continue
            columns = _columns(vertices)
            enter, leave, slant = crossings(vertices, rays[:, :, columns])
            ring, column = np.nonzero((enter > _NEAREST_M) & (enter < leave) & (enter < ranges[:, columns]))
            ranges[ring, columns[column]] = enter[ring, column]
            reflectance[ring, columns[column]] = base * (0.4 + 0.6 * slant[ring, column])
    shape = ranges.shape
    noisy = ranges + np.clip(draw.normal(0.0, _NOISE_M, shape), -_MOST_NOISE_M, _MOST_NOISE_M)
    intensity = np.clip(np.rint(reflectance * draw.uniform(0.5, 1.6, shape)), 0, 255)
    lost = 0.02 + 0.10 * clip.weather.rain
    kept = (ranges > _NEAREST_M) & (ranges < _FARTHEST_M) & (draw.random(shape) > lost * (1.0 + ranges / _FARTHEST_M))
    # As a spinning lidar writes them: all rings of a column, then the next column.
    column, ring = np.nonzero(kept.T)
    points = np.empty((len(ring), POINT_COLUMNS), np.float32)
    points[:, :3] = (rays[:, ring, column] * noisy[ring, column]).T
    points[:, 3] = intensity[ring, column]
    points[:, 4] = ring
    return points


def _rays() -> NDArray[np.float64]:
    """Return unit directions (3, NUM_RINGS, NUM_COLUMNS) in the lidar frame, turning clockwise from the rear left."""
    elevation = np.radians(np.linspace(_LOWEST_DEG, _HIGHEST_DEG, NUM_RINGS))[:, None]
    azimuth = -np.pi / 2.0 - 2.0 * np.pi * np.arange(NUM_COLUMNS) / NUM_COLUMNS
    flat = np.cos(elevation)
    return np.stack([flat * np.cos(azimuth), flat * np.sin(azimuth), np.sin(elevation) + 0.0 * azimuth])


def crossings(
    vertices: NDArray[np.float64], directions: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return where rays from the origin enter and leave a block, and how steeply they meet it; (R, C) each.

    ``vertices`` (8, 3) are the block's, ``directions`` (3, R, C) those of the rays; places are multiples of these. A
    ray that misses the block enters it after it leaves.
    """
    # A convex body is where all its sides' planes are behind: a ray is inside from the last entry to the first exit.
    enter = np.zeros(directions.shape[1:])
    leave = np.full(directions.shape[1:], np.inf)
    slant = np.ones(directions.shape[1:])
    for at in SIDES.values():
        a, b, c = vertices[list(at[:3])]
        normal = np.cross(b - a, c - b)
        normal /= np.linalg.norm(normal)
        speed = np.einsum("i,ijk->jk", normal, directions)
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = (normal @ a) / speed
        inwards = (speed < 0) & (crossing > enter)
        slant[inwards] = -speed[inwards]
        np.copyto(enter, crossing, where=inwards)
        np.minimum(leave, crossing, out=leave, where=speed > 0)
        leave[(speed == 0) & (normal @ a < 0)] = -1.0
    return enter, leave, slant


def _columns(vertices: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the columns of the sweep whose rays can meet a body with these vertices (V, 3)."""
    centre = vertices.mean(0)
    bearing = np.arctan2(centre[1], centre[0])
    offsets = np.angle(np.exp(1j * (np.arctan2(vertices[:, 1], vertices[:, 0]) - bearing)))
    if np.ptp(offsets) > np.pi:
        return np.arange(NUM_COLUMNS)
    step = 2.0 * np.pi / NUM_COLUMNS
    first = int(np.floor((-np.pi / 2.0 - bearing - offsets.max()) / step))
    count = int(np.ceil(np.ptp(offsets) / step)) + 2
    return np.arange(first, first + count) % NUM_COLUMNS


def points_in_box(
    points: NDArray[np.float64],
    centre: tuple[float, float, float],
    yaw_rad: float,
    size_lwh: tuple[float, float, float],
) -> int:
    """Return how many of the points (N, 3) are in an upright box, its faces included."""
    offset = points - centre
    near = np.abs(offset).max(axis=1) <= 0.5 * float(np.linalg.norm(size_lwh))
    offset = offset[near]
    c, s = np.cos(yaw_rad), np.sin(yaw_rad)
    along, left = c * offset[:, 0] + s * offset[:, 1], c * offset[:, 1] - s * offset[:, 0]
    length, width, height = size_lwh
    inside = (np.abs(along) <= length / 2) & (np.abs(left) <= width / 2) & (np.abs(offset[:, 2]) <= height / 2)
    return int(inside.sum())
