"""Values moved by a law equal those computed afresh from the augmented world, over all augmentations there are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law
from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.rigid import rigid, rotation_matrices
from fuelrail.pipeline.transforms.ego import BevMap
from fuelrail.pipeline.transforms.image import ImageAugment
from support.laws import SIZE, channel, ego_map, move

seeds = st.integers(0, 2**32)
RADAR = channel(
    Law(
        "ego_points",
        roles={
            "positions": (("x", "y", "z"),),
            "vectors": (("vx", "vy"), ("cx", "cy")),
        },
    ),
    dtype="float32",
    columns=("x", "y", "z", "rcs", "vx", "vy", "cx", "cy"),
    frame="sensor:radar",
)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_radar_points_and_velocities_are_those_of_the_augmented_world(
    seed,
) -> None:
    rng = np.random.default_rng(seed)
    ego = ego_map(seed)
    yaw = rng.uniform(-np.pi, np.pi)
    radar2ego = rigid(
        np.array([math.cos(yaw / 2), 0, 0, math.sin(yaw / 2)]),
        rng.uniform(-3, 3, 3),
    )
    where = rng.uniform(-60, 60, (30, 3))
    velocity = rng.uniform(-20, 20, (30, 3)) * (1, 1, 0)
    rotation = radar2ego[:3, :3]
    place = radar2ego[:3, 3]

    def measured(
        points: np.ndarray[Any, Any], speeds: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        speeds = speeds @ rotation
        return np.c_[
            (points - place) @ rotation,
            np.arange(30),
            speeds[:, :2],
            -speeds[:, :2],
        ].astype(np.float32)

    moved = move(
        RADAR,
        measured(where, velocity),
        ego=ego,
        sensor2ego={"radar": radar2ego},
    )
    matrix = ego.matrix
    expected = measured(where @ matrix[:3, :3].T + matrix[:3, 3], velocity @ matrix[:3, :3].T)
    np.testing.assert_allclose(moved, expected, atol=2e-4)
    with pytest.raises(SchemaError, match="frame of 'radar', whose place is unknown"):
        move(RADAR, moved, ego=ego)


EGO_BOXES = channel(
    Law(
        "ego_boxes",
        roles={
            "boxes": (("b",),),
            "vectors": (("v",),),
            "rotations": (("q",),),
        },
    ),
    kind="ragged",
    frame="ego",
    arrays=(
        ArraySpec("b", "float32", (7,)),
        ArraySpec("v", "float32", (3,)),
        ArraySpec("q", "float64", (4,)),
    ),
)
CORNERS = np.array([[x, y, z] for x in (-0.5, 0.5) for y in (-0.5, 0.5) for z in (-0.5, 0.5)])


def sorted_rows(points: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return points[np.lexsort(np.round(points, 2).T)]


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_boxes_hold_the_corners_of_the_augmented_world(seed) -> None:
    rng = np.random.default_rng(seed)
    ego = ego_map(seed)
    yaw = rng.uniform(-np.pi, np.pi)
    size = rng.uniform(1, 9, 3)
    centre = rng.uniform(-40, 40, 3)
    q = np.array([math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)])
    velocity = rng.uniform(-9, 9, 3)
    value = {
        "b": np.array([[*centre, *size, yaw]], np.float32),
        "v": velocity[None].astype(np.float32),
        "q": q[None],
    }
    moved = move(EGO_BOXES, value, ego=ego)
    matrix = ego.matrix
    corners = (CORNERS * size) @ rotation_matrices(q).T + centre
    expected_corners = corners @ matrix[:3, :3].T + matrix[:3, 3]
    box = moved["b"][0]
    turned = rotation_matrices(moved["q"][0])
    box_corners = (CORNERS * box[3:6]) @ turned.T + box[:3]
    pairs = np.linalg.norm(box_corners[:, None] - expected_corners[None], axis=-1)
    assert pairs.min(0).max() < 1e-3
    assert pairs.min(1).max() < 1e-3
    assert abs(box[6]) <= np.float32(math.pi)
    heading = matrix[:3, :3] @ rotation_matrices(q)[:, 0] / ego.scale
    np.testing.assert_allclose(turned[:, 0], heading, atol=1e-9)
    np.testing.assert_allclose((math.cos(box[6]), math.sin(box[6])), heading[:2], atol=1e-5)
    np.testing.assert_allclose(moved["v"][0], matrix[:3, :3] @ velocity, atol=1e-4)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_trajectories_and_poses_are_those_of_the_augmented_world(seed) -> None:
    rng = np.random.default_rng(seed)
    ego = ego_map(seed)
    matrix = ego.matrix
    q = rng.normal(size=(2, 5, 4))
    poses = rigid(
        q / np.linalg.norm(q, axis=-1, keepdims=True),
        rng.uniform(-30, 30, (2, 5, 3)),
    )
    law = Law("ego_poses")
    moved = move(
        channel(law, dtype="float64", frame="ego", kind="array", shape=(2, 5, 4, 4)),
        poses,
        ego=ego,
    )
    np.testing.assert_allclose(
        moved[..., :3, 3],
        poses[..., :3, 3] @ matrix[:3, :3].T + matrix[:3, 3],
        atol=1e-9,
    )
    np.testing.assert_allclose(
        moved[..., :3, 0] * ego.scale,
        poses[..., :3, 0] @ matrix[:3, :3].T,
        atol=1e-9,
    )
    np.testing.assert_allclose(np.linalg.det(moved[..., :3, :3]), 1.0, atol=1e-9)
    flat = Law("ego_poses", roles={"positions": (("x", "y"),), "yaws": (("yaw",),)})
    yaws = rng.uniform(-np.pi, np.pi, (4, 6))
    paths = np.concatenate([rng.uniform(-30, 30, (4, 6, 2)), yaws[..., None]], -1)
    plan = move(
        channel(
            flat,
            kind="array",
            dtype="float64",
            frame="ego",
            columns=("x", "y", "yaw"),
        ),
        paths,
        ego=ego,
    )
    np.testing.assert_allclose(
        plan[..., :2],
        paths[..., :2] @ matrix[:2, :2].T + matrix[:2, 3],
        atol=1e-9,
    )
    heading = np.stack([np.cos(yaws), np.sin(yaws)], -1) @ matrix[:2, :2].T / ego.scale
    np.testing.assert_allclose(
        np.stack([np.cos(plan[..., 2]), np.sin(plan[..., 2])], -1),
        heading,
        atol=1e-9,
    )


EXTENT = (-25.6, -19.2, -2.0, 25.6, 19.2, 4.0)
CELLS = (64, 48, 6)


def occupancy_channel(
    interpolation: str = "nearest", axes: tuple[str, ...] = ("x", "y", "z")
) -> Channel:
    law = Law("ego_grid", interpolation=interpolation, fill=0.0, extent_m=EXTENT)  # type: ignore[arg-type]
    return channel(law, kind="array", axes=axes, frame="ego")


def cell_centres() -> np.ndarray[Any, Any]:
    sides = [
        low + (np.arange(size) + 0.5) * (high - low) / size
        for low, high, size in zip(EXTENT[:3], EXTENT[3:], CELLS, strict=True)
    ]
    return np.stack(np.meshgrid(*sides, indexing="ij"), -1)


def depth_inside(points: np.ndarray[Any, Any], boxes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How deep points (..., 3) lie in the deepest of the boxes (M, 7) [m]; negative outside."""
    deepest = np.full(points.shape[:-1], -np.inf)
    for x, y, z, length, width, height, yaw in boxes:
        offset = points - (x, y, z)
        c = math.cos(yaw)
        s = math.sin(yaw)
        along = c * offset[..., 0] + s * offset[..., 1]
        across = c * offset[..., 1] - s * offset[..., 0]
        sides = [
            length / 2 - abs(along),
            width / 2 - abs(across),
            height / 2 - abs(offset[..., 2]),
        ]
        inner = np.minimum.reduce(sides)
        outer = -np.sqrt(sum(np.minimum(side, 0.0) ** 2 for side in sides))
        deepest = np.maximum(deepest, np.where(inner >= 0, inner, outer))
    return deepest


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_occupancy_is_that_of_the_augmented_boxes_but_for_half_a_cell(
    seed,
) -> None:
    rng = np.random.default_rng(seed)
    ego = ego_map(seed)
    boxes = np.c_[
        rng.uniform(-20, 20, (6, 2)),
        rng.uniform(-1, 3, 6),
        rng.uniform(2, 9, (6, 3)),
        rng.uniform(-np.pi, np.pi, 6),
    ]
    centres = cell_centres()
    grid = (depth_inside(centres, boxes) > 0).astype(np.uint8)
    moved = move(occupancy_channel(), grid, ego=ego)
    afresh = depth_inside(centres, ego.boxes3d(boxes.astype(np.float32)).astype(np.float64))
    back = centres @ ego.inverse[:3, :3].T + ego.inverse[:3, 3]
    is_known = ((back > EXTENT[:3]) & (back < EXTENT[3:])).all(-1)
    half_cell = ego.scale * math.sqrt(0.4**2 + 0.4**2 + 0.5**2) + 1e-3
    clear = is_known & (abs(afresh) > half_cell)
    np.testing.assert_array_equal(moved[clear], afresh[clear] > 0)
    assert clear.sum() > 0.2 * is_known.sum()
    is_unknown = ((back < np.array(EXTENT[:3]) - 1e-6) | (back > np.array(EXTENT[3:]) + 1e-6)).any(
        -1
    )
    assert not moved[is_unknown].any()


@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("flips", [(False, False), (True, False), (False, True), (True, True)])
def test_quarter_turns_flips_and_whole_cells_move_a_grid_exactly(quarter, flips) -> None:
    grid = np.random.default_rng(0).integers(0, 9, (20, 20, 3)).astype(np.int8)
    law = Law("ego_grid", extent_m=(-10.0, -10.0, 10.0, 10.0), fill=-1.0)
    ego = BevMap(
        rotation_rad=quarter * math.pi / 2,
        flip_x=flips[0],
        flip_y=flips[1],
        translation_m=(2.0, -3.0, 0.5),
    )
    moved = move(
        channel(law, kind="array", axes=("x", "y", "class"), frame="ego"),
        grid,
        ego=ego,
    )
    expected = np.rot90(grid, quarter, (0, 1))
    expected = expected[::-1] if flips[0] else expected
    expected = expected[:, ::-1] if flips[1] else expected
    shifted = np.full_like(grid, -1)
    shifted[2:, :-3] = expected[:-2, 3:]
    np.testing.assert_array_equal(moved, shifted)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_a_linear_field_and_its_flow_stay_one(seed) -> None:
    rng = np.random.default_rng(seed)
    ego = ego_map(seed)
    slope = rng.uniform(-1, 1, 3)
    centres = cell_centres()
    linear = move(occupancy_channel("linear"), centres @ slope, ego=ego)
    back = centres @ ego.inverse[:3, :3].T + ego.inverse[:3, 3]
    half = np.array([0.4, 0.4, 0.5])
    inner = ((back >= EXTENT[:3] + half) & (back <= EXTENT[3:] - half)).all(-1)
    np.testing.assert_allclose(linear[inner], (back @ slope)[inner], atol=1e-9)
    flow = np.broadcast_to(rng.uniform(-9, 9, 2), (*CELLS, 2)).astype(np.float64)
    law = Law("ego_grid", extent_m=EXTENT, roles={"vectors": (("vx", "vy"),)})
    it = channel(
        law,
        kind="array",
        axes=("x", "y", "z", "flow"),
        columns=("vx", "vy"),
        frame="ego",
        dtype="float64",
    )
    moved = move(it, flow, ego=ego)
    np.testing.assert_allclose(moved[inner], (flow @ ego.matrix[:2, :2].T)[inner], atol=1e-9)


@pytest.mark.parametrize("interpolation", ["nearest", "linear"])
def test_cells_outside_the_extent_of_a_grid_of_vectors_are_filled_and_the_fill_is_not_turned(
    interpolation,
) -> None:
    rng = np.random.default_rng(0)
    ego = BevMap(rotation_rad=0.7, scale=1.1, flip_y=True, translation_m=(6.0, -4.0, 0.0))
    law = Law(
        "ego_grid",
        interpolation=interpolation,
        fill=-7.0,
        extent_m=EXTENT,
        roles={"vectors": (("vx", "vy"),)},
    )
    it = channel(
        law,
        kind="array",
        axes=("x", "y", "z", "column"),
        columns=("vx", "vy", "mass"),
        frame="ego",
        dtype="float64",
    )
    moved = move(it, rng.uniform(-9, 9, (*CELLS, 3)), ego=ego)
    back = cell_centres() @ ego.inverse[:3, :3].T + ego.inverse[:3, 3]
    outside = ((back < np.array(EXTENT[:3]) - 1e-6) | (back > np.array(EXTENT[3:]) + 1e-6)).any(-1)
    assert 0.05 < outside.mean() < 0.95
    assert (moved[outside] == -7.0).all()
    assert not (moved[~outside] == -7.0).any()


def test_axes_in_another_order_and_extents_downwards_are_the_same_world() -> None:
    ego = ego_map(3)
    grid = np.random.default_rng(1).integers(0, 9, CELLS).astype(np.uint8)
    moved = move(occupancy_channel(), grid, ego=ego)
    turned = move(
        occupancy_channel(axes=("z", "y", "x")),
        grid.transpose(2, 1, 0),
        ego=ego,
    )
    np.testing.assert_array_equal(turned.transpose(2, 1, 0), moved)
    down = Law("ego_grid", extent_m=(25.6, 19.2, -2.0, -25.6, -19.2, 4.0))
    it = channel(down, kind="array", axes=("x", "y", "z"), frame="ego")
    np.testing.assert_array_equal(move(it, grid[::-1, ::-1], ego=ego)[::-1, ::-1], moved)


def test_fixed_and_classes_move_nothing_and_identity_returns_the_value_itself() -> None:
    value = np.ones((3, 8), np.float32)
    for law in ("fixed", "classes"):
        assert move(channel(Law(law)), value, ego=ego_map(1)) is value
    assert move(RADAR, value) is value
    with pytest.raises(SchemaError, match="camera 'cam', which has no map here"):
        move(channel(Law("image", camera="cam"), kind="image"), value)
    small = ImageAugment(height=8, width=8).draw([SIZE], seed=0, epoch=0, sample=0)[0]
    with pytest.raises(
        SchemaError,
        match="a raster of 8 x 3 pixels; on a stored image of 96 x 64 at 1/1 it has 96 x 64",
    ):
        move(
            channel(Law("image", camera="cam"), kind="image"),
            value,
            images={"cam": small},
        )
