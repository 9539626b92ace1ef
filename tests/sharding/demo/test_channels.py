"""Occupancy and tokens of the synthetic drive: true to its points and boxes, and moved by augmentation as they are."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from fuelrail.pipeline.channels.laws import LAWS, Motion
from fuelrail.pipeline.channels.selection import decode_values
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.rigid import invert_rigid, rotation_matrices
from fuelrail.pipeline.sample.schema import Boxes
from fuelrail.pipeline.transforms.ego import BevMap
from fuelrail.sharding.api import shard, verify
from fuelrail.sharding.demo.capture import TOKENS, top_view_tokens
from fuelrail.sharding.demo.options import SynthOptions
from fuelrail.sharding.demo.world import captures, make_clip
from support.synth_channels import (
    CELL_M,
    EXTENT_M,
    FIRST_CLASS,
    FREE,
    OCCUPANCY,
    SHAPE,
    STATIC,
    occupancy_grid,
    synth_with_occupancy,
)

pytestmark = pytest.mark.slow

WORLD: dict[str, Any] = {
    "seed": 5,
    "clips": 1,
    "frames": 3,
    "size": (64, 36),
    "lidar_sweeps": 1,
    "workers": 1,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("occupancy")
    synth_with_occupancy(base / "drive", **WORLD)
    shard(f"nuscenes:{base / 'drive'}", base / "out", workers=1)
    assert verify(base / "out", deep=True, workers=1).faults == []
    return open_dataset(base / "out")


def grid_of(dataset: Any, number: int) -> np.ndarray:
    (channel,) = dataset.manifest.extra_channels
    assert channel.law == OCCUPANCY.law
    return decode_values(dataset[number].extra, (channel,), "it")["occupancy"]


def cell_of(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cells = np.floor((places - EXTENT_M[:3]) / CELL_M).astype(int)
    is_inside = ((cells >= 0) & (cells < SHAPE)).all(1)
    return cells[is_inside], is_inside


def test_every_point_and_box_is_in_the_grid(dataset) -> None:
    for number in range(len(dataset)):
        sample = dataset[number]
        grid = grid_of(dataset, number)
        lidar2ego = sample.geometry.lidar2keyego(0)
        points = sample.points["lidar_top"][:, :3] @ lidar2ego[:3, :3].T + lidar2ego[:3, 3]
        cells, _ = cell_of(points)
        assert len(cells) > 5000
        assert (grid[tuple(cells.T)] != FREE).all()
        boxes = sample.boxes
        cells, is_inside = cell_of(boxes.boxes3d[:, :3].astype(np.float64))
        big = (boxes.boxes3d[is_inside, 3:6] > math.sqrt(3) * CELL_M).all(1) & (
            boxes.label[is_inside] >= 0
        )
        assert big.sum() > 2
        assert (grid[tuple(cells[big].T)] == boxes.label[is_inside][big] + FIRST_CLASS).all()


def test_cells_of_a_class_lie_in_its_boxes(dataset) -> None:
    grid = grid_of(dataset, 1)
    boxes = dataset[1].boxes
    cells = np.argwhere(grid >= FIRST_CLASS)
    places = np.array(EXTENT_M[:3]) + (cells + 0.5) * CELL_M
    turn = rotation_matrices(boxes.rotation_wxyz.astype(np.float64))
    offset = np.einsum("mji,pmj->pmi", turn, places[:, None] - boxes.boxes3d[:, :3])
    near = (np.abs(offset) <= boxes.boxes3d[:, 3:6] / 2 + CELL_M).all(
        -1
    )  # a point may be in the corner of its cell
    same = boxes.label + FIRST_CLASS == grid[tuple(cells.T)][:, None]
    assert (near & same).any(1).all()
    assert (grid == STATIC).sum() > 2000


def make_box(**values: Any) -> Boxes:
    fields = {
        "boxes3d": np.array([[10.0, 4.0, 0.6, 4.4, 1.9, 1.6, 0.0]], np.float32),
        "rotation_wxyz": np.array([[1.0, 0, 0, 0]], np.float32),
        "velocity": np.array([[10.0, 0, 0]], np.float32),
        "label": np.array([3], np.int16),
        "instance_id": np.array([1], np.int64),
        "num_lidar_pts": np.array([1], np.int32),
        "num_radar_pts": np.array([0], np.int32),
        "visibility": np.array([4], np.int8),
        "attribute": np.array([-1], np.int16),
        "valid": np.array([1], np.uint8),
    }
    return Boxes(**{**fields, **values})


def test_what_moved_on_leaves_no_trail() -> None:
    points = np.array([[10.0, 4.0, 0.6], [5.0, 4.0, 0.6], [5.0, -4.0, 0.6]])
    age_s = np.array([0.0, 0.5, 0.5])  # half a second ago the box was 5 m behind
    grid = occupancy_grid(points, age_s, make_box())
    cells, _ = cell_of(points)
    assert grid[tuple(cells.T)].tolist() == [FIRST_CLASS + 3, FREE, STATIC]
    assert (occupancy_grid(points, age_s, make_box(label=np.array([-1], np.int16))) <= STATIC).all()
    assert (occupancy_grid(points, age_s, None)[tuple(cells.T)] == STATIC).all()


@pytest.mark.parametrize(
    "ego",
    [
        BevMap(flip_y=True),
        BevMap(flip_x=True),
        BevMap(flip_x=True, flip_y=True),
        BevMap(rotation_rad=math.pi / 2),
    ],
)
def test_an_augmented_grid_is_that_of_augmented_points_and_boxes(dataset, ego) -> None:
    sample = dataset[1]
    lidar2ego = sample.geometry.lidar2keyego(0)
    points = (
        sample.points["lidar_top"][:, :3].astype(np.float64) @ lidar2ego[:3, :3].T
        + lidar2ego[:3, 3]
    )
    age_s = np.zeros(len(points))
    boxes = sample.boxes
    moved_boxes = dataclasses.replace(
        boxes,
        boxes3d=ego.boxes3d(boxes.boxes3d.astype(np.float64)).astype(np.float32),
        rotation_wxyz=ego.rotations(boxes.rotation_wxyz).astype(np.float32),
    )
    matrix = ego.matrix
    fresh = occupancy_grid(points @ matrix[:3, :3].T + matrix[:3, 3], age_s, moved_boxes)
    moved = LAWS["ego_grid"].move(occupancy_grid(points, age_s, boxes), OCCUPANCY, Motion(ego=ego))
    # The maps take cells to cells; a place on the border of two may fall to either.
    assert (fresh != moved).sum() <= 1e-3 * (fresh != FREE).sum()


def test_tokens_say_what_is_around_the_nearest_cells_first() -> None:
    world = SynthOptions(seed=1, clips=1, frames=1)
    clip = make_clip(world, 0)
    moment = captures(world, clip)[0].timestamp_us
    solids = clip.solids(moment)
    tokens = top_view_tokens(clip, solids, moment)
    assert tokens.shape == TOKENS.shape
    assert tokens[0] == TOKENS.vocabulary.size - 1
    assert tokens[1:].max() < tokens[0]
    global2ego = invert_rigid(clip.ego2global(moment))
    middles = (
        np.stack(np.meshgrid(np.arange(32), np.arange(32), indexing="ij"), -1).reshape(-1, 2) - 15.5
    )
    middles = middles[np.argsort((middles**2).sum(1), kind="stable")] * 3.2
    places = [
        (global2ego[:3, :3] @ solid.centre + global2ego[:3, 3])[:2]
        for solid in solids
        if solid.actor >= 0 and clip.actors[solid.actor].category.startswith("vehicle")
    ]
    near = [place for place in places if np.abs(place).max() < 51]
    assert len(near) > 3
    for place in near:
        cell = np.flatnonzero(np.abs(middles - place).max(1) <= 1.6)[0]
        assert tokens[1 + cell] % 6 in (
            1,
            2,
            3,
        )  # a vehicle, or who stands in the same cell
