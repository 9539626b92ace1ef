"""Vectors of the nuScenes map expansion in a window about the ego vehicle, in ego at the sample's
time.

Layout of the files: https://www.nuscenes.org/nuscenes#map-expansion and ``NuScenesMap`` of
nuscenes-devkit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.frame import FileMember
from fuelrail.sharding.sources.adapter.vector_maps import MapWindows, VectorMap
from fuelrail.sharding.sources.shared.foreign import read_json

if TYPE_CHECKING:
    from fuelrail.sharding.sources.nuscenes.geometry import SceneRows

FOLDER: Final = "maps/expansion"
LAYERS: Final = (
    "drivable_area",
    "road_segment",
    "road_block",
    "lane",
    "ped_crossing",
    "walkway",
    "stop_line",
    "carpark_area",
    "road_divider",
    "lane_divider",
)


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


_TABLES: Final[list[Any]] = [
    ("node", list[_Node]),
    ("line", list[_Line]),
    ("polygon", list[_Polygon]),
]
_File: Any = msgspec.defstruct(
    "_File", [*_TABLES, *((layer, list[_Element], []) for layer in LAYERS)]
)


class Maps:
    """The maps of the scenes' locations; scenes of a place without a file have none."""

    def __init__(self, windows: MapWindows) -> None:
        self._windows = windows
        self.channels = (windows.channel,)

    def members(self, rows: SceneRows, number: int) -> Iterator[FileMember]:
        """Yield the window at one sample, as far as the file is there."""
        file = f"{FOLDER}/{rows.log.location}.json"
        pose = rows.ego2global[number : number + 1]
        for (reference,) in self._windows.references(file, pose):
            yield FileMember(
                reference.name,
                reference.ref,
                (file,),
                num_bytes=reference.bytes,
            )


def parse_map(data: bytes, file: str) -> VectorMap:
    """Return the lines of a file of the map expansion, and the outlines of its areas; raise
    SourceError.
    """
    document = read_json(data, f"map file '{file}'", _File, "is not a map of nuScenes' expansion")
    nodes = {node.token: (node.x, node.y) for node in document.node}
    chains_of_lines = {line.token: [line.node_tokens] for line in document.line}
    chains_of_polygons = {
        polygon.token: [
            [*tokens, *tokens[:1]]
            for tokens in (
                polygon.exterior_node_tokens,
                *(hole.node_tokens for hole in polygon.holes),
            )
        ]
        for polygon in document.polygon
    }
    lines = []
    layers = []
    for number, layer in enumerate(LAYERS):
        elements: list[_Element] = getattr(document, layer)
        for element in elements:
            named = [
                (chains_of_polygons, token)
                for token in (element.polygon_token, *element.polygon_tokens)
                if token
            ]
            named += [(chains_of_lines, element.line_token)] if element.line_token else []
            for table, token in named:
                try:
                    chains = [
                        np.array([nodes[node] for node in chain]).reshape(-1, 2)
                        for chain in table[token]
                    ]
                except KeyError as error:
                    raise SourceError(
                        f"map file '{file}': layer '{layer}' names the token {error!s:.80}, "
                        "which is not in the file"
                    ) from error
                chains_kept = [chain for chain in chains if len(chain) > 1]
                lines += chains_kept
                layers += [number] * len(chains_kept)
    return VectorMap.from_lines(lines, layers, f"map file '{file}'")
