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
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.sharding.demo.rig import stream

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
_GRAIN: Final = {"leaves": 24.0, "bark": 16.0, "facade": 9.0, "cloth": 12.0}
_SHADE: Final = np.array(
    (0.95, 0.78, 1.1), np.float32
)  # of sides across x, y and z of the unit box
_NOISE_PX: Final = 512


class Block(NamedTuple):
    """A block of one material between two corners in the unit box."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]
    material: str

    @property
    def corners(self) -> NDArray[np.float64]:
        """All eight corners (8, 3); not to be written to."""
        return _list_corners(self)


@lru_cache(maxsize=256)
def _list_corners(block: Block) -> NDArray[np.float64]:
    return np.stack(np.meshgrid(*zip(block.low, block.high, strict=True)), -1).reshape(8, 3)


def _make_block(
    x: tuple[float, float], z: tuple[float, float], half: float, material: str
) -> Block:
    return Block((x[0], -half, z[0]), (x[1], half, z[1]), material)


def _make_rider(seat: float) -> tuple[Block, ...]:
    wheels = (_make_block(x, (0.0, seat), 0.14, "tyre") for x in ((-0.5, -0.16), (0.16, 0.5)))
    return (
        *wheels,
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
    "vehicle.trailer": (*_WHEELS, _make_block((-0.5, 0.5), (0.2, 1.0), 0.5, "paint")),
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
        return _SHAPES["human" if self.kind.startswith("human.") else self.kind]

    def unit2global(self) -> NDArray[np.float64]:
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
    along = np.einsum(
        "ij,jrc->irc", sensor2unit[:3, :3].astype(rays.dtype), rays
    )  # unlike BLAS, in this thread alone
    with np.errstate(divide="ignore", invalid="ignore"):
        first, second = (
            (np.array(corner) - sensor2unit[:3, 3]).astype(rays.dtype)[:, None, None] / along
            for corner in (block.low, block.high)
        )
    entries = np.minimum(first, second)
    exits = np.maximum(first, second)
    # By pairs, which takes a third of the time of a reduction over an axis of three.
    enter = np.maximum(np.maximum(entries[0], entries[1]), entries[2])
    leave = np.minimum(np.minimum(exits[0], exits[1]), exits[2])
    is_met = (enter > 0) & (enter < leave)
    return np.where(is_met, enter, np.inf), entries


@lru_cache(maxsize=1)
def _make_noise() -> NDArray[np.float32]:
    """Return noise (512, 512), mean 0 and standard deviation 1, that tiles seamlessly and has
    more of the coarse.
    """
    frequency = np.fft.fftfreq(_NOISE_PX, 1 / _NOISE_PX)
    white = stream("tile", "grain").standard_normal((_NOISE_PX, _NOISE_PX))
    spectrum = np.fft.fft2(white) / np.maximum(np.hypot(frequency[:, None], frequency), 1.0) ** 1.4
    tile = np.fft.ifft2(spectrum).real
    return np.asarray((tile - tile.mean()) / tile.std(), np.float32)


def noise_at(x_m: Floats, y_m: Floats, px_per_m: float) -> Floats:
    """Return noise of mean 0 and standard deviation 1 at places on a surface, in metres."""
    x, y = (
        np.floor(place * np.float32(px_per_m)).astype(np.int32) % _NOISE_PX for place in (x_m, y_m)
    )
    return np.asarray(_make_noise()[y, x])


def colours(solid: Solid, material: str, places: Floats, axes: NDArray[np.intp]) -> Floats:
    """Return RGB (N, 3) in full light of places (3, N) in the unit box, on sides across these
    axes (N,).
    """
    x, y, z = places * np.array(solid.size_lwh, places.dtype)[:, None]
    across = np.where(axes == 0, y, x)
    up = np.where(axes == 2, y, z)
    grain = noise_at(across + solid.style, up, 24.0) * _GRAIN.get(material, 4.0)
    rgb = np.array(_COLOURS.get(material, solid.colour), np.float32) + grain[:, None]
    if material == "facade":
        rgb[(axes != 2) & (np.mod(across, 2.6) < 1.2) & (np.mod(up, 3.1) > 1.5)] = _COLOURS["glass"]
    elif material == "striped":
        rgb[np.mod(up, 0.3) < 0.13] = (240, 240, 238)
    return np.asarray(rgb * _SHADE[axes][:, None], np.float32)
