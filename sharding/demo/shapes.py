"""What an object looks like: convex parts and flat cut-outs, in a unit box.

Unit box coordinates: x from -0.5 (rear) to 0.5 (front), y from -0.5 (right) to 0.5 (left), z from 0 to 1 (top). They
are scaled to the size of the object's box, so that a shape fills its box and never leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Face:
    """A planar convex polygon: vertex numbers, counter-clockwise from outside; texture name; where the texture lies.

    ``frame`` (3, 3): columns are the texture's direction to the right, its direction down and its top left corner, so
    ``frame @ (s, t, 1)`` is the unit-box point of texture coordinates s, t in 0..1.
    """

    vertices: tuple[int, ...]
    texture: str
    frame: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A convex body with textured faces, or, with ``flat``, one two-sided face whose texture has transparent places."""

    vertices: NDArray[np.float64]  # (V, 3), unit box
    faces: tuple[Face, ...]
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of one kind of object.

    ``upright``: texture of a cut-out that always faces the camera, for people and tree crowns, which have no parts to
    draw. ``bodies`` are what the lidar hits and what hides other things.
    """

    parts: tuple[Part, ...]
    bodies: tuple[Part, ...]
    upright: str = ""
    side: str = ""  # cut-out seen from the side, in the plane y = 0; ``upright`` is then used from ahead and behind


def _rim_frame(start: NDArray[np.float64], end: NDArray[np.float64], half_width: float) -> NDArray[np.float64]:
    # From point to point (x, z) of the profile, counter-clockwise: where it descends, the face looks to the rear.
    descends = end[1] < start[1]
    top, bottom = (start, end) if descends else (end, start)
    across = np.array([0.0, -2.0 if descends else 2.0, 0.0]) * half_width
    high, low = np.array([top[0], 0.0, top[1]]), np.array([bottom[0], 0.0, bottom[1]])
    return np.column_stack([across, low - high, high - across / 2.0])


def extrude(
    profile: Sequence[tuple[float, float]],
    side: str,
    rim: Sequence[str],
    *,
    half_width: tuple[float, float] = (0.5, 0.5),
) -> Part:
    """Convex body with a profile of (x, z) points, counter-clockwise seen from the right side (x to the right, z up).

    ``rim[i]`` is the texture of the face from point i to i + 1; ``half_width`` is half its width at the bottom and at
    the top. The side texture spans the profile's bounding rectangle, with the front at its right on both sides.
    """
    points = np.asarray(profile)
    count = len(points)
    low, high = points.min(0), points.max(0)

    def half(z: float) -> float:
        share = (z - low[1]) / (high[1] - low[1])
        return half_width[0] + (half_width[1] - half_width[0]) * float(share)

    right = np.array([(x, -half(z), z) for x, z in points])
    left = right * (1.0, -1.0, 1.0)
    faces = []
    for vertices, sign in ((tuple(range(count)), -1.0), (tuple(range(2 * count - 1, count - 1, -1)), 1.0)):
        corner = np.array([low[0], sign * half(high[1]), high[1]])
        down = np.array([low[0], sign * half(low[1]), low[1]]) - corner
        across = np.array([high[0] - low[0], 0.0, 0.0])
        faces.append(Face(vertices, side, np.column_stack([across, down, corner])))
    for index, texture in enumerate(rim):
        following = (index + 1) % count
        frame = _rim_frame(points[index], points[following], max(half_width))
        faces.append(Face((index, count + index, count + following, following), texture, frame))
    return Part(np.concatenate([right, left]), tuple(faces))


def block(
    x: tuple[float, float],
    z: tuple[float, float],
    half_width: float,
    textures: str | tuple[str, str, str, str],
) -> Part:
    """Upright box; textures of its sides, front, rear and top (the bottom looks as the sides do)."""
    side, front, rear, top = (textures,) * 4 if isinstance(textures, str) else textures
    profile = ((x[0], z[0]), (x[1], z[0]), (x[1], z[1]), (x[0], z[1]))
    return extrude(profile, side, (side, front, top, rear), half_width=(half_width, half_width))


def _shifted(part: Part, left: float) -> Part:
    shift = np.array([0.0, left, 0.0])
    faces = tuple(Face(f.vertices, f.texture, f.frame + np.column_stack([np.zeros((3, 2)), shift])) for f in part.faces)
    return Part(part.vertices + shift, faces)


def _cutout(y: float, x: tuple[float, float], z: tuple[float, float], texture: str) -> Part:
    vertices = np.array([(x[0], y, z[0]), (x[1], y, z[0]), (x[1], y, z[1]), (x[0], y, z[1])])
    frame = np.column_stack([vertices[1] - vertices[0], vertices[0] - vertices[3], vertices[3]])
    return Part(vertices, (Face((0, 1, 2, 3), texture, frame),), flat=True)


def _wheels(texture: str, height: float, clearance: float, places: tuple[float, ...], reach: float) -> tuple[Part, ...]:
    # Discs at both sides; below the body also the treads, which give them their width from ahead and behind.
    discs = [_cutout(y, (-0.5, 0.5), (0.0, height), texture) for y in (-0.498, 0.498)]
    treads = []
    for x in places:
        profile = ((x - reach / 2, 0.0), (x + reach / 2, 0.0), (x + reach, clearance), (x - reach, clearance))
        tread = extrude(profile, "tyre", ("tyre",) * 4, half_width=(0.055, 0.055))
        treads += [_shifted(tread, y) for y in (-0.435, 0.435)]
    return (*discs, *treads)


def _pillar(radius: float = 0.42) -> Part:
    angles = np.radians(np.arange(0, 360, 60))
    ring = np.column_stack([np.cos(angles), np.sin(angles)]) * radius
    vertices = np.concatenate([np.column_stack([ring, np.full(6, z)]) for z in (0.0, 0.98)])
    frame = np.eye(3)
    sides = [Face((i, (i + 1) % 6, 6 + (i + 1) % 6, 6 + i), "plain", frame) for i in range(6)]
    caps = [Face((5, 4, 3, 2, 1, 0), "plain", frame), Face((6, 7, 8, 9, 10, 11), "plain", frame)]
    return Part(vertices, (*sides, *caps))


def _drawn(*parts: Part) -> Shape:
    return Shape(parts, tuple(part for part in parts if not part.flat))


_CAR_BODY: Final = (
    (-0.485, 0.13), (0.485, 0.13), (0.5, 0.36), (0.45, 0.49), (0.22, 0.56), (-0.46, 0.58), (-0.5, 0.42),
)  # fmt: skip
_CAR_CABIN: Final = ((-0.46, 0.58), (0.23, 0.58), (0.06, 0.985), (-0.02, 1.0), (-0.27, 1.0), (-0.36, 0.97))


def _car() -> Shape:
    body = extrude(
        _CAR_BODY, "car_side", ("dark", "bumper", "front", "hood", "paint", "rear", "bumper"), half_width=(0.495, 0.47)
    )
    cabin = extrude(
        _CAR_CABIN,
        "car_glass",
        ("paint", "windshield", "paint", "paint", "paint", "windshield"),
        half_width=(0.46, 0.36),
    )
    return _drawn(*_wheels("wheels", 0.40, 0.125, (-0.31, 0.31), 0.05), body, cabin)


def _truck() -> Shape:
    cargo = block((-0.5, 0.23), (0.16, 1.0), 0.49, ("cargo", "plain", "doors", "plain"))
    cab = extrude(
        ((0.24, 0.12), (0.5, 0.12), (0.5, 0.5), (0.45, 0.84), (0.24, 0.86)),
        "cab_side",
        ("dark", "front", "windshield", "paint", "paint"),
        half_width=(0.47, 0.44),
    )
    chassis = block((-0.48, 0.235), (0.09, 0.155), 0.4, "dark")
    return _drawn(*_wheels("truck_wheels", 0.31, 0.085, (-0.34, 0.35), 0.05), chassis, cargo, cab)


def _bus() -> Shape:
    body = block((-0.5, 0.5), (0.09, 1.0), 0.49, ("bus_side", "bus_front", "bus_rear", "plain"))
    return _drawn(*_wheels("truck_wheels", 0.30, 0.085, (-0.34, 0.35), 0.05), body)


def _trailer() -> Shape:
    body = block((-0.5, 0.5), (0.26, 1.0), 0.49, ("cargo", "plain", "doors", "plain"))
    chassis = block((-0.45, 0.45), (0.12, 0.255), 0.38, "dark")
    return _drawn(*_wheels("trailer_wheels", 0.28, 0.115, (-0.4, -0.28), 0.04), chassis, body)


def _digger() -> Shape:
    tracks = block((-0.42, 0.36), (0.0, 0.3), 0.5, "tracks")
    body = block((-0.5, 0.02), (0.305, 0.64), 0.44, ("machine", "plain", "machine", "plain"))
    cab = block((0.03, 0.3), (0.305, 0.98), 0.3, "cab_box")
    arm = extrude(
        ((0.31, 0.5), (0.5, 0.1), (0.5, 0.3), (0.4, 0.9), (0.31, 0.99)),
        "plain",
        ("plain",) * 5,
        half_width=(0.08, 0.08),
    )
    return _drawn(tracks, body, cab, arm)


def _cone() -> Shape:
    base = block((-0.5, 0.5), (0.0, 0.06), 0.5, "dark")
    cone = extrude(
        ((-0.34, 0.065), (0.34, 0.065), (0.08, 1.0), (-0.08, 1.0)),
        "cone",
        ("dark", "cone", "dark", "cone"),
        half_width=(0.34, 0.08),
    )
    return _drawn(base, cone)


def _barrier() -> Shape:
    foot = block((-0.5, 0.5), (0.0, 0.3), 0.5, "concrete")
    wall = block((-0.25, 0.25), (0.305, 1.0), 0.5, ("concrete", "stripes", "stripes", "concrete"))
    return _drawn(foot, wall)


def _lamp() -> Shape:
    # In the unit box of a thin post; the arm reaches out of it over the road, lamps are never annotated.
    post = block((-0.5, 0.5), (0.0, 0.97), 0.5, "metal")
    arm = extrude(
        ((-0.4, 0.975), (0.4, 0.975), (0.4, 0.985), (-0.4, 0.985)), "metal", ("metal",) * 4, half_width=(6.0, 6.0)
    )
    return _drawn(post, arm)


_PERSON: Final = Shape((), (_pillar(),), upright="person")
_BOX: Final = block((-0.5, 0.5), (0.0, 1.0), 0.5, ("facade_x", "facade_y", "facade_y", "roof"))
_RIDER_BODY: Final = (block((-0.48, 0.48), (0.0, 0.55), 0.2, "plain"), block((-0.2, 0.2), (0.56, 0.97), 0.4, "plain"))


@lru_cache(maxsize=32)
def shape_of(kind: str) -> Shape:
    """Shape of an annotated category, of ``bicycle`` (one without its rider) or of a kind of scenery."""
    makers = {
        "vehicle.car": _car,
        "vehicle.truck": _truck,
        "vehicle.bus.rigid": _bus,
        "vehicle.trailer": _trailer,
        "vehicle.construction": _digger,
        "movable_object.trafficcone": _cone,
        "movable_object.barrier": _barrier,
        "post": _lamp,
    }
    if kind in makers:
        return makers[kind]()
    if kind.startswith("human."):
        return _PERSON
    if kind in ("vehicle.bicycle", "vehicle.motorcycle"):
        name = kind.removeprefix("vehicle.")
        return Shape((), _RIDER_BODY, upright=f"{name}_front", side=f"{name}_side")
    if kind == "bicycle":  # nobody on it
        return Shape((), (block((-0.48, 0.48), (0.0, 0.9), 0.2, "plain"),), upright="cycle_front", side="cycle_side")
    if kind == "tree":
        return _drawn(block((-0.5, 0.5), (0.0, 1.0), 0.5, "bark"))
    if kind == "crown":
        return Shape((), (_pillar(0.48),), upright="crown")
    assert kind == "building", kind
    return _drawn(_BOX)


def painting_order(parts: Sequence[Part], eye: NDArray[np.float64]) -> list[int]:
    """Order in which to paint parts seen from ``eye`` (3,) in unit box coordinates, farthest first.

    Each two of an object's parts are parted by a plane along one of the axes; the one on the eye's side comes later.
    """
    lows, highs = _extents(tuple(parts))
    # below[a, b]: a plane across an axis has a on its low side and b on its high side. An eye on b's side sees b first.
    below = highs[:, None] <= lows[None] + 1e-9
    ahead = (below & (eye >= lows)[None]).any(-1)
    astern = (below & (eye <= highs)[:, None]).any(-1)
    before = np.asarray(ahead | astern.T)
    # Where one plane says yes and another says no, neither hides the other.
    before &= ~before.T
    behind = [set(np.nonzero(before[:, index])[0].tolist()) for index in range(len(parts))]
    order: list[int] = []
    left = list(range(len(parts)))
    while left:
        index = next((a for a in left if behind[a].isdisjoint(left)), left[0])
        order.append(index)
        left.remove(index)
    return order


@lru_cache(maxsize=32)
def _extents(parts: tuple[Part, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.array([part.vertices.min(0) for part in parts]), np.array([part.vertices.max(0) for part in parts])
