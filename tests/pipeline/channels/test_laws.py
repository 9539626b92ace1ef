"""Values moved by a law equal those computed afresh from the augmented world, over all augmentations there are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.channels.laws import LAWS, Motion
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law
from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.rigid import rigid, rotation_matrices
from fuelrail.pipeline.transforms.ego import BevAugment, BevMap
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.pipeline.transforms.lens import Lens

EGO = BevAugment(
    train=True, rotate_deg=(-180.0, 180.0), scale=(0.8, 1.25), flip_x_prob=0.5, flip_y_prob=0.5, translate_std_m=0.7
)
SIZE = (96, 64)
seeds = st.integers(0, 2**32)


def ego_map(seed: int) -> BevMap:
    return EGO.draw(seed=seed, epoch=0, sample=0)


@st.composite
def image_maps(draw: st.DrawFn, *, rotate: bool = True) -> ImageMap:
    """Any map that `ImageAugment` can draw, to a small output."""
    kind = draw(st.sampled_from(["width", "cover", "contain", "stretch", 0.5, "jitter", "range"]))
    factors: dict[str, Any] = {"resize": kind}
    if kind == "jitter":
        factors = {"resize": "width", "resize_jitter": (-0.06, 0.4)}
    if kind == "range":
        factors = {"resize_range": (0.3, 1.6)}
    degrees = draw(st.sampled_from([0.0, 5.4, 45.0])) if rotate else 0.0
    augment = ImageAugment(
        height=draw(st.integers(16, 80)), width=draw(st.integers(16, 110)), train=draw(st.booleans()),
        crop_y=draw(st.sampled_from(["bottom", "center", "top", "random"])),
        crop_x=draw(st.sampled_from(["random", "center", "left"])), crop_bottom=(0.0, 0.2),
        flip_prob=draw(st.sampled_from([0.0, 0.5, 1.0])), rotate_deg=(-degrees, degrees), **factors,
    )  # fmt: skip
    return augment.draw([SIZE], seed=draw(seeds), epoch=0, sample=0)[0]


def channel(law: Law, **facts: Any) -> Channel:
    return Channel(name="it", kind=facts.pop("kind", "points"), field="it.npy", law=law, **facts)


def move(channel: Channel, value: Any, **motion: Any) -> Any:
    return LAWS[channel.law.name].move(value, channel, Motion(**motion))


def output_centres(image_map: ImageMap) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where each output pixel's centre lies on the stored image, centre-origin (H, W, 2), and whether it sees it."""
    width, height = image_map.out_wh
    u, v = np.meshgrid(np.arange(width), np.arange(height))
    inverse = np.linalg.inv(image_map.centre_matrix())
    places = np.stack([u, v, np.ones_like(u)], -1) @ inverse.T
    left, top, right, bottom = image_map.visible
    x, y = places[..., 0] + 0.5, places[..., 1] + 0.5
    if left >= right or top >= bottom:
        return places[..., :2], np.zeros((height, width), bool)
    return places[..., :2], (x >= left) & (x <= right) & (y >= top) & (y <= bottom)


def border_distance(image_map: ImageMap, places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    left, top, right, bottom = image_map.visible
    x, y = places[..., 0] + 0.5, places[..., 1] + 0.5
    return np.minimum.reduce([abs(x - left), abs(x - right), abs(y - top), abs(y - bottom)])


@given(image_maps(), seeds)
@settings(max_examples=60, deadline=None)
def test_a_mask_is_the_stored_pixel_in_which_each_output_pixel_lies(image_map, seed) -> None:
    mask = np.random.default_rng(seed).integers(1, 65536, SIZE[::-1]).astype(np.uint16)
    law = Law("image", camera="cam", fill=7.0)
    moved = move(channel(law, kind="image"), mask, images={"cam": image_map})
    places, seen = output_centres(image_map)
    at = np.floor(places + 0.5).astype(int).clip(0, np.array(SIZE) - 1)
    wanted = np.where(seen, mask[at[..., 1], at[..., 0]], 7)
    # A place on the line between two pixels may round to either.
    clear = (abs(places + 0.5 - np.rint(places + 0.5)) > 1e-5).all(-1) & (border_distance(image_map, places) > 1e-5)
    assert moved.dtype == np.uint16
    assert moved.shape == image_map.out_wh[::-1]
    np.testing.assert_array_equal(moved[clear], wanted[clear])


@given(image_maps(), seeds)
@settings(max_examples=60, deadline=None)
def test_depth_of_a_plane_is_that_of_the_plane_in_the_augmented_image(image_map, seed) -> None:
    a, b = np.random.default_rng(seed).uniform(-0.3, 0.3, 2)
    u, v = np.meshgrid(np.arange(SIZE[0]), np.arange(SIZE[1]))
    depth = (60.0 + a * u + b * v).astype(np.float32)
    law = Law("image", camera="cam", interpolation="linear", fill=-1.0)
    moved = move(channel(law, kind="array"), depth, images={"cam": image_map})
    places, seen = output_centres(image_map)
    inner = seen & ((places >= 0) & (places <= np.array(SIZE) - 1)).all(-1)
    np.testing.assert_allclose(moved[inner], (60.0 + places @ (a, b))[inner], rtol=1e-5)
    outside = ~seen & (border_distance(image_map, places) > 1e-4)
    assert (moved[outside] == -1.0).all()


@given(image_maps(), st.sampled_from([2, 3, 8]))
@settings(max_examples=30, deadline=None)
def test_a_raster_at_a_fraction_lies_where_the_whole_one_does(image_map, fraction) -> None:
    height, width = -(-SIZE[1] // fraction), -(-SIZE[0] // fraction)
    small = np.arange(height * width, dtype=np.int32).reshape(height, width)
    whole = small.repeat(fraction, 0).repeat(fraction, 1)[: SIZE[1], : SIZE[0]]
    images = {"cam": image_map}
    moved = move(channel(Law("image", camera="cam", fraction=fraction), kind="array"), small, images=images)
    wanted = move(channel(Law("image", camera="cam"), kind="array"), whole, images=images)
    np.testing.assert_array_equal(moved, wanted)


BOXES = channel(
    Law("image_points", camera="cam", roles={"boxes": (("box",),), "points": (("point",),), "visible": (("seen",),)}),
    kind="ragged",
    arrays=(ArraySpec("box", "float64", (4,)), ArraySpec("point", "float64", (2,)), ArraySpec("seen", "uint8")),
)


def of_boxes(boxes: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {"box": boxes, "point": (boxes[:, :2] + boxes[:, 2:]) / 2, "seen": np.ones(len(boxes), np.uint8)}


@given(image_maps(), seeds)
@settings(max_examples=60, deadline=None)
def test_boxes_bound_what_the_output_shows_of_their_stored_boxes(image_map, seed) -> None:
    # Afresh: of a dense cloud of points of the stored box, those that are seen, and their bounds in the output.
    rng = np.random.default_rng(seed)
    low = rng.uniform(-20, 90, (4, 2))
    boxes = np.concatenate([low, low + rng.uniform(5, 50, (4, 2))], 1)
    moved = move(BOXES, of_boxes(boxes), images={"cam": image_map})
    width, height = image_map.out_wh
    step = np.linspace(0, 1, 121)
    cloud = low[:, None, None] + np.stack(np.meshgrid(step, step), -1) * (boxes[:, None, None, 2:] - low[:, None, None])
    cloud = cloud.reshape(4, -1, 2)
    left, top, right, bottom = image_map.visible
    kept = ((cloud >= (left - 0.5, top - 0.5)) & (cloud <= (right - 0.5, bottom - 0.5))).all(-1)
    matrix = image_map.centre_matrix()
    there = cloud @ matrix[:2, :2].T + matrix[:2, 2]
    inside = ((there >= -0.5) & (there <= (width - 0.5, height - 0.5))).all(-1)
    step_px = 50 / 120 * image_map.max_scale * 2 + 1e-6
    for number in range(4):
        box = moved["box"][number]
        assert (box >= -0.5).all()
        assert (box <= np.tile((width - 0.5, height - 0.5), 2)).all()
        seen = there[number][kept[number] & inside[number]]
        if len(seen):
            if moved["seen"][number]:
                assert (box[:2] <= seen.min(0) + 1e-6).all()
                assert (box[2:] >= seen.max(0) - 1e-6).all()
            if image_map.is_axis_aligned and moved["seen"][number]:
                assert np.abs(box - np.concatenate([seen.min(0), seen.max(0)])).max() <= step_px
        elif image_map.is_axis_aligned:
            assert not moved["seen"][number] or (box[2:] - box[:2]).min() <= step_px


@given(image_maps(rotate=False), seeds)
@settings(max_examples=40, deadline=None)
def test_boxes_of_projected_corners_equal_those_of_the_augmented_projection(image_map, seed) -> None:
    rng = np.random.default_rng(seed)
    corners = rng.uniform((-6, -3, 8), (6, 3, 30), (5, 8, 3))
    camera = np.array([[60.0, 0, 47.0], [0, 60.0, 30.0], [0, 0, 1]])
    bounds = []
    for k in (camera, image_map.ida_mat()[:3, :3] @ camera):
        pixels = corners @ k.T
        pixels = pixels[..., :2] / pixels[..., 2:]
        bounds.append(np.concatenate([pixels.min(1), pixels.max(1)], 1))
    width, height = image_map.out_wh
    wanted = bounds[1].clip(-0.5, np.tile((width - 0.5, height - 0.5), 2))
    moved = move(BOXES, of_boxes(bounds[0]), images={"cam": image_map})
    left, top, right, bottom = image_map.visible
    whole = (bounds[0] >= np.tile((left - 0.5, top - 0.5), 2)) & (bounds[0] <= np.tile((right - 0.5, bottom - 0.5), 2))
    use = whole.all(1) & (moved["seen"] == 1)
    np.testing.assert_allclose(moved["box"][use], wanted[use], atol=1e-9)


@given(image_maps(), seeds)
@settings(max_examples=40, deadline=None)
def test_keypoints_follow_ida_mat_and_say_whether_they_are_seen(image_map, seed) -> None:
    points = np.random.default_rng(seed).uniform(-10, 110, (40, 2))
    value = {"box": np.zeros((40, 4)), "point": points, "seen": np.ones(40, np.uint8)}
    only_points = channel(
        Law("image_points", camera="cam", roles={"points": (("point",),), "visible": (("seen",),)}),
        kind="ragged", arrays=BOXES.arrays,
    )  # fmt: skip
    moved = move(only_points, value, images={"cam": image_map})
    wanted = (np.c_[points, np.ones(40), np.ones(40)] @ image_map.ida_mat().T)[:, :2]
    np.testing.assert_allclose(moved["point"], wanted, atol=1e-9)
    raster = np.ones(SIZE[::-1], np.uint8)
    drawn = move(channel(Law("image", camera="cam"), kind="image"), raster, images={"cam": image_map})
    for (u, v), seen in zip(moved["point"], moved["seen"], strict=True):
        if seen:  # what is seen lies on a pixel that shows the image, or on the border of one
            near = drawn[max(0, int(v)) : int(v) + 2, max(0, int(u)) : int(u) + 2]
            assert near.any()


@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize(("shape", "wanted"), [((), [1, 1, 0]), ((1,), [1, 1, 0]), ((2, 1), [[1, 0], [0, 0], [0, 0]])])
def test_boxes_with_keypoints_are_visible_while_one_of_them_is(num_rows, shape, wanted) -> None:
    law = Law("image_points", camera="cam", roles={"points": (("at",),), "boxes": (("box",),), "visible": (("seen",),)})
    arrays = (
        ArraySpec("at", "float32", (2, 2)), ArraySpec("box", "float32", (4,)), ArraySpec("seen", "uint8", shape),
    )  # fmt: skip
    out = (-9.0, -9.0)
    value = {
        "at": np.array([[(5, 5), out], [out, out], [out, out]], np.float32)[:num_rows],
        "box": np.array([(-9, -9, -5, -5), (0, 0, 9, 9), (-9, -9, -5, -5)], np.float32)[:num_rows],
        "seen": np.ones((num_rows, *shape), np.uint8),
    }
    moved = move(channel(law, kind="ragged", arrays=arrays), value, images={"cam": ImageMap.identity(SIZE)})
    assert moved["seen"].tolist() == np.reshape(wanted[:num_rows], (num_rows, *shape)).tolist()


def test_what_crops_leave_nothing_of_keeps_its_place_as_a_point_and_has_no_area_as_a_box() -> None:
    cropped = ImageMap.identity(SIZE).crop(10, 20, 30, 40).flip()
    law = Law("image_points", camera="cam", roles={"points": (("at",),), "boxes": (("box",),), "visible": (("seen",),)})
    arrays = (ArraySpec("at", "float64", (2,)), ArraySpec("box", "float64", (4,)), ArraySpec("seen", "uint8"))
    places = np.array([(3.0, 5.0), (10 - 0.5, 20 - 0.5), (39.5 + 1e-3, 30.0)])
    value = {
        "at": places,
        "box": np.array([(0.0, 0.0, 5.0, 6.0), (2.0, 30.0, 9.5, 35.0), (0.0, 0.0, 12.0, 25.0)]),
        "seen": np.ones(3, np.uint8),
    }
    moved = move(channel(law, kind="ragged", arrays=arrays), value, images={"cam": cropped})
    np.testing.assert_allclose(moved["at"], np.c_[29 - (places[:, 0] - 10), places[:, 1] - 20], atol=1e-9)
    np.testing.assert_allclose(
        moved["box"], [(29.5, -0.5, 29.5, -0.5), (29.5, 10.0, 29.5, 15.0), (27.0, -0.5, 29.5, 5.0)], atol=1e-9
    )
    assert moved["seen"].tolist() == [0, 1, 1]  # a point on the border is inside


def test_a_lens_is_undone_for_points_as_for_pixels() -> None:
    import dataclasses

    camera = ((80.0, 0.0, 47.5), (0.0, 80.0, 31.5), (0.0, 0.0, 1.0))
    lens = Lens("pinhole", (-0.2, 0.05, 0.0, 0.0), camera, camera)
    image_map = dataclasses.replace(
        ImageAugment(height=128, width=192, resize="stretch").draw([SIZE], seed=0, epoch=0, sample=0)[0], lens=lens
    )
    images = {"cam": image_map}
    for place in ((20, 12), (70, 50), (47, 31), (85, 20)):
        dot = np.zeros(SIZE[::-1], np.float32)
        dot[place[1], place[0]] = 1.0
        law = Law("image", camera="cam", interpolation="linear")
        drawn = move(channel(law, kind="array"), dot, images=images)
        v, u = np.indices(drawn.shape)
        centre = np.array([(u * drawn).sum(), (v * drawn).sum()]) / drawn.sum()
        value = of_boxes(np.array([[*place, *place]], np.float64))
        np.testing.assert_allclose(move(BOXES, value, images=images)["point"][0], centre, atol=0.15)


RADAR = channel(
    Law("ego_points", roles={"positions": (("x", "y", "z"),), "vectors": (("vx", "vy"), ("cx", "cy"))}),
    dtype="float32", columns=("x", "y", "z", "rcs", "vx", "vy", "cx", "cy"), frame="sensor:radar",
)  # fmt: skip


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_radar_points_and_velocities_are_those_of_the_augmented_world(seed) -> None:
    rng, ego = np.random.default_rng(seed), ego_map(seed)
    yaw = rng.uniform(-np.pi, np.pi)
    radar2ego = rigid(np.array([math.cos(yaw / 2), 0, 0, math.sin(yaw / 2)]), rng.uniform(-3, 3, 3))
    where, velocity = rng.uniform(-60, 60, (30, 3)), rng.uniform(-20, 20, (30, 3)) * (1, 1, 0)
    rotation, place = radar2ego[:3, :3], radar2ego[:3, 3]

    def measured(points: np.ndarray[Any, Any], speeds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        speeds = speeds @ rotation
        return np.c_[(points - place) @ rotation, np.arange(30), speeds[:, :2], -speeds[:, :2]].astype(np.float32)

    moved = move(RADAR, measured(where, velocity), ego=ego, sensor2ego={"radar": radar2ego})
    matrix = ego.matrix
    wanted = measured(where @ matrix[:3, :3].T + matrix[:3, 3], velocity @ matrix[:3, :3].T)
    np.testing.assert_allclose(moved, wanted, atol=2e-4)
    with pytest.raises(SchemaError, match="frame of 'radar', whose place is unknown"):
        move(RADAR, moved, ego=ego)


EGO_BOXES = channel(
    Law("ego_boxes", roles={"boxes": (("b",),), "vectors": (("v",),), "rotations": (("q",),)}),
    kind="ragged", frame="ego",
    arrays=(ArraySpec("b", "float32", (7,)), ArraySpec("v", "float32", (3,)), ArraySpec("q", "float64", (4,))),
)  # fmt: skip
CORNERS = np.array([[x, y, z] for x in (-0.5, 0.5) for y in (-0.5, 0.5) for z in (-0.5, 0.5)])


def sorted_rows(points: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return points[np.lexsort(np.round(points, 2).T)]


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_boxes_hold_the_corners_of_the_augmented_world(seed) -> None:
    rng, ego = np.random.default_rng(seed), ego_map(seed)
    yaw, size, centre = rng.uniform(-np.pi, np.pi), rng.uniform(1, 9, 3), rng.uniform(-40, 40, 3)
    q = np.array([math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)])
    velocity = rng.uniform(-9, 9, 3)
    value = {"b": np.array([[*centre, *size, yaw]], np.float32), "v": velocity[None].astype(np.float32), "q": q[None]}
    moved = move(EGO_BOXES, value, ego=ego)
    matrix = ego.matrix
    corners = (CORNERS * size) @ rotation_matrices(q).T + centre
    wanted = corners @ matrix[:3, :3].T + matrix[:3, 3]
    box, turned = moved["b"][0], rotation_matrices(moved["q"][0])
    of_box = (CORNERS * box[3:6]) @ turned.T + box[:3]
    pairs = np.linalg.norm(of_box[:, None] - wanted[None], axis=-1)
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
    rng, ego = np.random.default_rng(seed), ego_map(seed)
    matrix = ego.matrix
    q = rng.normal(size=(2, 5, 4))
    poses = rigid(q / np.linalg.norm(q, axis=-1, keepdims=True), rng.uniform(-30, 30, (2, 5, 3)))
    law = Law("ego_poses")
    moved = move(channel(law, dtype="float64", frame="ego", kind="array", shape=(2, 5, 4, 4)), poses, ego=ego)
    np.testing.assert_allclose(moved[..., :3, 3], poses[..., :3, 3] @ matrix[:3, :3].T + matrix[:3, 3], atol=1e-9)
    np.testing.assert_allclose(moved[..., :3, 0] * ego.scale, poses[..., :3, 0] @ matrix[:3, :3].T, atol=1e-9)
    np.testing.assert_allclose(np.linalg.det(moved[..., :3, :3]), 1.0, atol=1e-9)
    flat = Law("ego_poses", roles={"positions": (("x", "y"),), "yaws": (("yaw",),)})
    yaws = rng.uniform(-np.pi, np.pi, (4, 6))
    paths = np.concatenate([rng.uniform(-30, 30, (4, 6, 2)), yaws[..., None]], -1)
    plan = move(channel(flat, kind="array", dtype="float64", frame="ego", columns=("x", "y", "yaw")), paths, ego=ego)
    np.testing.assert_allclose(plan[..., :2], paths[..., :2] @ matrix[:2, :2].T + matrix[:2, 3], atol=1e-9)
    heading = np.stack([np.cos(yaws), np.sin(yaws)], -1) @ matrix[:2, :2].T / ego.scale
    np.testing.assert_allclose(np.stack([np.cos(plan[..., 2]), np.sin(plan[..., 2])], -1), heading, atol=1e-9)


EXTENT = (-25.6, -19.2, -2.0, 25.6, 19.2, 4.0)
CELLS = (64, 48, 6)


def occupancy_channel(interpolation: str = "nearest", axes: tuple[str, ...] = ("x", "y", "z")) -> Channel:
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
        c, s = math.cos(yaw), math.sin(yaw)
        along, left = c * offset[..., 0] + s * offset[..., 1], c * offset[..., 1] - s * offset[..., 0]
        sides = [length / 2 - abs(along), width / 2 - abs(left), height / 2 - abs(offset[..., 2])]
        inner = np.minimum.reduce(sides)
        outer = -np.sqrt(sum(np.minimum(side, 0.0) ** 2 for side in sides))
        deepest = np.maximum(deepest, np.where(inner >= 0, inner, outer))
    return deepest


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_occupancy_is_that_of_the_augmented_boxes_but_for_half_a_cell(seed) -> None:
    rng, ego = np.random.default_rng(seed), ego_map(seed)
    boxes = np.c_[rng.uniform(-20, 20, (6, 2)), rng.uniform(-1, 3, 6), rng.uniform(2, 9, (6, 3)),
                  rng.uniform(-np.pi, np.pi, 6)]  # fmt: skip
    centres = cell_centres()
    grid = (depth_inside(centres, boxes) > 0).astype(np.uint8)
    moved = move(occupancy_channel(), grid, ego=ego)
    afresh = depth_inside(centres, ego.boxes3d(boxes.astype(np.float32)).astype(np.float64))
    back = centres @ ego.inverse[:3, :3].T + ego.inverse[:3, 3]
    known = ((back > EXTENT[:3]) & (back < EXTENT[3:])).all(-1)
    half_cell = ego.scale * math.sqrt(0.4**2 + 0.4**2 + 0.5**2) + 1e-3
    clear = known & (abs(afresh) > half_cell)
    np.testing.assert_array_equal(moved[clear], afresh[clear] > 0)
    assert clear.sum() > 0.2 * known.sum()
    unknown = ((back < np.array(EXTENT[:3]) - 1e-6) | (back > np.array(EXTENT[3:]) + 1e-6)).any(-1)
    assert not moved[unknown].any()


@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("flips", [(False, False), (True, False), (False, True), (True, True)])
def test_quarter_turns_flips_and_whole_cells_move_a_grid_exactly(quarter, flips) -> None:
    grid = np.random.default_rng(0).integers(0, 9, (20, 20, 3)).astype(np.int8)
    law = Law("ego_grid", extent_m=(-10.0, -10.0, 10.0, 10.0), fill=-1.0)
    ego = BevMap(rotation_rad=quarter * math.pi / 2, flip_x=flips[0], flip_y=flips[1], translation_m=(2.0, -3.0, 0.5))
    moved = move(channel(law, kind="array", axes=("x", "y", "class"), frame="ego"), grid, ego=ego)
    wanted = np.rot90(grid, quarter, (0, 1))
    wanted = wanted[::-1] if flips[0] else wanted
    wanted = wanted[:, ::-1] if flips[1] else wanted
    shifted = np.full_like(grid, -1)
    shifted[2:, :-3] = wanted[:-2, 3:]
    np.testing.assert_array_equal(moved, shifted)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_a_linear_field_and_its_flow_stay_one(seed) -> None:
    rng, ego = np.random.default_rng(seed), ego_map(seed)
    slope = rng.uniform(-1, 1, 3)
    centres = cell_centres()
    linear = move(occupancy_channel("linear"), centres @ slope, ego=ego)
    back = centres @ ego.inverse[:3, :3].T + ego.inverse[:3, 3]
    half = np.array([0.4, 0.4, 0.5])
    inner = ((back >= EXTENT[:3] + half) & (back <= EXTENT[3:] - half)).all(-1)
    np.testing.assert_allclose(linear[inner], (back @ slope)[inner], atol=1e-9)
    flow = np.broadcast_to(rng.uniform(-9, 9, 2), (*CELLS, 2)).astype(np.float64)
    law = Law("ego_grid", extent_m=EXTENT, roles={"vectors": (("vx", "vy"),)})
    it = channel(law, kind="array", axes=("x", "y", "z", "flow"), columns=("vx", "vy"), frame="ego", dtype="float64")
    moved = move(it, flow, ego=ego)
    np.testing.assert_allclose(moved[inner], (flow @ ego.matrix[:2, :2].T)[inner], atol=1e-9)


@pytest.mark.parametrize("interpolation", ["nearest", "linear"])
def test_cells_outside_the_extent_of_a_grid_of_vectors_are_filled_and_the_fill_is_not_turned(interpolation) -> None:
    rng, ego = (
        np.random.default_rng(0),
        BevMap(rotation_rad=0.7, scale=1.1, flip_y=True, translation_m=(6.0, -4.0, 0.0)),
    )
    law = Law("ego_grid", interpolation=interpolation, fill=-7.0, extent_m=EXTENT, roles={"vectors": (("vx", "vy"),)})
    it = channel(
        law, kind="array", axes=("x", "y", "z", "column"), columns=("vx", "vy", "mass"), frame="ego", dtype="float64"
    )
    moved = move(it, rng.uniform(-9, 9, (*CELLS, 3)), ego=ego)
    back = cell_centres() @ ego.inverse[:3, :3].T + ego.inverse[:3, 3]
    outside = ((back < np.array(EXTENT[:3]) - 1e-6) | (back > np.array(EXTENT[3:]) + 1e-6)).any(-1)
    assert 0.05 < outside.mean() < 0.95
    assert (moved[outside] == -7.0).all()
    assert not (moved[~outside] == -7.0).any()


def test_axes_in_another_order_and_extents_downwards_are_the_same_world() -> None:
    ego, grid = ego_map(3), np.random.default_rng(1).integers(0, 9, CELLS).astype(np.uint8)
    moved = move(occupancy_channel(), grid, ego=ego)
    turned = move(occupancy_channel(axes=("z", "y", "x")), grid.transpose(2, 1, 0), ego=ego)
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
        SchemaError, match="a raster of 8 x 3 pixels; on a stored image of 96 x 64 at 1/1 it has 96 x 64"
    ):
        move(channel(Law("image", camera="cam"), kind="image"), value, images={"cam": small})
