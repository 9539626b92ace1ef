"""Seeded random streams, and the sensor rig: six cameras and a roof lidar, placed and timed as on a
nuScenes car.

Each vehicle gets its own small, seeded calibration errors, so no two have the same matrices.
Frames: ego is x forward, y left, z up on the ground below the rear axle; a camera is x right, y
down, z forward; the lidar is x right, y forward, z up.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.rigid import rigid
from fuelrail.sharding.sources.adapter.poses import OPTICAL2FLU, quaternions

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64

QUATERNION_DECIMALS: Final = 12
# Of what ends up in a table: it is rounded first, so what is rendered is what they say.
METRE_DECIMALS: Final = 6
LIDAR_CHANNEL: Final = "LIDAR_TOP"


def stream(*path: object) -> np.random.Generator:
    """Return the random stream of a path such as ``(seed, "clip", 3)``: independent of the order
    of use.
    """
    text = "/".join(map(str, path))
    digest = hashlib.sha256(text.encode()).digest()
    key = int.from_bytes(digest[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def _make_rotation(roll: float, pitch: float, yaw: float) -> F64:
    """Return the rotation (3, 3) about the x, then the y, then the z axis [rad]."""
    a, b, c = np.cos((roll, pitch, yaw))
    d, e, f = np.sin((roll, pitch, yaw))
    about_x = np.array(
        [
            [1.0, 0.0, 0.0],
            [0.0, a, -d],
            [0.0, d, a],
        ]
    )
    about_y = np.array(
        [
            [b, 0.0, e],
            [0.0, 1.0, 0.0],
            [-e, 0.0, b],
        ]
    )
    about_z = np.array(
        [
            [c, -f, 0.0],
            [f, c, 0.0],
            [0.0, 0.0, 1.0],
        ]
    )
    turned: F64 = about_z @ about_y @ about_x
    return turned


def yaw_quaternion(yaw_rad: float) -> tuple[float, float, float, float]:
    """Return the rounded quaternion of a rotation about z."""
    half = yaw_rad / 2.0
    return (
        round(math.cos(half), QUATERNION_DECIMALS),
        0.0,
        0.0,
        round(math.sin(half), QUATERNION_DECIMALS),
    )


def _round_quaternion(rotation: F64) -> tuple[float, ...]:
    quaternion = quaternions(rotation[None])[0]
    return tuple(np.round(quaternion, QUATERNION_DECIMALS).tolist())


class _Mount(NamedTuple):
    yaw_deg: float
    translation: tuple[float, float, float]
    focal_px: float
    lead_us: int  # how long before the end of the lidar's revolution the shutter opens


# The lidar turns clockwise and ends its revolution at the rear left, so the front left camera fires
# first.
_MOUNTS: Final[dict[str, _Mount]] = {
    "CAM_FRONT": _Mount(0.0, (1.71, 0.01, 1.50), 1262.0, 35_500),
    "CAM_FRONT_RIGHT": _Mount(-55.5, (1.56, -0.495, 1.50), 1258.0, 27_600),
    "CAM_FRONT_LEFT": _Mount(55.0, (1.55, 0.495, 1.51), 1265.0, 43_100),
    "CAM_BACK": _Mount(180.0, (0.04, 0.005, 1.57), 804.0, 10_400),
    "CAM_BACK_LEFT": _Mount(108.5, (1.04, 0.484, 1.58), 1256.0, 600),
    "CAM_BACK_RIGHT": _Mount(-110.0, (1.03, -0.475, 1.555), 1255.0, 20_000),
}
CAMERA_CHANNELS: Final = tuple(_MOUNTS)


@dataclass(frozen=True, slots=True, eq=False)
class RigSensor:
    """A pinhole camera, or the lidar, on the car.

    ``intrinsics`` (3, 3) put the centre of the top left pixel at (0, 0); the lidar's are empty and
    its ``size`` in pixels is (0, 0). ``lead_us``: how long before the end of the lidar's revolution
    it records.
    """

    channel: str
    size: tuple[int, int]
    intrinsics: F64
    translation: tuple[float, ...]
    rotation: tuple[float, ...]
    lead_us: int

    @property
    def sensor2ego(self) -> F64:
        """Return sensor to ego, (4, 4)."""
        return rigid(np.array(self.rotation), np.array(self.translation))


@dataclass(frozen=True, slots=True)
class Rig:
    """The calibrated sensors of one vehicle."""

    vehicle: str
    cameras: tuple[RigSensor, ...]
    lidar: RigSensor


def make_rig(
    seed: int,
    vehicle: str,
    width_px: int,
    height_px: int,
) -> Rig:
    """Return the calibrated rig of ``vehicle`` with images of ``width_px`` x ``height_px``.

    Intrinsics are drawn for 1600 x 900 and scaled as a resize scales them on centre-origin pixels:
    ``f' = s f`` and ``c' = s (c + 1/2) - 1/2``.
    """
    scale_x = width_px / 1600
    scale_y = height_px / 900
    cameras = []
    for channel, mount in _MOUNTS.items():
        draw = stream(seed, "rig", vehicle, channel)
        deviations = draw.normal(0.0, (0.5, 0.25, 0.25))
        yaw, pitch, roll = np.radians(deviations)
        focal_px = mount.focal_px + draw.uniform(-6.0, 6.0)
        centre_x = 812.0 + draw.uniform(-16.0, 16.0)
        centre_y = 482.0 + draw.uniform(-16.0, 16.0)
        intrinsics = np.array(
            [
                [focal_px * scale_x, 0.0, scale_x * (centre_x + 0.5) - 0.5],
                [0.0, focal_px * scale_y, scale_y * (centre_y + 0.5) - 0.5],
                [0.0, 0.0, 1.0],
            ]
        )
        place = mount.translation + draw.normal(0.0, 0.01, 3)
        translation = tuple(np.round(place, METRE_DECIMALS).tolist())
        lead_us = mount.lead_us + int(draw.integers(-300, 301))
        heading = math.radians(mount.yaw_deg) + yaw
        rotation = _make_rotation(roll, pitch, heading) @ OPTICAL2FLU[:3, :3]
        turned = _round_quaternion(rotation)
        size = (width_px, height_px)
        cameras.append(
            RigSensor(
                channel=channel,
                size=size,
                intrinsics=np.round(intrinsics, 9),
                translation=translation,
                rotation=turned,
                lead_us=lead_us,
            )
        )
    draw = stream(seed, "rig", vehicle, LIDAR_CHANNEL)
    angles = draw.normal((0.0, 0.0, -90.0), (0.4, 0.4, 0.3))
    roll, pitch, yaw = np.radians(angles)
    translation = (
        round(0.96 + draw.normal(0.0, 0.02), METRE_DECIMALS),
        0.0,
        1.84,
    )
    turned = _round_quaternion(_make_rotation(roll, pitch, yaw))
    lidar = RigSensor(
        channel=LIDAR_CHANNEL,
        size=(0, 0),
        intrinsics=np.empty((0, 0)),
        translation=translation,
        rotation=turned,
        lead_us=0,
    )
    return Rig(vehicle, tuple(cameras), lidar)
