"""Writes a Lanelet2 map as OSM's XML, with the tags of Autoware."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def way(name, points, kind="", first=0) -> str:
    """A way of nodes of its own, whose ids begin at ``first``."""
    nodes = "".join(
        f"<node id='{first + index}' lat='35.6' lon='139.7'>"
        f"<tag k='local_x' v='{float(x)}'/><tag k='local_y' v='{float(y)}'/><tag k='ele' v='3.0'/></node>"
        for index, (x, y, *_) in enumerate(points)
    )
    refs = "".join(f"<nd ref='{first + index}'/>" for index in range(len(points)))
    tag = f"<tag k='type' v='{kind}'/>" if kind else ""
    return f"{nodes}<way id='{name}'>{refs}{tag}</way>"


def lanelet(name, left, right, subtype="road") -> str:
    members = "".join(
        f"<member type='way' ref='{ref}' role='{role}'/>"
        for ref, role in ((left, "left"), (right, "right"))
        if ref
    )
    tags = f"<tag k='type' v='lanelet'/><tag k='subtype' v='{subtype}'/>"
    return f"<relation id='{name}'>{members}<member type='relation' ref='9' role='regulatory_element'/>{tags}</relation>"  # noqa: E501


def osm(*elements: str) -> str:
    return f"<?xml version='1.0' encoding='UTF-8'?>\n<osm version='0.6'><MetaInfo/>{''.join(elements)}</osm>"


def write_map(dataset: Path, *elements: str) -> Path:
    """The map of a T4 dataset."""
    file = dataset / "map" / "lanelet2_map.osm"
    file.parent.mkdir(exist_ok=True)
    file.write_text(osm(*elements))
    return file
