"""Vectors of the nuScenes map expansion in a window about the ego vehicle, in ego at the sample's time.

Layout of the files: https://www.nuscenes.org/nuscenes#map-expansion and ``NuScenesMap`` of nuscenes-devkit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.vector_maps import VectorMap, encoded_window, map_channel
from fuelrail.sharding.sources.shared.foreign import read_json
from fuelrail.sharding.sources.shared.scan_table import Reference

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.sharding.sources.nuscenes.extras.batch import Batch

FOLDER: Final = "maps/expansion"
LAYERS: Final = (
    "drivable_area", "road_segment", "road_block", "lane", "ped_crossing", "walkway", "stop_line", "carpark_area",
    "road_divider", "lane_divider",
)  # fmt: skip
MAP: Final = map_channel(LAYERS)


class _Node(msgspec.Struct, frozen=True, gc=False):
    token: str
    x: float
    y: float


class _Line(msgspec.Struct, frozen=True, gc=False):
    token: str
    node_tokens: list[str]


class _Hole(msgspec.Struct, frozen=True, gc=False):
    node_tokens: list[str]


class _Polygon(msgspec.Struct, frozen=True, gc=False):
    token: str
    exterior_node_tokens: list[str]
    holes: list[_Hole] = []


class _Element(msgspec.Struct, frozen=True, gc=False):
    """A row of a layer: what it consists of."""

    polygon_token: str = ""
    polygon_tokens: list[str] = []
    line_token: str = ""


class _File(msgspec.Struct, frozen=True):
    node: list[_Node]
    line: list[_Line]
    polygon: list[_Polygon]
    drivable_area: list[_Element] = []
    road_segment: list[_Element] = []
    road_block: list[_Element] = []
    lane: list[_Element] = []
    ped_crossing: list[_Element] = []
    walkway: list[_Element] = []
    stop_line: list[_Element] = []
    carpark_area: list[_Element] = []
    road_divider: list[_Element] = []
    lane_divider: list[_Element] = []


class MapWindow(msgspec.Struct, frozen=True, tag="map"):
    """What a worker needs to build the member: the map's file, and ego to global (3 x 4)."""

    file: str
    ego2global: list[float]

    def member(self, read: Callable[[str], bytes]) -> bytes:
        """The member's bytes; raises SourceError."""
        return encoded_window(_parsed(read, self.file), self.ego2global, MAP)


class Maps:
    """The maps of the scenes' locations; scenes of a place without a file have none."""

    def __init__(self) -> None:
        self._found = False

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The entry of the table, where any sample so far has a map."""
        return (MAP,) if self._found else ()

    def members(self, batch: Batch, at: int) -> list[Reference]:
        """The reference of one sample's member."""
        keyframes = batch.keyframes
        log = keyframes.log[int(keyframes.scene_log[int(keyframes.sample_scene[batch.samples[at]])])]
        file = f"{FOLDER}/{log.location}.json"
        if batch.file_bytes(file, at) is None:
            return []
        self._found = True
        made = MapWindow(file, batch.geometry.ego2global[at, :3].reshape(-1).tolist())
        # A window has tens of kilobytes; its file has tens of megabytes.
        return [Reference(MAP.field, msgspec.json.encode(made).decode(), 1 << 15, is_estimate=True)]


@lru_cache(maxsize=2)
def _parsed(read: Callable[[str], bytes], file: str) -> VectorMap:
    """A whole map; kept for the samples that follow."""
    return parse_map(read(file), file)


def parse_map(data: bytes, file: str) -> VectorMap:
    """The lines of a file of the map expansion, and the outlines of its areas; raises SourceError."""
    found = read_json(data, f"map file '{file}'", _File, "is not a map of nuScenes' expansion")
    nodes = {node.token: (node.x, node.y) for node in found.node}
    of_line = {line.token: [line.node_tokens] for line in found.line}
    of_polygon = {
        polygon.token: [
            [*tokens, *tokens[:1]]
            for tokens in (polygon.exterior_node_tokens, *(hole.node_tokens for hole in polygon.holes))
        ]
        for polygon in found.polygon
    }
    lines, layers = [], []
    for number, layer in enumerate(LAYERS):
        elements: list[_Element] = getattr(found, layer)
        for element in elements:
            named = [(of_polygon, token) for token in (element.polygon_token, *element.polygon_tokens) if token]
            named += [(of_line, element.line_token)] if element.line_token else []
            for table, token in named:
                try:
                    chains = [np.array([nodes[node] for node in chain]).reshape(-1, 2) for chain in table[token]]
                except KeyError as error:
                    raise SourceError(
                        f"map file '{file}': layer '{layer}' names the token {error!s:.80}, which is not in the file"
                    ) from error
                kept = [chain for chain in chains if len(chain) > 1]
                lines += kept
                layers += [number] * len(kept)
    return VectorMap.of(lines, layers, f"map file '{file}'")
