"""The picture of one camera: a ray for each pixel, against the ground and the blocks of everything
near.

What is drawn is where the calibration says, to the pixel. Pixel coordinates have the centre of the
top left pixel at (0, 0). Camera rays have 1 as third component, so that multiples of them are
depths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import needs
from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.demo.rig import RigSensor, stream
from fuelrail.sharding.demo.shapes import Block, Floats, Solid, colours, meet, noise_at
from fuelrail.sharding.demo.street import FACADE_M, KERB_M, LANE_WIDTH_M

with needs("`fuelrail synth`"):
    import cv2

if TYPE_CHECKING:
    from fuelrail.sharding.demo.world import SynthClip, Weather

NEAR_M: Final = 0.3  # what is nearer to a camera is not drawn
_CUT_M: Final = NEAR_M / 2
_SILHOUETTE_PX: Final = 400  # width of the pictures in which silhouettes are counted


class Sight(NamedTuple):
    """A block that a camera may show, in a window of the image of H x W pixels."""

    block: Block
    window: tuple[slice, slice]
    depth: Floats  # (H, W) along the camera's axis, infinite where the pixel does not show it
    entries: Floats  # (3, H, W): the depths of the nearer sides across each axis of the unit box
    cam2unit: Floats  # camera to unit box, (4, 4)


def pixel_rays(intrinsics: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.float32]:
    """Return the rays (3, height, width) of all pixels of an image of ``size`` (width, height)."""
    u, v = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    rays = np.einsum("ij,jrc->irc", np.linalg.inv(intrinsics), np.stack([u, v, np.ones_like(u)]))
    return np.asarray(rays, np.float32)


def window_of(
    vertices: NDArray[np.float64], intrinsics: NDArray[np.float64], size: tuple[int, int]
) -> tuple[slice, slice]:
    """Return the rows and columns of an image of ``size`` (width, height) that can show a body.

    ``vertices`` (V, 3) are in camera axes.
    """
    if (vertices[:, 2] < NEAR_M).all():
        return slice(0, 0), slice(0, 0)
    margin_px = 0
    if (vertices[:, 2] < NEAR_M).any():
        # Only what is ahead of the camera shows: cut the body's hull off, well before the nearest
        # depth that is drawn.
        is_ahead = vertices[:, 2] >= _CUT_M
        ahead = vertices[is_ahead]
        behind = vertices[~is_ahead]
        share = (_CUT_M - behind[:, None, 2:]) / (ahead[:, 2:] - behind[:, None, 2:])
        crossings = behind[:, None] + (ahead - behind[:, None]) * share
        vertices = np.concatenate([ahead, crossings.reshape(-1, 3)])
        margin_px = 2
    pixels = vertices @ intrinsics.T
    pixels = pixels[:, :2] / pixels[:, 2:]
    low = np.clip(np.ceil(pixels.min(0)) - margin_px, 0, size).astype(int)
    high = np.clip(np.floor(pixels.max(0)) + 1 + margin_px, 0, size).astype(int)
    return slice(low[1], high[1]), slice(low[0], high[0])


def sights(
    solid: Solid, global2cam: NDArray[np.float64], intrinsics: NDArray[np.float64], rays: Floats
) -> Iterator[Sight]:
    """Yield what the pixels with these ``rays`` (3, H, W) show of an object, block by block."""
    unit2cam = global2cam @ solid.unit2global()
    cam2unit = np.linalg.inv(unit2cam)
    for block in solid.blocks:
        vertices = block.corners @ unit2cam[:3, :3].T + unit2cam[:3, 3]
        rows, columns = window_of(vertices, intrinsics, rays.shape[:0:-1])
        if rows.stop > rows.start and columns.stop > columns.start:
            depth, entries = meet(block, cam2unit, rays[:, rows, columns])
            depth[depth < NEAR_M] = np.inf
            yield Sight(
                block=block, window=(rows, columns), depth=depth, entries=entries, cam2unit=cam2unit
            )


def owners(
    camera: RigSensor, cam2global: NDArray[np.float64], solids: list[Solid], width_px: int
) -> tuple[NDArray[np.int32], dict[int, int]]:
    """Return the actor that each pixel (H, W) shows, -1 for none, and the number of pixels of
    each actor if alone.
    """
    scale = width_px / camera.size[0]
    size = (width_px, round(camera.size[1] * scale))
    global2cam = invert_rigid(cam2global)
    move = (scale - 1.0) / 2.0
    intrinsics = (
        np.array([[scale, 0.0, move], [0.0, scale, move], [0.0, 0.0, 1.0]]) @ camera.intrinsics
    )
    rays = pixel_rays(intrinsics, size)
    actors = np.full(size[::-1], -1, np.int32)
    nearest = np.full(size[::-1], np.inf)
    alone = dict[int, int]()
    for solid in solids:
        silhouette = np.zeros(size[::-1], np.bool_)
        for sight in sights(solid, global2cam, intrinsics, rays):
            silhouette[sight.window] |= sight.depth < np.inf
            nearer = sight.depth < nearest[sight.window]
            nearest[sight.window][nearer] = sight.depth[nearer]
            actors[sight.window][nearer] = solid.actor
        if solid.actor >= 0 and silhouette.any():
            alone[solid.actor] = int(silhouette.sum())
    return actors, alone


def visible_shares(clip: SynthClip, solids: list[Solid], capture_us: int) -> dict[int, float]:
    """Return the share 0..1 of each actor's silhouettes that nothing nearer hides, for actors in
    at least one image.
    """
    alone_pixels = np.zeros(len(clip.actors) + 1)
    visible_pixels = np.zeros(len(clip.actors) + 1)
    for camera in clip.rig.cameras:
        cam2global = clip.ego2global(capture_us - camera.lead_us) @ camera.sensor2ego
        actors, alone = owners(camera, cam2global, solids, _SILHOUETTE_PX)
        visible_pixels += np.bincount(actors.ravel() + 1, minlength=len(visible_pixels))
        for actor, pixels in alone.items():
            alone_pixels[actor + 1] += pixels
    return {
        actor - 1: float(visible_pixels[actor] / alone_pixels[actor])
        for actor in range(1, len(alone_pixels))
        if alone_pixels[actor]
    }


def render(
    clip: SynthClip, camera: RigSensor, solids: list[Solid], exposure_us: int
) -> NDArray[np.uint8]:
    """Return the picture (H, W, 3), RGB, taken at ``exposure_us``."""
    cam2global = clip.ego2global(exposure_us) @ camera.sensor2ego
    rays = pixel_rays(camera.intrinsics, camera.size)
    image = _paint_backdrop(clip, camera, cam2global, rays)
    nearest = np.full(image.shape[:2], np.inf, np.float32)
    for solid in sorted(
        solids, key=lambda candidate: math.dist(candidate.centre[:2], cam2global[:2, 3])
    ):  # fewer are painted over
        for sight in sights(solid, invert_rigid(cam2global), camera.intrinsics, rays):
            mask = sight.depth < nearest[sight.window]
            depth = sight.depth[mask]
            nearest[sight.window][mask] = depth
            turn = sight.cam2unit.astype(np.float32)
            pixel_places = rays[:, *sight.window][:, mask] * depth
            places = np.einsum("ij,jn->in", turn[:3, :3], pixel_places) + turn[:3, 3:]
            axes = sight.entries[:, mask].argmax(0)
            painted = colours(solid, sight.block.material, places, axes)
            image[sight.window][mask] = _add_haze(painted, depth, clip.weather)
    draw = stream("sensor", clip.name, camera.channel, exposure_us)
    noise = draw.standard_normal(image.shape[:2], dtype=np.float32)
    noisy = cv2.GaussianBlur(image, (0, 0), 0.5) + noise[..., None] * np.float32(2.1)
    return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)


def _add_haze(colour: Floats, depth: Floats, weather: Weather) -> Floats:
    """Return colours (N, 3), given in full light, as they are seen at these depths (N,)."""
    haze = np.array(weather.haze_rgb, np.float32)
    transmittance = np.exp(-depth / np.float32(weather.haze_m))[:, None]
    return np.asarray(haze + (colour * np.float32(weather.light) - haze) * transmittance)


def _paint_backdrop(
    clip: SynthClip, camera: RigSensor, cam2global: NDArray[np.float64], rays: Floats
) -> Floats:
    """Return sky and ground (H, W, 3)."""
    zenith, haze = (
        np.array(rgb, np.float32) for rgb in (clip.weather.zenith_rgb, clip.weather.haze_rgb)
    )
    toward = np.einsum("ij,jrc->irc", cam2global[:3, :3].astype(np.float32), rays)
    up = np.clip(toward[2] / np.hypot(toward[0], toward[1]), 0.0, 3.0)
    image = haze + (zenith - haze) * (1.0 - np.exp(-2.6 * up))[..., None]
    is_ground = toward[2] < -0.002
    depth = np.float32(-cam2global[2, 3]) / toward[2][is_ground]
    eye = cam2global[:2, 3] - (clip.road.x, clip.road.y)
    x, y = (
        np.float32(origin) + axis[is_ground] * depth
        for origin, axis in zip(eye, toward, strict=False)
    )
    ground = _paint_ground(*clip.road.locate(x, y), depth / np.float32(camera.intrinsics[0, 0]))
    image[is_ground] = _add_haze(ground, depth, clip.weather)
    return np.asarray(image, np.float32)


def _paint_ground(along: Floats, lateral: Floats, pixel_m: Floats) -> Floats:
    """Return the colour (N, 3) of places on the road, of which a pixel covers ``pixel_m``."""

    def band(distance: Floats, half: float) -> Floats:
        return np.clip((half - np.abs(distance)) / pixel_m + 0.5, 0.0, 1.0)

    grey = (
        86.0
        + 13.0 * noise_at(along, lateral, 60.0) / (1.0 + 9.0 * pixel_m)
        + 4.5 * noise_at(along, lateral, 6.0)
    )
    dashes = band(np.mod(along, 9.0) - 4.5, 1.6)
    distance = np.abs(lateral)
    paint = band(distance - 0.14, 0.06)
    paint = paint + band(distance - LANE_WIDTH_M, 0.07) * dashes
    paint += band(distance - 2 * LANE_WIDTH_M, 0.07)
    grey += (1.0 - band(lateral, KERB_M)) * 50.0 + (210.0 - grey) * 0.85 * paint
    grass = 1.0 - band(lateral, FACADE_M - 1.2)
    tint = 1.0 - grass[:, None] * np.array((0.36, 0.2, 0.6), np.float32)
    return np.asarray(grey[:, None] * tint, np.float32)
