"""Light and air: what the weather, street lamps and the car's own headlights do to a colour."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.sharding.demo.world import Clip, Weather

_DIRECT: Final = 0.62  # sunlight on a surface that faces the sun, with ``ambient`` 1.0 for white paint in the open
_LAMP_HEIGHT_M: Final = 6.8
_LAMP_RGB: Final = np.array([1.0, 0.80, 0.52], np.float32)
_HEADLIGHT_RGB: Final = np.array([1.0, 0.98, 0.92], np.float32)
_REACH_M: Final = 45.0


@dataclass(frozen=True, slots=True, eq=False)
class Light:
    """Light at one moment of a clip. Positions are global; lamps (N, 2) burn at night only."""

    weather: Weather
    ego_xy: tuple[float, float]
    ego_yaw_rad: float
    lamps: NDArray[np.float64]

    def on_ground(
        self, x: NDArray[np.float32], y: NDArray[np.float32], shadow: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Gain of colours on the ground: (...), or (..., 3) at night. ``shadow`` 0..1 takes the sun away."""
        ambient = np.float32(self.weather.ambient)
        sun = self.weather.sun
        if sun is not None:
            direct = np.float32(_DIRECT * sun[2])
            gain = np.full(x.shape, ambient + direct, np.float32)
            return gain - direct * shadow if shadow is not None else gain
        if not self.weather.night:
            gain = np.full(x.shape, ambient, np.float32)
            return gain * (1.0 - np.float32(0.4) * shadow) if shadow is not None else gain
        lit = np.full((*x.shape, 3), ambient, np.float32) + self._lamps_and_headlights(x, y)
        if shadow is not None:
            lit *= (1.0 - np.float32(0.5) * shadow)[..., None]
        return lit

    def on_face(self, point: NDArray[np.float64], normal: NDArray[np.float64]) -> NDArray[np.float32]:
        """Gain (3,) of a colour on a face with this global centre and unit normal."""
        ambient = self.weather.ambient * (0.88 + 0.16 * normal[2] + 0.05 * normal[0])
        if self.weather.sun is not None:
            return np.full(3, ambient + _DIRECT * max(0.0, float(normal @ self.weather.sun)), np.float32)
        if not self.weather.night:
            return np.full(3, ambient, np.float32)
        x, y = np.float32(point[0]), np.float32(point[1])
        return np.asarray(ambient + 0.8 * self._lamps_and_headlights(np.atleast_1d(x), np.atleast_1d(y))[0], np.float32)

    def through_air(self, distance_m: float) -> tuple[float, NDArray[np.float32]]:
        """Share of a colour that is left at this distance, and the haze (3,) that is added."""
        left = math.exp(-distance_m / self.weather.haze_m)
        return left, (1.0 - left) * np.asarray(self.weather.haze_rgb, np.float32)

    def _lamps_and_headlights(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
        lamps = np.zeros(x.shape, np.float32)
        near = self.lamps[np.hypot(*(self.lamps - self.ego_xy).T) < _REACH_M + 20.0]
        for lamp_x, lamp_y in near.astype(np.float32):
            square = np.square(x - lamp_x) + np.square(y - lamp_y)
            lamps += np.float32(0.55) / np.square(1.0 + square / np.float32(_LAMP_HEIGHT_M**2))
        c, s = np.float32(math.cos(self.ego_yaw_rad)), np.float32(math.sin(self.ego_yaw_rad))
        dx, dy = x - np.float32(self.ego_xy[0]), y - np.float32(self.ego_xy[1])
        ahead, left = c * dx + s * dy - np.float32(3.5), c * dy - s * dx
        spread = np.clip(1.35 - np.abs(left) / (np.maximum(ahead, 0.01) * 0.55 + 1.2), 0.0, 1.0)
        beam = np.where(ahead > 0, spread / (0.8 + np.square(ahead / 16.0)) * np.clip(ahead / 3.0, 0.0, 1.0), 0.0)
        return lamps[..., None] * _LAMP_RGB + 0.65 * beam.astype(np.float32)[..., None] * _HEADLIGHT_RGB


def light_of(clip: Clip, timestamp_us: int) -> Light:
    """Light of a clip at the time when a picture is taken."""
    (x, y, _), (w, _, _, z) = clip.ego(timestamp_us)
    lamps = [(prop.x, prop.y) for prop in clip.props if prop.kind == "post"] if clip.weather.night else []
    return Light(clip.weather, (x, y), 2.0 * math.atan2(z, w), np.array(lamps).reshape(-1, 2))
