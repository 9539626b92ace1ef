"""What an object is made of: blocks in a unit box, which cameras draw and the lidar hits, and their colours.

Unit box coordinates: x from -0.5 (rear) to 0.5 (front), y from -0.5 (right) to 0.5 (left), z from 0 to 1 (top). They
are scaled to the size of the object's box, so that a shape fills its box and never leaves it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from fuelrail.sharding.demo.rig import stream

if TYPE_CHECKING:
    from fuelrail.sharding.demo.solids import Solid

    Floats = NDArray[np.floating[Any]]

# Vertices of each side: bottom left, bottom right, top right and top left corner, seen from outside. Vertices 0 to 3
# are the bottom's front left, rear left, rear right and front right corners, 4 to 7 the top's.
SIDES: Final = {
    "front": (3, 0, 4, 7), "rear": (1, 2, 6, 5), "left": (0, 1, 5, 4), "right": (2, 3, 7, 6),
    "top": (6, 7, 4, 5), "bottom": (1, 0, 3, 2),
}  # fmt: skip
_COLOURS: Final = {
    "tyre": (30, 30, 32), "glass": (44, 54, 62), "concrete": (170, 168, 162), "bark": (82, 66, 52),
    "leaves": (74, 94, 46), "trousers": (52, 54, 66), "skin": (196, 150, 120), "metal": (96, 98, 100),
    "lamp": (190, 180, 160),
}  # fmt: skip
_WALLS: Final = ((168, 122, 98), (196, 184, 162), (142, 138, 136), (184, 152, 112), (120, 88, 76), (206, 200, 190))
_GRAIN: Final = {"leaves": 24.0, "bark": 16.0, "facade": 9.0, "cloth": 12.0}
_NOISE_PX: Final = 512
_NOISE_PX_PER_M: Final = 24


class ShapePart(NamedTuple):
    """A convex block of one material.

    ``vertices`` (8, 3) in the unit box; ``frames`` (6, 3, 3) for each side: its texture's direction to the right,
    direction down and top left corner as columns, so ``frame @ (s, t, 1)`` is the point of s, t in 0..1.
    """

    vertices: NDArray[np.float64]
    frames: NDArray[np.float64]
    material: str


def _block(x: tuple[float, float], z: tuple[float, float], half: float, material: str, taper: float = 1.0) -> ShapePart:
    """Return an upright block of that half width; its top is ``taper`` times as long and wide as its bottom."""
    middle = (x[0] + x[1]) / 2
    vertices = np.array(
        [
            (middle + (at - middle) * scale, side * half * scale, height)
            for height, scale in zip(z, (1.0, taper), strict=True)
            for at, side in ((x[1], 1), (x[0], 1), (x[0], -1), (x[1], -1))
        ]
    )
    frames = []
    for bottom_left, bottom_right, top_right, top_left in (vertices[list(at)] for at in SIDES.values()):
        right = max(bottom_right - bottom_left, top_right - top_left, key=lambda one: float(one @ one))
        middle_top = (top_left + top_right) / 2
        frames.append(np.column_stack([right, (bottom_left + bottom_right) / 2 - middle_top, middle_top - right / 2]))
    return ShapePart(vertices, np.array(frames), material)


def _wheels(top: float) -> ShapePart:
    return _block((-0.42, 0.42), (0.0, top), 0.46, "tyre")


def _person(legs: float, x: float) -> tuple[ShapePart, ...]:
    return _block((-x, x), (legs, 0.84), 0.5, "cloth", 0.8), _block((-0.16, 0.16), (0.84, 1.0), 0.17, "skin")


def _cycle(wheel: float, half: float) -> tuple[ShapePart, ...]:
    wheels = (_block(x, (0.0, wheel), half, "tyre") for x in ((-0.5, -0.16), (0.16, 0.5)))
    return (*wheels, _block((-0.16, 0.16), (0.3 * wheel, wheel), half, "paint"))


_SHAPES: Final[dict[str, tuple[ShapePart, ...]]] = {
    "vehicle.car": (
        _wheels(0.14), _block((-0.5, 0.5), (0.14, 0.56), 0.5, "body", 0.97),
        _block((-0.47, 0.26), (0.56, 1.0), 0.46, "glass", 0.72),
    ),
    "vehicle.truck": (
        _wheels(0.15), _block((-0.5, 0.25), (0.15, 1.0), 0.5, "cargo"), _block((0.26, 0.5), (0.15, 0.5), 0.47, "body"),
        _block((0.26, 0.49), (0.5, 0.84), 0.47, "glass", 0.9),
    ),
    "vehicle.bus.rigid": (_wheels(0.12), _block((-0.5, 0.5), (0.12, 1.0), 0.5, "bus")),
    "vehicle.trailer": (_wheels(0.2), _block((-0.5, 0.5), (0.2, 1.0), 0.5, "cargo")),
    "vehicle.construction": (
        _block((-0.42, 0.36), (0.0, 0.3), 0.5, "tyre"), _block((-0.5, 0.02), (0.3, 0.64), 0.44, "paint"),
        _block((0.03, 0.3), (0.3, 1.0), 0.3, "glass"), _block((0.31, 0.5), (0.1, 0.9), 0.08, "paint"),
    ),
    "vehicle.bicycle": (*_cycle(0.42, 0.06), *_person(0.42, 0.18)),
    "vehicle.motorcycle": (*_cycle(0.5, 0.14), *_person(0.5, 0.2)),
    "bicycle": (*_cycle(0.68, 0.06), _block((0.18, 0.26), (0.68, 1.0), 0.5, "metal")),
    "movable_object.trafficcone": (
        _block((-0.5, 0.5), (0.0, 0.06), 0.5, "tyre"), _block((-0.36, 0.36), (0.06, 1.0), 0.36, "striped", 0.22),
    ),
    "movable_object.barrier": (
        _block((-0.5, 0.5), (0.0, 0.3), 0.5, "concrete"), _block((-0.25, 0.25), (0.3, 1.0), 0.5, "striped"),
    ),
    "human": (_block((-0.4, 0.4), (0.0, 0.46), 0.34, "trousers"), *_person(0.46, 0.3)),
    "building": (_block((-0.5, 0.5), (0.0, 1.0), 0.5, "facade"),),
    "tree": (_block((-0.5, 0.5), (0.0, 1.0), 0.5, "bark"),),
    "crown": (
        _block((-0.34, 0.34), (0.0, 0.3), 0.34, "leaves", 1.47), _block((-0.5, 0.5), (0.3, 0.68), 0.5, "leaves", 0.88),
        _block((-0.44, 0.44), (0.68, 1.0), 0.44, "leaves", 0.45),
    ),
    # In the unit box of a thin post; its arm reaches out of it over the road. Posts are never annotated.
    "post": (_block((-0.5, 0.5), (0.0, 0.97), 0.5, "metal"), _block((-0.4, 0.4), (0.97, 0.985), 6.0, "lamp")),
}  # fmt: skip


def shape_of(kind: str) -> tuple[ShapePart, ...]:
    """Return the parts of an annotated category, of ``bicycle`` (one without its rider) or of a kind of scenery."""
    return _SHAPES["human" if kind.startswith("human.") else kind]


@lru_cache(maxsize=1)
def _noise() -> NDArray[np.float32]:
    """Return noise (512, 512), mean 0 and standard deviation 1, that tiles seamlessly."""
    draw = stream("tile", "grain")
    total = np.zeros((_NOISE_PX, _NOISE_PX), np.float32)
    for octave in range(7):
        step = 64 >> octave
        grid = np.pad(draw.standard_normal((_NOISE_PX // step,) * 2, dtype=np.float32), 2, mode="wrap")
        layer = cv2.resize(grid, None, fx=step, fy=step, interpolation=cv2.INTER_CUBIC)
        total += layer[2 * step : 2 * step + _NOISE_PX, 2 * step : 2 * step + _NOISE_PX] * 0.75**octave
    return np.asarray((total - total.mean()) / total.std(), np.float32)


def noise_at(x_m: Floats, y_m: Floats, px_per_m: float = _NOISE_PX_PER_M) -> Floats:
    """Return noise of mean 0 and standard deviation 1 at places on a surface, in metres."""
    x, y = (np.mod(place * np.float32(px_per_m), _NOISE_PX).astype(np.intp) for place in (x_m, y_m))
    return np.asarray(_noise()[y % _NOISE_PX, x % _NOISE_PX], np.float32)


def colours(solid: Solid, part: ShapePart, side: str, s: Floats, t: Floats, size_m: Floats) -> tuple[Floats, Floats]:
    """Return RGB (N, 3) of places on a side in full light, and the light of their own at night (N,), 0 for none.

    ``s`` (to the right) and ``t`` (down) are float32 (N,), 0 to 1 on the side, whose width and height are ``size_m``.
    """
    material, upright = part.material, side not in ("top", "bottom")
    base = _WALLS[solid.style % len(_WALLS)] if material == "facade" else _COLOURS.get(material, solid.colour)
    grain = noise_at(s * size_m[0] + solid.style, t * size_m[1], _NOISE_PX_PER_M) * _GRAIN.get(material, 4.0)
    found = np.array(base, np.float32) * (1.08 - 0.26 * t)[:, None] + grain[:, None]
    glow = np.zeros(len(s), np.float32)
    if material == "facade" and upright:
        bays, floors = (max(1, round(float(size) / pitch)) for size, pitch in zip(size_m, (2.6, 3.1), strict=True))
        x, y = np.abs(np.mod(s * bays, 1.0) - 0.5), np.abs(np.mod(t * floors, 1.0) - 0.5)
        found[(x < 0.27) & (y < 0.28)] = (214, 210, 202)
        pane = (x < 0.22) & (y < 0.25) & (x > 0.01)
        number = np.floor(s * bays) * 37 + np.floor(t * floors) * 101 + solid.style
        found[pane] = (30.0 + np.mod(number * 29.0, 46.0))[pane, None]
        glow[pane & (np.mod(number * 53.0, 10.0) < 3.0)] = 3.2
    elif material in ("body", "bus", "cargo") and side in ("front", "rear"):
        lamps = (np.abs(np.abs(s - 0.5) - 0.36) < 0.1) & (np.abs(t - (0.33 if material == "body" else 0.92)) < 0.1)
        found[lamps] = (255, 250, 232) if side == "front" else (220, 30, 26)
        glow[lamps] = 0.9 if solid.lamps else 0.0
        found[(np.abs(s - 0.5) < 0.15) & (np.abs(t - 0.75) < 0.06)] = (226, 226, 220)
    elif material == "body" and upright:  # wheels
        found[np.square((np.abs(s - 0.5) - 0.31) / 0.075) + np.square((1.0 - t) / 0.55) < 1.0] = (26, 26, 28)
    elif material == "striped":
        found[np.mod(t * 3.0 + (s if side in ("front", "rear") else 0.0), 1.0) < 0.45] = (240, 240, 238)
    if material == "bus" and upright:
        pane = (np.abs(t - 0.33) < 0.19) & (np.mod(s * 8.0, 1.0) > 0.08)
        found[pane] = _COLOURS["glass"]
        glow[pane] = 2.4 if solid.lamps else 0.0
    if material == "lamp":
        glow[:] = 1.3
    return found, glow
