"""Map features of version 1, in the first frame of a segment, as lines.

Numbers of fields are those of ``map.proto`` (github.com/waymo-research/waymo-open-dataset).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.vector_maps import VectorMap
from fuelrail.sharding.sources.shared.protobuf import (
    BYTES,
    FIXED64,
    doubles,
    fields,
    spans,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64

FRAME_MAP: Final = 10
FRAME_MAP_OFFSET: Final = 11
"""Fields of a ``Frame``."""

_POINT: Final = np.dtype([("_0", "V3"), ("x", "<f8"), ("_1", "V1"), ("y", "<f8"), ("_2", "V9")])
"""A point with its key and length, as the dataset's own files have it."""
_KEYS: Final = np.array([0, 1, 2, 11, 20])
"""The places of a point's keys: of the point, of x, y and z, and its length."""
_LENGTH_AND_KEYS: Final = (
    _POINT.itemsize - 2,
    *(number << 3 | FIXED64 for number in (1, 2, 3)),
)


class _Kind(NamedTuple):
    """A kind of feature: the field of its points, and whether these are an outline."""

    name: str
    points: int
    closed: bool = False


_KINDS: Final = {
    3: _Kind("lane", 8),
    4: _Kind("road_line", 2),
    5: _Kind("road_edge", 2),
    7: _Kind("stop_sign", 2),
    8: _Kind("crosswalk", 1, closed=True),
    9: _Kind("speed_bump", 1, closed=True),
    10: _Kind("driveway", 1, closed=True),
}
MAP_LAYERS: Final = tuple(kind.name for kind in _KINDS.values())


def parse_map(data: bytes, where: str) -> VectorMap:
    """Parse the map's lines from these fields of a ``Frame``; a stop sign is one vertex.

    Features of other kinds are left out. Raises SourceError, naming ``where``.
    """
    lines = []
    layers = []
    try:
        for field, wire_type, content in fields(data):
            if field != FRAME_MAP:
                continue
            feature = _read_message(field, wire_type, content)
            for number, wire, value in fields(feature):
                kind = _KINDS.get(number)
                if kind is not None:
                    message = _read_message(number, wire, value)
                    line = _read_points(message, kind.points)
                    is_sign = len(line) == 1 and kind.name == "stop_sign"
                    if len(line) < 2 and not is_sign:
                        continue
                    if kind.closed:
                        line = np.concatenate([line, line[:1]])
                    lines.append(line)
                    layers.append(MAP_LAYERS.index(kind.name))
    except ValueError as error:
        raise SourceError(f"{where} has no map of the Waymo Open Dataset: {error}") from error
    return VectorMap.from_lines(lines, layers, where)


def _read_message(number: int, wire: int, value: int | bytes) -> bytes:
    if wire != BYTES or isinstance(value, int):
        raise ValueError(f"field {number} is not a message")
    return value


def _read_points(data: bytes, field_number: int) -> F64:
    """Return the points (N, 2) of a feature in the global frame of its map; successive ones are
    read together.
    """
    parts = [np.empty((0, 2))]
    head = np.array([field_number << 3 | BYTES, *_LENGTH_AND_KEYS], np.uint8)
    position = 0
    while position < len(data):
        num_whole = 0
        if data[position] == head[0]:
            num_whole = (len(data) - position) // _POINT.itemsize
        num_bytes = num_whole * _POINT.itemsize
        table = np.frombuffer(data, np.uint8, num_bytes, position)
        table = table.reshape(num_whole, _POINT.itemsize)
        usual = (table[:, _KEYS] == head).all(1)
        count = num_whole if usual.all() else int(np.argmin(usual))
        if count:
            rows = np.frombuffer(data, _POINT, count, position)
            points = np.stack([rows["x"], rows["y"]], 1)
            parts.append(points)
            position += count * _POINT.itemsize
            continue
        number, wire, start, end, _ = next(spans(data[position:]))
        if number == field_number:
            message = _read_message(number, wire, data[position + start : position + end])
            x, y, _ = place(message)
            parts.append(np.array([[x, y]]))
        position += end
    return np.concatenate(parts)


def place(data: bytes) -> tuple[float, float, float]:
    """Read a ``MapPoint`` or ``Vector3d`` [m]; raise ValueError where it lacks a number."""
    x = doubles(data, 1)
    y = doubles(data, 2)
    z = doubles(data, 3)
    if not (x and y):
        raise ValueError(f"a place without {'y' if x else 'x'}")
    height = z[-1] if z else 0.0
    return x[-1], y[-1], height
