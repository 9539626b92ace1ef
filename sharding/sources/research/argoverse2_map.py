"""Vector maps of Argoverse 2: a JSON file of each log, in the city's frame, after ``map_api.py`` of av2-api."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.frames.vector_maps import VectorMap, map_channel

LAYERS: Final = ("drivable_area", "ped_crossing", "lane_marking", "lane_border")
"""``lane_marking`` is painted, ``lane_border`` is where a lane ends without paint."""
MAP: Final = map_channel(LAYERS)
_UNPAINTED: Final = ("NONE", "UNKNOWN")


class _Point(msgspec.Struct, frozen=True, gc=False):
    x: float
    y: float


class _Lane(msgspec.Struct, frozen=True):
    left_lane_boundary: list[_Point]
    right_lane_boundary: list[_Point]
    left_lane_mark_type: str = "UNKNOWN"
    right_lane_mark_type: str = "UNKNOWN"


class _Crossing(msgspec.Struct, frozen=True):
    edge1: list[_Point]
    edge2: list[_Point]


class _Area(msgspec.Struct, frozen=True):
    area_boundary: list[_Point]


class _File(msgspec.Struct, frozen=True):
    drivable_areas: dict[str, _Area]
    pedestrian_crossings: dict[str, _Crossing]
    lane_segments: dict[str, _Lane]


def parse_map(data: bytes, where: str) -> VectorMap:
    """The lines of a log's map; a border that two lanes share is one. Raises SourceError, naming ``where``."""
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"{where} is no vector map of Argoverse 2: {error}") from error
    outlines = [(0, [*one.area_boundary, *one.area_boundary[:1]]) for one in found.drivable_areas.values()]
    outlines += [(1, [*one.edge1, *reversed(one.edge2), *one.edge1[:1]]) for one in found.pedestrian_crossings.values()]
    for lane in found.lane_segments.values():
        outlines.append((3 if lane.left_lane_mark_type in _UNPAINTED else 2, lane.left_lane_boundary))
        outlines.append((3 if lane.right_lane_mark_type in _UNPAINTED else 2, lane.right_lane_boundary))
    lines = dict.fromkeys((layer, tuple((one.x, one.y) for one in points)) for layer, points in outlines)
    kept = [(layer, points) for layer, points in lines if len(points) > 1]
    return VectorMap.of([np.array(points) for _, points in kept], [layer for layer, _ in kept])
