"""The synthetic world as pure description: clips, what stands and moves in them, where the car is
at any time.

Everything is a function of the `SynthOptions`. What is rendered, scanned and written in tables is
read from here.

Time. The car moves all the time: each sensor is placed by the ego pose at its own timestamp. Other
objects step from one *capture* to the next (a capture is one revolution of the lidar and the six
exposures within it) and stand still during it, at their place at its reference time. So an
annotation, which the format ties to the sample's timestamp, lies exactly on the object in each of
the sample's images, though these are exposed up to 43 ms earlier.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.rigid import rigid
from fuelrail.sharding.demo.rig import (
    METRE_DECIMALS,
    Rig,
    make_rig,
    stream,
    yaw_quaternion,
)
from fuelrail.sharding.demo.shapes import Solid
from fuelrail.sharding.demo.street import (
    LANE_WIDTH_M,
    Actor,
    Road,
    check_times,
    corners,
    line_the_road,
    populate,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64
    from fuelrail.sharding.demo.options import SynthOptions

KEYFRAME_US: Final = 500_000
# 2030-01-01 14:00 UTC: nobody can take these drives for recorded ones.
_EPOCH_S: Final = 1_893_506_400
_CLIPS_PER_LOG: Final = 2
_EGO_LENGTH_M = 4.6
_EGO_WIDTH_M = 1.95
_EGO_CENTRE_M = 1.4
_BOX_LIFT_M: Final = 0.03
_REACH_M: Final = 130.0


class Weather(NamedTuple):
    """Light and air. Colours are RGB; ``haze_m`` is the distance at which haze hides 63 percent."""

    description: str
    light: float  # share of full light that falls on everything
    haze_m: float
    haze_rgb: tuple[int, int, int]
    zenith_rgb: tuple[int, int, int]


_WEATHERS: Final = (
    Weather(
        description="day, clear",
        light=1.0,
        haze_m=420.0,
        haze_rgb=(196, 208, 220),
        zenith_rgb=(84, 138, 206),
    ),
    Weather(
        description="rain, wet road",
        light=0.85,
        haze_m=150.0,
        haze_rgb=(178, 183, 188),
        zenith_rgb=(150, 157, 166),
    ),
    Weather(
        description="dusk, overcast",
        light=0.75,
        haze_m=240.0,
        haze_rgb=(186, 168, 160),
        zenith_rgb=(112, 112, 132),
    ),
    Weather(
        description="night, street lights",
        light=0.4,
        haze_m=110.0,
        haze_rgb=(18, 20, 28),
        zenith_rgb=(8, 10, 18),
    ),
)
_VEHICLES: Final = ("synth-a", "synth-b")
_LOCATIONS: Final = (
    "synth-riverside",
    "synth-hilltop",
    "synth-harbour",
    "synth-oldtown",
)


class Capture(NamedTuple):
    """One instant of one clip: a keyframe, which all sensors record, or a lidar sweep before
    keyframe ``frame``.
    """

    clip: int
    frame: int
    timestamp_us: int  # the reference: end of the lidar's revolution, place of the objects
    is_key_frame: bool


@dataclass(frozen=True, slots=True)
class SynthClip:
    """One drive segment: a road, those on it, a rig, and the car's motion."""

    index: int
    name: str
    log: int
    start_us: int
    duration_s: float
    road: Road
    rig: Rig
    weather: Weather
    actors: tuple[Actor, ...]
    scenery: tuple[Solid, ...]
    speed_mps: float
    # Amplitude in m/s and rate in rad/s of the speed, amplitude in m across the lane.
    sway: tuple[float, float, float]

    @property
    def description(self) -> str:
        """Return free text as a nuScenes scene has it; rain and night are found by these words."""
        return (
            f"Synthetic, {self.weather.description}, roadworks, parked cars, peds on sidewalk, "
            "peds crossing"
        )

    def seconds(self, timestamp_us: int) -> float:
        """Return the time since the start of the clip [s]."""
        return (timestamp_us - self.start_us) / 1e6

    def ego(
        self, timestamp_us: int
    ) -> tuple[tuple[float, float, float], tuple[float, float, float, float]]:
        """Return the rounded global translation and rotation (w, x, y, z) of the car; it moves
        in the plane z = 0.
        """
        x, y, yaw = _compute_ego_pose(
            self.road, self.speed_mps, self.sway, self.seconds(timestamp_us)
        )
        return (
            round(x, METRE_DECIMALS),
            round(y, METRE_DECIMALS),
            0.0,
        ), yaw_quaternion(yaw)

    def ego2global(self, timestamp_us: int) -> F64:
        """Return ego to global (4, 4) of exactly the pose that the tables hold."""
        translation, rotation = self.ego(timestamp_us)
        return rigid(np.array(rotation), np.array(translation))

    def actor_box(self, actor: Actor, capture_us: int) -> tuple[tuple[float, float, float], float]:
        """Return the rounded global centre and yaw of an actor's box in the capture with this
        reference time.
        """
        x, y, yaw = actor.pose(self.road, self.seconds(capture_us))
        # Boxes end a little above the ground: no ground point is ever inside one.
        return (
            x,
            y,
            round(_BOX_LIFT_M + actor.size_wlh[2] / 2.0, METRE_DECIMALS),
        ), yaw

    def solids(self, capture_us: int) -> list[Solid]:
        """Return all within sight of the car in a capture, actors first, at their places at its
        reference time.
        """
        actor_solids = []
        for index, actor in enumerate(self.actors):
            centre, yaw = self.actor_box(actor, capture_us)
            width, length, height = actor.size_wlh
            actor_solids.append(
                Solid(
                    kind=actor.category,
                    actor=index,
                    centre=centre,
                    yaw_rad=yaw,
                    size_lwh=(length, width, height),
                    colour=actor.colour,
                    style=index,
                )
            )
        ego_xy = self.ego(capture_us)[0][:2]
        return [
            solid
            for solid in (*actor_solids, *self.scenery)
            if math.dist(solid.centre[:2], ego_xy) < _REACH_M
        ]


def _compute_ego_pose(
    road: Road,
    speed_mps: float,
    sway: tuple[float, float, float],
    t_s: float,
) -> tuple[float, float, float]:
    """Return x, y, yaw: speed v + a sin(w t), so arc length v t + a (1 - cos w t) / w, and a
    slow sway in the lane.
    """
    pulse, rate, drift = sway
    pulse_m = pulse * (1.0 - math.cos(rate * t_s)) / rate
    along = speed_mps * t_s + pulse_m
    left = -LANE_WIDTH_M / 2.0 + drift * math.sin(0.11 * along)
    x, y = road.point(along, left)
    swing = drift * 0.11 * math.cos(0.11 * along)
    slope = swing / (1.0 - road.curvature_per_m * left)
    return x, y, road.heading(along) + math.atan(slope)


def token(seed: int, *path: object) -> str:
    """Return 32 hex digits for a record, from the seed and what the record is."""
    parts = ("fuelrail-synth", seed, *path)
    text = "/".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=16)
def make_clip(world: SynthOptions, index: int) -> SynthClip:
    """Return clip ``index`` of the world, which does not depend on how many clips there are."""
    draw = stream(world.seed, "clip", index)
    log = index // _CLIPS_PER_LOG
    log_start_s = _EPOCH_S + 7 * 86_400 * log
    start_us = (log_start_s + 1800 * (index % _CLIPS_PER_LOG)) * 1_000_000 + int(
        draw.integers(0, 1_000_000)
    )
    duration_s = KEYFRAME_US * 1e-6 * (world.frames - 1)
    speed_mps = draw.uniform(6.0, 9.5)
    route_m = speed_mps * duration_s
    radius_m = draw.uniform(110.0, 220.0)
    bend = min(1.0 / radius_m, 1.8 / (route_m + 150.0))
    bend = bend * draw.choice([-1.0, 1.0])
    road = Road(
        x=float(draw.uniform(400.0, 2400.0)),
        y=float(draw.uniform(400.0, 2400.0)),
        heading_rad=float(draw.uniform(-math.pi, math.pi)),
        curvature_per_m=0.0 if index % 3 == 1 else float(bend),
    )
    sway = (
        float(draw.uniform(0.4, 1.0)),
        float(draw.uniform(0.7, 1.1)),
        float(draw.uniform(0.1, 0.25)),
    )
    times_s = check_times(duration_s)
    track = [_compute_ego_pose(road, speed_mps, sway, t) for t in times_s]
    x, y, yaw = np.array(track).T
    return SynthClip(
        index=index,
        name=f"scene-{9001 + index:04d}",
        log=log,
        start_us=start_us,
        duration_s=duration_s,
        road=road,
        rig=make_rig(world.seed, _VEHICLES[log % len(_VEHICLES)], *world.size),
        weather=_WEATHERS[index % len(_WEATHERS)],
        actors=populate(
            stream(world.seed, "traffic", index),
            road=road,
            ego_track=corners(
                x + _EGO_CENTRE_M * np.cos(yaw),
                y=y + _EGO_CENTRE_M * np.sin(yaw),
                yaw_rad=yaw,
                length=_EGO_LENGTH_M + 0.8,
                width=_EGO_WIDTH_M + 0.5,
            ),
            route_m=route_m,
            ego_mps=speed_mps,
        ),
        scenery=line_the_road(stream(world.seed, "scenery", index), road, route_m),
        speed_mps=float(speed_mps),
        sway=sway,
    )


def log_facts(world: SynthOptions, log: int) -> dict[str, str]:
    """Return name, vehicle, date and place of a log, as the nuScenes log table has them."""
    clip = make_clip(world, log * _CLIPS_PER_LOG)
    started = datetime.fromtimestamp(clip.start_us // 1_000_000, tz=UTC)
    return {
        "logfile": f"{clip.rig.vehicle}-{started:%Y-%m-%d-%H-%M-%S}+0000",
        "vehicle": clip.rig.vehicle,
        "date_captured": f"{started:%Y-%m-%d}",
        "location": _LOCATIONS[log % len(_LOCATIONS)],
    }


def captures(world: SynthOptions, clip: SynthClip) -> list[Capture]:
    """Return all captures of a clip by time.

    Keyframes are half a second apart, within 2 ms; sweeps divide the time.
    """
    draw = stream(world.seed, "clock", clip.index)
    jitter = draw.integers(-1000, 1001, world.frames)
    jitter[0] = 0
    keys = [
        clip.start_us + KEYFRAME_US * frame + int(jitter[frame]) for frame in range(world.frames)
    ]
    captures_made = [
        Capture(
            clip=clip.index,
            frame=0,
            timestamp_us=keys[0],
            is_key_frame=True,
        )
    ]
    for frame, (before, key) in enumerate(pairwise(keys), 1):
        for step in range(1, world.lidar_sweeps + 2):
            time = before + (key - before) * step // (world.lidar_sweeps + 1)
            captures_made.append(
                Capture(
                    clip=clip.index,
                    frame=frame,
                    timestamp_us=time,
                    is_key_frame=time == key,
                )
            )
    return captures_made
