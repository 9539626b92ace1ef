"""What stands and moves in the world: upright objects made of blocks, which cameras draw and the
lidar hits.

Unit box coordinates of an object: x from -0.5 (rear) to 0.5 (front), y from -0.5 (right) to 0.5
(left), z from 0 to 1 (top). They are scaled to the object's box, so a shape fills its box and never
leaves it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64

Floats = NDArray[np.floating[Any]]

INSET_M: Final = 0.02  # as annotators leave a little room
_COLOURS: Final = {
    "tyre": (30, 30, 32),
    "glass": (44, 54, 62),
    "concrete": (170, 168, 162),
    "bark": (82, 66, 52),
    "leaves": (74, 94, 46),
    "trousers": (52, 54, 66),
    "skin": (196, 150, 120),
    "metal": (96, 98, 100),
}
_SHADE: Final = np.array((0.95, 0.78, 1.1))  # of sides across x, y and z of the unit box


class _Repeated(NamedTuple):
    """Rectangles that repeat over a side; a size of 0: over its whole length."""

    every_m: tuple[float, float]  # across and up
    size_m: tuple[float, float]
    rgb: tuple[int, int, int]


_DETAILS: Final = {
    "facade": _Repeated((2.6, 3.1), (1.2, 1.6), _COLOURS["glass"]),
    "striped": _Repeated((1.0, 0.3), (0.0, 0.13), (240, 240, 238)),
    "leaves": _Repeated((0.34, 0.31), (0.2, 0.17), (96, 118, 62)),
}


class Block(NamedTuple):
    """A block of one material between two corners in the unit box."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]
    material: str

    @property
    def corners(self) -> F64:
        """All eight corners (8, 3); not to be written to."""
        return _list_corners(self)


@lru_cache(maxsize=256)
def _list_corners(block: Block) -> F64:
    axes = zip(block.low, block.high, strict=True)
    grid = np.meshgrid(*axes)
    return np.stack(grid, -1).reshape(8, 3)


def _make_block(
    x: tuple[float, float],
    z: tuple[float, float],
    half: float,
    material: str,
) -> Block:
    low = (x[0], -half, z[0])
    high = (x[1], half, z[1])
    return Block(low, high, material)


def _make_rider(seat: float) -> tuple[Block, ...]:
    return (
        _make_block((-0.5, -0.16), (0.0, seat), 0.14, "tyre"),
        _make_block((0.16, 0.5), (0.0, seat), 0.14, "tyre"),
        _make_block((-0.2, 0.2), (0.3 * seat, 0.84), 0.5, "cloth"),
        _make_block((-0.1, 0.1), (0.84, 1.0), 0.2, "skin"),
    )


_WHEELS: Final = (
    _make_block((-0.42, -0.22), (0.0, 0.2), 0.46, "tyre"),
    _make_block((0.2, 0.4), (0.0, 0.2), 0.46, "tyre"),
)
_SHAPES: Final[dict[str, tuple[Block, ...]]] = {
    "vehicle.car": (
        *_WHEELS,
        _make_block((-0.5, 0.5), (0.15, 0.56), 0.5, "paint"),
        _make_block((-0.44, 0.22), (0.56, 1.0), 0.44, "glass"),
    ),
    "vehicle.truck": (
        *_WHEELS,
        _make_block((-0.5, 0.25), (0.15, 1.0), 0.5, "paint"),
        _make_block((0.26, 0.5), (0.15, 0.5), 0.47, "metal"),
        _make_block((0.26, 0.47), (0.5, 0.84), 0.47, "glass"),
    ),
    "vehicle.bus.rigid": (
        *_WHEELS,
        _make_block((-0.5, 0.5), (0.12, 0.45), 0.5, "paint"),
        _make_block((-0.49, 0.49), (0.45, 0.85), 0.49, "glass"),
        _make_block((-0.5, 0.5), (0.85, 1.0), 0.5, "paint"),
    ),
    "vehicle.trailer": (
        *_WHEELS,
        _make_block((-0.5, 0.5), (0.2, 1.0), 0.5, "paint"),
    ),
    "vehicle.construction": (
        _make_block((-0.42, 0.36), (0.0, 0.3), 0.5, "tyre"),
        _make_block((-0.5, 0.02), (0.3, 0.64), 0.44, "paint"),
        _make_block((0.03, 0.3), (0.3, 1.0), 0.3, "glass"),
        _make_block((0.31, 0.5), (0.1, 0.9), 0.08, "paint"),
    ),
    "vehicle.bicycle": _make_rider(0.42),
    "vehicle.motorcycle": _make_rider(0.5),
    "movable_object.trafficcone": (
        _make_block((-0.5, 0.5), (0.0, 0.06), 0.5, "tyre"),
        _make_block((-0.3, 0.3), (0.06, 0.5), 0.3, "striped"),
        _make_block((-0.16, 0.16), (0.5, 1.0), 0.16, "striped"),
    ),
    "movable_object.barrier": (
        _make_block((-0.5, 0.5), (0.0, 0.3), 0.5, "concrete"),
        _make_block((-0.25, 0.25), (0.3, 1.0), 0.5, "striped"),
    ),
    "human": (
        _make_block((-0.4, 0.4), (0.0, 0.46), 0.34, "trousers"),
        _make_block((-0.3, 0.3), (0.46, 0.84), 0.5, "cloth"),
        _make_block((-0.16, 0.16), (0.84, 1.0), 0.17, "skin"),
    ),
    "building": (_make_block((-0.5, 0.5), (0.0, 1.0), 0.5, "facade"),),
    "trunk": (_make_block((-0.5, 0.5), (0.0, 1.0), 0.5, "bark"),),
    "crown": (
        _make_block((-0.36, 0.36), (0.0, 0.25), 0.36, "leaves"),
        _make_block((-0.5, 0.5), (0.25, 0.7), 0.5, "leaves"),
        _make_block((-0.36, 0.36), (0.7, 1.0), 0.36, "leaves"),
    ),
    "post": (_make_block((-0.5, 0.5), (0.0, 1.0), 0.5, "metal"),),
}


@dataclass(frozen=True, slots=True)
class Solid:
    """One upright box.

    ``kind`` is an annotated category or a kind of scenery; ``style`` shifts its texture.

    ``actor``: index in the clip's actors, -1 for scenery.
    """

    kind: str
    actor: int
    centre: tuple[float, float, float]
    yaw_rad: float
    size_lwh: tuple[float, float, float]
    colour: tuple[int, int, int]
    style: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What it is made of."""
        return _SHAPES[self.shape]

    @property
    def shape(self) -> str:
        """The name of its shape."""
        if self.kind.startswith("human."):
            return "human"
        return self.kind

    def unit2global(self) -> F64:
        """Return unit box coordinates to global, (4, 4); annotated objects stay a little inside
        their boxes.
        """
        inset = INSET_M if self.actor >= 0 else 0.0
        length, width, height = (size - 2.0 * inset for size in self.size_lwh)
        c = math.cos(self.yaw_rad)
        s = math.sin(self.yaw_rad)
        x, y, z = self.centre
        return np.array(
            [
                [c * length, -s * width, 0.0, x],
                [s * length, c * width, 0.0, y],
                [0.0, 0.0, height, z - height / 2.0],
                [0, 0, 0, 1],
            ]
        )


def meet(block: Block, sensor2unit: Floats, rays: Floats) -> tuple[Floats, Floats]:
    """Return where rays (3, R, C) from a sensor, in its frame, enter a block, as multiples of them;
    inf for a miss.

    That is (R, C), and (3, R, C) where they pass the nearer of the two sides across each axis: the
    side that a ray enters by is across the axis of the largest of these.
    """
    # A ray is inside from the last entry between two opposite sides to the first exit.
    # In this thread alone, unlike BLAS.
    turn = sensor2unit[:3, :3].astype(rays.dtype)
    along = np.einsum("ij,jrc->irc", turn, rays)
    sensor = sensor2unit[:3, 3]
    low = (np.array(block.low) - sensor).astype(rays.dtype)
    high = (np.array(block.high) - sensor).astype(rays.dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = low[:, None, None] / along
        second = high[:, None, None] / along
    entries = np.minimum(first, second)
    exits = np.maximum(first, second)
    # By pairs, which takes a third of the time of a reduction over an axis of three.
    enter = np.maximum(entries[0], entries[1])
    enter = np.maximum(enter, entries[2])
    leave = np.minimum(exits[0], exits[1])
    leave = np.minimum(leave, exits[2])
    is_met = (enter > 0) & (enter < leave)
    return np.where(is_met, enter, np.inf), entries


class Sides(NamedTuple):
    """The sides of a shape's blocks, all six of each.

    Attributes:
        quads: corners (N, 4, 3) in the unit box, counter-clockwise as seen from outside.
        axes: (N,), the axis that each is across.
        blocks: (N,), number of the block.
        block_middles: (N, 3).
        materials: of each.
    """

    quads: F64
    axes: NDArray[np.intp]
    blocks: NDArray[np.intp]
    block_middles: F64
    materials: tuple[str, ...]


class Details(NamedTuple):
    """What is on a side, such as windows: corners (N, 4, 3) in the unit box, and their colour."""

    quads: F64
    rgb: F64


@lru_cache(maxsize=64)
def list_sides(shape: str) -> Sides:
    """Return the sides of a shape."""
    quads = []
    axes = []
    numbers = []
    middles = []
    materials = []
    for number, block in enumerate(_SHAPES[shape]):
        low = np.array(block.low)
        high = np.array(block.high)
        for axis in range(3):
            first = (axis + 1) % 3
            second = (axis + 2) % 3
            for is_high in (False, True):
                quad = np.empty((4, 3))
                quad[:, axis] = high[axis] if is_high else low[axis]
                quad[1:3, first] = high[first]
                quad[[0, 3], first] = low[first]
                quad[:2, second] = low[second]
                quad[2:, second] = high[second]
                quads.append(quad if is_high else quad[::-1])
                axes.append(axis)
                numbers.append(number)
                middles.append((low + high) / 2.0)
                materials.append(block.material)
    return Sides(
        quads=np.array(quads),
        axes=np.array(axes),
        blocks=np.array(numbers),
        block_middles=np.array(middles),
        materials=tuple(materials),
    )


def side_colours(solid: Solid, sides: Sides) -> F64:
    """Return the colours (N, 3) of a solid's sides in full light."""
    colours = np.array([_COLOURS.get(material, solid.colour) for material in sides.materials])
    shades = _SHADE[sides.axes]
    return np.asarray(colours * shades[:, None], np.float64)


def list_details(solid: Solid, side: int) -> Details | None:
    """Return the windows or stripes of a side, by its number in `list_sides`; None for others."""
    sides = list_sides(solid.shape)
    axis = int(sides.axes[side])
    material = sides.materials[side]
    if axis == 2 or material not in _DETAILS:
        return None
    detail = _DETAILS[material]
    quad = sides.quads[side]
    across = 1 - axis
    length = solid.size_lwh[across]
    height = solid.size_lwh[2]
    columns = _repeat(
        quad[:, across] * length,
        every=detail.every_m[0],
        size=detail.size_m[0],
    )
    rows = _repeat(
        quad[:, 2] * height,
        every=detail.every_m[1],
        size=detail.size_m[1],
    )
    if not len(columns) or not len(rows):
        return None
    grid = (len(columns), len(rows), 2)
    column = np.broadcast_to(columns[:, None], grid).reshape(-1, 2)
    row = np.broadcast_to(rows[None], grid).reshape(-1, 2)
    quads = np.empty((len(column), 4, 3))
    quads[:, :, axis] = quad[0, axis]
    # Counter-clockwise from the low corner.
    quads[:, :, across] = column[:, (0, 1, 1, 0)] / length
    quads[:, :, 2] = row[:, (0, 0, 1, 1)] / height
    rgb = np.array(detail.rgb) * _SHADE[axis]
    return Details(quads, np.asarray(rgb, np.float64))


def _repeat(corners: F64, every: float, size: float) -> F64:
    """Return spans (N, 2) of a size at equal distances, centred between the outermost corners."""
    start = corners.min()
    end = corners.max()
    if size == 0.0:
        return np.array([[start, end]])
    count = int((end - start) / every)
    first = start + (end - start - count * every + every - size) / 2.0
    starts = first + every * np.arange(count)
    return np.stack([starts, starts + size], -1)
