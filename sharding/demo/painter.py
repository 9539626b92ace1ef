"""Objects painted over the backdrop, from the farthest to the nearest, and the finished picture of one camera."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import cv2
import numpy as np

from fuelrail.sharding.demo.backdrop import backdrop
from fuelrail.sharding.demo.facades import facade
from fuelrail.sharding.demo.light import Light, light_of
from fuelrail.sharding.demo.noise import to_pixels
from fuelrail.sharding.demo.poses import inverse, stream
from fuelrail.sharding.demo.raster import Image, Window, blend, clip_depth, convex_hull, coverage, normal_of, window_of
from fuelrail.sharding.demo.shapes import Face, Part, painting_order, shape_of
from fuelrail.sharding.demo.solids import Solid, far_to_near
from fuelrail.sharding.demo.textures import texture

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.sharding.demo.rig import Camera
    from fuelrail.sharding.demo.world import Clip

NEAR_M: Final = 0.3
INSET_M: Final = 0.02  # objects stay this far inside their boxes, as annotators leave a little room
_SHADOW_SHIFT: Final = 3
_SMALLEST_PX: Final = 0.7
_NOISE_MARGIN_PX: Final = 97


@dataclass(slots=True, eq=False)
class Canvas:
    """A picture being painted. ``owners`` (H, W) int32: the actor that each pixel mostly shows, -1 for none."""

    camera: Camera
    light: Light
    global2cam: NDArray[np.float64]
    image: Image
    owners: NDArray[np.int32] | None

    @property
    def eye(self) -> NDArray[np.float64]:
        """Global position (3,) of the camera."""
        position: NDArray[np.float64] = -self.global2cam[:3, :3].T @ self.global2cam[:3, 3]
        return position


def render(
    clip: Clip, camera: Camera, solids: list[Solid], exposure_us: int, *, owners: bool = False
) -> tuple[Image, NDArray[np.int32] | None]:
    """Picture (H, W, 3) RGB uint8 taken at ``exposure_us``, and on demand the actor that owns each pixel (H, W)."""
    light = light_of(clip, exposure_us)
    cam2global = clip.ego2global(exposure_us) @ camera.cam2ego
    global2cam = inverse(cam2global)
    seen = [solid for solid in solids if _in_view(solid, camera, global2cam)]
    shadows = _shadows(clip, camera, seen, global2cam)
    image = backdrop(clip, camera, light, shadows, _SHADOW_SHIFT)
    nobody = np.full((camera.height_px, camera.width_px), -1, np.int32) if owners else None
    canvas = Canvas(camera, light, global2cam, image, nobody)
    if seen:
        heights = np.array([(s.centre[2] - s.size_lwh[2] / 2, s.centre[2] + s.size_lwh[2] / 2) for s in seen])
        for index in far_to_near(np.array([solid.footprint() for solid in seen]), heights, canvas.eye[:2]):
            _paint(canvas, seen[index])
    _develop(clip, camera, exposure_us, canvas.image)
    return canvas.image, canvas.owners


def _in_view(solid: Solid, camera: Camera, global2cam: NDArray[np.float64]) -> bool:
    vertices = solid.vertices() @ global2cam[:3, :3].T + global2cam[:3, 3]
    ahead = vertices[:, 2] > NEAR_M
    if not ahead.any():
        return False
    if not ahead.all():
        return True
    x, y, _ = (camera.intrinsics @ (vertices / vertices[:, 2:]).T).round(6)
    # A lamp's arm, a shadow and a glow reach out of the box.
    margin = 0.5 * camera.width_px if solid.kind == "post" else 0.1 * camera.width_px
    return bool(
        x.max() > -margin
        and x.min() < camera.width_px + margin
        and y.max() > -margin
        and y.min() < camera.height_px + margin
    )


def _shadows(
    clip: Clip, camera: Camera, solids: list[Solid], global2cam: NDArray[np.float64]
) -> list[NDArray[np.int32]]:
    sun = clip.weather.sun
    polygons = []
    for solid in solids:
        base = solid.footprint()
        low = max(0.0, solid.centre[2] - solid.size_lwh[2] / 2)
        if sun is not None:
            tall = solid.centre[2] + solid.size_lwh[2] / 2
            slant = np.array(sun[:2]) / sun[2]
            base = _ground_hull(np.concatenate([base - slant * low, base - slant * tall * 0.96]))
        elif solid.actor < 0 or low > 0.5:
            continue
        ground = np.column_stack([base, np.zeros(len(base))]) @ global2cam[:3, :3].T + global2cam[:3, 3]
        kept = clip_depth(ground, NEAR_M)
        if len(kept) >= 3:
            pixels = convex_hull(_projected(camera, kept))
            limit = 4.0 * camera.width_px
            polygons.append(np.round(np.clip(pixels, -limit, limit) * (1 << _SHADOW_SHIFT)).astype(np.int32))
    return polygons


def _ground_hull(points: NDArray[np.float64]) -> NDArray[np.float64]:
    # Relative to the first point: large coordinates lose too much in float32.
    return np.asarray(convex_hull(points - points[0]) + points[0], np.float64)


def _projected(camera: Camera, points: NDArray[np.float64]) -> NDArray[np.float64]:
    image = points @ camera.intrinsics.T
    pixels: NDArray[np.float64] = image[:, :2] / image[:, 2:]
    return pixels


def unit2global(solid: Solid) -> NDArray[np.float64]:
    """Unit box coordinates of a solid's shape to global, (4, 4); annotated ones stay inside their boxes."""
    inset = INSET_M if solid.actor >= 0 else 0.0
    length, width, height = (size - 2.0 * inset for size in solid.size_lwh)
    c, s = math.cos(solid.yaw_rad), math.sin(solid.yaw_rad)
    x, y, z = solid.centre
    return np.array(
        [
            [c * length, -s * width, 0.0, x],
            [s * length, c * width, 0.0, y],
            [0.0, 0.0, height, z - height / 2.0],
            [0, 0, 0, 1],
        ]
    )


def _paint(canvas: Canvas, solid: Solid) -> None:
    shape = shape_of(solid.kind)
    placed = unit2global(solid)
    eye = (np.linalg.inv(placed) @ np.append(canvas.eye, 1.0))[:3]
    for index in painting_order(shape.parts, eye) if shape.parts else ():
        _paint_part(canvas, solid, shape.parts[index], placed)
    if shape.upright:
        part = _upright(solid, shape.upright, shape.side, canvas.eye)
        _paint_part(canvas, solid, part[0], part[1])
    if canvas.light.weather.night:
        _glow(canvas, solid, placed)


def _upright(solid: Solid, front: str, side: str, eye: NDArray[np.float64]) -> tuple[Part, NDArray[np.float64]]:
    # A vertical rectangle through the middle of the box that faces the camera, or the box's own plane of symmetry.
    length, width, height = (size - 2 * INSET_M for size in solid.size_lwh)
    x, y, z = solid.centre
    towards = math.atan2(eye[1] - y, eye[0] - x)
    name, angle, span = front, towards - math.pi / 2.0, min(length, width)
    if side:
        across = abs(math.sin(towards - solid.yaw_rad))
        name, angle, span = (
            (side, solid.yaw_rad, length) if across > 0.55 else (front, solid.yaw_rad + math.pi / 2, width)
        )
    elif solid.style % 2:
        angle += math.pi
    c, s = math.cos(angle), math.sin(angle)
    low = z - height / 2.0
    placed = np.array([[c * span, -s, 0, x], [s * span, c, 0, y], [0, 0, height, low], [0, 0, 0, 1]])
    vertices = np.array([(-0.5, 0, 0), (0.5, 0, 0), (0.5, 0, 1), (-0.5, 0, 1)], dtype=np.float64)
    frame = np.column_stack([vertices[1] - vertices[0], vertices[0] - vertices[3], vertices[3]])
    return Part(vertices, (Face((0, 1, 2, 3), name, frame),), flat=True), placed


def _texture(solid: Solid, face: Face, night: bool) -> list[Image]:
    if face.texture.startswith("facade"):
        along = face.texture == "facade_x"
        name = "front" if along else "gable"
        width = solid.size_lwh[0] if along else solid.size_lwh[1]
        return facade(solid.style, name, round(width, 3), round(solid.size_lwh[2], 3), night)
    return texture(face.texture, solid.colour, solid.style, night and solid.lamps)


def _paint_part(canvas: Canvas, solid: Solid, part: Part, placed: NDArray[np.float64]) -> None:
    camera = canvas.camera
    unit2cam = canvas.global2cam @ placed
    vertices = part.vertices @ unit2cam[:3, :3].T + unit2cam[:3, 3]
    if (vertices[:, 2] < NEAR_M).all():
        return
    faces = []
    for face in part.faces:
        corners = vertices[list(face.vertices)]
        normal = normal_of(corners)
        if part.flat or normal @ corners[0] < 0:
            kept = clip_depth(corners, NEAR_M)
            if len(kept) >= 3:
                faces.append((face, _projected(camera, kept), normal))
    if not faces:
        return
    hull = convex_hull(np.concatenate([polygon for _, polygon, _ in faces]))
    window = window_of(hull, camera.width_px, camera.height_px)
    if window is None or len(hull) < 3 or np.ptp(hull, axis=0).max() < _SMALLEST_PX:
        return
    night = canvas.light.weather.night
    patch: Image | None = None
    see_through: NDArray[np.float32] | None = None
    distance = float(np.linalg.norm(vertices.mean(0)))
    for face, polygon, normal in faces:
        drawn = _warped(
            _texture(solid, face, night), camera.intrinsics @ unit2cam[:3] @ _homogeneous(face.frame), polygon, window
        )
        if drawn.shape[2] == 4:
            see_through = drawn[..., 3].astype(np.float32) * np.float32(1.0 / 255.0)
            drawn = np.ascontiguousarray(drawn[..., :3])
        gain = _gain(canvas, solid, face, part, placed, normal)
        drawn = _lit(drawn, gain, *canvas.light.through_air(distance))
        if patch is None:
            patch = drawn
        else:
            inner = Window(0, 0, *drawn.shape[:2])
            blend(patch, inner, drawn, coverage(polygon - (window.left, window.top), inner, inset_px=-0.5))
    assert patch is not None
    alpha = coverage(hull, window)
    if see_through is not None:
        alpha *= see_through
    blend(canvas.image, window, patch, alpha)
    if canvas.owners is not None:
        canvas.owners[window.slices][alpha >= 0.5] = solid.actor


def _homogeneous(frame: NDArray[np.float64]) -> NDArray[np.float64]:
    # Columns right, down (directions) and corner (a point), (4, 3).
    return np.vstack([frame, [0.0, 0.0, 1.0]])


def _gain(
    canvas: Canvas, solid: Solid, face: Face, part: Part, placed: NDArray[np.float64], normal_cam: NDArray[np.float64]
) -> NDArray[np.float32]:
    corners = part.vertices[list(face.vertices)].mean(0)
    point = placed[:3, :3] @ corners + placed[:3, 3]
    normal = canvas.global2cam[:3, :3].T @ normal_cam
    normal /= max(float(np.linalg.norm(normal)), 1e-12)
    if part.flat:
        normal = normal if normal @ (canvas.eye - point) > 0 else -normal
    gain = canvas.light.on_face(point, normal)
    if canvas.light.weather.night and solid.lamps and face.texture in _EMITTING:
        gain = np.maximum(gain, 0.85)
    elif canvas.light.weather.night and face.texture.startswith("facade"):
        gain = np.minimum(gain + np.float32(0.22), 1.0)
    return gain


_EMITTING: Final = frozenset({"front", "rear", "bus_side", "bus_front", "bus_rear"})


def _warped(
    levels: list[Image], texture2px: NDArray[np.float64], polygon: NDArray[np.float64], window: Window
) -> Image:
    height, width = levels[0].shape[:2]
    # Texture pixels are unit squares from its edge; pixel i has its centre at i + 1/2 there and at i in the image.
    px2texture = np.linalg.inv(texture2px)
    at = polygon.mean(0)
    places = (at + np.array([[0, 0], [1, 0], [0, 1]])) @ px2texture[:, :2].T + px2texture[:, 2]
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
    border = cv2.BORDER_REPLICATE if chosen.shape[2] == 3 else cv2.BORDER_CONSTANT
    warped = cv2.warpPerspective(chosen, scale @ px2texture @ shift, size, flags=flags, borderMode=border)
    return np.asarray(warped, np.uint8)


def _lit(image: Image, gain: NDArray[np.float32], left: float, haze: NDArray[np.float32]) -> Image:
    factors = np.zeros((3, 4), np.float64)
    factors[:, :3] = np.diag(gain * left)
    factors[:, 3] = haze
    return np.asarray(cv2.transform(image, factors), np.uint8)


def _glow(canvas: Canvas, solid: Solid, placed: NDArray[np.float64]) -> None:
    """Halos of lamps at night, over what is already painted; nearer objects are painted over them."""
    lamps: list[tuple[tuple[float, float, float], tuple[int, int, int], float, tuple[float, float, float]]] = []
    if solid.kind == "post":
        lamps = [
            ((0.0, 5.0, 0.97), (255, 206, 140), 0.55, (0.0, 0.0, 0.0)),
            ((0.0, -5.0, 0.97), (255, 206, 140), 0.55, (0.0, 0.0, 0.0)),
        ]
    elif solid.lamps and solid.kind in ("vehicle.car", "vehicle.truck", "vehicle.bus.rigid"):
        z = {"vehicle.car": 0.43, "vehicle.truck": 0.26, "vehicle.bus.rigid": 0.27}[solid.kind]
        for y in (-0.37, 0.37):
            lamps.append(((0.5, y, z), (255, 250, 232), 0.34, (1.0, 0.0, 0.0)))
            lamps.append(((-0.5, y, z + 0.06), (255, 40, 30), 0.22, (-1.0, 0.0, 0.0)))
    for place, colour, radius_m, facing in lamps:
        point = placed[:3, :3] @ place + placed[:3, 3]
        towards = canvas.eye - point
        strength = 1.0
        if any(facing):
            direction = placed[:3, :3] @ facing
            strength = float(direction @ towards) / float(np.linalg.norm(direction) * np.linalg.norm(towards))
        if strength > 0.05:
            _halo(canvas, point, colour, radius_m, min(1.0, strength))
            if canvas.light.weather.rain:  # on the wet road, drawn out towards the camera
                _halo(canvas, point * (1, 1, -1), colour, radius_m * 0.8, 0.4 * strength, stretch=5.0)


def _halo(
    canvas: Canvas,
    point: NDArray[np.float64],
    colour: tuple[int, int, int],
    radius_m: float,
    strength: float,
    stretch: float = 1.0,
) -> None:
    camera = canvas.camera
    seen = canvas.global2cam[:3, :3] @ point + canvas.global2cam[:3, 3]
    if seen[2] < 1.0:
        return
    x, y = _projected(camera, seen[None])[0]
    radius = min(0.09 * camera.width_px, camera.intrinsics[0, 0] * radius_m / seen[2] + 1.5)
    reach = np.array([radius, radius * stretch]) * 2.2
    middle = np.array([x, y])
    window = window_of(np.array([middle - reach, middle + reach]), camera.width_px, camera.height_px, 0.0)
    if window is None:
        return
    across = np.exp(-np.square((np.arange(window.left, window.right) - x) / radius))
    down = np.exp(-np.square((np.arange(window.top, window.bottom) - y) / (radius * stretch)))
    glow = (0.75 * strength * down[:, None] * across[None, :]).astype(np.float32)
    target = canvas.image[window.slices]
    lit = target.astype(np.float32)
    target[...] = to_pixels(lit + (np.asarray(colour, np.float32) - lit * np.float32(0.5)) * glow[..., None])


def _develop(clip: Clip, camera: Camera, exposure_us: int, image: Image) -> None:
    """What lens and sensor add, in place: darker corners and a little noise, more of it at night."""
    field, vignette = _sensor(camera.width_px, camera.height_px)
    draw = stream("sensor", clip.name, camera.channel, exposure_us)
    row, column = (int(value) for value in draw.integers(0, _NOISE_MARGIN_PX, 2))
    noise = field[row : row + camera.height_px, column : column + camera.width_px]
    strength = 3.2 if clip.weather.night else 1.6
    shaded = cv2.multiply(image, vignette, dtype=cv2.CV_32F)
    image[...] = to_pixels(shaded + noise[..., None] * np.float32(strength))


@lru_cache(maxsize=2)
def _sensor(width_px: int, height_px: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    # A field of noise that is larger than the picture, and the lens's brightness (H, W, 3).
    shape = (height_px + _NOISE_MARGIN_PX, width_px + _NOISE_MARGIN_PX)
    field = cv2.GaussianBlur(stream("sensor", "field").standard_normal(shape, dtype=np.float32), (3, 3), 0.6)
    y, x = np.mgrid[-1 : 1 : height_px * 1j, -1 : 1 : width_px * 1j]
    vignette = (1.02 - 0.12 * np.square(x * x + 0.5 * y * y)).astype(np.float32)
    return np.asarray(field, np.float32), np.ascontiguousarray(np.repeat(vignette[..., None], 3, axis=2))
