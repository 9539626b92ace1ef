"""A road of constant curvature in the ground plane, and footprints on it.

Places on the road are ``(along, left)`` in metres: arc length of the centre line, and distance to its left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LANE_WIDTH_M: Final = 3.5
PARKING_M: Final = 8.25  # centre of the parked cars, left or right of the centre line
KERB_M: Final = 9.4
FACADE_M: Final = 15.0
_STRAIGHT_PER_M: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Road:
    """Centre line through ``(x, y)`` of the global frame, ``heading_rad`` there, constant ``curvature_per_m``."""

    x: float
    y: float
    heading_rad: float
    curvature_per_m: float

    def heading(self, along: float) -> float:
        """Global heading of the centre line in rad."""
        return self.heading_rad + self.curvature_per_m * along

    def point(self, along: float, left: float) -> tuple[float, float]:
        """Global x, y of a place on the road."""
        k = self.curvature_per_m
        if abs(k) < _STRAIGHT_PER_M:
            u, v = along, left
        else:
            radius = 1.0 / k - left
            u, v = math.sin(k * along) * radius, 1.0 / k - math.cos(k * along) * radius
        c, s = math.cos(self.heading_rad), math.sin(self.heading_rad)
        return self.x + c * u - s * v, self.y + s * u + c * v

    def locate(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Inverse of `point` for arrays of offsets from the road's own origin, float32 in the global axes."""
        c, s = np.float32(math.cos(self.heading_rad)), np.float32(math.sin(self.heading_rad))
        u, v = c * x + s * y, c * y - s * x
        k = self.curvature_per_m
        if abs(k) < _STRAIGHT_PER_M:
            return u, v
        sign, radius = math.copysign(1.0, k), np.float32(1.0 / k)
        v -= radius
        along = np.arctan2(np.float32(sign) * u, np.float32(-sign) * v) * radius
        return along, radius - np.float32(sign) * np.hypot(u, v)


def corners(
    x: NDArray[np.float64], y: NDArray[np.float64], yaw_rad: NDArray[np.float64], length: float, width: float
) -> NDArray[np.float64]:
    """Footprint corners (..., 4, 2), counter-clockwise, of upright boxes with the given centres."""
    along = np.array([0.5, -0.5, -0.5, 0.5]) * length
    left = np.array([0.5, 0.5, -0.5, -0.5]) * width
    c, s = np.cos(yaw_rad)[..., None], np.sin(yaw_rad)[..., None]
    return np.stack([x[..., None] + c * along - s * left, y[..., None] + s * along + c * left], axis=-1)


def footprints_overlap(first: NDArray[np.float64], second: NDArray[np.float64]) -> bool:
    """Whether two tracks of rectangles (T, 4, 2) touch at any of the T instants (separating axis theorem)."""
    apart = np.zeros(len(first), bool)
    for rectangle in (first, second):
        for edge in (rectangle[:, 1] - rectangle[:, 0], rectangle[:, 2] - rectangle[:, 1]):
            a = (first * edge[:, None]).sum(-1)
            b = (second * edge[:, None]).sum(-1)
            apart |= (a.max(1) < b.min(1)) | (b.max(1) < a.min(1))
    return not bool(apart.all())
