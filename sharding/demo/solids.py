"""The upright boxes of one capture, in global coordinates: what cameras draw and the lidar hits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.sharding.demo.street import Prop, corners

if TYPE_CHECKING:
    from fuelrail.sharding.demo.world import SynthClip

TRUNK_WIDTH_M: Final = 0.3
CROWN_BASE_M: Final = 3.9  # above every parked vehicle
INSET_M: Final = 0.02  # as annotators leave a little room
_REACH_M: Final = 130.0


@dataclass(frozen=True, slots=True)
class Solid:
    """One upright box. ``actor``: index in the clip's actors, -1 for scenery; ``kind`` and ``style`` pick its looks.

    A tree is two of them: the trunk, and the crown that hangs over what stands below it.
    """

    kind: str
    actor: int
    centre: tuple[float, float, float]
    yaw_rad: float
    size_lwh: tuple[float, float, float]
    colour: tuple[int, int, int]
    style: int
    lamps: bool = False  # whether its lamps are on at night

    def footprint(self) -> NDArray[np.float64]:
        """Return the corners (4, 2) in the ground plane, counter-clockwise from the front left one."""
        x, y, _ = self.centre
        return corners(np.asarray(x), np.asarray(y), np.asarray(self.yaw_rad), self.size_lwh[0], self.size_lwh[1])

    def unit2global(self) -> NDArray[np.float64]:
        """Return unit box coordinates to global, (4, 4); annotated objects stay a little inside their boxes."""
        inset = INSET_M if self.actor >= 0 else 0.0
        length, width, height = (size - 2.0 * inset for size in self.size_lwh)
        c, s = math.cos(self.yaw_rad), math.sin(self.yaw_rad)
        x, y, z = self.centre
        return np.array(
            [
                [c * length, -s * width, 0.0, x],
                [s * length, c * width, 0.0, y],
                [0.0, 0.0, height, z - height / 2.0],
                [0, 0, 0, 1],
            ]
        )


def solids_near(clip: SynthClip, capture_us: int) -> list[Solid]:
    """Return all within sight of the car in a capture, actors first, at their places at its reference time."""
    ego_xy = clip.ego(capture_us)[0][:2]

    found = []
    for index, actor in enumerate(clip.actors):
        centre, yaw = clip.actor_box(actor, capture_us)
        if math.dist(centre[:2], ego_xy) < _REACH_M:
            width, length, height = actor.size_wlh
            lamps = actor.attribute in ("vehicle.moving", "vehicle.stopped", "cycle.with_rider")
            size = (length, width, height)
            kind = "bicycle" if actor.attribute == "cycle.without_rider" else actor.category
            found.append(Solid(kind, index, centre, yaw, size, actor.colour, index, lamps))
    for prop in clip.props:
        if math.dist((prop.x, prop.y), ego_xy) < _REACH_M:
            width, length, height = prop.size_wlh
            if prop.kind == "tree":
                crown = (width, width, height - CROWN_BASE_M)
                found.append(_scenery(prop, "crown", CROWN_BASE_M, crown))
                width = length = TRUNK_WIDTH_M
                height = CROWN_BASE_M + 0.3
            found.append(_scenery(prop, prop.kind, 0.0, (length, width, height)))
    return found


def _scenery(prop: Prop, kind: str, floor_m: float, size_lwh: tuple[float, float, float]) -> Solid:
    centre = (prop.x, prop.y, floor_m + size_lwh[2] / 2.0)
    return Solid(kind, -1, centre, prop.yaw_rad, size_lwh, (128, 128, 128), prop.style)


VISIBILITY_LEVELS: Final = ("v0-40", "v40-60", "v60-80", "v80-100")


def visibility_level(share: float) -> str:
    """Return the token of the visibility table for a share of 0 to 1: ``"1"`` to ``"4"``."""
    return str(1 + sum(share > limit for limit in (0.4, 0.6, 0.8)))
