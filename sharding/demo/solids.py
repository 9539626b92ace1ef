"""The upright boxes of one capture, in global coordinates: what cameras draw, the lidar hits, and hides what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.demo.picture.raster import NEAR_M, clip_depth
from fuelrail.sharding.demo.picture.shapes import shape_of
from fuelrail.sharding.demo.street import Prop, corners

if TYPE_CHECKING:
    from fuelrail.sharding.demo.rig import Camera
    from fuelrail.sharding.demo.world import Clip

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
        """Corners (4, 2) in the ground plane, counter-clockwise from the front left one."""
        x, y, _ = self.centre
        return corners(np.asarray(x), np.asarray(y), np.asarray(self.yaw_rad), self.size_lwh[0], self.size_lwh[1])

    def vertices(self) -> NDArray[np.float64]:
        """Corners (8, 3): the footprint at the bottom, then at the top."""
        base = self.footprint()
        half = self.size_lwh[2] / 2.0
        return np.concatenate(
            [np.column_stack([base, np.full(4, self.centre[2] + side * half)]) for side in (-1.0, 1.0)]
        )

    def unit2global(self) -> NDArray[np.float64]:
        """Unit box coordinates of its shape to global, (4, 4); annotated ones stay a little inside their boxes."""
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


def solids_near(clip: Clip, capture_us: int) -> list[Solid]:
    """Everything within sight of the car in a capture, actors first, at their places at its reference time."""
    (ego_x, ego_y, _), _ = clip.ego(capture_us)

    def near(x: float, y: float) -> bool:
        return math.hypot(x - ego_x, y - ego_y) < _REACH_M

    found = []
    for index, actor in enumerate(clip.actors):
        centre, yaw = clip.actor_box(actor, capture_us)
        if near(centre[0], centre[1]):
            width, length, height = actor.size_wlh
            lamps = actor.attribute in ("vehicle.moving", "vehicle.stopped", "cycle.with_rider")
            size = (length, width, height)
            kind = "bicycle" if actor.attribute == "cycle.without_rider" else actor.category
            found.append(Solid(kind, index, centre, yaw, size, actor.colour, index, lamps))
    for prop in clip.props:
        if near(prop.x, prop.y):
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


def far_to_near(
    footprints: NDArray[np.float64], heights: NDArray[np.float64], eye_xy: NDArray[np.float64]
) -> list[int]:
    """Painting order of upright boxes, given footprints (N, 4, 2) and bottoms and tops (N, 2), seen from a low point.

    Two disjoint rectangles are parted by a line along a side of one of them; the one on the eye's side of that line
    can hide the other and never the reverse. These pairwise facts are sorted topologically; where they form a cycle,
    which three long boxes can, the farthest goes first. Where footprints overlap, one box hangs over another, above the
    eye: a ray meets the lower one first. A crown hides the tip of its own trunk.
    """
    count = len(footprints)
    sides = np.roll(footprints, -1, axis=1) - footprints
    normals = np.stack([sides[..., 1], -sides[..., 0]], axis=-1)  # outward: corners run counter-clockwise
    offsets = (normals * footprints).sum(-1)
    parted = ((normals[:, :, None, None] * footprints).sum(-1) >= offsets[:, :, None, None] - 1e-9).all(-1)
    eye_outside = (normals * eye_xy).sum(-1) > offsets
    # before[a, b]: a is painted before b. A side of `a` parts them; the eye is beyond it with b, or behind it with a.
    some = parted.any(1)
    side = parted.argmax(1)
    beyond = np.take_along_axis(eye_outside, side, axis=1)
    before = (some & beyond) | (some & ~beyond).T
    overlap = ~(some | some.T)
    above = heights[:, None, 0] >= heights[None, :, 1]
    lower = heights[:, None, 0] < heights[None, :, 0]
    before |= overlap & (above | (lower & ~above.T))
    both = before & before.T
    distance = np.square(footprints.mean(1) - eye_xy).sum(-1)
    # Both ways round: no hiding either way along those lines, keep the order by distance.
    before &= ~(both & (distance[:, None] <= distance))
    np.fill_diagonal(before, False)
    order: list[int] = []
    waiting = before.sum(0)
    left = np.ones(count, bool)
    for _ in range(count):
        ready = left & (waiting == 0)
        pool = ready if ready.any() else left
        index = int(np.where(pool, distance, -1.0).argmax())
        order.append(index)
        left[index] = False
        waiting = waiting - before[index]
    return order


_WIDTH_PX: Final = 400  # silhouettes are counted in small pictures
VISIBILITY_LEVELS: Final = ("v0-40", "v40-60", "v60-80", "v80-100")
_LIMITS: Final = (0.4, 0.6, 0.8)


def visibility_level(share: float) -> str:
    """Token of the visibility table for a share of 0 to 1: ``"1"`` to ``"4"``."""
    return str(1 + sum(share > limit for limit in _LIMITS))


def visible_shares(clip: Clip, solids: list[Solid], capture_us: int) -> dict[int, float]:
    """Share 0..1 of each actor's silhouettes in all images that nothing nearer hides; actors out of all images lack."""
    whole: dict[int, int] = {}
    seen: dict[int, int] = {}
    for camera in clip.rig.cameras:
        _count(clip, camera, solids, capture_us, whole, seen)
    return {actor: min(1.0, seen.get(actor, 0) / pixels) for actor, pixels in whole.items()}


def _count(
    clip: Clip, camera: Camera, solids: list[Solid], capture_us: int, whole: dict[int, int], seen: dict[int, int]
) -> None:
    scale = _WIDTH_PX / camera.width_px
    width, height = _WIDTH_PX, round(camera.height_px * scale)
    cam2global = clip.ego2global(capture_us - camera.lead_us) @ camera.cam2ego
    global2cam = invert_rigid(cam2global)
    silhouettes = [_silhouettes(solid, camera, global2cam, scale) for solid in solids]
    drawn = [index for index, polygons in enumerate(silhouettes) if polygons]
    if not drawn:
        return
    footprints = np.array([solids[index].footprint() for index in drawn])
    heights = np.array(
        [
            (solids[i].centre[2] - solids[i].size_lwh[2] / 2, solids[i].centre[2] + solids[i].size_lwh[2] / 2)
            for i in drawn
        ]
    )
    owners = np.zeros((height, width), np.int32)
    alone = np.zeros((height, width), np.uint8)
    for place in far_to_near(footprints, heights, cam2global[:2, 3]):
        index = drawn[place]
        actor = solids[index].actor
        for polygon in silhouettes[index]:
            cv2.fillConvexPoly(owners, polygon, actor + 1)
            if actor >= 0:
                cv2.fillConvexPoly(alone, polygon, 1)
        if actor >= 0:
            pixels = np.concatenate(silhouettes[index])
            low, high = np.maximum(pixels.min(0), 0), np.maximum(pixels.max(0) + 1, 0)
            window = alone[low[1] : high[1], low[0] : high[0]]
            count = int(window.sum())
            window[...] = 0
            if count:
                whole[actor] = whole.get(actor, 0) + count
    counts = np.bincount(owners.ravel())
    for owner in np.nonzero(counts[1:])[0]:
        seen[int(owner)] = seen.get(int(owner), 0) + int(counts[owner + 1])


def _silhouettes(
    solid: Solid, camera: Camera, global2cam: NDArray[np.float64], scale: float
) -> list[NDArray[np.int32]]:
    # Convex polygons (M, 2) of whole pixels of the small picture; none where the solid is out of it.
    unit2cam = global2cam @ solid.unit2global()
    polygons = []
    for part in shape_of(solid.kind):
        vertices = part.vertices @ unit2cam[:3, :3].T + unit2cam[:3, 3]
        if (vertices[:, 2] < NEAR_M).all():
            continue
        kept = np.concatenate([clip_depth(vertices[list(face.vertices)], NEAR_M) for face in part.faces])
        image = kept @ camera.intrinsics.T
        pixels = (image[:, :2] / image[:, 2:] + 0.5) * scale - 0.5
        low, high = pixels.min(0), pixels.max(0)
        if high[0] < 0 or high[1] < 0 or low[0] > _WIDTH_PX or low[1] > camera.height_px * scale:
            continue
        limited = np.clip(pixels, -8.0 * _WIDTH_PX, 8.0 * _WIDTH_PX)
        polygons.append(np.asarray(cv2.convexHull(np.rint(limited).astype(np.int32))[:, 0], np.int32))
    return polygons
