"""One ray against all blocks of the synthetic drive, number by number: what cameras and lidar must agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.sharding.demo.shapes import Solid


def first_met(
    origin: np.ndarray,
    ray: np.ndarray,
    solids: Sequence[Solid],
    nearest: float,
    farthest: float = np.inf,
) -> tuple[float, Solid | None]:
    """Where a ray in global coordinates first enters a block, in multiples of it, and whose block that is."""
    nearest_solid: Solid | None = None
    for solid in solids:
        global2unit = np.linalg.inv(solid.unit2global())
        start = (global2unit @ np.append(origin, 1.0)).tolist()
        along = (global2unit @ np.append(ray, 0.0)).tolist()
        for block in solid.blocks:
            enter = 0.0
            leave = np.inf
            for axis in range(3):
                sides = sorted(
                    (side[axis] - start[axis]) / along[axis] for side in (block.low, block.high)
                )
                enter = max(enter, sides[0])
                leave = min(leave, sides[1])
            if nearest < enter < leave and enter < farthest:
                farthest = enter
                nearest_solid = solid
    return farthest, nearest_solid
