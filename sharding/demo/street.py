"""The street: a road of constant curvature, what lines it, and the actors on it, which never touch one another.

Places on the road are ``(along, left)`` in metres: arc length of the centre line, and distance to its left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.sharding.demo.rig import METRE_DECIMALS

LANE_WIDTH_M: Final = 3.5
PARKING_M: Final = 8.25  # centre of the parked cars, left or right of the centre line
KERB_M: Final = 9.4
FACADE_M: Final = 15.0
_STRAIGHT_PER_M: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Road:
    """Centre line through ``(x, y)`` of the global frame, ``heading_rad`` there, constant ``curvature_per_m``."""

    x: float
    y: float
    heading_rad: float
    curvature_per_m: float

    def heading(self, along: float) -> float:
        """Return the global heading of the centre line in rad."""
        return self.heading_rad + self.curvature_per_m * along

    def point(self, along: float, left: float) -> tuple[float, float]:
        """Return global x, y of a place on the road."""
        k = self.curvature_per_m
        if abs(k) < _STRAIGHT_PER_M:
            u, v = along, left
        else:
            radius = 1.0 / k - left
            u, v = math.sin(k * along) * radius, 1.0 / k - math.cos(k * along) * radius
        c, s = math.cos(self.heading_rad), math.sin(self.heading_rad)
        return self.x + c * u - s * v, self.y + s * u + c * v

    def locate(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the inverse of `point` for arrays of offsets from the road's origin, float32 in the global axes."""
        c, s = np.float32(math.cos(self.heading_rad)), np.float32(math.sin(self.heading_rad))
        u, v = c * x + s * y, c * y - s * x
        k = self.curvature_per_m
        if abs(k) < _STRAIGHT_PER_M:
            return u, v
        sign, radius = math.copysign(1.0, k), np.float32(1.0 / k)
        v -= radius
        along = np.arctan2(np.float32(sign) * u, np.float32(-sign) * v) * radius
        return along, radius - np.float32(sign) * np.hypot(u, v)


def corners(
    x: NDArray[np.float64], y: NDArray[np.float64], yaw_rad: NDArray[np.float64], length: float, width: float
) -> NDArray[np.float64]:
    """Return the corners (..., 4, 2) of footprints, counter-clockwise, of upright boxes with the given centres."""
    along = np.array([0.5, -0.5, -0.5, 0.5]) * length
    left = np.array([0.5, 0.5, -0.5, -0.5]) * width
    c, s = np.cos(yaw_rad)[..., None], np.sin(yaw_rad)[..., None]
    return np.stack([x[..., None] + c * along - s * left, y[..., None] + s * along + c * left], axis=-1)


def footprints_overlap(first: NDArray[np.float64], second: NDArray[np.float64]) -> bool:
    """Return whether two tracks of rectangles (T, 4, 2) touch at any of the T instants (separating axis theorem)."""
    apart = np.zeros(len(first), bool)
    for rectangle in (first, second):
        for edge in (rectangle[:, 1] - rectangle[:, 0], rectangle[:, 2] - rectangle[:, 1]):
            a = (first * edge[:, None]).sum(-1)
            b = (second * edge[:, None]).sum(-1)
            apart |= (a.max(1) < b.min(1)) | (b.max(1) < a.min(1))
    return not bool(apart.all())


@dataclass(frozen=True, slots=True)
class Prop:
    """An upright box of scenery on the ground. ``kind`` is building, tree or post; ``style`` picks its looks."""

    kind: str
    x: float
    y: float
    yaw_rad: float
    size_wlh: tuple[float, float, float]
    style: int


def line_the_road(draw: np.random.Generator, road: Road, route_m: float) -> tuple[Prop, ...]:
    """Return what lines the road, from behind the start to past the end; no two buildings overlap."""
    start, end = -110.0, route_m + 150.0
    props = [*_greenery(draw, road, start, end)]
    buildings: list[np.ndarray] = []
    for prop in _buildings(draw, road, start, end):
        width, length, _ = prop.size_wlh
        footprint = corners(np.array([prop.x]), np.array([prop.y]), np.array([prop.yaw_rad]), length + 0.4, width + 0.4)
        if not any(footprints_overlap(footprint, other) for other in buildings):
            buildings.append(footprint)
            props.append(prop)
    return tuple(props)


def _buildings(draw: np.random.Generator, road: Road, start: float, end: float) -> Iterator[Prop]:
    for side in (-1, 1):
        along = start
        while along < end:
            length, depth = draw.uniform(11.0, 26.0), draw.uniform(9.0, 16.0)
            height = draw.uniform(5.5, 11.0) if draw.random() < 0.6 else draw.uniform(12.0, 30.0)
            setback = draw.uniform(0.0, 2.5)
            left = side * (FACADE_M + setback + depth / 2.0)
            # On the inner side of a bend the back of a building has less room than its front.
            stretch = max(1.0, 1.0 / (1.0 - road.curvature_per_m * (left + np.sign(left) * depth / 2.0)))
            along += length * stretch / 2.0
            x, y = road.point(along, left)
            heading = road.heading(along) + (np.pi if side < 0 else 0.0)
            yield Prop("building", x, y, float(heading), (depth, length, height), int(draw.integers(1 << 16)))
            along += length * stretch / 2.0 + (draw.uniform(0.5, 2.0) if draw.random() < 0.75 else draw.uniform(8, 16))


def _greenery(draw: np.random.Generator, road: Road, start: float, end: float) -> Iterator[Prop]:
    for side in (-1, 1):
        along = start
        while along < end:
            kind = "post" if draw.random() < 0.4 else "tree"
            x, y = road.point(along, side * (KERB_M + 0.9))
            height = draw.uniform(6.5, 9.0) if kind == "tree" else 7.0
            width = draw.uniform(2.2, 3.2) if kind == "tree" else 0.22
            yaw = road.heading(along) + (0.0 if side < 0 else np.pi)
            yield Prop(kind, x, y, float(yaw), (width, width, height), int(draw.integers(1 << 16)))
            along += draw.uniform(9.0, 17.0)


_CHECK_STEP_S: Final = 0.1
_ELBOW_ROOM_M: Final = 0.35


class _Kind(NamedTuple):
    size_wlh: tuple[float, float, float]
    colours: tuple[tuple[int, int, int], ...]


_PAINTS: Final = (
    (196, 198, 200), (236, 236, 234), (44, 46, 50), (120, 24, 28), (28, 60, 120), (92, 98, 104), (20, 84, 66),
    (170, 140, 84),
)  # fmt: skip
_CLOTHES: Final = ((150, 40, 44), (40, 64, 130), (60, 60, 64), (190, 170, 130), (70, 110, 70), (180, 180, 184))
KINDS: Final[dict[str, _Kind]] = {
    "vehicle.car": _Kind((1.88, 4.55, 1.62), _PAINTS),
    "vehicle.truck": _Kind((2.45, 7.4, 3.1), ((220, 220, 216), (180, 60, 40), (50, 90, 150), (210, 170, 60))),
    "vehicle.bus.rigid": _Kind((2.6, 11.6, 3.3), ((200, 50, 44), (40, 120, 90), (230, 190, 70))),
    "vehicle.trailer": _Kind((2.5, 9.0, 3.6), ((205, 205, 205), (120, 140, 160))),
    "vehicle.construction": _Kind((2.4, 5.6, 2.9), ((222, 168, 30),)),
    "vehicle.motorcycle": _Kind((0.8, 2.1, 1.55), ((60, 30, 30), (40, 40, 48))),
    "vehicle.bicycle": _Kind((0.62, 1.75, 1.65), ((40, 100, 110), (140, 60, 50))),
    "human.pedestrian.adult": _Kind((0.66, 0.7, 1.76), _CLOTHES),
    "human.pedestrian.child": _Kind((0.5, 0.52, 1.22), _CLOTHES),
    "human.pedestrian.construction_worker": _Kind((0.7, 0.72, 1.8), ((240, 130, 20),)),
    "movable_object.trafficcone": _Kind((0.4, 0.4, 0.82), ((238, 96, 24),)),
    "movable_object.barrier": _Kind((2.1, 0.55, 1.0), ((206, 40, 34),)),
}

_BARE_BICYCLE: Final = _Kind((0.6, 1.75, 1.0), KINDS["vehicle.bicycle"].colours)


@dataclass(frozen=True, slots=True)
class Actor:
    """One annotated object: a box that moves at constant speed in road coordinates and keeps its angle to the road.

    ``size_wlh`` in metres as nuScenes orders it, ``speed_mps`` along and to the left of the road, ``facing_rad``
    relative to the road's heading, ``attribute`` the nuScenes attribute name or "".
    """

    category: str
    size_wlh: tuple[float, float, float]
    colour: tuple[int, int, int]
    along: float
    left: float
    speed_mps: tuple[float, float]
    facing_rad: float
    attribute: str

    def pose(self, road: Road, t_s: float) -> tuple[float, float, float]:
        """Return rounded global x, y of the footprint's centre and yaw, ``t_s`` seconds into the clip."""
        along = self.along + self.speed_mps[0] * t_s
        x, y = road.point(along, self.left + self.speed_mps[1] * t_s)
        return round(x, METRE_DECIMALS), round(y, METRE_DECIMALS), round(road.heading(along) + self.facing_rad, 9)


def _actor(
    draw: np.random.Generator,
    category: str,
    along: float,
    left: float,
    speed_mps: tuple[float, float] = (0.0, 0.0),
    facing_rad: float | None = None,
    attribute: str = "",
) -> Actor:
    kind = _BARE_BICYCLE if attribute == "cycle.without_rider" else KINDS[category]
    spread = 0.0 if category.startswith("movable") else 0.06
    width, length, height = (round(float(size * (1.0 + draw.uniform(-spread, spread))), 3) for size in kind.size_wlh)
    if facing_rad is None:
        facing_rad = math.atan2(speed_mps[1], speed_mps[0])
    colour = kind.colours[int(draw.integers(len(kind.colours)))]
    return Actor(category, (width, length, height), colour, along, left, speed_mps, facing_rad, attribute)


def _lane_traffic(draw: np.random.Generator, start: float, end: float, ego_mps: float) -> Iterator[Actor]:
    mix = ["vehicle.car"] * 8 + ["vehicle.truck"] * 2 + ["vehicle.bus.rigid", "vehicle.motorcycle", "vehicle.trailer"]
    for lane, direction in ((-0.5, 1), (-1.5, 1), (0.5, -1), (1.5, -1)):
        # Within a lane all keep one speed, so nobody ever runs into the one ahead.
        speed = direction * (ego_mps + draw.uniform(-0.3, 0.3) if lane == -0.5 else ego_mps * draw.uniform(0.75, 1.3))
        drift = abs(speed) * end / max(ego_mps, 1.0) if direction < 0 else 0.0
        along = start + draw.uniform(0.0, 12.0)
        while along < end + drift:
            category = mix[int(draw.integers(len(mix)))]
            attribute = "cycle.with_rider" if category == "vehicle.motorcycle" else "vehicle.moving"
            left = lane * LANE_WIDTH_M + draw.uniform(-0.15, 0.15)
            if category == "vehicle.trailer":  # with the truck that pulls it
                pulls = (KINDS[category].size_wlh[1] + KINDS["vehicle.truck"].size_wlh[1]) / 2.0 + 1.6
                truck = along + pulls if direction > 0 else along
                yield _actor(draw, "vehicle.truck", truck, left, (speed, 0.0), attribute=attribute)
                yield _actor(draw, category, truck - direction * pulls, left, (speed, 0.0), attribute=attribute)
                along += pulls
            else:
                yield _actor(draw, category, along, left, (speed, 0.0), attribute=attribute)
            along += KINDS[category].size_wlh[1] + draw.uniform(13.0, 34.0)


def _parked(draw: np.random.Generator, start: float, end: float) -> Iterator[Actor]:
    for side, facing in ((-1, 0.0), (1, math.pi)):
        along = start + draw.uniform(0.0, 6.0)
        while along < end:
            category = "vehicle.truck" if draw.random() < 0.12 else "vehicle.car"
            if draw.random() < 0.55:
                left, turn = side * PARKING_M + draw.uniform(-0.1, 0.1), facing + draw.normal(0, 0.02)
                yield _actor(draw, category, along, left, facing_rad=turn, attribute="vehicle.parked")
            along += KINDS[category].size_wlh[1] + draw.uniform(1.4, 5.0)


def _people(draw: np.random.Generator, start: float, end: float) -> Iterator[Actor]:
    for _ in range(int((end - start) / 9.0)):
        category = "human.pedestrian.child" if draw.random() < 0.15 else "human.pedestrian.adult"
        along, left = draw.uniform(start, end), draw.choice([-1.0, 1.0]) * draw.uniform(KERB_M + 1.7, KERB_M + 4.2)
        is_standing, away = draw.random() < 0.3, draw.choice([-1.0, 1.0])
        velocity = (0.0 if is_standing else away * draw.uniform(0.9, 1.6), 0.0)
        facing = draw.uniform(-math.pi, math.pi) if is_standing else None
        attribute = "pedestrian.standing" if is_standing else "pedestrian.moving"
        yield _actor(draw, category, along, left, velocity, facing, attribute)
    for _ in range(6):  # crossing the road where the traffic lets them
        side = float(draw.choice([-1.0, 1.0]))
        velocity = (draw.uniform(-0.2, 0.2), -side * draw.uniform(1.2, 1.7))
        along, left = draw.uniform(start + 40.0, end), side * draw.uniform(3.0, 12.0)
        yield _actor(draw, "human.pedestrian.adult", along, left, velocity, attribute="pedestrian.moving")
    for _ in range(int((end - start) / 30.0)):
        speed = draw.uniform(3.0, 5.0)
        place = (draw.uniform(start, end), -6.85) if draw.random() < 0.5 else (draw.uniform(start, end), 6.85)
        velocity = (math.copysign(speed, -place[1]), 0.0)
        yield _actor(draw, "vehicle.bicycle", *place, velocity, attribute="cycle.with_rider")
    for _ in range(3):
        along, left = draw.uniform(start, end), draw.choice([-1.0, 1.0]) * (KERB_M + 0.35)
        yield _actor(draw, "vehicle.bicycle", along, left, facing_rad=0.1, attribute="cycle.without_rider")


def _roadworks(draw: np.random.Generator, along: float) -> Iterator[Actor]:
    side = float(draw.choice([-1.0, 1.0]))
    lane = side * PARKING_M
    facing = draw.uniform(-0.2, 0.2)
    yield _actor(draw, "vehicle.construction", along, lane, facing_rad=facing, attribute="vehicle.stopped")
    for step in range(6):
        yield _actor(draw, "movable_object.trafficcone", along - 12.0 + 3.2 * step, lane - side * 2.1, facing_rad=0.0)
    for step in range(3):
        yield _actor(draw, "movable_object.barrier", along - 7.0 - 1.2 * step, lane + side * 0.2 * step, facing_rad=0.0)
    for _ in range(2):
        place = (along + draw.uniform(4.0, 8.0), lane + draw.uniform(-0.6, 0.6))
        category = "human.pedestrian.construction_worker"
        yield _actor(draw, category, *place, facing_rad=draw.uniform(-3.0, 3.0), attribute="pedestrian.standing")


def populate(
    draw: np.random.Generator, road: Road, ego_track: NDArray[np.float64], route_m: float, ego_mps: float
) -> tuple[Actor, ...]:
    """Return actors along ``route_m`` metres of road, none of which ever touches another or the ego car.

    ``ego_track`` (T, 4, 2) holds the ego car's footprints every tenth of a second over the clip.
    """
    start, end = -60.0, route_m + 75.0
    candidates = [
        *_roadworks(draw, draw.uniform(12.0, 30.0 + 0.5 * route_m)),
        *_lane_traffic(draw, start, end, ego_mps),
        *_parked(draw, start, end),
        *_people(draw, start, end),
    ]
    times = [_CHECK_STEP_S * step for step in range(len(ego_track))]
    kept: list[Actor] = []
    tracks: list[NDArray[np.float64]] = [ego_track]
    for actor in candidates:
        track = footprint_track(actor, road, times, _ELBOW_ROOM_M)
        if not _touches_any(track, tracks):
            kept.append(actor)
            tracks.append(track)
    return tuple(kept)


def check_times(duration_s: float) -> list[float]:
    """Return the instants at which footprints are checked against each other."""
    return [_CHECK_STEP_S * step for step in range(int(duration_s / _CHECK_STEP_S) + 2)]


def footprint_track(actor: Actor, road: Road, times_s: Sequence[float], margin_m: float = 0.0) -> NDArray[np.float64]:
    """Return the footprints (T, 4, 2) of an actor at the given times, grown by ``margin_m`` in length and width."""
    x, y, yaw = np.array([actor.pose(road, t) for t in times_s]).T
    return corners(x, y, yaw, actor.size_wlh[1] + margin_m, actor.size_wlh[0] + margin_m)


def _touches_any(track: NDArray[np.float64], others: Sequence[NDArray[np.float64]]) -> bool:
    centre, reach = track.mean(1), np.ptp(track[0], axis=0).sum()
    for other in others:
        near = reach + np.ptp(other[0], axis=0).sum()
        if np.abs(other.mean(1) - centre).max(-1).min() < near and footprints_overlap(track, other):
            return True
    return False
