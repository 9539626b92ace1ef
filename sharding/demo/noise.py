"""Fractal noise, the raw material of the textures, and textures with their smaller copies."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import cv2
import numpy as np

from fuelrail.sharding.demo.poses import stream

if TYPE_CHECKING:
    from numpy.typing import NDArray


def fractal(draw: np.random.Generator, height: int, width: int, cell: int, octaves: int = 4) -> NDArray[np.float32]:
    """Smooth noise (height, width), mean 0 and standard deviation 1; its largest spots are ``cell`` pixels wide."""
    total = np.zeros((height, width), np.float32)
    for octave in range(octaves):
        step = max(1, cell >> octave)
        shape = (height // step + 3, width // step + 3)
        grid = draw.standard_normal(shape, dtype=np.float32)
        size = (shape[1] * step, shape[0] * step)
        layer = cv2.resize(grid, size, interpolation=cv2.INTER_CUBIC)[step : step + height, step : step + width]
        total += layer * 0.6**octave
        if step == 1:
            break
    return standardised(total)


def standardised(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same with mean 0 and standard deviation 1."""
    values = values - values.mean()
    return values / max(float(values.std()), 1e-6)


@lru_cache(maxsize=8)
def tile(name: str, size: int, cell: int, octaves: int) -> NDArray[np.float32]:
    """Noise (size, size) that tiles seamlessly on all sides. ``size`` and ``cell`` are powers of two."""
    draw = stream("tile", name)
    total = np.zeros((size, size), np.float32)
    for octave in range(octaves):
        step = max(1, cell >> octave)
        count = size // step
        grid = np.pad(draw.standard_normal((count, count), dtype=np.float32), 2, mode="wrap")
        layer = cv2.resize(grid, None, fx=step, fy=step, interpolation=cv2.INTER_CUBIC)
        total += layer[2 * step : 2 * step + size, 2 * step : 2 * step + size] * 0.7**octave
        if step == 1:
            break
    return standardised(total)


def with_smaller(texture: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """A texture and its halvings down to a few pixels: level k is smaller by 2 to the power k."""
    levels = [np.ascontiguousarray(texture)]
    while min(levels[-1].shape[:2]) >= 8:
        height, width = levels[-1].shape[:2]
        smaller = cv2.resize(levels[-1], (width // 2, height // 2), interpolation=cv2.INTER_AREA)
        levels.append(np.asarray(smaller, np.uint8))
    return levels


def to_pixels(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounded and clipped to 0..255."""
    return np.clip(np.rint(values), 0, 255).astype(np.uint8, order="C")
