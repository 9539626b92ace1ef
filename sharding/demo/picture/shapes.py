"""What an object is made of: blocks in a unit box, which cameras draw, the lidar hits and other things hide behind.

Unit box coordinates: x from -0.5 (rear) to 0.5 (front), y from -0.5 (right) to 0.5 (left), z from 0 to 1 (top). They
are scaled to the size of the object's box, so that a shape fills its box and never leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    Span = tuple[float, float]

# Bottom left, bottom right, top right and top left corner of each side, seen from outside; vertices 0 to 3 are the
# bottom's front left, rear left, rear right and front right corners, 4 to 7 the top's.
_SIDES: Final = {
    "front": (3, 0, 4, 7), "rear": (1, 2, 6, 5), "left": (0, 1, 5, 4), "right": (2, 3, 7, 6),
    "top": (6, 7, 4, 5), "bottom": (1, 0, 3, 2),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Face:
    """A planar quadrangle: vertex numbers, counter-clockwise from outside; the side it is; where its texture lies.

    ``frame`` (3, 3): columns are the texture's direction to the right, its direction down and its top left corner, so
    ``frame @ (s, t, 1)`` is the unit-box point of texture coordinates s, t in 0..1.
    """

    vertices: tuple[int, int, int, int]
    side: str
    frame: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A convex block of one material. ``vertices`` (8, 3) in the unit box."""

    vertices: NDArray[np.float64]
    faces: tuple[Face, ...]
    material: str


def block(
    x: Span, z: Span, half_width: float, material: str, *, top_x: Span | None = None, top_half: float | None = None
) -> Part:
    """Return an upright block; its top may be smaller or larger than its bottom."""
    rows = []
    for (rear, front), half, height in ((x, half_width, z[0]), (top_x or x, top_half or half_width, z[1])):
        rows += [(front, half, height), (rear, half, height), (rear, -half, height), (front, -half, height)]
    vertices = np.array(rows)
    return Part(vertices, tuple(Face(at, side, _frame(vertices[list(at)])) for side, at in _SIDES.items()), material)


def _frame(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    bottom_left, bottom_right, top_right, top_left = corners
    rights = (bottom_right - bottom_left, top_right - top_left)
    right = max(rights, key=lambda one: float(one @ one))
    middle = (top_left + top_right) / 2
    return np.column_stack([right, (bottom_left + bottom_right) / 2 - middle, middle - right / 2])


def _axles(*places: float, top: float, reach: float = 0.06) -> tuple[Part, ...]:
    return tuple(block((x - reach, x + reach), (0.0, top), 0.46, "tyre") for x in places)


def _person(x: Span, legs: float, half: float) -> tuple[Part, ...]:
    middle = (x[0] + x[1]) / 2
    return (
        block(x, (legs, 0.84), half, "cloth", top_half=0.8 * half),
        block((middle - 0.16, middle + 0.16), (0.84, 1.0), 0.17, "skin"),
    )


def _cycle(wheel: float, half: float, material: str) -> tuple[Part, ...]:
    wheels = (block(x, (0.0, wheel), half, "tyre") for x in ((-0.5, -0.16), (0.16, 0.5)))
    return (*wheels, block((-0.16, 0.16), (0.3 * wheel, wheel), half, material))


_SHAPES: Final[dict[str, tuple[Part, ...]]] = {
    "vehicle.car": (
        *_axles(-0.31, 0.31, top=0.14),
        block((-0.5, 0.5), (0.14, 0.56), 0.5, "body", top_x=(-0.49, 0.47), top_half=0.48),
        block((-0.47, 0.26), (0.56, 0.95), 0.46, "glass", top_x=(-0.36, 0.07), top_half=0.37),
        block((-0.36, 0.07), (0.95, 1.0), 0.37, "paint"),
    ),
    "vehicle.truck": (
        *_axles(-0.36, -0.24, 0.36, top=0.15, reach=0.05),
        block((-0.5, 0.25), (0.15, 1.0), 0.5, "cargo"),
        block((0.26, 0.5), (0.15, 0.5), 0.47, "body"),
        block((0.26, 0.5), (0.5, 0.8), 0.47, "glass", top_x=(0.26, 0.45)),
        block((0.26, 0.45), (0.8, 0.86), 0.47, "paint"),
    ),
    "vehicle.bus.rigid": (*_axles(-0.3, 0.34, top=0.12), block((-0.5, 0.5), (0.12, 1.0), 0.5, "bus")),
    "vehicle.trailer": (*_axles(-0.4, -0.26, top=0.2, reach=0.05), block((-0.5, 0.5), (0.2, 1.0), 0.5, "cargo")),
    "vehicle.construction": (
        block((-0.42, 0.36), (0.0, 0.3), 0.5, "tyre"),
        block((-0.5, 0.02), (0.3, 0.64), 0.44, "paint"),
        block((0.03, 0.3), (0.3, 1.0), 0.3, "glass"),
        block((0.31, 0.5), (0.1, 0.9), 0.08, "paint", top_x=(0.31, 0.4)),
    ),
    "vehicle.bicycle": (*_cycle(0.42, 0.06, "paint"), *_person((-0.2, 0.16), 0.42, 0.5)),
    "vehicle.motorcycle": (*_cycle(0.5, 0.14, "body"), *_person((-0.24, 0.16), 0.5, 0.5)),
    "bicycle": (*_cycle(0.68, 0.06, "paint"), block((0.18, 0.26), (0.68, 1.0), 0.5, "metal", top_half=0.4)),
    "movable_object.trafficcone": (
        block((-0.5, 0.5), (0.0, 0.06), 0.5, "tyre"),
        block((-0.36, 0.36), (0.06, 1.0), 0.36, "cone", top_x=(-0.08, 0.08), top_half=0.08),
    ),
    "movable_object.barrier": (
        block((-0.5, 0.5), (0.0, 0.3), 0.5, "concrete"),
        block((-0.25, 0.25), (0.3, 1.0), 0.5, "stripes"),
    ),
    "human": (block((-0.5, 0.5), (0.0, 0.46), 0.34, "trousers", top_x=(-0.3, 0.3)), *_person((-0.34, 0.34), 0.46, 0.5)),
    "building": (block((-0.5, 0.5), (0.0, 1.0), 0.5, "facade"),),
    "tree": (block((-0.5, 0.5), (0.0, 1.0), 0.5, "bark"),),
    "crown": (
        block((-0.34, 0.34), (0.0, 0.3), 0.34, "leaves", top_x=(-0.5, 0.5), top_half=0.5),
        block((-0.5, 0.5), (0.3, 0.68), 0.5, "leaves", top_x=(-0.44, 0.44), top_half=0.44),
        block((-0.44, 0.44), (0.68, 1.0), 0.44, "leaves", top_x=(-0.2, 0.2), top_half=0.2),
    ),
    # In the unit box of a thin post; its arm reaches out of it over the road. Posts are never annotated.
    "post": (block((-0.5, 0.5), (0.0, 0.97), 0.5, "metal"), block((-0.4, 0.4), (0.97, 0.985), 6.0, "lamp")),
}  # fmt: skip


def shape_of(kind: str) -> tuple[Part, ...]:
    """Return the parts of an annotated category, of ``bicycle`` (one without its rider) or of a kind of scenery."""
    return _SHAPES["human" if kind.startswith("human.") else kind]


def painting_order(parts: tuple[Part, ...], eye: NDArray[np.float64]) -> list[int]:
    """Return the order in which to paint parts seen from ``eye`` (3,) in unit box coordinates, the farthest first.

    Each two of an object's parts are parted by a plane along one of the axes; the one on the eye's side comes later.
    """
    lows, highs = _extents(parts)
    # below[a, b]: a plane across an axis has a on its low side and b on its high side. An eye on b's side sees b first.
    below = highs[:, None] <= lows[None] + 1e-9
    ahead = (below & (eye >= lows)[None]).any(-1)
    astern = (below & (eye <= highs)[:, None]).any(-1)
    before = np.asarray(ahead | astern.T)
    before &= ~before.T  # where one plane says yes and another says no, neither hides the other
    order: list[int] = []
    left = list(range(len(parts)))
    while left:
        index = next((a for a in left if not before[left, a].any()), left[0])
        order.append(index)
        left.remove(index)
    return order


@lru_cache(maxsize=32)
def _extents(parts: tuple[Part, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.array([part.vertices.min(0) for part in parts]), np.array([part.vertices.max(0) for part in parts])
