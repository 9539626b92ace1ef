"""Facades of buildings, painted from a style number: walls, windows, shops."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import cv2
import numpy as np

from fuelrail.sharding.demo.noise import fractal, to_pixels, with_smaller
from fuelrail.sharding.demo.poses import stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Image = NDArray[np.uint8]
    Colour = tuple[int, int, int]

_PX_PER_M: Final = 26
_FLOOR_M: Final = 3.2
_WALLS: Final = (
    (142, 84, 66), (186, 168, 140), (158, 156, 152), (206, 198, 184), (176, 136, 92),
    (120, 92, 80), (138, 148, 152), (190, 150, 128),
)  # fmt: skip
_SIGNS: Final = (
    (40, 84, 140),
    (160, 44, 40),
    (34, 104, 70),
    (222, 178, 60),
    (60, 60, 66),
    (120, 60, 110),
    (228, 226, 220),
)
_LIT: Final = ((255, 222, 160), (250, 206, 130), (236, 236, 220), (180, 196, 220))


@lru_cache(maxsize=72)
def facade(style: int, side: str, width_m: float, height_m: float, night: bool) -> list[Image]:
    """Facade ``side`` of the building with this style, RGB, and its smaller copies. At night some windows are lit."""
    draw = stream("facade", style)
    wall = _WALLS[int(draw.integers(len(_WALLS)))]
    bricks = draw.random() < 0.5
    bay_m, glazed = draw.uniform(1.9, 3.0), draw.uniform(0.42, 0.7)
    shops = draw.random() < 0.55
    draw = stream("facade", style, side)
    height, width = round(height_m * _PX_PER_M), round(width_m * _PX_PER_M)
    image = _wall(draw, height, width, wall, bricks)
    bays = max(1, int(width_m / bay_m))
    bay_px = width / bays
    floors = max(1, int((height_m - 0.9) / _FLOOR_M))
    first = height - round(_FLOOR_M * 1.15 * _PX_PER_M)
    trim = _tint(wall, 1.22)
    for floor in range(1, floors):
        bottom = first - round((floor - 1) * _FLOOR_M * _PX_PER_M)
        for bay in range(bays):
            centre = (bay + 0.5) * bay_px
            _window(draw, image, centre, bottom - 0.9 * _PX_PER_M, bay_px * glazed, 1.55 * _PX_PER_M, trim, night)
        if draw.random() < 0.35:
            cv2.rectangle(image, (0, bottom - 5), (width, bottom), _tint(wall, 0.9), -1)
    _cornice(image, wall)
    _ground_floor(draw, image, first, bays, bay_px, wall, night, shops and side.startswith("front"))
    return with_smaller(image)


def _tint(colour: Colour, factor: float) -> Colour:
    red, green, blue = (int(min(250, value * factor)) for value in colour)
    return red, green, blue


def _wall(draw: np.random.Generator, height: int, width: int, wall: Colour, bricks: bool) -> Image:
    stains = fractal(draw, height, width, 128, 4)
    light = 1.0 + 0.045 * stains
    # Rain and dirt run down: streaks that keep their column.
    streaks = cv2.resize(fractal(draw, 4, width, 8, 3), (width, height), interpolation=cv2.INTER_LINEAR)
    light += 0.025 * streaks
    rows, columns = (4, 9) if bricks else (22, 44)
    grid = draw.standard_normal((height // rows + 1, width // columns + 2), dtype=np.float32)
    stones = cv2.resize(grid, None, fx=columns, fy=rows, interpolation=cv2.INTER_NEAREST)
    light += (0.07 if bricks else 0.02) * stones[:height, :width]
    light += 0.03 * draw.standard_normal((height, width), dtype=np.float32)
    light[::rows] *= 0.9 if bricks else 0.94
    light *= np.linspace(1.06, 0.9, height, dtype=np.float32)[:, None]
    return to_pixels(np.asarray(wall, np.float32) * light[..., None])


def _window(
    draw: np.random.Generator, image: Image, x: float, y: float, width: float, height: float, trim: Colour, night: bool
) -> None:
    # Centre x and bottom y in pixels.
    left, right, top, bottom = round(x - width / 2), round(x + width / 2), round(y - height), round(y)
    if top < 2:
        return
    cv2.rectangle(image, (left - 3, top - 3), (right + 3, bottom + 3), trim, -1)
    cv2.rectangle(image, (left - 5, bottom + 3), (right + 5, bottom + 6), _tint(trim, 1.1), -1)
    kind = draw.random()
    if night:
        glass = _LIT[int(draw.integers(len(_LIT)))] if kind < 0.3 else (16, 18, 24)
    else:
        shade = 0.8 + 0.5 * float(draw.random())
        glass = _tint((58, 70, 82), shade)
    cv2.rectangle(image, (left, top), (right, bottom), glass, -1)
    if not night:
        # The sky in the upper part of the pane, ending in a slanted line.
        end = top + (bottom - top) * (0.3 + 0.5 * float(draw.random()))
        sky = np.array([[left, top], [right, top], [right, end - 6], [left, end + 6]]).round().astype(np.int32)
        cv2.fillConvexPoly(image, sky, _tint(glass, 1.45), cv2.LINE_AA)
    if 0.3 < kind < 0.6:
        drop = top + round((bottom - top) * float(draw.uniform(0.2, 0.9)))
        blind = (206, 200, 186) if not night else (42, 40, 38)
        cv2.rectangle(image, (left, top), (right, drop), blind, -1)
        for line in range(top + 4, drop, 5):
            cv2.line(image, (left, line), (right, line), _tint(blind, 0.88), 1)
    middle = (left + right) // 2
    cv2.line(image, (middle, top), (middle, bottom), trim, 2)
    if draw.random() < 0.5:
        cv2.line(image, (left, top + (bottom - top) // 3), (right, top + (bottom - top) // 3), trim, 2)


def _cornice(image: Image, wall: Colour) -> None:
    for row, rows, factor in ((0, 6, 1.12), (6, 14, 0.95), (14, 17, 0.7)):
        image[row:rows] = _tint(wall, factor)


def _ground_floor(
    draw: np.random.Generator, image: Image, top: int, bays: int, bay_px: float, wall: Colour, night: bool, shops: bool
) -> None:
    height, width = image.shape[:2]
    cv2.rectangle(image, (0, height - 14), (width, height), _tint(wall, 0.6), -1)
    bay = 0
    while bay < bays:
        span = min(bays - bay, int(draw.integers(1, 4))) if shops else 1
        left, right = round(bay * bay_px + 8), round((bay + span) * bay_px - 8)
        if shops:
            _shop(draw, image, left, right, top, night)
        elif draw.random() < 0.22:
            door = _SIGNS[int(draw.integers(len(_SIGNS)))]
            middle = (left + right) // 2
            cv2.rectangle(image, (middle - 18, height - 66), (middle + 18, height - 2), _tint(wall, 1.2), -1)
            cv2.rectangle(image, (middle - 14, height - 62), (middle + 14, height - 2), _tint(door, 0.6), -1)
            cv2.rectangle(image, (middle - 9, height - 58), (middle + 9, height - 38), (60, 70, 78), -1)
        else:
            x, size = (left + right) / 2, (right - left) * 0.72
            _window(draw, image, x, height - 0.9 * _PX_PER_M, size, 1.6 * _PX_PER_M, _tint(wall, 1.2), night)
        bay += span


def _shop(draw: np.random.Generator, image: Image, left: int, right: int, top: int, night: bool) -> None:
    height = image.shape[0]
    sign = _SIGNS[int(draw.integers(len(_SIGNS)))]
    glow = 1.0 if not night else float(draw.choice([0.25, 1.1]))
    board = top + 26
    cv2.rectangle(image, (left, top), (right, board), _tint(sign, glow), -1)
    ink = (240, 238, 230) if sum(sign) < 420 else (50, 46, 42)
    x = left + 14
    while x < right - 24 and x < left + 150:  # letters: upright strokes with a bar or a bow
        stroke = int(draw.integers(6, 13))
        cv2.rectangle(image, (x, top + 8), (x + 2, board - 7), _tint(ink, glow), -1)
        middle = int(draw.integers(top + 8, board - 8))
        cv2.rectangle(image, (x, middle), (x + stroke, middle + 2), _tint(ink, glow), -1)
        if draw.random() < 0.6:
            cv2.rectangle(image, (x + stroke, top + 8), (x + stroke + 2, board - 7), _tint(ink, glow), -1)
        x += stroke + 6
    inside = (_LIT[int(draw.integers(2))] if draw.random() < 0.6 else (22, 24, 30)) if night else (66, 74, 80)
    cv2.rectangle(image, (left, board + 4), (right, height - 12), _tint(inside, 0.9), -1)
    for _ in range(max(2, (right - left) // 14)):  # goods behind the glass
        x, tall = int(draw.integers(left, max(left + 1, right - 8))), int(draw.integers(8, 34))
        goods = _SIGNS[int(draw.integers(len(_SIGNS)))]
        cv2.rectangle(
            image, (x, height - 16 - tall), (x + int(draw.integers(4, 12)), height - 16), _tint(goods, 0.8 * glow), -1
        )
    for x in range(left, right + 1, max(30, (right - left) // 3)):
        cv2.line(image, (x, board + 4), (x, height - 12), (50, 52, 54), 3)
    if not night:
        pane = np.array([[left + 10, board + 4], [left + 40, board + 4], [left + 16, height - 12], [left, height - 12]])
        cv2.fillConvexPoly(image, pane.astype(np.int32), (112, 122, 128), cv2.LINE_AA)
    if draw.random() < 0.4:
        awning = np.array([[left, board], [right, board], [right + 8, board + 20], [left - 8, board + 20]], np.int32)
        cv2.fillConvexPoly(image, awning, _tint(sign, 0.9 * glow), cv2.LINE_AA)
        for x in range(left, right, 22):
            stripe = np.array([[x, board], [x + 11, board], [x + 11, board + 20], [x, board + 20]], np.int32)
            cv2.fillConvexPoly(image, stripe, _tint((232, 230, 222), glow), cv2.LINE_AA)
