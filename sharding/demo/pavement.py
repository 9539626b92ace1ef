"""The colour of the ground as a function of the place on the road, filtered to the size of a pixel.

Two strips of texels describe the road: one across it, one along it, repeated every `PERIOD_M`. Each has a row for
every halving of its resolution (level k averages 2 to the power k texels), so that one bilinear look-up gives the right
average for a pixel of any size: MIP mapping in one dimension, exact for a pattern that is a product of the two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import cv2
import numpy as np

from fuelrail.sharding.demo.noise import fractal, tile, to_pixels
from fuelrail.sharding.demo.poses import stream
from fuelrail.sharding.demo.road import FACADE_M, KERB_M, LANE_WIDTH_M

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

TEXEL_M: Final = 0.01
HALF_WIDTH_M: Final = 40.0
PERIOD_M: Final = 90.0
NUM_LEVELS: Final = 12
_CROSSING_M: Final = (38.0, 41.4)  # along the road, once in a period
_PAINT_RGB: Final = (218, 216, 206)
_MIDDLE_RGB: Final = ((218, 216, 206), (226, 176, 58))  # of the solid lines in the middle, by the region's custom
_GRAIN_PX_PER_M: Final = 80.0
_STAIN_PX_PER_M: Final = 3.0
_TILE_PX: Final = 1024


class Footprint(NamedTuple):
    """How large each pixel is on the ground, as levels of the strips: log2 of texels along and across."""

    along: Floats
    across: Floats
    grain: Floats  # contrast 0..1 that is left of texture of a few centimetres, and of a few decimetres
    stain: Floats


def footprint(along_m: Floats, across_m: Floats) -> Footprint:
    """From the extent in metres of each pixel along the car and across it."""
    largest = np.maximum(along_m, across_m)

    def level(extent_m: Floats) -> Floats:
        return np.asarray(np.clip(np.log2(extent_m / TEXEL_M), 0.0, NUM_LEVELS - 1), np.float32)

    def contrast(px_per_m: float) -> Floats:
        # Beyond two texels a pixel the untouched texture would alias.
        return (1.0 / (1.0 + np.square(largest * px_per_m / 2.0))).astype(np.float32)

    return Footprint(level(along_m), level(across_m), contrast(_GRAIN_PX_PER_M), contrast(_STAIN_PX_PER_M))


def _levels(strip: Floats, *, wrap: bool) -> NDArray[np.uint8]:
    # (N, C) in 0..255 to (NUM_LEVELS, N, C).
    rows = []
    for level in range(NUM_LEVELS):
        width = min(1 << level, len(strip))
        padded = np.pad(strip, ((width, width), (0, 0)), mode="wrap" if wrap else "edge")
        blurred = cv2.blur(padded, (1, width), borderType=cv2.BORDER_REPLICATE).reshape(padded.shape)
        rows.append(to_pixels(np.asarray(blurred, np.float32)[width : width + len(strip)]))
    return np.ascontiguousarray(np.stack(rows))


def _near(place: Floats, at: float, half_width: float) -> Floats:
    return np.where(np.abs(place - at) <= half_width, np.float32(255.0), np.float32(0.0)).astype(np.float32)


@lru_cache(maxsize=4)
def _across(style: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    # Colour and solid lines; then what the strip along the road is multiplied with: dashes, zebra, joints, stalls.
    draw = stream("pavement", style)
    left = (np.arange(-HALF_WIDTH_M, HALF_WIDTH_M, TEXEL_M) + TEXEL_M / 2).astype(np.float32)
    side = np.abs(left)
    asphalt = np.float32(draw.uniform(94, 120)) * np.array([1.0, 1.0, 1.02], np.float32)
    within = np.mod(side, LANE_WIDTH_M) / LANE_WIDTH_M - 0.5
    wheels = np.exp(-np.square((np.abs(within) - 0.23) / 0.09)) - 0.6 * np.exp(-np.square(within / 0.1))
    rough = fractal(draw, 1, len(left), 256, 6)[0]
    colour = asphalt * (1.0 - 0.05 * wheels * (side < 7.0) + 0.02 * rough)[:, None]
    colour[side > 7.1] *= 1.07
    colour[side > KERB_M - 0.3] *= 0.78
    stone = np.array([(168, 162, 150), (154, 152, 148), (172, 150, 132), (146, 144, 146)][style % 4], np.float32)
    colour[side > KERB_M] = (176, 174, 168)
    walk = side > KERB_M + 0.25
    colour[walk] = (stone * (1.0 + 0.03 * rough)[:, None])[walk]
    joints = np.where(np.mod(side - KERB_M, 0.8) < 0.018, 255.0, 0.0).astype(np.float32)
    joints[~walk] = 0.0
    colour[joints > 0] *= 0.74
    verge = side > FACADE_M + 2.2
    colour[verge] = (np.array([92, 98, 66], np.float32) * (1.0 + 0.06 * rough)[:, None])[verge]
    colour[np.abs(side - 0.13) <= 0.06] = _MIDDLE_RGB[style % len(_MIDDLE_RGB)]
    solid = _near(side, 2 * LANE_WIDTH_M + 0.05, 0.05)
    zebra = np.where((side < 9.0) & (np.mod(left + 60.0, 1.2) < 0.6), 255.0, 0.0).astype(np.float32)
    dashes = _near(side, LANE_WIDTH_M, 0.065)
    stalls = np.where((side > 7.1) & (side < KERB_M - 0.3), 255.0, 0.0).astype(np.float32)
    base = _levels(np.column_stack([colour, solid]).astype(np.float32), wrap=False)
    return base, _levels(
        np.column_stack([dashes, zebra, np.where(walk, 255.0, 0.0), stalls]).astype(np.float32), wrap=False
    )


@lru_cache(maxsize=1)
def _along() -> NDArray[np.uint8]:
    along = (np.arange(0.0, PERIOD_M, TEXEL_M) + TEXEL_M / 2).astype(np.float32)
    crossing = (along > _CROSSING_M[0]) & (along < _CROSSING_M[1])
    clear = (along > _CROSSING_M[0] - 1.5) & (along < _CROSSING_M[1] + 1.5)
    dashes = np.where((np.mod(along, 9.0) < 3.0) & ~clear, 255.0, 0.0)
    joints = np.where(np.mod(along, 0.8) < 0.018, 255.0, 0.0)
    stalls = np.where(np.mod(along, 6.0) < 0.1, 255.0, 0.0)
    return _levels(np.column_stack([dashes, crossing * 255.0, joints, stalls]).astype(np.float32), wrap=True)


@lru_cache(maxsize=1)
def _grain() -> NDArray[np.uint8]:
    # Gravel of the asphalt in the first channel, cracks and mended places in the second; no seams.
    draw = stream("pavement", "grain")
    gravel = tile("gravel", _TILE_PX, 4, 3)
    wear = np.zeros((_TILE_PX, _TILE_PX), np.float32)
    for _ in range(9):
        place, angle = draw.uniform(0, _TILE_PX, 2), float(draw.uniform(0, 2 * np.pi))
        path = [place]
        for _ in range(int(draw.integers(10, 40))):
            angle += float(draw.normal(0, 0.5))
            path.append(path[-1] + 14.0 * np.array([np.cos(angle), np.sin(angle)]))
        for shift_x in (-_TILE_PX, 0, _TILE_PX):
            for shift_y in (-_TILE_PX, 0, _TILE_PX):
                points = np.round(np.array(path) + np.array([shift_x, shift_y])).astype(np.int32)
                cv2.polylines(wear, [points], False, 1.0, 1, cv2.LINE_AA)
    return np.ascontiguousarray(np.stack([to_pixels(128.0 + 36.0 * gravel), to_pixels(255.0 * wear)], axis=-1))


def ground_colour(style: int, along: Floats, left: Floats, size: Footprint, *, wet: bool) -> Floats:
    """Colour (H, W, 3) in 0..255 of the ground at these places in full light."""
    base, across = _across(style)
    column = (left + np.float32(HALF_WIDTH_M)) * np.float32(1.0 / TEXEL_M) - np.float32(0.5)
    repeat = along - np.float32(PERIOD_M) * np.floor(along * np.float32(1.0 / PERIOD_M))
    row = repeat * np.float32(1.0 / TEXEL_M) - np.float32(0.5)
    painted = cv2.remap(base, column, size.across, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    factor = cv2.remap(across, column, size.across, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    pattern = cv2.remap(_along(), row, size.along, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    pattern = cv2.multiply(factor, pattern, scale=1.0 / 255.0)
    paint = cv2.max(cv2.max(painted[..., 3], pattern[..., 0]), cv2.max(pattern[..., 1], pattern[..., 3]))

    grain = _looked_up(_grain(), along, left, _GRAIN_PX_PER_M)
    stain = _looked_up(_stains(), along, left, _STAIN_PX_PER_M)[..., None][..., 0].astype(np.float32) - 128.0
    gravel = (grain[..., 0].astype(np.float32) - 128.0) * size.grain
    stain *= size.stain
    on_road = np.abs(left) < np.float32(KERB_M)
    light = 1.0 + np.float32(0.0034) * gravel + np.float32(0.0022) * stain
    light -= grain[..., 1].astype(np.float32) * size.grain * np.where(on_road, np.float32(0.0017), np.float32(0.0004))
    light -= pattern[..., 2].astype(np.float32) * np.float32(0.0011)
    if wet:
        light *= np.float32(0.62)
    # Paint is worn where the road is stained.
    alpha = paint.astype(np.float32) * np.float32(1.0 / 255.0) * np.clip(0.8 + np.float32(0.006) * stain, 0.3, 1.0)
    colour = painted[..., :3].astype(np.float32)
    colour += (np.array(_PAINT_RGB, np.float32) - colour) * alpha[..., None]
    colour *= light[..., None]
    return colour


@lru_cache(maxsize=1)
def _stains() -> NDArray[np.uint8]:
    return to_pixels(128.0 + 40.0 * tile("stains", _TILE_PX, 32, 5))


def _looked_up(texture: NDArray[np.uint8], along: Floats, left: Floats, px_per_m: float) -> NDArray[np.uint8]:
    x = along * np.float32(px_per_m)
    y = left * np.float32(px_per_m)
    x -= np.float32(_TILE_PX) * np.floor(x * np.float32(1.0 / _TILE_PX))
    y -= np.float32(_TILE_PX) * np.floor(y * np.float32(1.0 / _TILE_PX))
    return np.asarray(cv2.remap(texture, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP), np.uint8)
