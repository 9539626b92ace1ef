"""Lines of a map in a window about the ego vehicle, in ego at the sample's time, as the channel ``map``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

HALF_M: Final = 51.2
WINDOW_BYTES: Final = 1 << 15
"""About those of a window; its file has up to tens of megabytes."""


class VectorMap(NamedTuple):
    """Lines of a map: points (N, 2) in global, number of the layer, bounds (L, 4) of each."""

    lines: list[NDArray[np.float64]]
    layers: list[int]
    bounds: NDArray[np.float64]

    @classmethod
    def of(cls, lines: list[NDArray[np.float64]], layers: list[int]) -> VectorMap:
        """Lines with their bounds."""
        return cls(lines, layers, np.array([(*line.min(0), *line.max(0)) for line in lines]).reshape(-1, 4))


def map_channel(layers: Sequence[str]) -> Channel:
    """The entry of the table for a map of these layers."""
    return Channel(
        name="map",
        kind="ragged",
        field="map.safetensors",
        law=Law("ego_points", roles={"positions": (("point",),)}),
        arrays=(ArraySpec("point", "float32", (2,), "m"), ArraySpec("line", "int32"), ArraySpec("layer", "uint8")),
        frame="ego",
        optional=True,
        description=f"vertices of lines and outlines, cut at x, y = +-{HALF_M} m; line counts lines; layer is of: "
        + ", ".join(layers),
    )


def window(whole: VectorMap, ego2global: NDArray[np.float64]) -> dict[str, NDArray[np.generic]]:
    """The part of a map about an ego pose (3, 4), as :func:`map_channel` has it, in the ego's own height."""
    place, reach = ego2global[:2, 3], HALF_M * 2**0.5 * 1.1
    near = (whole.bounds[:, :2] <= place + reach).all(1) & (whole.bounds[:, 2:] >= place - reach).all(1)
    points, layers = [], []
    for row in np.flatnonzero(near).tolist():
        in_ego = (whole.lines[row] - place) @ ego2global[:2, :2]
        for piece in cut(in_ego):
            points.append(piece)
            layers.append(whole.layers[row])
    counts = [len(piece) for piece in points]
    return {
        "point": np.concatenate([np.empty((0, 2)), *points]).astype(np.float32),
        "line": np.repeat(np.arange(len(points)), counts).astype(np.int32),
        "layer": np.repeat(np.array(layers, np.uint8), counts),
    }


def cut(line: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """Yield the pieces (K, 2) of a line (N, 2) within the window, in its order: Liang and Barsky, 1984."""
    start, step = line[:-1], np.diff(line, axis=0)
    first, last = np.zeros(len(start)), np.ones(len(start))
    for axis in (0, 1):
        for sign in (1.0, -1.0):
            speed, room = sign * step[:, axis], HALF_M - sign * start[:, axis]
            share = np.divide(room, speed, out=np.zeros_like(room), where=speed != 0)
            last = np.where(speed > 0, np.minimum(last, share), last)
            first = np.where(speed < 0, np.maximum(first, share), first)
            last = np.where((speed == 0) & (room < 0), -1.0, last)
    piece: list[NDArray[np.float64]] = []
    for at in np.flatnonzero(first < last).tolist():
        begin, end = (start[at] + share * step[at] for share in (first[at], last[at]))
        if piece and (first[at] > 0 or last[at - 1] < 1 or first[at - 1] >= last[at - 1]):
            yield np.stack(piece)
            piece = []
        piece += [end] if piece else [begin, end]
    if piece:
        yield np.stack(piece)
