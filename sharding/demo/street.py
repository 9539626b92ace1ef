"""The street: a road of constant curvature, what lines it, and the actors on it, which never touch
one another.

Places on the road are ``(along, left)`` in metres: arc length of the centre line, and distance to
its left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.sharding.demo.rig import METRE_DECIMALS
from fuelrail.sharding.demo.shapes import Solid

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32, F64

LANE_WIDTH_M: Final = 3.5
PARKING_M: Final = 8.25  # centre of the parked cars, left or right of the centre line
KERB_M: Final = 9.4
FACADE_M: Final = 15.0
_CYCLING_M: Final = 6.85
_STRAIGHT_PER_M: Final = 1e-6
_CROWN_BASE_M: Final = 3.9  # above every parked vehicle
_CHECK_STEP_S: Final = 0.1
_ELBOW_ROOM_M: Final = 0.35
SIZES_WLH: Final = {
    "vehicle.car": (1.88, 4.55, 1.62),
    "vehicle.truck": (2.45, 7.4, 3.1),
    "vehicle.bus.rigid": (2.6, 11.6, 3.3),
    "vehicle.trailer": (2.5, 9.0, 3.6),
    "vehicle.construction": (2.4, 5.6, 2.9),
    "vehicle.motorcycle": (0.8, 2.1, 1.55),
    "vehicle.bicycle": (0.62, 1.75, 1.65),
    "human.pedestrian.adult": (0.66, 0.7, 1.76),
    "human.pedestrian.child": (0.5, 0.52, 1.22),
    "human.pedestrian.construction_worker": (0.7, 0.72, 1.8),
    "movable_object.trafficcone": (0.4, 0.4, 0.82),
    "movable_object.barrier": (2.1, 0.55, 1.0),
}
_SIGNAL_COLOURS: Final = {
    "vehicle.construction": (222, 168, 30),
    "human.pedestrian.construction_worker": (240, 130, 20),
    "movable_object.trafficcone": (238, 96, 24),
    "movable_object.barrier": (206, 40, 34),
}
_PAINTS: Final = (
    (196, 198, 200),
    (236, 236, 234),
    (44, 46, 50),
    (120, 24, 28),
    (28, 60, 120),
    (92, 98, 104),
    (20, 84, 66),
    (170, 140, 84),
)
_WALLS: Final = (
    (168, 122, 98),
    (196, 184, 162),
    (142, 138, 136),
    (184, 152, 112),
    (120, 88, 76),
    (206, 200, 190),
)


@dataclass(frozen=True, slots=True)
class Road:
    """Centre line through ``(x, y)`` of the global frame, ``heading_rad`` there, constant
    ``curvature_per_m``.
    """

    x: float
    y: float
    heading_rad: float
    curvature_per_m: float

    def heading(self, along: float) -> float:
        """Return the global heading of the centre line in rad."""
        return self.heading_rad + self.curvature_per_m * along

    def point(self, along: float, lateral: float) -> tuple[float, float]:
        """Return global x, y of a place on the road."""
        k = self.curvature_per_m
        if abs(k) < _STRAIGHT_PER_M:
            u = along
            v = lateral
        else:
            radius = 1.0 / k - lateral
            u = math.sin(k * along) * radius
            v = 1.0 / k - math.cos(k * along) * radius
        c = math.cos(self.heading_rad)
        s = math.sin(self.heading_rad)
        x = self.x + c * u - s * v
        y = self.y + s * u + c * v
        return x, y

    def locate(self, x: F32, y: F32) -> tuple[F32, F32]:
        """Return the inverse of `point` for arrays of offsets from the road's origin, float32 in
        the global axes.
        """
        c = np.float32(math.cos(self.heading_rad))
        s = np.float32(math.sin(self.heading_rad))
        u = c * x + s * y
        v = c * y - s * x
        k = self.curvature_per_m
        if abs(k) < _STRAIGHT_PER_M:
            return u, v
        sign = math.copysign(1.0, k)
        radius = np.float32(1.0 / k)
        v -= radius
        turn = np.float32(sign)
        along = np.arctan2(turn * u, -turn * v) * radius
        lateral = radius - turn * np.hypot(u, v)
        return along, lateral


def corners(
    x: F64,
    y: F64,
    yaw_rad: F64,
    length: float | F64,
    width: float | F64,
) -> F64:
    """Return the corners (..., 4, 2) of footprints, counter-clockwise, of upright boxes with the
    given centres.
    """
    along = np.array([0.5, -0.5, -0.5, 0.5]) * length
    lateral = np.array([0.5, 0.5, -0.5, -0.5]) * width
    c = np.cos(yaw_rad)[..., None]
    s = np.sin(yaw_rad)[..., None]
    corner_x = x[..., None] + c * along - s * lateral
    corner_y = y[..., None] + s * along + c * lateral
    return np.stack([corner_x, corner_y], axis=-1)


def footprints_overlap(first: F64, second: F64) -> bool:
    """Return whether two tracks of rectangles (T, 4, 2) touch at any of the T instants
    (separating axis theorem).
    """
    is_before = first.max(1) < second.min(1)
    is_behind = second.max(1) < first.min(1)
    apart = (is_before | is_behind).any(1)
    if not apart.all():
        for rectangle in (first, second):
            edges = np.diff(rectangle[:, :3], axis=1)
            for edge in (edges[:, 0], edges[:, 1]):
                a = (first * edge[:, None]).sum(-1)
                b = (second * edge[:, None]).sum(-1)
                is_left = a.max(1) < b.min(1)
                is_right = b.max(1) < a.min(1)
                apart |= is_left | is_right
    return not bool(apart.all())


def line_the_road(
    draw: np.random.Generator,
    road: Road,
    route_m: float,
) -> tuple[Solid, ...]:
    """Return buildings, trees and posts on both sides of the road, from behind the start to past
    the end.
    """
    solids: list[Solid] = []

    def stand(
        kind: str,
        along: float,
        lateral: float,
        size_lwh: tuple[float, float, float],
        floor_m: float = 0.0,
    ) -> None:
        height = floor_m + size_lwh[2] / 2.0
        centre = (*road.point(along, lateral), height)
        wall = int(draw.integers(len(_WALLS)))
        colour = _WALLS[wall]
        solids.append(
            Solid(
                kind=kind,
                actor=-1,
                centre=centre,
                yaw_rad=road.heading(along),
                size_lwh=size_lwh,
                colour=colour,
                style=int(draw.integers(1 << 16)),
            )
        )

    start = -110.0
    end = route_m + 150.0
    for side in (-1, 1):
        along = start
        while along < end:
            size = draw.uniform((11.0, 9.0, 5.5), (26.0, 16.0, 24.0))
            length, depth, height = size.tolist()
            stand(
                "building",
                along + length / 2.0,
                side * (FACADE_M + depth / 2.0),
                (length, depth, height),
            )
            along += length + draw.uniform(0.5, 6.0)
        along = start
        while along < end:
            lateral = side * (KERB_M + 0.9)
            if draw.random() < 0.4:
                stand("post", along, lateral, (0.22, 0.22, 7.0))
            else:
                width = draw.uniform(2.2, 3.2)
                crown_height = draw.uniform(2.6, 5.1)
                stand(
                    "crown",
                    along,
                    lateral,
                    (width, width, crown_height),
                    floor_m=_CROWN_BASE_M,
                )
                stand("trunk", along, lateral, (0.3, 0.3, _CROWN_BASE_M))
            along += draw.uniform(9.0, 17.0)
    return tuple(solids)


@dataclass(frozen=True, slots=True)
class Actor:
    """One annotated object: a box that moves at constant speed in road coordinates and keeps its
    angle to the road.

    ``size_wlh`` in metres as nuScenes orders it, ``speed_mps`` along and to the left of the road,
    ``facing_rad`` relative to the road's heading, ``attribute`` the nuScenes attribute name or "".
    """

    category: str
    size_wlh: tuple[float, float, float]
    colour: tuple[int, int, int]
    along: float
    lateral: float
    speed_mps: tuple[float, float]
    facing_rad: float
    attribute: str

    def pose(self, road: Road, t_s: float) -> tuple[float, float, float]:
        """Return rounded global x, y of the footprint's centre and yaw, ``t_s`` seconds into the
        clip.
        """
        along = self.along + self.speed_mps[0] * t_s
        lateral = self.lateral + self.speed_mps[1] * t_s
        x, y = road.point(along, lateral)
        return (
            round(x, METRE_DECIMALS),
            round(y, METRE_DECIMALS),
            round(road.heading(along) + self.facing_rad, 9),
        )


def _make_actor(
    draw: np.random.Generator,
    category: str,
    along: float,
    lateral: float,
    attribute: str = "",
    speed_mps: tuple[float, float] = (0.0, 0.0),
    facing_rad: float | None = None,
) -> Actor:
    """Return an actor that faces where it goes, or as ``facing_rad`` says, of a size near its
    category's.
    """
    spread = 0.0 if category.startswith("movable") else 0.06
    width, length, height = (
        round(size * (1.0 + draw.uniform(-spread, spread)), 3) for size in SIZES_WLH[category]
    )
    facing = math.atan2(speed_mps[1], speed_mps[0]) if facing_rad is None else facing_rad
    paint = _PAINTS[int(draw.integers(len(_PAINTS)))]
    colour = _SIGNAL_COLOURS.get(category, paint)
    return Actor(
        category=category,
        size_wlh=(width, length, height),
        colour=colour,
        along=along,
        lateral=lateral,
        speed_mps=speed_mps,
        facing_rad=facing,
        attribute=attribute,
    )


def _place_vehicles(
    draw: np.random.Generator,
    start: float,
    end: float,
    ego_mps: float,
) -> Iterator[Actor]:
    mix = ["vehicle.car"] * 8 + ["vehicle.truck"] * 2 + ["vehicle.bus.rigid", "vehicle.motorcycle"]
    for lane, direction in ((-0.5, 1), (-1.5, 1), (0.5, -1), (1.5, -1)):
        # Within a lane all keep one speed, so nobody ever runs into the one ahead.
        speed = direction * (
            ego_mps + draw.uniform(-0.3, 0.3) if lane == -0.5 else ego_mps * draw.uniform(0.75, 1.3)
        )
        drift = abs(speed) * end / max(ego_mps, 1.0) if direction < 0 else 0.0
        along = start + draw.uniform(0.0, 12.0)
        while along < end + drift:
            category = mix[int(draw.integers(len(mix)))]
            attribute = "cycle.with_rider" if category == "vehicle.motorcycle" else "vehicle.moving"
            yield _make_actor(
                draw,
                category=category,
                along=along,
                lateral=lane * LANE_WIDTH_M + draw.uniform(-0.15, 0.15),
                attribute=attribute,
                speed_mps=(speed, 0.0),
            )
            along += SIZES_WLH[category][1] + draw.uniform(13.0, 34.0)
    mix = ["vehicle.car"] * 8 + ["vehicle.truck", "vehicle.trailer"]
    for side, facing in ((-1, 0.0), (1, math.pi)):
        along = start + draw.uniform(0.0, 6.0)
        while along < end:
            category = mix[int(draw.integers(len(mix)))]
            turned = facing + draw.normal(0, 0.02)
            yield _make_actor(
                draw,
                category=category,
                along=along,
                lateral=side * PARKING_M,
                attribute="vehicle.parked",
                facing_rad=turned,
            )
            along += SIZES_WLH[category][1] + draw.uniform(1.4, 11.0)


def _place_people(
    draw: np.random.Generator,
    start: float,
    end: float,
) -> Iterator[Actor]:
    def somewhere(near: float, far: float) -> tuple[float, float]:
        along = draw.uniform(start, end)
        side = draw.choice([-1.0, 1.0])
        return along, side * draw.uniform(near, far)

    for _ in range(int((end - start) / 9.0)):
        category = "human.pedestrian.child" if draw.random() < 0.15 else "human.pedestrian.adult"
        place = somewhere(KERB_M + 1.7, KERB_M + 4.2)
        direction = draw.choice([-1.0, 1.0])
        speed = direction * draw.uniform(0.9, 1.6)
        if draw.random() < 0.3:
            facing = draw.uniform(-math.pi, math.pi)
            yield _make_actor(
                draw,
                category,
                *place,
                attribute="pedestrian.standing",
                facing_rad=facing,
            )
        else:
            yield _make_actor(
                draw,
                category,
                *place,
                attribute="pedestrian.moving",
                speed_mps=(speed, 0.0),
            )
    for _ in range(6):  # crossing the road where the traffic lets them
        along, lateral = somewhere(3.0, 12.0)
        velocity = (
            draw.uniform(-0.2, 0.2),
            math.copysign(draw.uniform(1.2, 1.7), -lateral),
        )
        yield _make_actor(
            draw,
            category="human.pedestrian.adult",
            along=along,
            lateral=lateral,
            attribute="pedestrian.moving",
            speed_mps=velocity,
        )
    for _ in range(int((end - start) / 30.0)):
        along, lateral = somewhere(_CYCLING_M, _CYCLING_M)
        speed = draw.uniform(3.0, 5.0)
        velocity = (math.copysign(speed, -lateral), 0.0)
        yield _make_actor(
            draw,
            category="vehicle.bicycle",
            along=along,
            lateral=lateral,
            attribute="cycle.with_rider",
            speed_mps=velocity,
        )


def _place_roadworks(draw: np.random.Generator, along: float) -> Iterator[Actor]:
    side = float(draw.choice([-1.0, 1.0]))
    lane = side * PARKING_M
    yield _make_actor(
        draw,
        category="vehicle.construction",
        along=along,
        lateral=lane,
        attribute="vehicle.stopped",
    )
    for step in range(6):
        yield _make_actor(
            draw,
            "movable_object.trafficcone",
            along - 12.0 + 3.2 * step,
            lane - side * 2.1,
        )
    for step in range(3):
        yield _make_actor(
            draw,
            category="movable_object.barrier",
            along=along - 7.0 - 1.2 * step,
            lateral=lane,
        )
    for step in range(2):
        category = "human.pedestrian.construction_worker"
        facing = draw.uniform(-3.0, 3.0)
        yield _make_actor(
            draw,
            category=category,
            along=along + 5.0 + 2.0 * step,
            lateral=lane,
            attribute="pedestrian.standing",
            facing_rad=facing,
        )


def populate(
    draw: np.random.Generator,
    road: Road,
    ego_track: F64,
    route_m: float,
    ego_mps: float,
) -> tuple[Actor, ...]:
    """Return actors along ``route_m`` metres of road, none of which ever touches another or the ego
    car.

    ``ego_track`` (T, 4, 2) holds the ego car's footprints every tenth of a second over the clip.
    """
    start = -60.0
    end = route_m + 75.0
    candidates = [
        *_place_roadworks(draw, draw.uniform(12.0, 30.0 + 0.5 * route_m)),
        *_place_vehicles(draw, start, end, ego_mps),
        *_place_people(draw, start, end),
    ]
    times = [_CHECK_STEP_S * step for step in range(len(ego_track))]
    actors: list[Actor] = []
    tracks: list[F64] = [ego_track]
    for actor in candidates:
        track = footprint_track(actor, road, times, _ELBOW_ROOM_M)
        if not any(footprints_overlap(track, occupied) for occupied in tracks):
            actors.append(actor)
            tracks.append(track)
    return tuple(actors)


def check_times(duration_s: float) -> list[float]:
    """Return the instants at which footprints are checked against each other."""
    num_steps = int(duration_s / _CHECK_STEP_S) + 2
    return [_CHECK_STEP_S * step for step in range(num_steps)]


def footprint_track(
    actor: Actor,
    road: Road,
    times_s: Sequence[float],
    margin_m: float = 0.0,
) -> F64:
    """Return the footprints (T, 4, 2) of an actor at the given times, grown by ``margin_m`` in
    length and width.
    """
    poses = np.array([actor.pose(road, t) for t in times_s])
    x, y, yaw = poses.T
    return corners(
        x,
        y=y,
        yaw_rad=yaw,
        length=actor.size_wlh[1] + margin_m,
        width=actor.size_wlh[0] + margin_m,
    )
