"""What lies behind all objects: sky, skyline and the ground with its road."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import cv2
import numpy as np

from fuelrail.sharding.demo import pavement
from fuelrail.sharding.demo.noise import fractal, tile, to_pixels
from fuelrail.sharding.demo.poses import stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.sharding.demo.light import Light
    from fuelrail.sharding.demo.rig import Camera
    from fuelrail.sharding.demo.world import Clip

    Floats = NDArray[np.float32]

_COARSE: Final = 4  # sky and lamplight are smooth: worked out for every fourth pixel
_FARTHEST_M: Final = 900.0
_ZENITH_RGB: Final = {
    "clear": (84, 138, 206), "rain": (150, 157, 166), "dusk": (112, 112, 132),
    "night": (8, 10, 18), "night-rain": (12, 13, 18),
}  # fmt: skip
_CLOUD_RGB: Final = {
    "clear": (240, 242, 245), "rain": (196, 200, 205), "dusk": (206, 176, 158),
    "night": (26, 25, 30), "night-rain": (36, 34, 36),
}  # fmt: skip
_CLOUDINESS: Final = {"clear": -0.35, "rain": 0.5, "dusk": 0.25, "night": 0.0, "night-rain": 0.4}


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """What a camera sees of an empty plane, in ego coordinates: the same for every picture that it takes."""

    top: int  # first row of the image that may hold ground
    x: Floats  # ground hit by each pixel from that row on, ego frame
    y: Floats
    distance: Floats
    cover: Floats  # share of the pixel that is below the horizon
    size: pavement.Footprint
    sky_azimuth: Floats  # directions of every `_COARSE`-th pixel, ego frame
    sky_elevation: Floats


def _directions(camera: Camera, step: int) -> Floats:
    # (H / step, W / step, 3), ego axes, not normalised: depth along the optical axis is 1.
    rows = np.arange(0, camera.height_px, step, dtype=np.float64)
    columns = np.arange(0, camera.width_px, step, dtype=np.float64)
    if step > 1:  # centres of the blocks that a resize by `step` averages
        rows, columns = rows + (step - 1) / 2, columns + (step - 1) / 2
    u, v = np.meshgrid(columns, rows)
    pixels = np.stack([u, v, np.ones_like(u)], axis=-1)
    turn = camera.cam2ego[:3, :3] @ np.linalg.inv(camera.intrinsics)
    return (pixels @ turn.T).astype(np.float32)


@lru_cache(maxsize=6)
def _view(camera: Camera) -> _View:
    rays = _directions(camera, 1)
    focal_px = float(camera.intrinsics[1, 1])
    eye = np.array(camera.translation, np.float32)
    top = max(0, int(np.argmax((rays[..., 2] < 0.002).any(1))) - 1)
    rays = rays[top:]
    down = np.maximum(-rays[..., 2], eye[2] / np.float32(_FARTHEST_M))
    depth = eye[2] / down
    x, y = eye[0] + rays[..., 0] * depth, eye[1] + rays[..., 1] * depth
    extent = [
        np.abs(np.gradient(place, axis=0)) + np.abs(np.gradient(place, axis=1)) + np.float32(1e-4) for place in (x, y)
    ]
    cover = np.clip(0.5 - rays[..., 2] * np.float32(focal_px), 0.0, 1.0)
    coarse = _directions(camera, _COARSE)
    flat = np.hypot(coarse[..., 0], coarse[..., 1])
    return _View(
        top=top,
        x=x,
        y=y,
        distance=np.hypot(x - eye[0], y - eye[1]),
        cover=cover.astype(np.float32),
        size=pavement.footprint(extent[0], extent[1]),
        sky_azimuth=np.arctan2(coarse[..., 1], coarse[..., 0]),
        sky_elevation=np.arctan2(coarse[..., 2], flat),
    )


@lru_cache(maxsize=2)
def _skyline(clip_name: str) -> Floats:
    # Height in rad of far buildings and trees for 2048 azimuths.
    draw = stream("skyline", clip_name)
    blocks = np.zeros(2048, np.float32)
    at = 0
    while at < 2048:
        width = int(draw.integers(8, 46))
        blocks[at : at + width] = draw.uniform(0.004, 0.05) if draw.random() < 0.75 else draw.uniform(0.04, 0.065)
        at += width
    hills = 0.02 + 0.006 * fractal(draw, 1, 2048, 64, 6)
    return np.asarray(np.maximum(blocks, hills), np.float32)


def _sky(clip: Clip, view: _View, yaw_rad: float) -> Floats:
    weather = clip.weather
    azimuth = view.sky_azimuth + np.float32(yaw_rad)
    elevation = view.sky_elevation
    up = np.clip(elevation, 0.0, 1.2)
    share = 1.0 - np.exp(-up * 3.2)
    horizon = np.array(weather.haze_rgb, np.float32)
    sky = horizon + (np.array(_ZENITH_RGB[weather.name], np.float32) - horizon) * share[..., None]
    # Clouds lie in a plane overhead and shrink towards the horizon.
    reach = 1.0 / (np.sin(up) + np.float32(0.09))
    shift = float(clip.index) * 173.0
    clouds = cv2.remap(
        to_pixels(128.0 + 42.0 * tile("clouds", 512, 128, 6)),
        np.mod(np.cos(azimuth) * reach * 62.0 + shift, 512.0).astype(np.float32),
        np.mod(np.sin(azimuth) * reach * 62.0, 512.0).astype(np.float32),
        cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_WRAP,
    ).astype(np.float32)
    thick = np.clip((clouds - 128.0) / 60.0 + _CLOUDINESS[weather.name], 0.0, 1.0) * np.clip(up * 9.0, 0.0, 0.9)
    shade = np.array(_CLOUD_RGB[weather.name], np.float32) * (1.06 - 0.14 * thick[..., None])
    sky += (shade - sky) * thick[..., None]
    columns = np.mod(azimuth / np.float32(2 * math.pi), 1.0) * 2048.0
    height = cv2.remap(
        _skyline(clip.name),
        columns.astype(np.float32),
        np.zeros_like(columns),
        cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_WRAP,
    )
    far = np.clip((height - elevation) / 0.004 + 0.5, 0.0, 1.0) * 0.55
    silhouette = horizon * np.array([0.62, 0.66, 0.68], np.float32)
    return np.asarray(sky + (silhouette - sky) * far[..., None], np.float32)


def backdrop(
    clip: Clip, camera: Camera, light: Light, shadows: list[NDArray[np.int32]], shadow_shift: int
) -> NDArray[np.uint8]:
    """Sky and ground (H, W, 3) RGB. ``shadows`` are convex polygons in pixels times 2 to the power ``shadow_shift``."""
    view = _view(camera)
    weather = clip.weather
    horizon = np.array(weather.haze_rgb, np.float32)
    sky = to_pixels(_sky(clip, view, light.ego_yaw_rad))
    size = (camera.width_px, camera.height_px)
    image = np.asarray(cv2.resize(sky, size, interpolation=cv2.INTER_LINEAR), np.uint8)

    c, s = np.float32(math.cos(light.ego_yaw_rad)), np.float32(math.sin(light.ego_yaw_rad))
    dx, dy = np.float32(light.ego_xy[0] - clip.road.x), np.float32(light.ego_xy[1] - clip.road.y)
    along, left = clip.road.locate(dx + c * view.x - s * view.y, dy + s * view.x + c * view.y)
    ground = pavement.ground_colour(clip.log, along, left, view.size, wet=weather.rain)
    ground *= _ground_light(
        view, light, c, s, _shadow(camera, view.top, shadows, shadow_shift, sharp=weather.sun is not None)
    )
    if weather.rain:  # at a flat angle wet asphalt mirrors the sky
        mirror = np.clip(view.distance / np.float32(45.0), 0.04, 0.5) * (np.abs(left) < np.float32(9.4))
        ground += (horizon * np.float32(0.92) - ground) * mirror[..., None]
    air = np.exp(view.distance * np.float32(-1.0 / weather.haze_m)) * view.cover
    below = image[view.top :].astype(np.float32)
    hazy = horizon * view.cover[..., None] + below * (1.0 - view.cover[..., None])
    ground -= horizon
    ground *= air[..., None]
    ground += hazy
    image[view.top :] = to_pixels(ground)
    return image


def _shadow(camera: Camera, top: int, shadows: list[NDArray[np.int32]], shift: int, *, sharp: bool) -> Floats:
    # Share of the light that is kept off, 0..1; under a grey sky its edges are soft.
    mask = np.zeros((camera.height_px - top, camera.width_px), np.uint8)
    for polygon in shadows:
        cv2.fillConvexPoly(mask, polygon - np.array([0, top << shift], np.int32), 255, cv2.LINE_AA, shift)
    sigma_px = camera.width_px / (1300.0 if sharp else 400.0)
    soft = cv2.GaussianBlur(mask, (0, 0), max(sigma_px, 0.3))
    return soft.astype(np.float32) * np.float32(1.0 / 255.0)


def _ground_light(view: _View, light: Light, c: np.float32, s: np.float32, shadow: Floats) -> Floats:
    if not light.weather.night:
        return light.on_ground(view.x, view.y, shadow)[..., None]
    x, y = view.x[::_COARSE, ::_COARSE], view.y[::_COARSE, ::_COARSE]
    dx, dy = np.float32(light.ego_xy[0]), np.float32(light.ego_xy[1])
    lit = light.on_ground(dx + c * x - s * y, dy + s * x + c * y)
    height, width = view.x.shape
    # Coarse samples sit at the corners of their blocks: map pixel u to coarse u / step.
    grow = np.array([[1.0 / _COARSE, 0.0, 0.0], [0.0, 1.0 / _COARSE, 0.0]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    grown = cv2.warpAffine(lit, grow, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    full = np.asarray(grown, np.float32)
    full *= (1.0 - np.float32(0.5) * shadow)[..., None]
    return full
