"""How much of each object the six cameras see, as the nuScenes visibility table grades it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import cv2
import numpy as np

from fuelrail.sharding.demo.camera import NEAR_M
from fuelrail.sharding.demo.poses import inverse
from fuelrail.sharding.demo.raster import clip_depth
from fuelrail.sharding.demo.shapes import shape_of
from fuelrail.sharding.demo.solids import far_to_near

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.sharding.demo.rig import Camera
    from fuelrail.sharding.demo.solids import Solid
    from fuelrail.sharding.demo.world import Clip

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
    global2cam = inverse(cam2global)
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
