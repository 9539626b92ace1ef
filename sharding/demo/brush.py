"""Drawing on a texture in shares of its size: x to the right and y down, both 0 to 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np

from fuelrail.sharding.demo.noise import fractal, to_pixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Image = NDArray[np.uint8]
    Colour = tuple[int, int, int]
    Span = tuple[float, float]


class Look(NamedTuple):
    """What a texture is painted from: randomness of its own, the object's colour, whether lamps are lit."""

    draw: np.random.Generator
    colour: tuple[int, int, int]
    night: bool


def rough(draw: np.random.Generator, height: int, width: int, colour: Colour, strength: float) -> Image:
    """A matt surface (height, width, 3)."""
    noise = fractal(draw, height, width, max(4, height // 4))
    return to_pixels(np.asarray(colour, np.float32) * (1.0 + strength * noise)[..., None])


def glossy(height: int, width: int, colour: Colour, low: float = 0.72, high: float = 1.12) -> Image:
    """Car paint (height, width, 3): it reflects the sky above and the dark road below."""
    rows = np.linspace(0.0, 1.0, height, dtype=np.float32)
    light = np.interp(rows, (0.0, 0.25, 0.45, 0.55, 1.0), (high, 1.02, 0.98, 0.86, low)).astype(np.float32)
    image = np.asarray(colour, np.float32) * light[:, None, None]
    return to_pixels(np.broadcast_to(image, (height, width, 3)).astype(np.float32))


def box(image: Image, x: Span, y: Span, colour: Colour, thickness: int = -1) -> None:
    """Fill a rectangle."""
    height, width = image.shape[:2]
    cv2.rectangle(
        image, (round(x[0] * width), round(y[0] * height)), (round(x[1] * width) - 1, round(y[1] * height) - 1),
        _like(image, colour), thickness,
    )  # fmt: skip


def line(image: Image, a: Span, b: Span, colour: Colour, thickness: int = 1) -> None:
    """Draw a line, ``thickness`` in pixels."""
    height, width = image.shape[:2]
    start, end = ((round(x * width), round(y * height)) for x, y in (a, b))
    cv2.line(image, start, end, _like(image, colour), thickness, cv2.LINE_AA)


def oval(image: Image, centre: Span, radii: Span, colour: Colour) -> None:
    """Fill an ellipse."""
    height, width = image.shape[:2]
    place = (round(centre[0] * width), round(centre[1] * height))
    size = (max(1, round(radii[0] * width)), max(1, round(radii[1] * height)))
    cv2.ellipse(image, place, size, 0, 0, 360, _like(image, colour), -1, cv2.LINE_AA)


def polygon(image: Image, points: list[Span], colour: Colour) -> None:
    """Fill a polygon."""
    height, width = image.shape[:2]
    corners = np.round(np.asarray(points) * (width, height)).astype(np.int32)
    cv2.fillPoly(image, [corners], _like(image, colour), cv2.LINE_AA)


def _like(image: Image, colour: Colour) -> tuple[int, ...]:
    return (*colour, 255) if image.shape[2] == 4 else colour


def scaled(colour: Colour, factor: float) -> Colour:
    """A colour made darker or lighter."""
    red, green, blue = (int(min(255, value * factor)) for value in colour)
    return red, green, blue


def clear(height: int, width: int) -> Image:
    """An image (height, width, 4) that is see-through everywhere."""
    return np.zeros((height, width, 4), np.uint8)
