"""Three real nuScenes keyframes the whole way: sharded, loaded, decoded, their boxes drawn.

The keyframes' tables hold no annotations, so the boxes come from another code base's info record of one of them
(mmdetection3d's), which also has its own calibration matrices and counts of lidar points to hold ours against.
"""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest

from fuelrail import ImageAugment, World
from fuelrail.__main__ import main
from fuelrail.loaders.batch.assemble import assemble
from fuelrail.loaders.records import BatchSlot, FrameTask, Parsed, Source, Task
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.loaders.viewer.drawing import (
    DrawnBoxes,
    DrawnFrame,
    contact_sheet,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.batching import Cursor
from fuelrail.pipeline.sample.schema import Boxes
from fuelrail.pipeline.transforms.ego import IDENTITY
from support.loaders import make_loader
from support.restricted_pickle import load_restricted
from support.shared_data import shared_data

pytestmark = pytest.mark.real

INFO = "mmdet3d-info/n015-2018-07-24-11-22-45+0800.pkl"
IMAGE = ImageAugment(
    height=256,
    width=704,
    train=True,
    resize_range=(0.42, 0.5),
    flip_prob=0.5,
    rotate_deg=(-5.4, 5.4),
)


@pytest.fixture(scope="module")
def dataroot():
    return shared_data("nuscenes-mini")


@pytest.fixture(scope="module")
def record(dataroot):
    with (dataroot / INFO).open("rb") as file:
        return load_restricted(file)


@pytest.fixture(scope="module")
def info(record):
    return record["data_list"][0]


@pytest.fixture(scope="module")
def dataset(dataroot, tmp_path_factory):
    out = tmp_path_factory.mktemp("real") / "keyframes"
    options = [
        "-o",
        "version=v1.0-derived",
        "--seed",
        "7",
        "--splits",
        "train=1.0",
        "--workers",
        "1",
    ]
    assert main(["shard", f"nuscenes:{dataroot}", str(out), *options]) == 0
    return open_dataset(out)


@pytest.fixture(scope="module")
def sample(dataset, info):
    reader = SampleReader(dataset)
    samples = [reader.sample(index) for index in range(dataset.manifest.num_samples)]
    return next(candidate for candidate in samples if candidate.meta.sample_token == info["token"])


@pytest.fixture(scope="module")
def boxes(dataset, record, info):
    """The record's boxes, which are in the lidar frame, as ours in ego."""
    lidar2ego = np.array(info["lidar_points"]["lidar2ego"])
    stored = np.array([instance["bbox_3d"] for instance in info["instances"]])
    heading = (
        np.column_stack([np.cos(stored[:, 6]), np.sin(stored[:, 6]), np.zeros(len(stored))])
        @ lidar2ego[:3, :3].T
    )
    yaw = np.arctan2(heading[:, 1], heading[:, 0])
    centre = stored[:, :3] @ lidar2ego[:3, :3].T + lidar2ego[:3, 3]
    count = len(stored)
    names = {number: name for name, number in record["metainfo"]["categories"].items()}
    labels = [names.get(instance["bbox_label_3d"]) for instance in info["instances"]]
    classes = dataset.manifest.classes
    zero = np.zeros(count)
    return Boxes(
        boxes3d=np.column_stack([centre, stored[:, 3:6], yaw]).astype(np.float32),
        rotation_wxyz=np.column_stack([np.cos(yaw / 2), zero, zero, np.sin(yaw / 2)]).astype(
            np.float32
        ),
        velocity=np.full((count, 3), np.nan, np.float32),
        label=np.array(
            [classes.index(name) if name in classes else -1 for name in labels],
            np.int16,
        ),
        instance_id=np.arange(count, dtype=np.int64),
        num_lidar_pts=np.array(
            [instance["num_lidar_pts"] for instance in info["instances"]],
            np.int32,
        ),
        num_radar_pts=np.full(count, -1, np.int32),
        visibility=np.full(count, -1, np.int8),
        attribute=np.full(count, -1, np.int16),
        valid=np.ones(count, np.uint8),
    )


def test_all_three_keyframes_come_out_of_the_loader(dataset):
    batches = list(make_loader(dataset, 1, image=IMAGE, world=World(), points=True))
    assert len(batches) == 3
    assert len({key for batch in batches for key in batch["sample_key"]}) == 3
    for batch in batches:
        assert batch["img"].shape == (1, 6, 3, 256, 704)
        assert batch["cam_valid"].all()
        assert batch["img"].float().std() > 20, "a street has contrast"
    assert sorted(len(points) > 0 for batch in batches for points in batch["points"]) == [
        False,
        False,
        True,
    ]


def test_matrices_equal_the_other_code_bases(dataset, sample, info):
    geometry = sample.geometry
    lidar2img = geometry.lidar2img()
    for number, camera in enumerate(dataset.manifest.cameras):
        theirs = info["images"][camera.source_name]
        intrinsics = np.eye(4)
        intrinsics[:3, :3] = theirs["cam2img"]
        expected = intrinsics @ np.array(theirs["lidar2cam"])
        np.testing.assert_allclose(geometry.intrinsics[number], theirs["cam2img"], rtol=1e-12)
        # Pixels of points 10 m and more away, all around: theirs come from float32 poses at coordinates of 1 km.
        angles = np.linspace(0, 2 * np.pi, 33)
        around = np.column_stack(
            [
                20 * np.cos(angles),
                20 * np.sin(angles),
                np.zeros(33),
                np.ones(33),
            ]
        )
        ours = around @ lidar2img[number].T
        expected_pixels = around @ expected.T
        is_ahead = expected_pixels[:, 2] > 5
        assert is_ahead.any()
        np.testing.assert_allclose(
            ours[is_ahead, :2] / ours[is_ahead, 2:3],
            expected_pixels[is_ahead, :2] / expected_pixels[is_ahead, 2:3],
            atol=0.3,
        )


def test_the_lidar_points_in_each_box_are_as_many_as_annotated(sample, boxes):
    lidar2ego = sample.geometry.lidar2keyego()
    points = sample.points["lidar_top"][:, :3] @ lidar2ego[:3, :3].T + lidar2ego[:3, 3]
    for box, expected in zip(boxes.boxes3d.astype(np.float64), boxes.num_lidar_pts, strict=True):
        local = points - box[:3]
        cos = np.cos(box[6])
        sin = np.sin(box[6])
        x = cos * local[:, 0] + sin * local[:, 1]
        y = cos * local[:, 1] - sin * local[:, 0]
        slack = 0.02  # boxes are rounded, and lie in the tilted lidar frame
        inside = (
            (abs(x) <= box[3] / 2 + slack)
            & (abs(y) <= box[4] / 2 + slack)
            & (abs(local[:, 2]) <= box[5] / 2 + slack)
        )
        assert abs(int(inside.sum()) - expected) <= max(3, 0.15 * expected)


def test_boxes_in_the_lidars_frame_are_those_of_the_record(dataset, sample, boxes, info):
    maps = IMAGE.evaluation().draw(sample.geometry.img_wh.tolist(), seed=0, epoch=0, sample=0)
    slot = BatchSlot(0, 0, np.zeros((1, 6, 3, IMAGE.height, IMAGE.width), np.uint8))
    source = Source(
        name=None,
        dataset=dataset,
        first_row=0,
        base=0,
        storage=None,
        reader=None,
        attributes=None,
    )
    task = Task(
        slot=slot,
        batch_row=0,
        source=source,
        frames=(FrameTask(0, True, None, None),),
        current=0,
        valid=True,
        position=0,
    )
    entry = Parsed(
        task=task,
        samples=(replace(sample, boxes=boxes),),
        maps=(maps,),
        changes=(),
        bev=IDENTITY,
    )
    lidar_boxes = assemble([entry], box_frame="lidar")["gt_boxes_3d"][0].numpy()
    theirs = np.array([instance["bbox_3d"] for instance in info["instances"]])
    np.testing.assert_allclose(lidar_boxes[:, :6], theirs[:, :6], atol=1e-3)
    # The boxes of this test have lost the lidar's tilt of a degree or so.
    off = (lidar_boxes[:, 6] - theirs[:, 6] + np.pi) % (2 * np.pi) - np.pi
    assert np.abs(off).max() < 2e-3


def test_boxes_are_drawn_through_the_augmentation(dataset, sample, boxes, tmp_path):
    cameras = [camera.channel for camera in dataset.manifest.cameras]
    with make_loader(dataset, 1, image=IMAGE, seed=5, shuffle=False, world=World()) as loader:
        (batch,) = loader.make_steps(Cursor(1), 0)
    images = batch["img"][0].numpy()
    ego2img = batch["ego2img"][0].numpy()
    drawn = DrawnBoxes(boxes.corners().astype(np.float64), boxes.label)
    sheet = contact_sheet([DrawnFrame(images, ego2img, drawn)], cameras, dataset.manifest.classes)
    bare = contact_sheet([DrawnFrame(images, ego2img)], cameras, dataset.manifest.classes)
    assert cv2.imwrite(str(tmp_path / "keyframe.png"), sheet[..., ::-1])
    changed = (sheet[: len(bare)] != bare).any(-1)
    assert 0.005 < changed.mean() < 0.3
    # What lies well inside the picture in front of a camera has its centre among changed pixels.
    ahead = ego2img @ np.append(boxes.boxes3d[:, :3], np.ones((len(boxes.boxes3d), 1)), 1).T
    pixels = ahead[:, :2] / ahead[:, 2:3]
    near = (ahead[:, 2] > 3) & (ahead[:, 2] < 20)
    inside = (
        near
        & (pixels[:, 0] > 20)
        & (pixels[:, 0] < 684)
        & (pixels[:, 1] > 20)
        & (pixels[:, 1] < 236)
    )
    assert inside.any()
