"""Flat pictures with see-through surroundings: people, riders from the side and from ahead, tree crowns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import cv2
import numpy as np

from fuelrail.sharding.demo.brush import Look, box, clear, line, oval, polygon, scaled
from fuelrail.sharding.demo.noise import fractal, to_pixels

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Image = NDArray[np.uint8]
    Colour = tuple[int, int, int]

_SKINS: Final = ((222, 178, 148), (168, 118, 84), (108, 74, 52), (236, 196, 168))
_HAIRS: Final = ((40, 32, 26), (88, 62, 38), (24, 22, 22), (150, 140, 132))
_TROUSERS: Final = ((44, 50, 70), (58, 56, 54), (30, 30, 34), (110, 96, 76))
_LEAVES: Final = ((74, 96, 46), (60, 88, 40), (92, 104, 50), (128, 104, 44), (66, 82, 52), (104, 112, 60))
_TYRE: Final = (26, 26, 28)


def _pick(draw: np.random.Generator, colours: tuple[Colour, ...]) -> Colour:
    return colours[int(draw.integers(len(colours)))]


def _person(look: Look) -> Image:
    image = clear(384, 144)
    skin, hair, legs = _pick(look.draw, _SKINS), _pick(look.draw, _HAIRS), _pick(look.draw, _TROUSERS)
    stride = 0.04 + 0.14 * float(look.draw.random())
    for side, tint in ((-1.0, 0.8), (1.0, 1.0)):
        foot = 0.5 + side * (0.10 + stride)
        points = [(0.5 + side * 0.23, 0.50), (0.5 - side * 0.02, 0.50), (foot - 0.07, 0.97), (foot + 0.07, 0.97)]
        polygon(image, points, scaled(legs, tint))
        polygon(image, [(foot - 0.08, 0.96), (foot + 0.10, 0.96), (foot + 0.13, 1.0), (foot - 0.08, 1.0)], (30, 28, 28))
    for side, tint in ((-1.0, 0.78), (1.0, 0.92)):
        hand = (0.5 + side * (0.36 + 0.08 * float(look.draw.random())), 0.53)
        line(image, (0.5 + side * 0.24, 0.20), hand, scaled(look.colour, tint), 17)
        oval(image, hand, (0.055, 0.022), skin)
    polygon(image, [(0.24, 0.19), (0.38, 0.155), (0.62, 0.155), (0.76, 0.19), (0.73, 0.53), (0.27, 0.53)], look.colour)
    polygon(image, [(0.60, 0.16), (0.76, 0.19), (0.73, 0.53), (0.58, 0.53)], scaled(look.colour, 0.82))
    if look.draw.random() < 0.5:
        box(image, (0.30, 0.70), (0.30, 0.34), scaled(look.colour, 1.35))
    oval(image, (0.5, 0.15), (0.09, 0.03), scaled(skin, 0.85))
    oval(image, (0.5, 0.082), (0.150, 0.066), skin)
    oval(image, (0.5, 0.055), (0.160, 0.055), hair)
    oval(image, (0.52, 0.098), (0.125, 0.042), skin)
    return image


def _wheel(image: Image, centre: tuple[float, float], radius_px: int, thickness: int) -> None:
    height, width = image.shape[:2]
    place = (round(centre[0] * width), round(centre[1] * height) - radius_px)
    for angle in np.arange(0.0, np.pi, np.pi / 6):
        dx, dy = round(radius_px * np.cos(angle)), round(radius_px * np.sin(angle))
        ends = ((place[0] - dx, place[1] - dy), (place[0] + dx, place[1] + dy))
        cv2.line(image, *ends, (120, 122, 126, 255), 1, cv2.LINE_AA)
    cv2.circle(image, place, radius_px - thickness, (*_TYRE, 255), thickness * 2, cv2.LINE_AA)


def _rider(draw: np.random.Generator, image: Image, colour: Colour, lean: float, helmet: Colour) -> None:
    # Seen from the side, to the right: hip on the saddle, hands on the bar.
    legs, hip, shoulder = _pick(draw, _TROUSERS), (0.38, 0.47), (0.38 + lean, 0.20)
    line(image, hip, (0.55, 0.60), legs, 30)
    line(image, (0.55, 0.60), (0.49, 0.84), legs, 22)
    line(image, (0.46, 0.85), (0.56, 0.86), (30, 28, 28), 14)
    line(image, hip, shoulder, colour, 50)
    line(image, (shoulder[0], shoulder[1] + 0.04), (0.66, 0.42), scaled(colour, 0.8), 19)
    oval(image, (shoulder[0] + 0.05, 0.095), (0.062, 0.065), _pick(draw, _SKINS))
    oval(image, (shoulder[0] + 0.04, 0.065), (0.078, 0.065), helmet)


def _cycle_side(look: Look) -> Image:
    # The lower part of the picture of a ridden one.
    return np.ascontiguousarray(_frame(look)[160:])


def _bicycle_side(look: Look) -> Image:
    image = _frame(look)
    _rider(look.draw, image, scaled(look.colour, 1.2), 0.14, (214, 214, 220))
    return image


def _frame(look: Look) -> Image:
    image = clear(400, 424)
    for x in (0.195, 0.805):
        _wheel(image, (x, 1.0), 81, 5)
    for a, b in (
        ((0.195, 0.80), (0.45, 0.82)), ((0.45, 0.82), (0.38, 0.54)), ((0.38, 0.58), (0.68, 0.52)),
        ((0.45, 0.82), (0.69, 0.56)),
        ((0.195, 0.80), (0.38, 0.58)), ((0.68, 0.46), (0.805, 0.80)), ((0.68, 0.45), (0.63, 0.42)),
    ):  # fmt: skip
        line(image, a, b, look.colour, 7)
    line(image, (0.33, 0.53), (0.44, 0.53), (30, 28, 28), 9)
    return image


def _cycle_front(look: Look) -> Image:
    return np.ascontiguousarray(_bars(look)[160:])


def _bicycle_front(look: Look) -> Image:
    image = _bars(look)
    _rider_front(look.draw, image, scaled(look.colour, 1.2), (214, 214, 220))
    return image


def _bars(look: Look) -> Image:
    image = clear(400, 150)
    box(image, (0.46, 0.54), (0.6, 1.0), _TYRE)
    line(image, (0.5, 0.44), (0.5, 0.7), look.colour, 9)
    line(image, (0.04, 0.44), (0.96, 0.44), (44, 46, 50), 7)
    return image


def _rider_front(draw: np.random.Generator, image: Image, colour: Colour, helmet: Colour) -> None:
    legs = _pick(draw, _TROUSERS)
    for side in (-1.0, 1.0):
        line(image, (0.5 + side * 0.12, 0.48), (0.5 + side * 0.2, 0.64), legs, 26)
        line(image, (0.5 + side * 0.2, 0.64), (0.5 + side * 0.16, 0.86), legs, 20)
        line(image, (0.5 + side * 0.26, 0.22), (0.5 + side * 0.4, 0.43), scaled(colour, 0.8), 20)
    polygon(image, [(0.24, 0.2), (0.4, 0.16), (0.6, 0.16), (0.76, 0.2), (0.68, 0.52), (0.32, 0.52)], colour)
    oval(image, (0.5, 0.10), (0.15, 0.068), _pick(draw, _SKINS))
    oval(image, (0.5, 0.062), (0.18, 0.06), helmet)


def _motorcycle_side(look: Look) -> Image:
    image = clear(400, 540)
    for x in (0.165, 0.835):
        _wheel(image, (x, 1.0), 84, 13)
    polygon(
        image, [(0.2, 0.58), (0.5, 0.6), (0.58, 0.5), (0.7, 0.5), (0.72, 0.64), (0.56, 0.86), (0.34, 0.86)], look.colour
    )
    polygon(image, [(0.14, 0.52), (0.48, 0.58), (0.46, 0.62), (0.2, 0.62)], (34, 32, 32))
    line(image, (0.68, 0.46), (0.835, 0.80), (120, 122, 126), 10)
    line(image, (0.12, 0.85), (0.46, 0.86), (140, 142, 146), 12)
    oval(image, (0.74, 0.53), (0.03, 0.05), (250, 246, 220) if look.night else (214, 218, 220))
    _rider(look.draw, image, (52, 54, 60), 0.12, scaled(look.colour, 1.3))
    return image


def _motorcycle_front(look: Look) -> Image:
    image = clear(400, 200)
    box(image, (0.4, 0.6), (0.56, 1.0), _TYRE)
    polygon(image, [(0.3, 0.5), (0.7, 0.5), (0.62, 0.76), (0.38, 0.76)], look.colour)
    line(image, (0.04, 0.44), (0.96, 0.44), (44, 46, 50), 9)
    _rider_front(look.draw, image, (52, 54, 60), scaled(look.colour, 1.3))
    oval(image, (0.5, 0.56), (0.09, 0.04), (255, 250, 224) if look.night else (214, 218, 220))
    return image


def _crown(look: Look) -> Image:
    height, width = 320, 256
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    x, y = x / (width - 1) * 2 - 1, y / (height - 1) * 2 - 1
    bulk, leaves = fractal(look.draw, height, width, 64, 3), fractal(look.draw, height, width, 10, 4)
    radius = np.sqrt(x * x + y * y)
    inside = (0.84 - radius) * 6.0 + 0.55 * bulk + 0.55 * leaves
    # Never over the border of the picture: a crown fills its cylinder and does not leave it.
    inside = np.minimum(inside, (0.985 - np.maximum(np.abs(x), np.abs(y))) * 40.0)
    leaf = np.asarray(_pick(look.draw, _LEAVES), np.float32)
    light = 0.86 - 0.26 * y + 0.10 * bulk + 0.20 * leaves - 0.10 * x
    image = np.empty((height, width, 4), np.uint8)
    image[..., :3] = to_pixels(leaf * np.clip(light, 0.25, 1.6)[..., None])
    image[..., 3] = to_pixels(np.clip(inside * 2.0 + 0.5, 0.0, 1.0) * 255.0)
    return image


PAINTERS: Final[dict[str, Callable[[Look], Image]]] = {
    "person": _person,
    "cycle_side": _cycle_side,
    "cycle_front": _cycle_front,
    "bicycle_side": _bicycle_side,
    "bicycle_front": _bicycle_front,
    "motorcycle_side": _motorcycle_side,
    "motorcycle_front": _motorcycle_front,
    "crown": _crown,
}
