"""What lines the road and is never annotated: buildings, trees, lamp posts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fuelrail.sharding.demo.road import FACADE_M, KERB_M, Road, corners, footprints_overlap

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    """Both sides of the road, from behind the start to past the end; no two buildings overlap."""
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
