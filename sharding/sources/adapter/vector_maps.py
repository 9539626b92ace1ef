"""Lines of a map in a window about the ego vehicle, in ego at the sample's time, as the channel
``map``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.channels import computed
from fuelrail.sharding.sources.shared.scan_table import Reference

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64

MAP: Final = "map:"
"""Begins the reference of a window of a map."""
HALF_M: Final = 51.2
WINDOW_BYTES: Final = 1 << 15
"""About those of a window; its file has up to tens of megabytes."""


class VectorMap(NamedTuple):
    """Lines of a map: points (N, 2) in global, number of the layer, bounds (L, 4) of each."""

    lines: list[F64]
    layers: list[int]
    bounds: F64

    @classmethod
    def from_lines(cls, lines: list[F64], layers: list[int], where: str) -> VectorMap:
        """Take lines with their bounds; raise SourceError, naming ``where``, for a place that is
        not finite.
        """
        if not lines:
            return cls([], [], np.empty((0, 4)))
        points = np.concatenate(lines)
        lengths = [len(line) for line in lines[:-1]]
        starts = np.cumsum([0, *lengths])
        low = np.minimum.reduceat(points, starts)
        high = np.maximum.reduceat(points, starts)
        bounds = np.concatenate([low, high], 1)
        is_finite = np.isfinite(bounds).all(1)
        if not is_finite.all():
            row = int(np.argmin(is_finite))
            line = lines[row]
            bad_vertices = line[~np.isfinite(line).all(1)]
            bad = bad_vertices[0]
            raise SourceError(
                f"{where}: line {row} has a vertex at {bad.tolist()}; wanted are finite numbers [m]"
            )
        return cls(lines, layers, bounds)


class MapWindows:
    """Windows of a source's maps as members: ``read`` reads the map at a place, which is any
    text.
    """

    def __init__(self, layers: Sequence[str], read: Callable[[str], VectorMap]) -> None:
        self.channel = map_channel(layers)
        self._whole = lru_cache(maxsize=4)(read)

    def references(self, place: str, ego2global: F64) -> list[list[Reference]]:
        """Return the member at each of these poses (F, 4, 4), made when it is written; none
        where a pose is NaN.
        """
        poses = ego2global[:, :3].reshape(-1, 12)
        members: list[list[Reference]] = []
        for matrix in poses.tolist():
            if not math.isfinite(matrix[0]):
                members.append([])
                continue
            text = msgspec.json.encode((place, matrix)).decode()
            member = Reference(
                name=self.channel.field,
                ref=MAP + text,
                bytes=WINDOW_BYTES,
                is_estimate=True,
            )
            members.append([member])
        return members

    def make_window(self, place: str, ego2global: F64) -> Reference:
        """Return the member at a pose (4, 4), made now: best for maps that take long to read."""
        pose = ego2global[:3].ravel().tolist()
        data = encoded_window(self._whole(place), pose, self.channel)
        return computed(self.channel, data)

    def member(self, ref: str) -> bytes:
        """Return the bytes of a member; raise SourceError."""
        place, ego2global = msgspec.json.decode(ref.removeprefix(MAP))
        return encoded_window(self._whole(place), ego2global, self.channel)


def map_channel(layers: Sequence[str]) -> Channel:
    """Return the entry of the table for a map of these layers."""
    return Channel(
        name="map",
        kind="ragged",
        field="map.safetensors",
        law=Law("ego_points", roles={"positions": (("point",),)}),
        arrays=(
            ArraySpec("point", "float32", (2,), "m"),
            ArraySpec("line", "int32"),
            ArraySpec("layer", "uint8"),
        ),
        frame="ego",
        optional=True,
        description=(
            f"vertices of lines and outlines, cut at x, y = +-{HALF_M} m; line counts lines; "
            "layer is of: "
        )
        + ", ".join(layers),
    )


def encoded_window(
    vector_map: VectorMap,
    ego2global: Sequence[float],
    channel: Channel,
) -> bytes:
    """Return the bytes of a :func:`window` about an ego pose of 12 numbers, row by row."""
    pose = np.array(ego2global).reshape(3, 4)
    arrays = window(vector_map, pose)
    return KINDS[channel.kind].encode(arrays, channel)


def window(vector_map: VectorMap, ego2global: F64) -> dict[str, NDArray[np.generic]]:
    """Return the part of a map about an ego pose (3, 4), as :func:`map_channel` has it, in the
    ego's own height.
    """
    place = ego2global[:2, 3]
    reach = HALF_M * 2**0.5 * 1.1
    low = vector_map.bounds[:, :2]
    high = vector_map.bounds[:, 2:]
    near = (low <= place + reach).all(1)
    near &= (high >= place - reach).all(1)
    pieces = []
    layers = []
    turn = ego2global[:2, :2]
    for row in np.flatnonzero(near).tolist():
        in_ego = (vector_map.lines[row] - place) @ turn
        for piece in cut(in_ego):
            pieces.append(piece)
            layers.append(vector_map.layers[row])
    counts = [len(piece) for piece in pieces]
    points = np.concatenate([np.empty((0, 2)), *pieces])
    lines = np.repeat(np.arange(len(pieces)), counts)
    return {
        "point": points.astype(np.float32),
        "line": lines.astype(np.int32),
        "layer": np.repeat(np.array(layers, np.uint8), counts),
    }


def cut(line: F64) -> Iterator[F64]:
    """Yield the pieces (K, 2) of a line (N, 2) within the window, in its order: Liang and Barsky,
    1984.

    A line may be one vertex, such as a sign.
    """
    if (np.abs(line) <= HALF_M).all():
        yield line
        return
    start = line[:-1]
    step = np.diff(line, axis=0)
    first = np.zeros(len(start))
    last = np.ones(len(start))
    for axis in (0, 1):
        for sign in (1.0, -1.0):
            speed = sign * step[:, axis]
            room = HALF_M - sign * start[:, axis]
            share = np.divide(
                room,
                speed,
                out=np.zeros_like(room),
                where=speed != 0,
            )
            last = np.where(speed > 0, np.minimum(last, share), last)
            first = np.where(speed < 0, np.maximum(first, share), first)
            is_outside = (speed == 0) & (room < 0)
            last = np.where(is_outside, -1.0, last)
    piece: list[F64] = []
    for segment in np.flatnonzero(first < last).tolist():
        begin = start[segment] + first[segment] * step[segment]
        end = start[segment] + last[segment] * step[segment]
        before = segment - 1
        enters = first[segment] > 0
        has_gap = last[before] < 1 or first[before] >= last[before]
        if piece and (enters or has_gap):
            yield np.stack(piece)
            piece = []
        piece += [end] if piece else [begin, end]
    if piece:
        yield np.stack(piece)
