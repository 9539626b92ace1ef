"""What is drawn on images, and where."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail import ImageAugment
from fuelrail.loaders.viewer import drawing
from fuelrail.loaders.viewer.drawing import (
    NEAR_M,
    DrawnBoxes,
    DrawnFrame,
    contact_sheet,
    project_segment,
)
from fuelrail.pipeline.transforms.image_map import ida_mats
from support.datasets import make_boxes

K = np.array([[300.0, 0, 159.5], [0, 300.0, 99.5], [0, 0, 1]])
EGO2CAM = np.array([[0, -1, 0, 0], [0, 0, -1, 1.5], [1, 0, 0, 0], [0, 0, 0, 1.0]])
EGO2IMG = np.eye(4)
EGO2IMG[:3, :3] = K
EGO2IMG = EGO2IMG @ EGO2CAM

coordinates = st.floats(-50, 50, allow_subnormal=False)
points = st.tuples(coordinates, coordinates, coordinates).map(np.array)


@given(points, points)
def test_a_segment_projects_as_opencv_projects_its_ends(start, end):
    segment = project_segment(start, end, EGO2IMG)
    if start[0] < NEAR_M and end[0] < NEAR_M:
        assert segment is None
        return
    for point, pixel in zip((start, end), segment, strict=True):
        if point[0] < NEAR_M:  # cut: where the segment crosses the near plane
            share = (NEAR_M - start[0]) / (end[0] - start[0])
            point = start + share * (end - start)
        camera = (EGO2CAM @ np.append(point, 1))[:3]
        expected, _ = cv2.projectPoints(camera[None], np.zeros(3), np.zeros(3), K, None)
        np.testing.assert_allclose(pixel, expected[0, 0], rtol=1e-6, atol=1e-5)


def drawn(boxes):
    return None if boxes is None else DrawnBoxes(boxes.corners().astype(np.float64), boxes.label)


def sheet_of(images, boxes, classes):
    return contact_sheet(
        [DrawnFrame(images, EGO2IMG[None], drawn(boxes))],
        ["cam_front"],
        classes,
    )


def test_a_box_is_drawn_on_its_corners_and_nowhere_else():
    boxes = make_boxes(np.random.default_rng(0), 1)
    boxes.boxes3d[0] = (12, 1, 1.0, 4, 2, 1.6, 0.3)
    boxes.rotation_wxyz[0] = (np.cos(0.15), 0, 0, np.sin(0.15))
    images = np.zeros((1, 3, 200, 320), np.uint8)
    sheet = sheet_of(images, boxes, ["car"])
    bare = sheet_of(images, None, ["car"])
    changed = (sheet[: len(bare)] != bare).any(-1)
    projected = np.append(boxes.corners()[0], np.ones((8, 1)), 1) @ EGO2IMG.T
    pixels = projected[:, :2] / projected[:, 2:3] + 4  # the sheet's border
    for u, v in pixels.round().astype(int):
        assert changed[v - 1 : v + 2, u - 1 : u + 2].any()
    rows, columns = np.nonzero(changed)
    assert columns.min() >= pixels[:, 0].min() - 2
    assert columns.max() <= pixels[:, 0].max() + 2
    assert rows.min() >= pixels[:, 1].min() - 2
    assert rows.max() <= pixels[:, 1].max() + 2


def box_at(*rows):
    boxes = make_boxes(np.random.default_rng(0), len(rows))
    for number, (x, y, yaw) in enumerate(rows):
        boxes.boxes3d[number] = (x, y, 1.0, 4, 2, 1.6, yaw)
        boxes.rotation_wxyz[number] = (np.cos(yaw / 2), 0, 0, np.sin(yaw / 2))
        boxes.label[number] = number
    return boxes


def test_a_box_behind_another_is_not_seen_through_it():
    images = np.full((1, 3, 200, 320), 90, np.uint8)
    near = box_at((9, 0, 0.0))
    far = box_at((9, 0, 0.0), (30, 0, 0.0))
    sheets = [sheet_of(images, boxes, ["car", "bus"])[:200] for boxes in (near, far)]
    np.testing.assert_array_equal(*sheets)
    beside = sheet_of(images, box_at((9, 0, 0.0), (30, 9, 0.0)), ["car", "bus"])[:200]
    assert (beside != sheets[0]).any()


def test_a_camera_that_the_clip_lacks_has_no_boxes():
    images = np.zeros((2, 3, 200, 320), np.uint8)
    matrices = np.stack([EGO2IMG, np.full((4, 4), np.nan)])
    cameras = ["cam_front", "cam_back"]
    boxes = box_at((9, 0, 0.0))
    with_boxes, without = (
        contact_sheet([DrawnFrame(images, matrices, frame_boxes)], cameras, ["car"])[:208]
        for frame_boxes in (drawn(boxes), None)
    )
    changed = (with_boxes != without).any((0, 2))
    assert changed[:324].any() and not changed[324:].any()


@pytest.mark.parametrize("degrees", [-7.0, 0.0, 5.0])
@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_captions_say_what_turned_the_picture(degrees, flip):
    turned = (degrees, degrees + 1e-9)
    image = ImageAugment(height=40, width=60, train=True, flip_prob=flip, rotate_deg=turned)
    (image_map,) = image.draw([(100, 80)], seed=1, epoch=0, sample=0)
    caption = drawing.turn_text(ida_mats([image_map])[0])
    assert ("mirrored" in caption) == (flip == 1.0)
    assert (f"{degrees:+.1f} deg" in caption) == (degrees != 0.0)


def test_the_view_from_above_has_ahead_on_top_and_left_on_the_left():
    pane = drawing._draw_from_above(512, None, np.array([[30.0, 20.0, 1.0], [80.0, 0.0, 1.0]]))
    bare = drawing._draw_from_above(512, None, np.zeros((0, 3)))
    rows, columns = np.nonzero((pane != bare).any(-1))
    assert (rows.tolist(), columns.tolist()) == (
        [106],
        [156],
    )  # 5 pixels for a metre, from the middle
    boxes = box_at((20, -10, np.pi / 2))
    changed = drawing._draw_from_above(512, drawn(boxes), np.zeros((0, 3))) != bare
    rows, columns = np.nonzero(changed.any(-1))
    assert abs((rows.min() + rows.max()) / 2 - 156) <= 2
    assert columns.max() <= 306 + 12  # 4 m along y
    assert columns.min() < 306 - 12, "the heading points to the left, beyond the front"
