"""Map vectors: cut exactly, in ego, and hostile files."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fuelrail.pipeline.channels.selection import decode_values
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.api import shard, verify
from fuelrail.sharding.sources.adapter.vector_maps import HALF_M, cut, window
from fuelrail.sharding.sources.nuscenes.extras.maps import LAYERS, parse_map
from support.nuscenes_tables import build_nuscenes


def expansion(
    rng: np.random.Generator,
    number: int = 12,
    place: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Any]:
    """A small map of lines and of polygons with a hole, in the layout of the expansion."""
    content: dict[str, Any] = {
        "version": "1.3",
        "node": [],
        "line": [],
        "polygon": [],
        **{name: [] for name in LAYERS},
    }

    def chain(points: np.ndarray) -> list[str]:
        tokens = [f"n{len(content['node']) + line_index}" for line_index in range(len(points))]
        content["node"] += [
            {"token": t, "x": x, "y": y} for t, (x, y) in zip(tokens, points.tolist(), strict=True)
        ]
        return tokens

    for line_index in range(number):
        points = np.cumsum(rng.normal(0, 25, (9, 2)), 0) + place
        content["line"].append({"token": f"l{line_index}", "node_tokens": chain(points)})
        content["lane_divider"].append(
            {
                "token": f"d{line_index}",
                "line_token": f"l{line_index}",
                "lane_divider_segments": [],
            }
        )
        hole = [{"node_tokens": chain(points[:3] + 1.0)}]
        polygon = {
            "token": f"p{line_index}",
            "exterior_node_tokens": chain(points + 3.0),
            "holes": hole,
        }
        content["polygon"].append(polygon)
        content["ped_crossing"].append(
            {"token": f"c{line_index}", "polygon_token": f"p{line_index}"}
        )
    content["drivable_area"].append(
        {
            "token": "a",
            "polygon_tokens": [f"p{index}" for index in range(number)],
        }
    )
    return content


def dense(line: np.ndarray) -> np.ndarray:
    shares = np.linspace(0, 1, 400)[:, None]
    return np.concatenate([a * (1 - shares) + b * shares for a, b in pairwise(line)])


def length(line: np.ndarray) -> float:
    return float(np.linalg.norm(np.diff(line, axis=0), axis=1).sum())


def distance(points: np.ndarray, line: np.ndarray) -> np.ndarray:
    a = line[:-1]
    step = np.diff(line, axis=0)
    share = ((points[:, None] - a) * step).sum(-1) / np.maximum((step * step).sum(-1), 1e-12)
    return np.linalg.norm(
        points[:, None] - a - np.clip(share, 0, 1)[..., None] * step, axis=-1
    ).min(1)


def test_pieces_are_what_of_a_line_is_in_the_window() -> None:
    rng = np.random.default_rng(0)
    num_pieces = 0
    for _ in range(60):
        line = np.cumsum(rng.normal(0, 40, (8, 2)), 0)
        pieces = list(cut(line))
        points = dense(line)
        inside = (np.abs(points) <= HALF_M).all(1)
        num_pieces += len(pieces)
        if not pieces:
            assert not inside.any()
            continue
        assert all((np.abs(piece) <= HALF_M + 1e-9).all() for piece in pieces)
        assert all((distance(piece, line) < 1e-9).all() for piece in pieces)
        near = np.min([distance(points[inside], piece) for piece in pieces], axis=0)
        assert near.max(initial=0.0) < 1e-9
        steps = np.linalg.norm(np.diff(points, axis=0), axis=1)
        expected = steps[inside[:-1] & inside[1:]].sum()
        assert sum(map(length, pieces)) == pytest.approx(
            expected, abs=len(pieces) * 2 * steps.max() + 1e-9
        )
    assert num_pieces > 60


def test_the_window_is_in_ego(tmp_path) -> None:
    vector_map = parse_map(
        json.dumps(expansion(np.random.default_rng(1), place=(500.0, 900.0))).encode(),
        "m",
    )
    yaw = 0.7
    pose = np.array(
        [
            [np.cos(yaw), -np.sin(yaw), 0, 510.0],
            [np.sin(yaw), np.cos(yaw), 0, 880.0],
            [0, 0, 1, 0],
        ]
    )
    vectors = window(vector_map, pose)
    back = vectors["point"].astype(np.float64) @ pose[:2, :2].T + pose[:2, 3]
    assert set(np.unique(vectors["layer"])) == {
        LAYERS.index(n) for n in ("lane_divider", "ped_crossing", "drivable_area")
    }
    for number in range(vectors["line"].max() + 1):
        mask = vectors["line"] == number
        (layer,) = np.unique(vectors["layer"][mask])
        lines = [
            line
            for line, line_layer in zip(vector_map.lines, vector_map.layers, strict=True)
            if line_layer == layer
        ]
        assert min(distance(back[mask], line).max() for line in lines) < 1e-4
    empty = window(vector_map, pose + [[0, 0, 0, 1e5]] * 3)
    assert empty["point"].shape == (0, 2)


def test_a_dataset_with_maps_is_sound(tmp_path) -> None:
    nuscenes = build_nuscenes(tmp_path / "root", {"scene-0061": 2}, cameras=("CAM_FRONT",))
    (nuscenes.root / "maps" / "expansion").mkdir()
    file = nuscenes.root / "maps" / "expansion" / "testville.json"
    file.write_text(json.dumps(expansion(np.random.default_rng(2), place=(400.0, 1100.0))))
    shard(
        f"nuscenes:{nuscenes.root}",
        tmp_path / "out",
        workers=1,
        options={"channels": ["map"]},
    )
    assert verify(tmp_path / "out", deep=True, workers=1).faults == []
    dataset = open_dataset(tmp_path / "out")
    (channel,) = dataset.manifest.extra_channels
    value = decode_values(dataset[0].extra, (channel,), "it")["map"]
    assert len(value["point"]) > 20
    assert np.abs(value["point"]).max() <= np.float32(HALF_M)
    file.unlink()
    shard(
        f"nuscenes:{nuscenes.root}",
        tmp_path / "none",
        workers=1,
        options={"channels": ["map"]},
    )
    assert open_dataset(tmp_path / "none").manifest.extra_channels == ()


GOOD = expansion(np.random.default_rng(3), 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a map"),
        ("[]", "is not a map"),
        ("{}", "is missing"),
        ("version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"),
        (json.dumps({**GOOD, "node": []}), "names the token 'n"),
        (json.dumps({**GOOD, "polygon": []}), "names the token 'p0'"),
        (
            json.dumps({**GOOD, "lane_divider": [{"line_token": 5}]}),
            "must be text; got ",
        ),
        (
            json.dumps(GOOD).replace('"x": ', '"x": 1e999, "z": ', 1),
            "is not a map",
        ),
        ("[" * 100_000, "is not a map"),
    ],
)
def test_a_hostile_file_is_a_named_error(text, message) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        parse_map(text.encode(), "maps/expansion/x.json")
    assert "maps/expansion/x.json" in str(caught.value)
