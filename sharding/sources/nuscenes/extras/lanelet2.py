"""Lanelet2 maps of T4 datasets: OSM's XML with the tags of Autoware, as lines in the frame of the
map.

A node has its place in the tags ``local_x`` and ``local_y`` [m], a way is a line of nodes, and a
relation of type ``lanelet`` has a left and a right way (Poggenhans et al., ITSC 2018). Types of
lines and lanelets:
https://docs.ros.org/en/ros2_packages/rolling/api/lanelet2_core/doc/LinestringTagging.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.vector_maps import VectorMap
from fuelrail.sharding.sources.shared.foreign import read_xml

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64

FILE: Final = "map/lanelet2_map.osm"
MAP_LAYERS: Final = (
    "lane",
    "ped_crossing",
    "walkway",
    "lane_marking",
    "lane_border",
    "road_border",
    "stop_line",
)
"""Outlines of lanelets, then lines: ``lane_marking`` is painted, ``lane_border`` is where a lane
ends without paint.
"""
_LANELETS: Final = {
    "crosswalk": "ped_crossing",
    "walkway": "walkway",
    "shared_walkway": "walkway",
    "stairs": "walkway",
    "pedestrian_lane": "walkway",
}
"""Subtype to layer; others are lanes."""
_WAYS: Final = {
    "line_thin": "lane_marking",
    "line_thick": "lane_marking",
    "virtual": "lane_border",
    "road_border": "road_border",
    "curbstone": "road_border",
    "guard_rail": "road_border",
    "wall": "road_border",
    "fence": "road_border",
    "stop_line": "stop_line",
}
"""Type to layer; others are left out."""


def parse_map(data: bytes, where: str) -> tuple[VectorMap, int]:
    """Return the lines of a map, and the number of ways that are of no layer; raise SourceError,
    naming ``where``.
    """
    elements = _Elements(data, where)
    lines: list[F64] = []
    layers: list[int] = []

    def add(line: F64, layer: str) -> None:
        if len(line) > 1:
            lines.append(line)
            layers.append(MAP_LAYERS.index(layer))

    bounds = set()
    for name, tags in elements.tags["relation"].items():
        if tags.get("type") == "lanelet":
            roles = dict(elements.members[name])
            missing = {"left", "right"} - roles.keys()
            if missing:
                raise SourceError(
                    f"{where}: lanelet {name} has no {' and no '.join(sorted(missing))} way"
                )
            left_line, right_line = (
                elements.line(roles[side], f"lanelet {name}") for side in ("left", "right")
            )
            bounds |= {roles["left"], roles["right"]}
            add(
                outline(left_line, right_line),
                _LANELETS.get(tags.get("subtype", ""), "lane"),
            )
    num_others = 0
    for name, tags in elements.tags["way"].items():
        layer = _WAYS.get(tags.get("type", ""))
        if layer is not None:
            add(elements.line(name, "the map"), layer)
        elif name not in bounds:
            num_others += 1
    return VectorMap.from_lines(lines, layers, where), num_others


def outline(left_line: F64, right_line: F64) -> F64:
    """Return the closed outline (N, 2) of a lanelet, whose bounds may run either way."""
    if min(map(len, (left_line, right_line))) < 1:
        return np.empty((0, 2))
    # The right line is reversed where it would cross the outline.
    to_start, to_end = np.linalg.norm(right_line[[0, -1]] - left_line[-1], axis=1)
    if to_end <= to_start:
        right_line = right_line[::-1]
    return np.concatenate([left_line, right_line, left_line[:1]])


class _Elements:
    """The elements of a file: tags, nodes of ways, and members of relations by the id of each."""

    def __init__(self, data: bytes, where: str) -> None:
        self._where = where
        self._places: dict[str, dict[str, float]] = {
            "local_x": {},
            "local_y": {},
        }
        self._nodes: dict[str, list[str]] = {}
        self.tags: dict[str, dict[str, dict[str, str]]] = {
            "way": {},
            "relation": {},
        }
        self.members: dict[str, list[tuple[str, str]]] = {}
        self._element = ""
        self._kind = ""
        self._name = ""
        read_xml(data, where, self, "is not a Lanelet2 map, or it is cut off")

    def start(self, element: str, attributes: dict[str, str]) -> None:
        """Take an element."""
        if not self._element and element != "osm":
            raise ValueError(f"its first element is '{element}', wanted is 'osm'")
        self._element = element
        if element in ("node", "way", "relation"):
            self._kind = element
            self._name = attributes["id"]
            if attributes.get("action") == "delete":  # as the editor JOSM leaves it
                self._kind = ""
            elif element != "node":
                self.tags[element][self._name] = {}
                (self._nodes if element == "way" else self.members)[self._name] = []
        elif element == "tag":
            if self._kind == "node" and attributes["k"] in self._places:
                self._places[attributes["k"]][self._name] = float(attributes["v"])
            elif self._kind in self.tags and attributes["k"] in (
                "type",
                "subtype",
            ):
                self.tags[self._kind][self._name][attributes["k"]] = attributes["v"]
        elif element == "nd" and self._kind == "way":
            self._nodes[self._name].append(attributes["ref"])
        elif element == "member" and self._kind == "relation" and attributes["type"] == "way":
            member = (attributes["role"], attributes["ref"])
            self.members[self._name].append(member)

    def line(self, way: str, owner: str) -> F64:
        """Return the vertices (N, 2) of a way; raise SourceError where it, or a node of it, is
        missing.
        """
        x, y = self._places.values()
        if way not in self._nodes:
            raise SourceError(
                f"{self._where}: {owner} refers to way {way}, which is not in the file"
            )
        try:
            points = [(x[node], y[node]) for node in self._nodes[way]]
            return np.array(points).reshape(-1, 2)
        except KeyError as error:
            raise SourceError(
                f"{self._where}: way {way} refers to node {error}, which is not in the file "
                "with local_x and local_y; where nodes have latitude and longitude alone, "
                "write the map with Autoware's tools first"
            ) from error
