"""Values in an image, moved by a law, equal those computed afresh from the augmented image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.channels.table import ArraySpec, Law
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.pipeline.transforms.lens import Lens
from support.laws import SIZE, channel, move

seeds = st.integers(0, 2**32)


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
        height=draw(st.integers(16, 80)),
        width=draw(st.integers(16, 110)),
        train=draw(st.booleans()),
        crop_y=draw(st.sampled_from(["bottom", "center", "top", "random"])),
        crop_x=draw(st.sampled_from(["random", "center", "left"])),
        crop_bottom=(0.0, 0.2),
        flip_prob=draw(st.sampled_from([0.0, 0.5, 1.0])),
        rotate_deg=(-degrees, degrees),
        **factors,
    )
    return augment.draw([SIZE], seed=draw(seeds), epoch=0, sample=0)[0]


def output_centres(
    image_map: ImageMap,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where each output pixel's centre lies on the stored image, centre-origin (H, W, 2), and whether it sees it."""
    width, height = image_map.out_wh
    u, v = np.meshgrid(np.arange(width), np.arange(height))
    inverse = np.linalg.inv(image_map.centre_matrix())
    places = np.stack([u, v, np.ones_like(u)], -1) @ inverse.T
    left, top, right, bottom = image_map.visible
    x = places[..., 0] + 0.5
    y = places[..., 1] + 0.5
    if left >= right or top >= bottom:
        return places[..., :2], np.zeros((height, width), bool)
    return places[..., :2], (x >= left) & (x <= right) & (y >= top) & (y <= bottom)


def border_distance(image_map: ImageMap, places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    left, top, right, bottom = image_map.visible
    x = places[..., 0] + 0.5
    y = places[..., 1] + 0.5
    return np.minimum.reduce([abs(x - left), abs(x - right), abs(y - top), abs(y - bottom)])


@given(image_maps(), seeds)
@settings(max_examples=60, deadline=None)
def test_a_mask_is_the_stored_pixel_in_which_each_output_pixel_lies(image_map, seed) -> None:
    mask = np.random.default_rng(seed).integers(1, 65536, SIZE[::-1]).astype(np.uint16)
    law = Law("image", camera="cam", fill=7.0)
    moved = move(channel(law, kind="image"), mask, images={"cam": image_map})
    places, is_seen = output_centres(image_map)
    pixels = np.floor(places + 0.5).astype(int).clip(0, np.array(SIZE) - 1)
    expected = np.where(is_seen, mask[pixels[..., 1], pixels[..., 0]], 7)
    # A place on the line between two pixels may round to either.
    clear = (abs(places + 0.5 - np.rint(places + 0.5)) > 1e-5).all(-1) & (
        border_distance(image_map, places) > 1e-5
    )
    assert moved.dtype == np.uint16
    assert moved.shape == image_map.out_wh[::-1]
    np.testing.assert_array_equal(moved[clear], expected[clear])


@given(image_maps(), seeds)
@settings(max_examples=60, deadline=None)
def test_depth_of_a_plane_is_that_of_the_plane_in_the_augmented_image(image_map, seed) -> None:
    a, b = np.random.default_rng(seed).uniform(-0.3, 0.3, 2)
    u, v = np.meshgrid(np.arange(SIZE[0]), np.arange(SIZE[1]))
    depth = (60.0 + a * u + b * v).astype(np.float32)
    law = Law("image", camera="cam", interpolation="linear", fill=-1.0)
    moved = move(channel(law, kind="array"), depth, images={"cam": image_map})
    places, is_seen = output_centres(image_map)
    inner = is_seen & ((places >= 0) & (places <= np.array(SIZE) - 1)).all(-1)
    np.testing.assert_allclose(moved[inner], (60.0 + places @ (a, b))[inner], rtol=1e-5)
    outside = ~is_seen & (border_distance(image_map, places) > 1e-4)
    assert (moved[outside] == -1.0).all()


@given(image_maps(), st.sampled_from([2, 3, 8]))
@settings(max_examples=30, deadline=None)
def test_a_raster_at_a_fraction_lies_where_the_whole_one_does(image_map, fraction) -> None:
    height = -(-SIZE[1] // fraction)
    width = -(-SIZE[0] // fraction)
    small = np.arange(height * width, dtype=np.int32).reshape(height, width)
    full_size = small.repeat(fraction, 0).repeat(fraction, 1)[: SIZE[1], : SIZE[0]]
    images = {"cam": image_map}
    moved = move(
        channel(Law("image", camera="cam", fraction=fraction), kind="array"),
        small,
        images=images,
    )
    expected = move(
        channel(Law("image", camera="cam"), kind="array"),
        full_size,
        images=images,
    )
    np.testing.assert_array_equal(moved, expected)


BOXES = channel(
    Law(
        "image_points",
        camera="cam",
        roles={
            "boxes": (("box",),),
            "points": (("point",),),
            "visible": (("seen",),),
        },
    ),
    kind="ragged",
    arrays=(
        ArraySpec("box", "float64", (4,)),
        ArraySpec("point", "float64", (2,)),
        ArraySpec("seen", "uint8"),
    ),
)


def boxes_value(boxes: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "box": boxes,
        "point": (boxes[:, :2] + boxes[:, 2:]) / 2,
        "seen": np.ones(len(boxes), np.uint8),
    }


@given(image_maps(), seeds)
@settings(max_examples=60, deadline=None)
def test_boxes_bound_what_the_output_shows_of_their_stored_boxes(image_map, seed) -> None:
    # Afresh: of a dense cloud of points of the stored box, those that are seen, and their bounds in the output.
    rng = np.random.default_rng(seed)
    low = rng.uniform(-20, 90, (4, 2))
    boxes = np.concatenate([low, low + rng.uniform(5, 50, (4, 2))], 1)
    moved = move(BOXES, boxes_value(boxes), images={"cam": image_map})
    width, height = image_map.out_wh
    step = np.linspace(0, 1, 121)
    cloud = low[:, None, None] + np.stack(np.meshgrid(step, step), -1) * (
        boxes[:, None, None, 2:] - low[:, None, None]
    )
    cloud = cloud.reshape(4, -1, 2)
    left, top, right, bottom = image_map.visible
    is_visible = ((cloud >= (left - 0.5, top - 0.5)) & (cloud <= (right - 0.5, bottom - 0.5))).all(
        -1
    )
    matrix = image_map.centre_matrix()
    moved_cloud = cloud @ matrix[:2, :2].T + matrix[:2, 2]
    inside = ((moved_cloud >= -0.5) & (moved_cloud <= (width - 0.5, height - 0.5))).all(-1)
    step_px = 50 / 120 * image_map.max_scale * 2 + 1e-6
    for number in range(4):
        box = moved["box"][number]
        assert (box >= -0.5).all()
        assert (box <= np.tile((width - 0.5, height - 0.5), 2)).all()
        seen_points = moved_cloud[number][is_visible[number] & inside[number]]
        if len(seen_points):
            if moved["seen"][number]:
                assert (box[:2] <= seen_points.min(0) + 1e-6).all()
                assert (box[2:] >= seen_points.max(0) - 1e-6).all()
            if image_map.is_axis_aligned and moved["seen"][number]:
                assert (
                    np.abs(box - np.concatenate([seen_points.min(0), seen_points.max(0)])).max()
                    <= step_px
                )
        elif image_map.is_axis_aligned:
            assert not moved["seen"][number] or (box[2:] - box[:2]).min() <= step_px


@given(image_maps(rotate=False), seeds)
@settings(max_examples=40, deadline=None)
def test_boxes_of_projected_corners_equal_those_of_the_augmented_projection(
    image_map, seed
) -> None:
    rng = np.random.default_rng(seed)
    corners = rng.uniform((-6, -3, 8), (6, 3, 30), (5, 8, 3))
    camera = np.array([[60.0, 0, 47.0], [0, 60.0, 30.0], [0, 0, 1]])
    bounds = []
    for k in (camera, image_map.ida_mat()[:3, :3] @ camera):
        pixels = corners @ k.T
        pixels = pixels[..., :2] / pixels[..., 2:]
        bounds.append(np.concatenate([pixels.min(1), pixels.max(1)], 1))
    width, height = image_map.out_wh
    expected = bounds[1].clip(-0.5, np.tile((width - 0.5, height - 0.5), 2))
    moved = move(BOXES, boxes_value(bounds[0]), images={"cam": image_map})
    left, top, right, bottom = image_map.visible
    is_uncut = (bounds[0] >= np.tile((left - 0.5, top - 0.5), 2)) & (
        bounds[0] <= np.tile((right - 0.5, bottom - 0.5), 2)
    )
    use = is_uncut.all(1) & (moved["seen"] == 1)
    np.testing.assert_allclose(moved["box"][use], expected[use], atol=1e-9)


@given(image_maps(), seeds)
@settings(max_examples=40, deadline=None)
def test_keypoints_follow_ida_mat_and_say_whether_they_are_seen(image_map, seed) -> None:
    points = np.random.default_rng(seed).uniform(-10, 110, (40, 2))
    value = {
        "box": np.zeros((40, 4)),
        "point": points,
        "seen": np.ones(40, np.uint8),
    }
    only_points = channel(
        Law(
            "image_points",
            camera="cam",
            roles={"points": (("point",),), "visible": (("seen",),)},
        ),
        kind="ragged",
        arrays=BOXES.arrays,
    )
    moved = move(only_points, value, images={"cam": image_map})
    expected = (np.c_[points, np.ones(40), np.ones(40)] @ image_map.ida_mat().T)[:, :2]
    np.testing.assert_allclose(moved["point"], expected, atol=1e-9)
    raster = np.ones(SIZE[::-1], np.uint8)
    drawn = move(
        channel(Law("image", camera="cam"), kind="image"),
        raster,
        images={"cam": image_map},
    )
    for (u, v), is_seen in zip(moved["point"], moved["seen"], strict=True):
        if is_seen:  # what is seen lies on a pixel that shows the image, or on the border of one
            near = drawn[max(0, int(v)) : int(v) + 2, max(0, int(u)) : int(u) + 2]
            assert near.any()


@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize(
    ("shape", "visible"),
    [((), [1, 1, 0]), ((1,), [1, 1, 0]), ((2, 1), [[1, 0], [0, 0], [0, 0]])],
)
def test_boxes_with_keypoints_are_visible_while_one_of_them_is(num_rows, shape, visible) -> None:
    law = Law(
        "image_points",
        camera="cam",
        roles={
            "points": (("at",),),
            "boxes": (("box",),),
            "visible": (("seen",),),
        },
    )
    arrays = (
        ArraySpec("at", "float32", (2, 2)),
        ArraySpec("box", "float32", (4,)),
        ArraySpec("seen", "uint8", shape),
    )
    out = (-9.0, -9.0)
    value = {
        "at": np.array([[(5, 5), out], [out, out], [out, out]], np.float32)[:num_rows],
        "box": np.array([(-9, -9, -5, -5), (0, 0, 9, 9), (-9, -9, -5, -5)], np.float32)[:num_rows],
        "seen": np.ones((num_rows, *shape), np.uint8),
    }
    moved = move(
        channel(law, kind="ragged", arrays=arrays),
        value,
        images={"cam": ImageMap.identity(SIZE)},
    )
    assert moved["seen"].tolist() == np.reshape(visible[:num_rows], (num_rows, *shape)).tolist()


def test_what_crops_leave_nothing_of_keeps_its_place_as_a_point_and_has_no_area_as_a_box() -> None:
    cropped = ImageMap.identity(SIZE).crop(10, 20, 30, 40).flip()
    law = Law(
        "image_points",
        camera="cam",
        roles={
            "points": (("at",),),
            "boxes": (("box",),),
            "visible": (("seen",),),
        },
    )
    arrays = (
        ArraySpec("at", "float64", (2,)),
        ArraySpec("box", "float64", (4,)),
        ArraySpec("seen", "uint8"),
    )
    places = np.array([(3.0, 5.0), (10 - 0.5, 20 - 0.5), (39.5 + 1e-3, 30.0)])
    value = {
        "at": places,
        "box": np.array(
            [
                (0.0, 0.0, 5.0, 6.0),
                (2.0, 30.0, 9.5, 35.0),
                (0.0, 0.0, 12.0, 25.0),
            ]
        ),
        "seen": np.ones(3, np.uint8),
    }
    moved = move(
        channel(law, kind="ragged", arrays=arrays),
        value,
        images={"cam": cropped},
    )
    np.testing.assert_allclose(
        moved["at"],
        np.c_[29 - (places[:, 0] - 10), places[:, 1] - 20],
        atol=1e-9,
    )
    np.testing.assert_allclose(
        moved["box"],
        [
            (29.5, -0.5, 29.5, -0.5),
            (29.5, 10.0, 29.5, 15.0),
            (27.0, -0.5, 29.5, 5.0),
        ],
        atol=1e-9,
    )
    assert moved["seen"].tolist() == [
        0,
        1,
        1,
    ]  # a point on the border is inside


def test_a_lens_is_undone_for_points_as_for_pixels() -> None:
    import dataclasses

    camera = ((80.0, 0.0, 47.5), (0.0, 80.0, 31.5), (0.0, 0.0, 1.0))
    lens = Lens("pinhole", (-0.2, 0.05, 0.0, 0.0), camera, camera)
    image_map = dataclasses.replace(
        ImageAugment(height=128, width=192, resize="stretch").draw(
            [SIZE], seed=0, epoch=0, sample=0
        )[0],
        lens=lens,
    )
    images = {"cam": image_map}
    for place in ((20, 12), (70, 50), (47, 31), (85, 20)):
        dot = np.zeros(SIZE[::-1], np.float32)
        dot[place[1], place[0]] = 1.0
        law = Law("image", camera="cam", interpolation="linear")
        drawn = move(channel(law, kind="array"), dot, images=images)
        v, u = np.indices(drawn.shape)
        centre = np.array([(u * drawn).sum(), (v * drawn).sum()]) / drawn.sum()
        value = boxes_value(np.array([[*place, *place]], np.float64))
        np.testing.assert_allclose(move(BOXES, value, images=images)["point"][0], centre, atol=0.15)
