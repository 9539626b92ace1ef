"""Convex polygons on pixels, with soft edges that lie where the polygon says.

Pixel coordinates have the centre of the top left pixel at (0, 0).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

NEAR_M: Final = 0.3  # what is nearer to a camera is cut off
Image = NDArray[np.uint8]


class Window(NamedTuple):
    """A rectangle of pixels: first row and column, and one past the last."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def slices(self) -> tuple[slice, slice]:
        """Index of the rectangle in an image."""
        return slice(self.top, self.bottom), slice(self.left, self.right)


def clip_depth(polygon: NDArray[np.float64], near_m: float) -> NDArray[np.float64]:
    """Part (M, 3) of a planar polygon (N, 3) in camera axes that is at least ``near_m`` ahead; may be empty."""
    depth = polygon[:, 2]
    if (depth >= near_m).all():
        return polygon
    kept = []
    for index in range(len(polygon)):
        following = (index + 1) % len(polygon)
        a, b = depth[index] - near_m, depth[following] - near_m
        if a >= 0:
            kept.append(polygon[index])
        if (a >= 0) != (b >= 0):
            kept.append(polygon[index] + a / (a - b) * (polygon[following] - polygon[index]))
    return np.array(kept).reshape(-1, 3)


def normal_of(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normal (3,), not normalised, of a planar polygon (N, 3): towards where it runs counter-clockwise."""
    # numpy's cross takes ten times as long for a single pair.
    (ax, ay, az), (bx, by, bz) = (corners[1] - corners[0]).tolist(), (corners[2] - corners[1]).tolist()
    return np.array([ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx])


def convex_hull(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Hull (M, 2) of points (N, 2)."""
    hull: NDArray[np.float64] = cv2.convexHull(points.astype(np.float32))[:, 0].astype(np.float64)
    return hull


def window_of(polygon: NDArray[np.float64], width_px: int, height_px: int, margin_px: float = 1.0) -> Window | None:
    """Pixels that a polygon (N, 2) can touch, or None where it lies outside the image."""
    low, high = polygon.min(0) - margin_px, polygon.max(0) + margin_px
    left, top = int(max(0.0, np.floor(low[0]))), int(max(0.0, np.floor(low[1])))
    right, bottom = int(min(width_px, np.ceil(high[0]) + 1.0)), int(min(height_px, np.ceil(high[1]) + 1.0))
    return Window(top, left, bottom, right) if top < bottom and left < right else None


def coverage(polygon: NDArray[np.float64], window: Window, *, inset_px: float = 0.0) -> NDArray[np.float32]:
    """How much of each pixel of ``window`` a convex polygon (N, 2) covers, 0 to 1, float32.

    From the signed distance of the pixel's centre to the nearest side: one half on the side itself, so the edge lies
    where the polygon says to a small fraction of a pixel.
    """
    following = np.roll(polygon, -1, axis=0)
    sides = following - polygon
    lengths = np.hypot(sides[:, 0], sides[:, 1])
    keep = lengths > 1e-6
    area = float((polygon[:, 0] * following[:, 1] - following[:, 0] * polygon[:, 1]).sum())
    nearest = np.full((window.bottom - window.top, window.right - window.left), 1e6, np.float32)
    columns = np.arange(window.left, window.right, dtype=np.float64)
    rows = np.arange(window.top, window.bottom, dtype=np.float64)
    sign = 1.0 if area > 0 else -1.0
    for (x, y), (dx, dy), length in zip(polygon[keep], sides[keep], lengths[keep], strict=True):
        nx, ny = -sign * dy / length, sign * dx / length
        across = ((columns - x) * nx).astype(np.float32)
        down = ((rows - y) * ny + 0.5 - inset_px).astype(np.float32)
        np.minimum(nearest, across[None, :] + down[:, None], out=nearest)
    return np.clip(nearest, 0.0, 1.0, out=nearest)


def blend(image: Image, window: Window, source: Image, alpha: NDArray[np.float32]) -> None:
    """Mix ``source`` into the window of ``image`` with weight ``alpha``."""
    rows, columns = window.slices
    target = image[rows, columns]
    target[...] = cv2.blendLinear(source, np.ascontiguousarray(target), alpha, 1.0 - alpha)
