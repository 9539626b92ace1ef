"""Vector maps: one map in each format gives the same lines about ego; hostile maps; a real one."""

from __future__ import annotations

import json
import time
from xml.etree import ElementTree

import numpy as np
import pytest

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.adapter.vector_maps import HALF_M
from fuelrail.sharding.sources.nuscenes.extras import lanelet2, maps
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.sources.waymo import maps as waymo_maps
from support.lanelet_map import lanelet, osm, way, write_map
from support.nuscenes_world import write_nuscenes
from support.sharding import scanned
from support.shared_data import shared_data
from support.source_suite import SourceSuite
from support.source_world import World, make_world
from support.waymo_files import (
    CAMERAS,
    field,
    map_feature,
    map_point,
    message,
    write_segment,
)

CROSSING = np.array([(50.0, 5, 1), (54, 5, 1), (54, 15, 1), (50, 15, 1)])
MARKING = np.array([(38.0, -20, 0), (38.5, 0, 0), (36.25, 30, 0)])
EDGE = np.array([(44.0, -30, 0), (44.0, 200, 0)])
SIGN = np.array([(47.0, 9, 2)])
OFFSET = np.array([3.0, -2.0, 0.5])
"""Of Waymo's frames: the map is drawn here."""
NAMES = {
    "nuscenes": {
        "ped_crossing": "crossing",
        "lane_divider": "marking",
        "road_divider": "edge",
    },
    "waymo": {
        "crosswalk": "crossing",
        "road_line": "marking",
        "road_edge": "edge",
        "stop_sign": "sign",
    },
    "t4": {
        "ped_crossing": "crossing",
        "lane_marking": "marking",
        "road_border": "edge",
    },
}
LAYERS = {
    "nuscenes": maps.LAYERS,
    "waymo": waymo_maps.MAP_LAYERS,
    "t4": lanelet2.MAP_LAYERS,
}


def write(kind, root) -> World:
    """One clip of the world with the map, in a format."""
    sizes = dict.fromkeys(
        CAMERAS if kind == "waymo" else ("cam_front", "cam_back", "cam_left"),
        (64, 48),
    )
    lidars = () if kind == "waymo" else ("lidar_top",)
    world = make_world(num_clips=1, num_frames=2, cameras=sizes, lidars=lidars, num_boxes=0)
    if kind == "waymo":
        first, last = world.clips[0].frames
        drawn = {
            "crosswalk": CROSSING,
            "road_line": MARKING,
            "road_edge": EDGE,
            "stop_sign": SIGN,
        }
        first.map_features = [
            map_feature(number, kind, line + OFFSET)
            for number, (kind, line) in enumerate(drawn.items())
        ]
        first.map_offset = last.map_offset = OFFSET
        write_segment(root / "segment-one_with_camera_labels.tfrecord", world.clips[0])
    elif kind == "t4":
        write_nuscenes(world, root, "annotation")
        write_map(
            root,
            way(1, CROSSING[:2], "pedestrian_marking"),
            way(2, CROSSING[2:], "", 10),
            way(3, MARKING, "line_thin", 20),
            way(4, EDGE, "curbstone", 30),
            way(5, SIGN, "traffic_light", 40),
            lanelet(6, 1, 2, "crosswalk"),
        )
    else:
        write_nuscenes(world, root, "v1.0-mini")
        lines = {"c": CROSSING, "m": MARKING, "e": EDGE}
        nodes = [
            {"token": f"{name}{index}", "x": x, "y": y}
            for name, line in lines.items()
            for index, (x, y, _) in enumerate(line.tolist())
        ]
        tokens = {
            name: [f"{name}{index}" for index in range(len(line))] for name, line in lines.items()
        }
        drawn = {
            "node": nodes,
            "line": [{"token": name, "node_tokens": tokens[name]} for name in "me"],
            "polygon": [{"token": "p", "exterior_node_tokens": tokens["c"]}],
            "ped_crossing": [{"polygon_token": "p"}],
            "lane_divider": [{"line_token": "m"}],
            "road_divider": [{"line_token": "e"}],
        }
        (root / "maps" / "expansion").mkdir(parents=True)
        (root / "maps" / "expansion" / "x.json").write_text(json.dumps(drawn))
    return world


@pytest.mark.parametrize("kind", NAMES)
def test_a_map_is_the_same_about_ego_in_each_format(tmp_path, kind):
    root = tmp_path / "source"
    root.mkdir()
    world = write(kind, root)
    options = {"channels": ["map"]} if kind == "nuscenes" else {"map": True}
    source, info, table = scanned(kind, root, tmp_path, **options)
    (channel,) = [entry for entry in info.channels if entry.name == "map"]
    assert len(table) == 2
    for number, frame in enumerate(world.clips[0].frames):
        (ref,) = [
            member.ref for member in table.row(number).members if member.name == channel.field
        ]
        value = KINDS["ragged"].decode(source.open(ref), channel)
        lines = {}
        for line in range(value["line"].max() + 1):
            mask = value["line"] == line
            (layer,) = np.unique(value["layer"][mask])
            lines[NAMES[kind][LAYERS[kind][layer]]] = value["point"][mask].astype(np.float64)

        def in_ego(points, frame=frame):
            return (points - frame.ego2global[:3, 3])[:, :2] @ frame.ego2global[:2, :2]

        assert set(lines) == set(NAMES[kind].values())
        corners = in_ego(CROSSING)
        assert lines["crossing"].shape == (5, 2)
        assert all(np.abs(corners - corner).sum(1).min() < 1e-4 for corner in lines["crossing"])
        assert len(np.unique(lines["crossing"], axis=0)) == 4
        np.testing.assert_allclose(lines["crossing"][0], lines["crossing"][-1])
        np.testing.assert_allclose(lines["marking"], in_ego(MARKING), atol=1e-4)
        np.testing.assert_allclose(lines["edge"][0], in_ego(EDGE)[0], atol=1e-4)
        assert np.abs(np.abs(lines["edge"][1]).max() - HALF_M) < 1e-4, (
            "cut at the border of the window"
        )
        if "sign" in lines:
            np.testing.assert_allclose(lines["sign"], in_ego(SIGN), atol=1e-4)
    SourceSuite().make(SourceSpec(kind, str(root), options), tmp_path / "out")
    plain = scan_source(SourceSpec(kind, str(root), {}))
    assert not plain.channels
    if kind == "t4":
        assert info.report.noted == {"lines of maps whose type is not stored": 1}


@pytest.mark.parametrize(
    ("kind", "noted"),
    [("waymo", "segments without a map"), ("t4", "datasets without a map")],
)
def test_what_has_no_map_is_counted(tmp_path, kind, noted):
    root = tmp_path / "source"
    root.mkdir()
    world = write(kind, root)
    if kind == "t4":
        (root / lanelet2.FILE).unlink()
    else:
        del world.clips[0].frames[0].map_features
        write_segment(root / "segment-one_with_camera_labels.tfrecord", world.clips[0])
    assert scan_source(SourceSpec(kind, str(root), {"map": True})).report.noted == {noted: 1}


LAUGHS = (
    "<!DOCTYPE osm [<!ENTITY a 'ha'>"
    + "".join(
        f"<!ENTITY {name} '{f'&{before};' * 10}'>"
        for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
    )
    + "]><osm>&k;</osm>"
)
GOOD = osm(way(1, EDGE), way(2, MARKING, "", 20), lanelet(3, 1, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "is not a Lanelet2 map, or it is cut off: line 1: no element found",
        ),
        (
            GOOD[: len(GOOD) // 2],
            "is not a Lanelet2 map, or it is cut off: line 2: ",
        ),
        ("<html/>", "its first element is 'html', wanted is 'osm'"),
        ("version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"),
        (
            GOOD.replace("<nd ref='0'/>", "<nd ref='77'/>"),
            "way 1 refers to node '77', which is not in the file",
        ),
        (
            GOOD.replace("k='local_y'", "k='y'", 1),
            "way 1 refers to node '0', .* with local_x and local_y",
        ),
        (
            GOOD.replace("v='44.0'", "v='nan'", 1),
            r"line 0 has a vertex at \[nan, -30.0\]; wanted are finite numbers",
        ),
        (
            GOOD.replace("v='44.0'", "v='east'", 1),
            "line 2: could not convert string to float: 'east'",
        ),
        (
            GOOD.replace("ref='2' role='right'", "ref='9' role='right'"),
            "lanelet 3 refers to way 9, which is not in",
        ),
        (osm(way(1, EDGE), lanelet(3, 1, 0)), "lanelet 3 has no right way"),
        (
            GOOD.replace("<node id='0'", "<node", 1),
            "line 2: an element has no 'id'",
        ),
        (LAUGHS, "it declares entities"),
        (
            "<!DOCTYPE osm [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><osm>&x;</osm>",
            "it declares entities",
        ),
        ("<osm>" * 50_000, "cut off"),
    ],
)
def test_a_hostile_lanelet2_map_is_a_named_error(text, message):
    start = time.process_time()
    with pytest.raises(SourceError, match=message) as caught:
        lanelet2.parse_map(text.encode(), "map 'm.osm'")
    assert "map 'm.osm'" in str(caught.value)
    assert time.process_time() - start < 2


def test_bounds_of_a_lanelet_may_run_either_way():
    left_bound = np.array([(0.0, 0), (9, 0)])
    right_bound = np.array([(0.0, -3), (9, -3)])
    expected = [(0, 0), (9, 0), (9, -3), (0, -3), (0, 0)]
    assert (
        lanelet2.outline(left_bound, right_bound).tolist()
        == lanelet2.outline(left_bound, right_bound[::-1]).tolist()
        == list(map(list, expected))
    )
    vector_map, _ = lanelet2.parse_map(
        osm(way(1, left_bound), way(2, right_bound, "", 9), lanelet(3, 1, 2)).encode(),
        "m",
    )
    assert vector_map.lines[0].tolist() == list(map(list, expected))
    deleted = osm(
        way(1, left_bound, "wall"),
        way(2, right_bound, "wall", 9).replace("<way ", "<way action='delete' "),
    )
    assert len(lanelet2.parse_map(deleted.encode(), "m")[0].lines) == 1, (
        "what an editor deleted stays in the file"
    )


LANE = map_feature(1, "lane", np.arange(15.0).reshape(5, 3))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (field(10, LANE)[:-5], "field 10 has .* bytes, .* are left"),
        (
            field(10, message((4, message((2, message((1, 4.0))))))),
            "a place without y",
        ),
        (
            field(10, map_feature(1, "road_line", [(np.nan, 0, 0), (1, 1, 1)])),
            r"vertex at \[nan, 0.0\]",
        ),
        (field(10, message((4, 7))), "field 4 is not a message"),
        (field(10, message((4, message((2, 3))))), "field 2 is not a message"),
        (
            field(10, message((4, message((2, message((1, 4), (2, 1.0))))))),
            "field 1 is not of doubles",
        ),
    ],
)
def test_a_damaged_map_of_waymo_is_a_named_error(data, message):
    with pytest.raises(SourceError, match=message) as caught:
        waymo_maps.parse_map(data, "file 'x.tfrecord#1+2'")
    assert "x.tfrecord#1+2" in str(caught.value)


def test_points_of_waymo_in_any_form_are_read():
    """Points without z, and those between other fields, are as those that the dataset's own files have."""
    points = np.arange(12.0).reshape(4, 3)
    odd = message(
        (1, 2),
        (2, map_point(points[0])),
        (2, map_point(points[1, :2])),
        (5, 9),
        (2, map_point(points[2])),
        (2, map_point(points[3])),
    )
    features = [
        message((1, 1), (4, odd)),
        message((1, 2), (77, odd)),
        LANE,
        map_feature(4, "driveway", points),
    ]
    vector_map = waymo_maps.parse_map(
        b"".join(field(10, feature) for feature in features) + field(11, b""),
        "m",
    )
    assert [waymo_maps.MAP_LAYERS[layer] for layer in vector_map.layers] == [
        "road_line",
        "lane",
        "driveway",
    ]
    np.testing.assert_array_equal(vector_map.lines[0], points[:, :2])
    np.testing.assert_array_equal(vector_map.lines[1], np.arange(15.0).reshape(5, 3)[:, :2])
    np.testing.assert_array_equal(vector_map.lines[2], points[[0, 1, 2, 3, 0], :2])


@pytest.mark.real
def test_the_map_of_a_real_t4_dataset(tmp_path):
    """Against a reading by ElementTree; its ego drives along x with no turn."""
    root = shared_data("t4-sample")
    source, info, table = scanned("t4", root, tmp_path, map=True)
    tree = ElementTree.parse(root / lanelet2.FILE)
    nodes = {
        element.get("id"): [
            float(element.find(f"tag[@k='local_{axis}']").get("v")) for axis in "xy"
        ]
        for element in tree.iter("node")
    }
    borders = [
        np.array([nodes[nd.get("ref")] for nd in element.iter("nd")])
        for element in tree.iter("way")
        if element.find("tag[@k='type']").get("v") in ("road_border", "curbstone", "fence")
    ]
    assert len(borders) == 6
    (channel,) = info.channels
    for number, ego_x in enumerate((0.0, 10.0, 20.0)):
        (ref,) = [
            member.ref for member in table.row(number).members if member.name == channel.field
        ]
        value = KINDS["ragged"].decode(source.open(ref), channel)
        mask = value["layer"] == lanelet2.MAP_LAYERS.index("road_border")
        points = value["point"][mask]
        inside = [
            point - (ego_x, 0)
            for line in borders
            for point in line
            if abs(point[0] - ego_x) <= HALF_M
        ]
        assert all(np.abs(points - point).sum(1).min() < 1e-4 for point in inside)
        ends = {(round(x, 3), round(y, 3)) for x, y in points.tolist()}
        assert {(round(HALF_M, 3), 10.0), (round(HALF_M, 3), -10.0)} <= ends
        lanes = value["point"][value["layer"] == lanelet2.MAP_LAYERS.index("lane")]
        assert {10.0, -10.0} <= set(lanes[:, 1].tolist())
