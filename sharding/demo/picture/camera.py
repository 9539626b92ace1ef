"""The picture of one camera: sky and ground by a ray for each pixel, then the objects from the farthest to the nearest.

An object is painted block by block, and a block side by side: a texture is warped by the plane's own homography, lit,
and mixed in by how much of each pixel the polygon covers. So what is drawn lies where the calibration says, to a small
fraction of a pixel, and ``owners`` says which object each pixel shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.demo.picture.materials import texture, tile, to_pixels
from fuelrail.sharding.demo.picture.raster import (
    NEAR_M,
    Image,
    Window,
    blend,
    clip_depth,
    convex_hull,
    coverage,
    normal_of,
    window_of,
)
from fuelrail.sharding.demo.picture.shapes import Face, Part, painting_order, shape_of
from fuelrail.sharding.demo.rig import Camera, stream
from fuelrail.sharding.demo.solids import Solid, far_to_near
from fuelrail.sharding.demo.street import FACADE_M, KERB_M, LANE_WIDTH_M

if TYPE_CHECKING:
    from fuelrail.sharding.demo.world import Clip, Weather

    Floats = NDArray[np.floating[Any]]

_COARSE: Final = 4  # sky and lamplight are smooth: worked out for every fourth pixel
_FARTHEST_M: Final = 900.0
_SMALLEST_PX: Final = 0.7
_SHADOW_SHIFT: Final = 3  # fraction bits of the corners of shadows
_DIRECT: Final = 0.62  # sunlight on a surface that faces the sun; ambient light is the weather's
_PAINT_RGB: Final = np.array((218, 216, 206), np.float32)
_LAMP_RGB: Final = np.array((1.0, 0.8, 0.52), np.float32)
_HEADLIGHT_RGB: Final = np.array((1.0, 0.98, 0.92), np.float32)
_ZENITH_RGB: Final = {
    "clear": (84, 138, 206), "rain": (150, 157, 166), "dusk": (112, 112, 132), "night": (8, 10, 18),
    "night-rain": (12, 13, 18),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Light:
    """Light at one moment of a clip. Positions are global; lamps (N, 2) burn at night only."""

    weather: Weather
    ego_xy: tuple[float, float]
    ego_yaw_rad: float
    lamps: NDArray[np.float64]

    def at(self, x: Floats, y: Floats) -> Floats:
        """Return the light of street lamps and headlights (..., 3) at places on the ground."""
        lamps = np.zeros(x.shape, np.float32)
        for lamp in self.lamps[np.hypot(*(self.lamps - self.ego_xy).T) < 65.0].astype(np.float32):
            lamps += 0.55 / np.square(1.0 + (np.square(x - lamp[0]) + np.square(y - lamp[1])) / 46.0)
        c, s = np.float32(math.cos(self.ego_yaw_rad)), np.float32(math.sin(self.ego_yaw_rad))
        dx, dy = x - np.float32(self.ego_xy[0]), y - np.float32(self.ego_xy[1])
        ahead, left = np.maximum(c * dx + s * dy - 3.5, 0.0), c * dy - s * dx
        spread = np.clip(1.35 - np.abs(left) / (ahead * 0.55 + 1.2), 0.0, 1.0)
        beam = 0.65 * spread / (0.8 + np.square(ahead / 16.0)) * np.clip(ahead / 3.0, 0.0, 1.0)
        return np.asarray(lamps[..., None] * _LAMP_RGB + beam[..., None] * _HEADLIGHT_RGB, np.float32)

    def on_face(self, point: NDArray[np.float64], normal: NDArray[np.float64]) -> Floats:
        """Return the gain (3,) of a colour on a face with this global centre and unit normal."""
        ambient = self.weather.ambient * (0.88 + 0.16 * normal[2] + 0.05 * normal[0])
        if self.weather.sun is not None:
            ambient += _DIRECT * max(0.0, float(normal @ self.weather.sun))
        gain = np.full(3, ambient, np.float32)
        if self.weather.night:
            gain += 0.8 * self.at(*point[:2, None].astype(np.float32))[0]
        return gain


@dataclass(slots=True, eq=False)
class _Canvas:
    camera: Camera
    light: _Light
    global2cam: NDArray[np.float64]
    eye: NDArray[np.float64]
    image: Image
    owners: NDArray[np.int32] | None


def render(
    clip: Clip, camera: Camera, solids: list[Solid], exposure_us: int, *, owners: bool = False
) -> tuple[Image, NDArray[np.int32] | None]:
    """Return the picture (H, W, 3) RGB uint8 taken at ``exposure_us``, and on demand whose each pixel is.

    ``owners`` (H, W) int32: the actor that a pixel mostly shows, -1 for none.
    """
    (x, y, _), (w, _, _, z) = clip.ego(exposure_us)
    lamps = [(prop.x, prop.y) for prop in clip.props if prop.kind == "post"] if clip.weather.night else []
    light = _Light(clip.weather, (x, y), 2.0 * math.atan2(z, w), np.array(lamps).reshape(-1, 2))
    cam2global = clip.ego2global(exposure_us) @ camera.cam2ego
    global2cam = invert_rigid(cam2global)
    seen = [solid for solid in solids if _in_view(solid, camera, global2cam)]
    shadow = _shadow(clip, camera, seen, global2cam)
    nobody = np.full((camera.height_px, camera.width_px), -1, np.int32) if owners else None
    canvas = _Canvas(camera, light, global2cam, cam2global[:3, 3], _backdrop(clip, camera, light, shadow), nobody)
    if seen:
        heights = np.array([(s.centre[2] - s.size_lwh[2] / 2, s.centre[2] + s.size_lwh[2] / 2) for s in seen])
        for index in far_to_near(np.array([solid.footprint() for solid in seen]), heights, canvas.eye[:2]):
            solid = seen[index]
            parts, unit2global = shape_of(solid.kind), solid.unit2global()
            eye = (np.linalg.inv(unit2global) @ np.append(canvas.eye, 1.0))[:3]
            for number in painting_order(parts, eye):
                _paint(canvas, solid, parts[number], unit2global)
    _develop(clip, camera, exposure_us, canvas.image)
    return canvas.image, canvas.owners


def _in_view(solid: Solid, camera: Camera, global2cam: NDArray[np.float64]) -> bool:
    vertices = solid.vertices() @ global2cam[:3, :3].T + global2cam[:3, 3]
    ahead = vertices[:, 2] > NEAR_M
    if not ahead.all():
        return bool(ahead.any())
    # A lamp's arm and a shadow reach out of the box.
    margin = camera.width_px * (0.5 if solid.kind == "post" else 0.1)
    pixels = _projected(camera, vertices)
    return bool((pixels.max(0) > -margin).all() and (pixels.min(0) < np.array(_size(camera)) + margin).all())


def _size(camera: Camera) -> tuple[int, int]:
    return camera.width_px, camera.height_px


def _projected(camera: Camera, points: NDArray[np.float64]) -> NDArray[np.float64]:
    image = points @ camera.intrinsics.T
    pixels: NDArray[np.float64] = image[:, :2] / image[:, 2:]
    return pixels


def _shadow(clip: Clip, camera: Camera, solids: list[Solid], global2cam: NDArray[np.float64]) -> Floats:
    """Return the share of the light (H, W) that objects keep off the ground; under a grey sky its edges are soft."""
    sun = clip.weather.sun
    mask = np.zeros((camera.height_px, camera.width_px), np.uint8)
    for solid in solids:
        base = solid.footprint()
        low, high = (max(0.0, solid.centre[2] + side * solid.size_lwh[2] / 2) for side in (-1, 1))
        if sun is not None:
            slant = np.array(sun[:2]) / sun[2]
            base = np.concatenate([base - slant * low, base - slant * high * 0.96])
            base = convex_hull(base - base[0]) + base[0]  # large coordinates lose too much in float32
        elif solid.actor < 0 or low > 0.5:
            continue
        ground = np.column_stack([base, np.zeros(len(base))]) @ global2cam[:3, :3].T + global2cam[:3, 3]
        kept = clip_depth(ground, NEAR_M)
        if len(kept) >= 3:
            limit = 4.0 * camera.width_px
            pixels = np.clip(convex_hull(_projected(camera, kept)), -limit, limit) * (1 << _SHADOW_SHIFT)
            cv2.fillConvexPoly(mask, np.round(pixels).astype(np.int32), 255, cv2.LINE_AA, _SHADOW_SHIFT)
    sigma_px = camera.width_px / (1300.0 if sun is not None else 400.0)
    return np.asarray(cv2.GaussianBlur(mask, (0, 0), max(sigma_px, 0.3)), np.float32) / 255.0


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """What a camera sees of an empty plane, in ego coordinates: the same for every picture that it takes."""

    top: int  # first row of the image that may hold ground
    x: Floats  # ground hit by each pixel from that row on
    y: Floats
    distance: Floats
    cover: Floats  # share of the pixel that is below the horizon
    length_m: Floats  # what a pixel covers, along x and y
    width_m: Floats
    sky: Floats  # directions of every `_COARSE`-th pixel, not normalised


@lru_cache(maxsize=6)
def _view(camera: Camera) -> _View:
    u, v = np.meshgrid(np.arange(camera.width_px, dtype=np.float64), np.arange(camera.height_px, dtype=np.float64))
    turn = camera.cam2ego[:3, :3] @ np.linalg.inv(camera.intrinsics)
    rays = (np.stack([u, v, np.ones_like(u)], axis=-1) @ turn.T).astype(np.float32)
    eye = np.array(camera.translation, np.float32)
    top = max(0, int(np.argmax((rays[..., 2] < 0.002).any(1))) - 1)
    below = rays[top:]
    depth = eye[2] / np.maximum(-below[..., 2], eye[2] / np.float32(_FARTHEST_M))
    x, y = eye[0] + below[..., 0] * depth, eye[1] + below[..., 1] * depth
    length, width = (np.abs(np.gradient(p, axis=0)) + np.abs(np.gradient(p, axis=1)) + 1e-3 for p in (x, y))
    cover = np.clip(0.5 - below[..., 2] * np.float32(camera.intrinsics[1, 1]), 0.0, 1.0)
    distance = np.hypot(x - eye[0], y - eye[1])
    return _View(top, x, y, distance, cover, length, width, rays[::_COARSE, ::_COARSE])


def _backdrop(clip: Clip, camera: Camera, light: _Light, shadow: Floats) -> Image:
    """Return sky and ground (H, W, 3)."""
    view, weather = _view(camera), clip.weather
    horizon = np.array(weather.haze_rgb, np.float32)
    up = np.clip(view.sky[..., 2] / np.hypot(view.sky[..., 0], view.sky[..., 1]), 0.0, 3.0)
    clouds = _noise(view.sky[..., 0] / (up + 0.12) * 24 + clip.index * 173, view.sky[..., 1] / (up + 0.12) * 24)
    share = (1.0 - np.exp(-2.6 * up))[..., None] * (1.0 - 0.22 * np.clip(clouds + 0.2, 0.0, 2.0))[..., None]
    sky = horizon + (np.array(_ZENITH_RGB[weather.name], np.float32) - horizon) * share
    image = np.asarray(cv2.resize(to_pixels(sky), _size(camera), interpolation=cv2.INTER_LINEAR), np.uint8)

    c, s = np.float32(math.cos(light.ego_yaw_rad)), np.float32(math.sin(light.ego_yaw_rad))
    dx, dy = np.float32(light.ego_xy[0] - clip.road.x), np.float32(light.ego_xy[1] - clip.road.y)
    along, left = clip.road.locate(dx + c * view.x - s * view.y, dy + s * view.x + c * view.y)
    ground = _ground(along, left, view.length_m, view.width_m)
    kept_off = shadow[view.top :, :, None]
    if weather.night:
        x, y = view.x[::_COARSE, ::_COARSE], view.y[::_COARSE, ::_COARSE]
        ego_x, ego_y = (np.float32(value) for value in light.ego_xy)
        lit = light.at(ego_x + c * x - s * y, ego_y + s * x + c * y)
        lit = np.asarray(cv2.resize(lit, view.x.shape[::-1], interpolation=cv2.INTER_LINEAR), np.float32)
        ground *= (weather.ambient + lit) * (1.0 - 0.5 * kept_off)
    elif weather.sun is not None:
        ground *= weather.ambient + np.float32(_DIRECT * weather.sun[2]) * (1.0 - kept_off)
    else:
        ground *= weather.ambient * (1.0 - np.float32(0.4) * kept_off)
    if weather.rain:  # at a flat angle wet asphalt mirrors the sky
        mirror = np.clip(view.distance / np.float32(45.0), 0.04, 0.5) * (np.abs(left) < KERB_M)
        ground += (horizon * np.float32(0.92) - ground) * mirror[..., None]
    ground = horizon + (ground - horizon) * np.exp(view.distance * np.float32(-1.0 / weather.haze_m))[..., None]
    above = image[view.top :].astype(np.float32)
    image[view.top :] = to_pixels(above + (ground - above) * view.cover[..., None])
    return image


def _noise(x: Floats, y: Floats) -> Floats:
    """Return noise at places (H, W), in pixels of an endless tile."""
    x, y = (np.mod(place, 512.0).astype(np.float32) for place in (x, y))
    return np.asarray(cv2.remap(tile("grain"), x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP), np.float32)


def _ground(along: Floats, left: Floats, length_m: Floats, width_m: Floats) -> Floats:
    """Return the colour (H, W, 3) of places on the road; a pixel covers ``length_m`` along and ``width_m`` across."""

    def band(distance: Floats, half: float, blur: Floats) -> Floats:
        return np.clip((half - np.abs(distance)) / blur + 0.5, 0.0, 1.0)

    fine = 1.0 / (1.0 + 9.0 * np.minimum(length_m, width_m))
    grey = 86.0 + 13.0 * _noise(along * 60.0, left * 60.0) * fine + 4.5 * _noise(along * 6.0, left * 6.0)
    walk = 1.0 - band(left, KERB_M, width_m)
    joints = np.maximum(
        band(np.mod(along, 1.5) - 0.75, 0.015, length_m), band(np.mod(left, 1.5) - 0.75, 0.015, width_m)
    )
    grey += walk * (56.0 - 40.0 * joints)
    dashes = band(np.mod(along, 9.0) - 4.5, 1.6, length_m)
    paint = np.maximum(
        band(np.abs(left) - 0.14, 0.06, width_m), band(np.abs(left) - LANE_WIDTH_M, 0.07, width_m) * dashes
    )
    paint = np.maximum(paint, band(np.abs(left) - 2 * LANE_WIDTH_M, 0.07, width_m))
    stripes = band(np.mod(left, 1.2) - 0.6, 0.3, width_m) * (1.0 - band(left, 2 * LANE_WIDTH_M, width_m) < 0.5)
    crossing = band(np.mod(along, 90.0) - 39.7, 1.7, length_m)
    paint = paint * (1.0 - crossing) + stripes * crossing
    colour = grey[..., None] * np.array((1.0, 1.0, 1.02), np.float32)
    grass = 1.0 - band(left, FACADE_M - 1.2, width_m)
    colour *= 1.0 - grass[..., None] * np.array((0.36, 0.2, 0.6), np.float32)
    colour += (_PAINT_RGB - colour) * np.float32(0.85) * (paint * (1.0 - walk))[..., None]
    return np.asarray(colour, np.float32)


def _paint(canvas: _Canvas, solid: Solid, part: Part, unit2global: NDArray[np.float64]) -> None:
    camera, weather = canvas.camera, canvas.light.weather
    unit2cam = canvas.global2cam @ unit2global
    vertices = part.vertices @ unit2cam[:3, :3].T + unit2cam[:3, 3]
    if (vertices[:, 2] < NEAR_M).all():
        return
    faces: list[tuple[Face, NDArray[np.float64], NDArray[np.float64]]] = []
    for face in part.faces:
        corners = vertices[list(face.vertices)]
        normal = normal_of(corners)
        if normal @ corners[0] < 0:
            kept = clip_depth(corners, NEAR_M)
            if len(kept) >= 3:
                faces.append((face, _projected(camera, kept), normal))
    if not faces:
        return
    hull = convex_hull(np.concatenate([polygon for _, polygon, _ in faces]))
    window = window_of(hull, camera.width_px, camera.height_px)
    if window is None or len(hull) < 3 or np.ptp(hull, axis=0).max() < _SMALLEST_PX:
        return
    left = math.exp(-float(np.linalg.norm(vertices.mean(0))) / weather.haze_m)
    haze = (1.0 - left) * np.asarray(weather.haze_rgb)
    patch: Image | None = None
    for face, polygon, normal in faces:
        size = [float(np.linalg.norm(unit2global[:3, :3] @ face.frame[:, column])) for column in (0, 1)]
        levels = texture(
            part.material, face.side, (round(size[0], 2), round(size[1], 2)), solid.colour, solid.style, weather.night
        )
        frame = np.vstack([face.frame, [0.0, 0.0, 1.0]])
        drawn = _warped(levels, camera.intrinsics @ unit2cam[:3] @ frame, polygon, window)
        centre = unit2global[:3, :3] @ part.vertices[list(face.vertices)].mean(0) + unit2global[:3, 3]
        gain = canvas.light.on_face(centre, canvas.global2cam[:3, :3].T @ (normal / np.linalg.norm(normal)))
        if weather.night:
            gain = np.clip(gain, _least_light(solid, part.material, face.side), None)
        lit = np.asarray(cv2.transform(drawn, np.column_stack([np.diag(gain * left), haze])), np.uint8)
        if patch is None:
            patch = lit
        else:
            inner = Window(0, 0, *lit.shape[:2])
            blend(patch, inner, lit, coverage(polygon - (window.left, window.top), inner, inset_px=-0.5))
    assert patch is not None, "there is a face"
    alpha = coverage(hull, window)
    blend(canvas.image, window, patch, alpha)
    if canvas.owners is not None:
        canvas.owners[window.slices][alpha >= 0.5] = solid.actor


def _least_light(solid: Solid, material: str, side: str) -> float:
    """Return the gain at night of a side that has lamps or windows of its own."""
    if material == "lamp" or (
        solid.lamps and (material == "bus" or (material == "body" and side in ("front", "rear")))
    ):
        return 0.85
    return 0.45 if material == "facade" else 0.0


def _warped(
    levels: list[Image], texture2px: NDArray[np.float64], polygon: NDArray[np.float64], window: Window
) -> Image:
    height, width = levels[0].shape[:2]
    # Texture pixels are unit squares from its edge; pixel i has its centre at i + 1/2 there and at i in the image.
    px2texture = np.linalg.inv(texture2px)
    places = (polygon.mean(0) + np.array([[0, 0], [1, 0], [0, 1]])) @ px2texture[:, :2].T + px2texture[:, 2]
    places = places[:, :2] / places[:, 2:] * (width, height)
    step = np.array([places[1] - places[0], places[2] - places[0]])
    squeeze = math.sqrt(abs(float(np.linalg.det(step))) + 1e-12)
    longest = max(float(np.hypot(*step[0])), float(np.hypot(*step[1])))
    # Between sharp and smooth where a face is seen at a flat angle.
    level = round(math.log2(max(1.0, math.sqrt(squeeze * longest))))
    chosen = levels[min(level, len(levels) - 1)]
    rows, columns = chosen.shape[:2]
    shift = np.array([[1.0, 0.0, window.left], [0.0, 1.0, window.top], [0.0, 0.0, 1.0]])
    scale = np.array([[columns, 0.0, -0.5], [0.0, rows, -0.5], [0.0, 0.0, 1.0]])
    size = (window.right - window.left, window.bottom - window.top)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    warped = cv2.warpPerspective(chosen, scale @ px2texture @ shift, size, flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(warped, np.uint8)


def _develop(clip: Clip, camera: Camera, exposure_us: int, image: Image) -> None:
    """Add what lens and sensor do, in place: darker corners and a little noise, more of it at night."""
    row, column = (int(value) for value in stream("sensor", clip.name, camera.channel, exposure_us).integers(0, 97, 2))
    field, vignette = _sensor(*_size(camera))
    noise = field[row : row + camera.height_px, column : column + camera.width_px, None]
    image[...] = to_pixels(image * vignette + noise * np.float32(3.2 if clip.weather.night else 1.6))


@lru_cache(maxsize=2)
def _sensor(width_px: int, height_px: int) -> tuple[Floats, Floats]:
    """Return a field of noise that is larger than the picture, and the lens's brightness (H, W, 1)."""
    field = stream("sensor", "field").standard_normal((height_px + 97, width_px + 97), dtype=np.float32)
    y, x = np.mgrid[-1 : 1 : height_px * 1j, -1 : 1 : width_px * 1j]
    vignette = (1.02 - 0.12 * np.square(x * x + 0.5 * y * y)).astype(np.float32)
    return np.asarray(cv2.GaussianBlur(field, (3, 3), 0.6), np.float32), vignette[..., None]
