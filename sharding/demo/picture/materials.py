"""Textures of the blocks' sides and of the ground: noise, and a few rectangles where windows and lamps are."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from fuelrail.sharding.demo.rig import stream

if TYPE_CHECKING:
    Image = NDArray[np.uint8]
    Colour = tuple[int, int, int]

PX_PER_M: Final = 24
_FLOOR_M: Final = 3.1
_WALLS: Final = ((168, 122, 98), (196, 184, 162), (142, 138, 136), (184, 152, 112), (120, 88, 76), (206, 200, 190))
_LIT: Final = ((255, 222, 160), (250, 206, 130), (236, 236, 220))
_COLOURS: Final[dict[str, Colour]] = {
    "tyre": (30, 30, 32), "glass": (44, 54, 62), "metal": (96, 98, 100), "concrete": (170, 168, 162),
    "bark": (82, 66, 52), "leaves": (74, 94, 46), "trousers": (52, 54, 66), "skin": (196, 150, 120),
    "lamp": (110, 110, 110),
}  # fmt: skip
_GRAIN: Final = {"leaves": 30.0, "bark": 16.0, "concrete": 10.0, "facade": 9.0, "cloth": 12.0, "trousers": 10.0}


@lru_cache(maxsize=4)
def tile(name: str) -> NDArray[np.float32]:
    """Return noise (512, 512), mean 0 and standard deviation 1, that tiles seamlessly."""
    draw = stream("tile", name)
    total = np.zeros((512, 512), np.float32)
    for octave in range(7):
        step = 64 >> octave
        grid = np.pad(draw.standard_normal((512 // step,) * 2, dtype=np.float32), 2, mode="wrap")
        layer = cv2.resize(grid, None, fx=step, fy=step, interpolation=cv2.INTER_CUBIC)
        total += layer[2 * step : 2 * step + 512, 2 * step : 2 * step + 512] * 0.75**octave
    return np.asarray((total - total.mean()) / total.std(), np.float32)


def to_pixels(values: NDArray[np.float32]) -> Image:
    """Round and clip to 0..255."""
    return np.clip(np.rint(values), 0, 255).astype(np.uint8, order="C")


@lru_cache(maxsize=512)
def texture(
    material: str, side: str, size_m: tuple[float, float], colour: Colour, style: int, night: bool
) -> list[Image]:
    """Return a side's picture of ``size_m`` (width, height), and its halvings: level k is smaller by 2 ** k."""
    width, height = (max(8, min(1024, round(PX_PER_M * metres))) for metres in size_m)
    draw = stream("texture", material, side, style)
    base = _WALLS[style % len(_WALLS)] if material == "facade" else _COLOURS.get(material, colour)
    row, column = (int(value) for value in draw.integers(0, 512, 2))
    grain = np.roll(tile("grain"), (row, column), (0, 1))
    grain = np.tile(grain, (height // 512 + 1, width // 512 + 1))[:height, :width, None]
    shade = np.linspace(1.08, 0.82, height, dtype=np.float32)[:, None, None]
    image = to_pixels(np.asarray(base, np.float32) * shade + np.float32(_GRAIN.get(material, 5.0)) * grain)
    painter = _PAINTERS.get(material)
    if painter is not None and side not in ("top", "bottom"):
        painter(image, side, draw, night)
    levels = [image]
    while min(levels[-1].shape[:2]) >= 8:
        levels.append(cv2.resize(levels[-1], None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA).astype(np.uint8))
    return levels


def _box(image: Image, x: tuple[float, float], y: tuple[float, float], colour: Colour) -> None:
    """Fill a rectangle, given in shares of the picture."""
    height, width = image.shape[:2]
    image[round(y[0] * height) : round(y[1] * height), round(x[0] * width) : round(x[1] * width)] = colour


def _facade(image: Image, side: str, draw: np.random.Generator, night: bool) -> None:  # noqa: ARG001
    height, width = image.shape[:2]
    floors, bays = max(1, round(height / PX_PER_M / _FLOOR_M)), max(1, round(width / PX_PER_M / 2.6))
    shutters = bool(draw.integers(2))
    for floor in range(floors):
        for bay in range(bays):
            ground = floor == floors - 1
            x, y = (bay + 0.28, bay + 0.72), (floor + (0.3 if ground else 0.25), floor + (0.96 if ground else 0.75))
            lit = night and draw.random() < 0.3
            glass = _LIT[int(draw.integers(3))] if lit else (int(draw.integers(30, 76)),) * 3
            frame = ((x[0] - 0.05) / bays, (x[1] + 0.05) / bays), ((y[0] - 0.03) / floors, (y[1] + 0.03) / floors)
            _box(image, *frame, (214, 210, 202))
            if shutters and not ground:
                _box(image, ((x[0] - 0.17) / bays, (x[0] - 0.05) / bays), frame[1], (70, 84, 80))
                _box(image, ((x[1] + 0.05) / bays, (x[1] + 0.17) / bays), frame[1], (70, 84, 80))
            _box(image, (x[0] / bays, x[1] / bays), (y[0] / floors, y[1] / floors), glass)
            _box(image, ((bay + 0.49) / bays, (bay + 0.51) / bays), (y[0] / floors, y[1] / floors), (214, 210, 202))


def _body(image: Image, side: str, draw: np.random.Generator, night: bool) -> None:  # noqa: ARG001
    if side in ("left", "right"):
        for at in (0.19, 0.81):
            height, width = image.shape[:2]
            centre, radii = (round(at * width), height), (round(0.075 * width), round(0.55 * height))
            cv2.ellipse(image, centre, radii, 0, 0, 360, (26, 26, 28), -1)
            cv2.ellipse(image, centre, (radii[0] // 2, radii[1] // 2), 0, 0, 360, (130, 132, 136), -1)
        for door in (0.38, 0.6):
            _box(image, (door, door + 0.006), (0.05, 0.9), (30, 30, 32))
        return
    for x in ((0.05, 0.24), (0.76, 0.95)):
        _box(image, x, (0.2, 0.45), (255, 250, 232) if side == "front" else (220, 30, 26))
    _box(image, (0.35, 0.65), (0.6, 0.78), (226, 226, 220))
    _box(image, (0.0, 1.0), (0.86, 1.0), (36, 36, 38))


def _bus(image: Image, side: str, draw: np.random.Generator, night: bool) -> None:
    glass = (235, 226, 190) if night else (44, 54, 62)
    _box(image, (0.03, 0.97), (0.14, 0.52), glass)
    if side in ("left", "right"):
        for bay in range(1, 8):
            _box(image, (bay / 8 - 0.008, bay / 8 + 0.008), (0.14, 0.52), (60, 60, 62))
        return
    _body(image, side, draw, night)
    _box(image, (0.06, 0.94), (0.1, 0.5), glass)


def _cargo(image: Image, side: str, draw: np.random.Generator, night: bool) -> None:  # noqa: ARG001
    if side in ("left", "right"):
        _box(image, (0.1, 0.9), (0.3, 0.6), tuple(int(value) for value in draw.integers(40, 220, 3)))  # type: ignore[arg-type]
        return
    for post in (0.0, 0.49, 0.97):
        _box(image, (post, post + 0.03), (0.0, 1.0), (90, 90, 92))
    for x in ((0.04, 0.18), (0.82, 0.96)):
        _box(image, x, (0.93, 0.98), (220, 30, 26))


def _bands(image: Image, side: str, draw: np.random.Generator, night: bool) -> None:  # noqa: ARG001
    for at in (0.3, 0.65):
        _box(image, (0.0, 1.0), (at, at + 0.14), (240, 240, 238))


def _stripes(image: Image, side: str, draw: np.random.Generator, night: bool) -> None:  # noqa: ARG001
    height, width = image.shape[:2]
    slope = (np.arange(width)[None] + np.arange(height)[:, None]) // max(1, height // 2) % 2
    image[slope == 0] = (206, 40, 34)


_PAINTERS: Final = {
    "facade": _facade, "body": _body, "bus": _bus, "cargo": _cargo, "cone": _bands, "stripes": _stripes,
}  # fmt: skip
