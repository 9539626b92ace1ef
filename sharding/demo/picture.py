"""The picture of one camera: sky and ground by a ray for each pixel, then each side of each object where it is nearest.

A side of a block is a plane: its borders and the reciprocal of its depth are linear in the coordinates of a pixel. So
what is drawn is where the calibration says, to the pixel, and no order of painting is needed. Pixel coordinates have
the centre of the top left pixel at (0, 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.demo.rig import RigSensor, stream
from fuelrail.sharding.demo.shapes import SIDES, ShapePart, colours, noise_at, shape_of
from fuelrail.sharding.demo.street import FACADE_M, KERB_M, LANE_WIDTH_M

if TYPE_CHECKING:
    from fuelrail.sharding.demo.solids import Solid
    from fuelrail.sharding.demo.world import SynthClip

    Floats = NDArray[np.floating[Any]]

NEAR_M: Final = 0.3  # what is nearer to a camera is not drawn
_FARTHEST_M: Final = 900.0
_COARSE: Final = 4  # lamplight is smooth: it is computed for every fourth pixel
_DIRECT: Final = 0.62  # sunlight on a surface that faces the sun; ambient light is the weather's
_LAMP_RGB: Final = np.array((1.0, 0.8, 0.52), np.float32)
_SILHOUETTE_PX: Final = 400  # width of the pictures in which silhouettes are counted


class Side(NamedTuple):
    """A side of an object that faces the camera, in a window of the image of H x W pixels."""

    part: ShapePart
    name: str
    number: int
    window: tuple[slice, slice]
    inside: NDArray[np.bool_]  # (H, W): the pixels whose centre it covers
    nearness: NDArray[np.float64]  # (H, W): reciprocal of the depth, where it covers the pixel
    px2texture: NDArray[np.float64]  # (3, 3): homogeneous pixels to the side's s and t


def window_of(
    vertices: NDArray[np.float64], intrinsics: NDArray[np.float64], size: tuple[int, int]
) -> tuple[slice, slice]:
    """Return the rows and columns of an image of ``size`` (width, height) that can show a body.

    ``vertices`` (V, 3) are in camera axes.
    """
    if (vertices[:, 2] < NEAR_M).all():
        return slice(0, 0), slice(0, 0)
    if (vertices[:, 2] < NEAR_M).any():
        return slice(0, size[1]), slice(0, size[0])
    pixels = vertices @ intrinsics.T
    pixels = pixels[:, :2] / pixels[:, 2:]
    low = np.clip(np.ceil(pixels.min(0)), 0, size).astype(int)
    high = np.clip(np.floor(pixels.max(0)) + 1, 0, size).astype(int)
    return slice(low[1], high[1]), slice(low[0], high[0])


def sides(
    solid: Solid, global2cam: NDArray[np.float64], intrinsics: NDArray[np.float64], size: tuple[int, int]
) -> Iterator[Side]:
    """Yield the sides of an object that face the camera, where they cover a pixel of its image (width, height)."""
    unit2cam, px2ray = global2cam @ solid.unit2global(), _inverse(intrinsics)
    for part in shape_of(solid.kind):
        vertices = part.vertices @ unit2cam[:3, :3].T + unit2cam[:3, 3]
        window = window_of(vertices, intrinsics, size)
        frames = unit2cam[:3, :3] @ part.frames
        frames[..., 2] += unit2cam[:3, 3]
        facing = np.flatnonzero(np.linalg.det(frames) > 0)
        if window[0].stop <= window[0].start or window[1].stop <= window[1].start:
            continue
        v, u = np.arange(window[0].start, window[0].stop)[:, None], np.arange(window[1].start, window[1].stop)
        for number in facing:
            name = tuple(SIDES)[number]
            inside = _inside(vertices[list(SIDES[name])], px2ray, u, v)
            if inside.any():
                # A ray r meets the plane at depth d where frame @ (s, t, 1) = d r.
                px2texture = _inverse(frames[number]) @ px2ray
                a, b, c = px2texture[2]
                yield Side(part, name, int(number), window, inside, a * u + (b * v + c), px2texture)


def _inverse(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.inv(matrix), np.float64)


def _inside(
    corners: NDArray[np.float64], px2ray: NDArray[np.float64], u: NDArray[np.int_], v: NDArray[np.int_]
) -> NDArray[np.bool_]:
    """Return which pixels (H, W) see a convex polygon (N, 3) in camera axes, counter-clockwise as it sees it."""
    inside = np.ones((len(v), len(u)), np.bool_)
    # Each edge and the eye span a plane: a ray through the polygon is on the same side of all of them.
    for a, b, c in np.cross(corners, np.roll(corners, -1, 0)) @ px2ray:
        inside &= a * u <= -(b * v + c)
    return inside


def owners(
    camera: RigSensor, cam2global: NDArray[np.float64], solids: list[Solid], width_px: int
) -> tuple[NDArray[np.int32], dict[int, int]]:
    """Return the actor that each pixel (H, W) shows, -1 for none, and the number of pixels of each actor if alone."""
    scale = width_px / camera.size[0]
    size, global2cam = (width_px, round(camera.size[1] * scale)), invert_rigid(cam2global)
    move = (scale - 1.0) / 2.0
    intrinsics = np.array([[scale, 0.0, move], [0.0, scale, move], [0.0, 0.0, 1.0]]) @ camera.intrinsics
    found, alone = np.full(size[::-1], -1, np.int32), dict[int, int]()
    nearest = np.zeros(size[::-1])
    for solid in solids:
        silhouette = np.zeros(size[::-1], np.bool_)
        for side in sides(solid, global2cam, intrinsics, size):
            silhouette[side.window] |= side.inside
            nearer = side.inside & (side.nearness > nearest[side.window])
            nearest[side.window][nearer] = side.nearness[nearer]
            found[side.window][nearer] = solid.actor
        if solid.actor >= 0 and silhouette.any():
            alone[solid.actor] = int(silhouette.sum())
    return found, alone


def visible_shares(clip: SynthClip, solids: list[Solid], capture_us: int) -> dict[int, float]:
    """Return the share 0..1 of each actor's silhouettes that nothing nearer hides, for actors in at least one image."""
    whole, seen = np.zeros(len(clip.actors) + 1), np.zeros(len(clip.actors) + 1)
    for camera in clip.rig.cameras:
        cam2global = clip.ego2global(capture_us - camera.lead_us) @ camera.sensor2ego
        found, alone = owners(camera, cam2global, solids, _SILHOUETTE_PX)
        seen += np.bincount(found.ravel() + 1, minlength=len(seen))
        for actor, pixels in alone.items():
            whole[actor + 1] += pixels
    return {actor - 1: float(seen[actor] / whole[actor]) for actor in range(1, len(whole)) if whole[actor]}


def render(clip: SynthClip, camera: RigSensor, solids: list[Solid], exposure_us: int) -> NDArray[np.uint8]:
    """Return the picture (H, W, 3), RGB, taken at ``exposure_us``."""
    weather, ego2global = clip.weather, clip.ego2global(exposure_us)
    global2ego = invert_rigid(ego2global)
    cam2global = ego2global @ camera.sensor2ego
    global2cam = invert_rigid(cam2global)
    posts = [(prop.x, prop.y) for prop in clip.props if prop.kind == "post"]
    lamps = np.array(posts).reshape(-1, 2) @ global2ego[:2, :2].T + global2ego[:2, 3]
    image = _backdrop(clip, camera, ego2global, lamps, _shadow(clip, camera, solids, global2cam))
    nearest, haze = np.zeros(image.shape[:2]), np.array(weather.haze_rgb, np.float32)
    for solid in sorted(solids, key=lambda one: math.dist(one.centre[:2], cam2global[:2, 3])):
        turn, place = solid.unit2global()[:3, :3], global2ego[:2, :3] @ solid.centre + global2ego[:2, 3]
        night = 0.8 * _lamplight(lamps, *place[:, None].astype(np.float32)) if weather.night else np.zeros(3)
        for side in sides(solid, global2cam, camera.intrinsics, camera.size):
            shown = side.inside & (side.nearness > nearest[side.window])
            v, u = np.nonzero(shown)
            nearness = side.nearness[shown]
            nearest[side.window][shown] = nearness
            u, v = u + side.window[1].start, v + side.window[0].start
            s, t = (np.asarray((a * u + b * v + c) / nearness, np.float32) for a, b, c in side.px2texture[:2])
            right, down, _ = (turn @ side.part.frames[side.number]).T
            size_m = np.hypot.reduce((right, down), 1)
            found, glow = colours(solid, side.part, side.name, s, t, size_m)
            normal = np.cross(down, right) / np.prod(size_m)
            gain = weather.ambient * (0.88 + 0.16 * normal[2] + 0.05 * normal[0]) + night
            if weather.sun is not None:
                gain += _DIRECT * max(0.0, float(normal @ weather.sun))
            found *= np.maximum(gain, glow[:, None] * _LAMP_RGB * weather.night)
            left = np.exp(-1.0 / (nearness * weather.haze_m))[:, None]
            image[side.window][shown] = haze + (found - haze) * left
    draw = stream("sensor", clip.name, camera.channel, exposure_us)
    noise = draw.standard_normal(image.shape[:2], dtype=np.float32)[..., None] * (3.2 if weather.night else 1.6)
    return np.clip(np.rint(cv2.GaussianBlur(image, (0, 0), 0.5) + noise), 0, 255).astype(np.uint8)


def _lamplight(lamps: NDArray[np.float64], x: Floats, y: Floats) -> Floats:
    """Return the light (..., 3) of headlights and of street lamps (N, 2) at places on the ground, all in ego."""
    ahead = np.maximum(x - 3.5, 0.0)
    spread = np.clip(1.35 - np.abs(y) / (ahead * 0.55 + 1.2), 0.0, 1.0) * np.clip(ahead / 3.0, 0.0, 1.0)
    light = (0.65 * spread / (0.8 + np.square(ahead / 16.0)))[..., None] * np.ones(3, np.float32)
    for lamp_x, lamp_y in lamps[np.hypot(*lamps.T) < 65.0].astype(np.float32):
        fall = np.square(1.0 + (np.square(x - lamp_x) + np.square(y - lamp_y)) / 46.0)
        light += (0.55 / fall)[..., None] * _LAMP_RGB
    return np.asarray(light, np.float32)


def _shadow(clip: SynthClip, camera: RigSensor, solids: list[Solid], global2cam: NDArray[np.float64]) -> Floats:
    """Return the share of the light (H, W) that objects keep off the ground; under a grey sky its edges are soft."""
    sun = clip.weather.sun
    mask = np.zeros(camera.size[::-1], np.float32)
    px2ray = _inverse(camera.intrinsics)
    for solid in solids:
        base = solid.footprint()
        low, high = (max(0.0, solid.centre[2] + side * solid.size_lwh[2] / 2) for side in (-1, 1))
        if sun is not None:
            slant = np.array(sun[:2]) / sun[2]
            base = np.concatenate([base - slant * low, base - slant * high * 0.96])
            # Large coordinates lose too much in float32.
            base = cv2.convexHull((base - base[0]).astype(np.float32), clockwise=False)[:, 0] + base[0]
        elif solid.actor < 0 or low > 0.5:
            continue
        ground = np.column_stack([base, np.zeros(len(base))]) @ global2cam[:3, :3].T + global2cam[:3, 3]
        rows, columns = window_of(ground, camera.intrinsics, camera.size)
        u, v = np.arange(columns.start, columns.stop), np.arange(rows.start, rows.stop)[:, None]
        mask[rows, columns][_inside(ground, px2ray, u, v)] = 1.0
    return np.asarray(cv2.GaussianBlur(mask, (0, 0), camera.size[0] / (1300.0 if sun is not None else 400.0)))


class _View(NamedTuple):
    """What a camera sees of an empty plane, in ego: the same for every picture that it takes."""

    top: int  # first row of the image that may show ground
    x: Floats  # places on the ground of each pixel from that row on
    y: Floats
    distance: Floats
    cover: Floats  # share of the pixel that is below the horizon
    length_m: Floats  # what a pixel covers, along x and y
    width_m: Floats
    up: Floats  # slope of the ray of each pixel of the image


@lru_cache(maxsize=6)
def _view(camera: RigSensor) -> _View:
    u, v = np.meshgrid(np.arange(camera.size[0]), np.arange(camera.size[1]))
    turn = camera.sensor2ego[:3, :3] @ np.linalg.inv(camera.intrinsics)
    rays = (np.stack([u, v, np.ones_like(u)], axis=-1) @ turn.T).astype(np.float32)
    eye = np.array(camera.translation, np.float32)
    top = max(0, int(np.argmax((rays[..., 2] < 0.002).any(1))) - 1)
    below = rays[top:]
    depth = eye[2] / np.maximum(-below[..., 2], eye[2] / np.float32(_FARTHEST_M))
    x, y = eye[0] + below[..., 0] * depth, eye[1] + below[..., 1] * depth
    length, width = (np.abs(np.gradient(p, axis=0)) + np.abs(np.gradient(p, axis=1)) + 1e-3 for p in (x, y))
    cover = np.clip(0.5 - below[..., 2] * np.float32(camera.intrinsics[1, 1]), 0.0, 1.0)
    up = np.clip(rays[..., 2] / np.hypot(rays[..., 0], rays[..., 1]), 0.0, 3.0)
    return _View(top, x, y, np.hypot(x - eye[0], y - eye[1]), cover, length, width, up)


def _backdrop(
    clip: SynthClip, camera: RigSensor, ego2global: NDArray[np.float64], lamps: NDArray[np.float64], shadow: Floats
) -> Floats:
    """Return sky and ground (H, W, 3)."""
    view, weather = _view(camera), clip.weather
    horizon = np.array(weather.haze_rgb, np.float32)
    sky_share = (1.0 - np.exp(-2.6 * view.up))[..., None]
    image = horizon + (np.array(weather.zenith_rgb, np.float32) - horizon) * sky_share

    turn, offset = ego2global[:2, :2].astype(np.float32), ego2global[:2, 3] - (clip.road.x, clip.road.y)
    along, left = clip.road.locate(
        *(np.float32(move) + a * view.x + b * view.y for (a, b), move in zip(turn, offset, strict=True))
    )
    ground = _ground(along, left, view.length_m, view.width_m)
    kept_off = shadow[view.top :, :, None]
    if weather.night:
        light = _lamplight(lamps, view.x[::_COARSE, ::_COARSE], view.y[::_COARSE, ::_COARSE])
        ground *= (weather.ambient + cv2.resize(light, view.x.shape[::-1])) * (1.0 - 0.5 * kept_off)
    elif weather.sun is not None:
        ground *= weather.ambient + np.float32(_DIRECT * weather.sun[2]) * (1.0 - kept_off)
    else:
        ground *= weather.ambient * (1.0 - np.float32(0.4) * kept_off)
    if weather.rain:  # at a flat angle wet asphalt mirrors the sky
        mirror = np.clip(view.distance / np.float32(45.0), 0.04, 0.5) * (np.abs(left) < KERB_M)
        ground += (horizon * np.float32(0.92) - ground) * mirror[..., None]
    ground = horizon + (ground - horizon) * np.exp(view.distance * np.float32(-1.0 / weather.haze_m))[..., None]
    image[view.top :] += (ground - image[view.top :]) * view.cover[..., None]
    return np.asarray(image, np.float32)


def _ground(along: Floats, left: Floats, length_m: Floats, width_m: Floats) -> Floats:
    """Return the colour (H, W, 3) of places on the road; a pixel covers ``length_m`` along and ``width_m`` across."""

    def band(distance: Floats, half: float, blur: Floats) -> Floats:
        return np.clip((half - np.abs(distance)) / blur + 0.5, 0.0, 1.0)

    fine = 1.0 / (1.0 + 9.0 * np.minimum(length_m, width_m))
    grey = 86.0 + 13.0 * noise_at(along, left, 60.0) * fine + 4.5 * noise_at(along, left, 6.0)
    walk = 1.0 - band(left, KERB_M, width_m)
    dashes = band(np.mod(along, 9.0) - 4.5, 1.6, length_m)
    paint = band(np.abs(left) - 0.14, 0.06, width_m) + band(np.abs(left) - LANE_WIDTH_M, 0.07, width_m) * dashes
    paint += band(np.abs(left) - 2 * LANE_WIDTH_M, 0.07, width_m)
    grey += walk * 50.0 + (210.0 - grey) * 0.85 * paint
    grass = 1.0 - band(left, FACADE_M - 1.2, width_m)
    tint = np.array((0.36, 0.2, 0.6), np.float32)
    return np.asarray(grey[..., None] * (1.0 - grass[..., None] * tint), np.float32)
