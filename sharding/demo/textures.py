"""Textures of objects, painted once: each a colour image, or one with a fourth channel for what is see-through.

Images are RGB(A) uint8. A texture is asked for by name, colour, style and whether it is night; facades of buildings
have a module of their own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import cv2
import numpy as np

from fuelrail.sharding.demo.brush import Look, box, clear, glossy, line, oval, polygon, rough, scaled
from fuelrail.sharding.demo.cutouts import PAINTERS
from fuelrail.sharding.demo.noise import fractal, to_pixels, with_smaller
from fuelrail.sharding.demo.poses import stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Image = NDArray[np.uint8]
    Colour = tuple[int, int, int]

_DARK: Final = (24, 25, 27)
_GLASS: Final = (46, 56, 64)
_NUM_STYLES: Final = 6
_WHEELS: Final = {  # places along the vehicle; radii in shares of its length and of the picture's height
    "wheels": ((0.19, 0.81), (0.072, 0.485)),
    "truck_wheels": ((0.16, 0.85), (0.066, 0.49)),
    "trailer_wheels": ((0.10, 0.22), (0.055, 0.49)),
}


@lru_cache(maxsize=512)
def texture(name: str, colour: tuple[int, int, int], style: int, night: bool) -> list[NDArray[np.uint8]]:
    """Texture ``name`` and its smaller copies; styles repeat after a few."""
    return with_smaller(_painted(name, colour, style % _NUM_STYLES, night))


def _painted(name: str, colour: Colour, style: int, night: bool) -> Image:
    draw = stream("texture", name, style)
    if name in _FLAT:
        return rough(draw, 48, 48, _FLAT[name], 0.05)
    if name in _WHEELS:
        return _wheel_row(*_WHEELS[name])
    if name == "plain":
        return rough(draw, 96, 96, colour, 0.03)
    if name == "paint":
        return glossy(64, 64, colour)
    return _PAINTERS[name](Look(draw, colour, night))


_FLAT: Final[dict[str, Colour]] = {
    "dark": _DARK, "tyre": (22, 22, 23), "metal": (96, 100, 104), "concrete": (168, 164, 156), "roof": (110, 108, 106),
}  # fmt: skip


def _car_side(look: Look) -> Image:
    image = glossy(160, 640, look.colour)
    edge = scaled(look.colour, 0.55)
    for x in (0.27, 0.47, 0.68):
        line(image, (x, 0.02), (x - 0.005, 0.86), edge, 2)
    line(image, (0.03, 0.36), (0.97, 0.40), scaled(look.colour, 1.18), 2)
    for x in (0.30, 0.50):
        box(image, (x, x + 0.035), (0.22, 0.27), edge)
    box(image, (0.0, 1.0), (0.88, 1.0), _DARK)
    for x in (0.19, 0.81):
        oval(image, (x, 0.86), (0.094, 0.56), (14, 14, 15))
    polygon(
        image, [(0.0, 0.30), (0.05, 0.28), (0.05, 0.46), (0.0, 0.5)], (230, 40, 34) if look.night else (150, 24, 22)
    )
    polygon(
        image, [(1.0, 0.36), (0.93, 0.33), (0.95, 0.5), (1.0, 0.52)], (240, 240, 225) if look.night else (190, 196, 200)
    )
    return image


def _car_glass(look: Look) -> Image:
    image = glossy(128, 512, look.colour)
    for left, right in (((0.16, 0.24), (0.44, 0.44)), ((0.47, 0.47), (0.72, 0.86))):
        corners = [(left[0], 0.9), (left[1], 0.14), (right[0], 0.14), (right[1], 0.9)]
        polygon(image, corners, _GLASS if not look.night else (16, 18, 22))
        x, y = (left[0] + right[0]) / 2, 0.2
        polygon(
            image,
            [(x, y), (x + 0.03, y), (x - 0.03, 0.85), (x - 0.08, 0.85)],
            (92, 104, 112) if not look.night else (24, 26, 30),
        )
    return image


def _windshield(look: Look) -> Image:
    image = glossy(128, 256, look.colour)
    polygon(image, [(0.05, 0.95), (0.14, 0.08), (0.86, 0.08), (0.95, 0.95)], _GLASS if not look.night else (16, 18, 22))
    if not look.night:
        polygon(image, [(0.2, 0.1), (0.8, 0.1), (0.75, 0.42), (0.3, 0.3)], (96, 110, 120))
    for x in (0.32, 0.68):
        oval(image, (x, 0.80), (0.05, 0.13), (38, 46, 53) if not look.night else (12, 13, 16))
    return image


def _front(look: Look) -> Image:
    image = glossy(128, 320, look.colour)
    lamp = (255, 252, 238) if look.night else (222, 228, 232)
    for x in (0.03, 0.78):
        box(image, (x, x + 0.19), (0.18, 0.62), (60, 62, 66))
        box(image, (x + 0.02, x + 0.17), (0.24, 0.55), lamp)
    box(image, (0.27, 0.73), (0.2, 0.8), _DARK)
    for y in np.linspace(0.28, 0.72, 4):
        line(image, (0.28, y), (0.72, y), (84, 86, 90), 2)
    return image


def _rear(look: Look) -> Image:
    image = glossy(128, 320, look.colour)
    lamp = (255, 44, 36) if look.night else (168, 26, 24)
    for x in (0.02, 0.76):
        box(image, (x, x + 0.22), (0.18, 0.72), lamp)
        box(image, (x + 0.08, x + 0.14), (0.3, 0.6), scaled(lamp, 1.3))
    line(image, (0.26, 0.52), (0.74, 0.52), scaled(look.colour, 0.6), 3)
    return image


def _bumper(look: Look) -> Image:
    image = glossy(96, 320, look.colour)
    box(image, (0.0, 1.0), (0.68, 1.0), _DARK)
    box(image, (0.2, 0.8), (0.4, 0.66), (44, 46, 49))
    _plate(look.draw, image, (0.37, 0.63), (0.1, 0.42))
    return image


def _plate(draw: np.random.Generator, image: Image, x: tuple[float, float], y: tuple[float, float]) -> None:
    box(image, x, y, (226, 226, 214))
    for place in np.linspace(x[0] + 0.02, x[1] - 0.05, 6):
        width = 0.012 + 0.012 * draw.random()
        box(image, (place, place + width), (y[0] + 0.08, y[1] - 0.08), (40, 40, 48))


def _hood(look: Look) -> Image:
    image = glossy(96, 160, look.colour, low=1.0, high=1.16)
    for x in (0.2, 0.8):
        line(image, (x, 0.0), (0.5 + (x - 0.5) * 0.8, 1.0), scaled(look.colour, 0.8), 2)
    return image


def _wheel(image: Image, x: float, radius: tuple[float, float]) -> None:
    centre = (x, 1.0 - radius[1])
    oval(image, centre, radius, (22, 22, 23))
    oval(image, centre, (radius[0] * 0.64, radius[1] * 0.64), (126, 130, 134))
    for angle in np.arange(0.0, np.pi, np.pi / 5):
        dx, dy = np.cos(angle) * radius[0] * 0.6, np.sin(angle) * radius[1] * 0.6
        line(image, (centre[0] - dx, centre[1] - dy), (centre[0] + dx, centre[1] + dy), (52, 54, 57), 3)
    oval(image, centre, (radius[0] * 0.16, radius[1] * 0.16), (64, 66, 70))


def _wheel_row(wheels_at: tuple[float, ...], radius: tuple[float, float]) -> Image:
    image = clear(128, 960)
    for x in wheels_at:
        _wheel(image, x, radius)
    return image


def _cargo(look: Look) -> Image:
    image = rough(look.draw, 256, 640, look.colour, 0.03)
    for x in np.linspace(0.0, 1.0, 15):
        line(image, (x, 0.0), (x, 1.0), scaled(look.colour, 0.88), 1)
    band = ((30, 70, 130), (160, 40, 36), (40, 110, 70), (220, 150, 30), (70, 70, 76), (110, 60, 120))[
        int(look.draw.integers(6))
    ]
    polygon(image, [(0.0, 0.62), (0.55, 0.62), (0.72, 0.84), (0.0, 0.84)], band)
    x = 0.1
    while x < 0.62:
        width = 0.03 + 0.03 * float(look.draw.random())
        box(image, (x, x + width), (0.3, 0.48), band)
        if look.draw.random() < 0.5:
            box(image, (x + 0.012, x + width - 0.01), (0.36, 0.42), look.colour)
        x += width + 0.014
    box(image, (0.0, 1.0), (0.96, 1.0), (70, 72, 74))
    for x in np.linspace(0.04, 0.94, 8):
        box(image, (x, x + 0.02), (0.965, 0.99), (210, 120, 30))
    return image


def _doors(look: Look) -> Image:
    image = rough(look.draw, 256, 256, look.colour, 0.03)
    for x in (0.02, 0.5, 0.98):
        line(image, (x, 0.0), (x, 1.0), scaled(look.colour, 0.6), 3)
    for x in (0.3, 0.42, 0.58, 0.7):
        line(image, (x, 0.06), (x, 0.92), (120, 122, 124), 3)
    for x in (0.02, 0.84):
        box(image, (x, x + 0.14), (0.94, 0.99), (255, 40, 34) if look.night else (176, 30, 26))
    return image


def _cab_side(look: Look) -> Image:
    image = glossy(224, 192, look.colour)
    polygon(image, [(0.3, 0.46), (0.3, 0.12), (0.76, 0.12), (0.9, 0.46)], _GLASS if not look.night else (16, 18, 22))
    for x in (0.26, 0.92):
        line(image, (x, 0.1), (x, 0.8), scaled(look.colour, 0.6), 2)
    box(image, (0.34, 0.46), (0.52, 0.55), _DARK)
    oval(image, (0.55, 1.0), (0.42, 0.3), (16, 16, 17))
    return image


def _bus_side(look: Look) -> Image:
    image = glossy(256, 960, look.colour)
    glass = (210, 190, 140) if look.night else (52, 62, 70)
    box(image, (0.01, 0.99), (0.14, 0.52), _DARK)
    for index, x in enumerate(np.linspace(0.02, 0.87, 9)):
        box(image, (x, x + 0.095), (0.17, 0.49), scaled(glass, 0.85 + 0.3 * float(look.draw.random())))
        if index % 3 == 1:
            box(image, (x + 0.005, x + 0.09), (0.16, 0.9), scaled(glass, 0.8))
            line(image, (x + 0.047, 0.16), (x + 0.047, 0.9), _DARK, 2)
    box(image, (0.0, 1.0), (0.62, 0.68), scaled(look.colour, 0.7))
    box(image, (0.0, 1.0), (0.94, 1.0), _DARK)
    for x in (0.16, 0.85):
        oval(image, (x, 1.0), (0.072, 0.2), (14, 14, 15))
    return image


def _bus_front(look: Look) -> Image:
    image = glossy(256, 224, look.colour)
    box(image, (0.06, 0.94), (0.18, 0.6), (34, 38, 42) if look.night else _GLASS)
    box(image, (0.2, 0.8), (0.05, 0.15), (20, 20, 20))
    for x in np.linspace(0.26, 0.7, 7):
        box(image, (x, x + 0.04), (0.075, 0.125), (255, 170, 40))
    for x in (0.06, 0.78):
        box(image, (x, x + 0.16), (0.76, 0.84), (255, 252, 238) if look.night else (222, 228, 232))
    box(image, (0.0, 1.0), (0.93, 1.0), _DARK)
    return image


def _bus_rear(look: Look) -> Image:
    image = glossy(256, 224, look.colour)
    box(image, (0.2, 0.8), (0.12, 0.36), _GLASS)
    box(image, (0.16, 0.84), (0.5, 0.8), scaled(look.colour, 0.6))
    for x in (0.03, 0.85):
        box(image, (x, x + 0.12), (0.66, 0.84), (255, 44, 36) if look.night else (168, 26, 24))
    _plate(look.draw, image, (0.38, 0.62), (0.82, 0.9))
    return image


def _tracks(look: Look) -> Image:
    image = rough(look.draw, 96, 384, (46, 44, 42), 0.1)
    for x in np.linspace(0.0, 1.0, 30):
        line(image, (x, 0.0), (x, 1.0), (24, 24, 24), 3)
    for x in np.linspace(0.12, 0.88, 6):
        oval(image, (x, 0.5), (0.05, 0.26), (92, 86, 74))
    return image


def _machine(look: Look) -> Image:
    image = rough(look.draw, 128, 192, look.colour, 0.06)
    for y in np.linspace(0.2, 0.55, 6):
        line(image, (0.08, y), (0.38, y), (60, 50, 20), 3)
    box(image, (0.5, 0.92), (0.4, 0.6), _DARK)
    box(image, (0.0, 1.0), (0.86, 1.0), (50, 46, 40))
    return image


def _cab_box(look: Look) -> Image:
    image = rough(look.draw, 192, 128, look.colour, 0.05)
    box(image, (0.1, 0.9), (0.1, 0.62), _GLASS if not look.night else (20, 22, 25))
    polygon(
        image, [(0.2, 0.12), (0.5, 0.12), (0.3, 0.6), (0.12, 0.6)], (96, 108, 116) if not look.night else (30, 32, 36)
    )
    return image


def _cone(look: Look) -> Image:
    image = rough(look.draw, 128, 64, look.colour, 0.04)
    for y in ((0.18, 0.34), (0.52, 0.72)):
        box(image, (0.0, 1.0), y, (232, 232, 228))
    return image


def _stripes(look: Look) -> Image:
    image = rough(look.draw, 96, 320, (226, 226, 222), 0.03)
    for x in np.arange(-0.2, 1.1, 0.2):
        polygon(image, [(x, 1.0), (x + 0.1, 1.0), (x + 0.2, 0.0), (x + 0.1, 0.0)], (196, 40, 34))
    return image


def _bark(look: Look) -> Image:
    grain = cv2.resize(fractal(look.draw, 24, 64, 8), (64, 256), interpolation=cv2.INTER_CUBIC)
    return to_pixels(np.asarray((88, 72, 58), np.float32) * (1.0 + 0.2 * grain)[..., None])


_SOLID: Final = (
    _car_side, _car_glass, _windshield, _front, _rear, _bumper, _hood, _cargo,
    _doors, _cab_side, _bus_side, _bus_front, _bus_rear, _tracks, _machine, _cab_box, _cone, _stripes, _bark,
)  # fmt: skip
_PAINTERS: Final[dict[str, Callable[[Look], Image]]] = {painter.__name__[1:]: painter for painter in _SOLID} | PAINTERS
