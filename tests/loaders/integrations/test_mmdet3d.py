"""Batches as BEVDet and mmdetection3d take them, against their own formulas, and against mmdetection3d where it is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fuelrail import BevAugment, DataLoader, ImageAugment, Transforms
from fuelrail.loaders.integrations.mmdet3d import img_inputs, mmdet3d_samples
from fuelrail.pipeline.errors import ConfigError
from support.batches import FULL

IMAGE = ImageAugment(
    height=32,
    width=64,
    train=True,
    resize=0.8,
    flip_prob=0.5,
    rotate_deg=(-9, 9),
)
BEV = BevAugment(
    train=True,
    rotate_deg=(-22.5, 22.5),
    scale=(0.9, 1.1),
    flip_x_prob=0.5,
    flip_y_prob=0.5,
)


@pytest.fixture(scope="module")
def root(build_once):
    return build_once({"train": (5,)})[0]


def batch_of(root, box_frame="ego", ego=BEV, points=False, **options):
    transforms = Transforms(image=IMAGE, ego=ego, box_frame=box_frame, points=points)
    with DataLoader(
        root,
        5,
        shuffle=True,
        drop_last=True,
        transforms=transforms,
        seed=3,
        **options,
    ) as loader:
        return next(iter(loader))


def test_bevdets_formula_leads_to_our_pixels(root) -> None:
    """BEVDet's view transformer (`get_ego_coor`), turned round: augmented ego to pixels is our ``ego2img``."""
    batch = batch_of(root)
    (
        imgs,
        sensor2ego,
        ego2global,
        intrinsics,
        post_rotations,
        post_translations,
        bda,
    ) = img_inputs(batch)
    assert imgs is batch["img"]
    keyego2global = ego2global[:, :1].double()
    sensor2keyego = torch.linalg.inv(keyego2global) @ ego2global.double() @ sensor2ego.double()
    points = torch.tensor(
        [[12.0, 3.0, 0.5], [-9.0, 1.0, -0.5], [20.0, -7.0, 2.0]],
        dtype=torch.float64,
    )
    plain = torch.linalg.inv(bda.double())[:, None, None] @ points[None, None, :, :, None]
    inverse = torch.linalg.inv(sensor2keyego)[:, :, None]
    camera = inverse[..., :3, :3] @ plain + inverse[..., :3, 3:]
    pixels = intrinsics.double()[:, :, None] @ camera
    depth = pixels[..., 2:, :]
    uv1 = torch.cat([pixels[..., :2, :] / depth, torch.zeros_like(depth)], -2)
    moved = (
        post_rotations.double()[:, :, None] @ uv1 + post_translations.double()[:, :, None, :, None]
    )
    ours = (
        batch["ego2img"].double()[:, :, None]
        @ torch.cat([points, torch.ones(3, 1)], 1)[None, None, :, :, None]
    )
    ahead = ours[..., 2, 0] > 1
    assert ahead.any()
    expected = (ours[..., :2, 0] / ours[..., 2:3, 0])[ahead]
    torch.testing.assert_close(moved[..., :2, 0][ahead], expected, atol=2e-2, rtol=1e-4)


def test_intrinsics_are_those_of_the_stored_image(root) -> None:
    stored = batch_of(root, ego=BevAugment())
    with DataLoader(
        root,
        5,
        shuffle=True,
        drop_last=True,
        transforms=Transforms(image=FULL),
        seed=3,
    ) as plain:
        torch.testing.assert_close(
            img_inputs(stored).intrinsics,
            next(iter(plain))["intrinsics"],
            atol=1e-3,
            rtol=1e-5,
        )


@pytest.mark.parametrize("box_frame", ["ego", "lidar"])
def test_boxes_stand_on_their_bottom(root, box_frame) -> None:
    batch = batch_of(root, box_frame)
    data = mmdet3d_samples(batch, box_frame=box_frame)
    assert [image.shape for image in data["inputs"]["img"]] == [batch["img"].shape[1:]] * 5
    total = 0
    for row, sample in enumerate(data["data_samples"]):
        boxes = sample["gt_bboxes_3d"]
        keep = (batch["gt_labels_3d"][row] >= 0) & batch["gt_valid"][row]
        batch_boxes = batch["gt_boxes_3d"][row][keep]
        torch.testing.assert_close(boxes[:, 2] + boxes[:, 5] / 2, batch_boxes[:, 2])
        torch.testing.assert_close(boxes[:, [0, 1, 3, 4, 5]], batch_boxes[:, [0, 1, 3, 4, 5]])
        torch.testing.assert_close(
            torch.sin(boxes[:, 6]),
            torch.sin(batch_boxes[:, 6]),
            atol=1e-5,
            rtol=0,
        )
        assert (boxes[:, 6].abs() <= math.pi + 1e-6).all()
        assert torch.isfinite(boxes).all()
        facts = sample["metainfo"]
        np.testing.assert_allclose(
            facts["cam2img"] @ facts["lidar2cam"],
            facts["lidar2img"],
            rtol=1e-3,
            atol=1e-2,
        )
        np.testing.assert_array_equal(facts["lidar2img"], batch[f"{box_frame}2img"][row].numpy())
        total += len(boxes)
    assert total > 0


def test_points_come_in_the_frame_of_the_boxes(root) -> None:
    lidar = batch_of(root, "lidar", points=True)
    ego = batch_of(root, points=True)
    in_lidar = mmdet3d_samples(lidar)["inputs"]["points"]
    in_ego = mmdet3d_samples(ego, box_frame="ego")["inputs"]["points"]
    for row in range(5):
        lidar2ego = lidar["lidar2ego"][row].double()
        expected = in_lidar[row][:, :3].double() @ lidar2ego[:3, :3].T + lidar2ego[:3, 3]
        torch.testing.assert_close(in_ego[row][:, :3].double(), expected, atol=1e-3, rtol=1e-4)


def test_boxes_outside_the_range_are_left_out(root) -> None:
    batch = batch_of(root, ego=BevAugment())
    every = mmdet3d_samples(batch, box_frame="ego")["data_samples"]
    samples_in_range = mmdet3d_samples(
        batch, box_frame="ego", point_range=[0, -100, -5, 100, 100, 3]
    )["data_samples"]
    for sample, part in zip(every, samples_in_range, strict=True):
        inside = (sample["gt_bboxes_3d"][:, 0] > 0) & (
            sample["gt_bboxes_3d"][:, :2].abs() < 100
        ).all(1)
        torch.testing.assert_close(part["gt_bboxes_3d"], sample["gt_bboxes_3d"][inside])
        assert len(part["gt_labels_3d"]) == len(part["gt_bboxes_3d"])


def test_what_cannot_be_given_is_refused_with_the_way_out(root) -> None:
    shifted = batch_of(root, ego=BevAugment(train=True, translate_std_m=0.5))
    with pytest.raises(ConfigError, match="3 x 3 matrix; leave translate_std_m out"):
        img_inputs(shifted)
    windows = batch_of(root, window={"frames": [-1, 0]})
    for adapter in (img_inputs, mmdet3d_samples):
        with pytest.raises(ConfigError, match="without a temporal window"):
            adapter(windows)
    groups = {"img": {"front": windows["img"]}}
    for adapter in (img_inputs, mmdet3d_samples):
        with pytest.raises(
            ConfigError,
            match=r"camera groups front: .* leave camera_groups out",
        ):
            adapter(groups)
    unlabelled = {name: value for name, value in batch_of(root).items() if name != "gt_boxes_3d"}
    with pytest.raises(ConfigError, match="needs labels"):
        mmdet3d_samples(unlabelled)


def test_mmdetection3ds_own_classes(root) -> None:
    structures = pytest.importorskip("mmdet3d.structures", reason="mmdet3d is not installed here")
    batch = batch_of(root, "lidar")
    plain = mmdet3d_samples(batch)["data_samples"]
    for row, sample in enumerate(mmdet3d_samples(batch, as_data_samples=True)["data_samples"]):
        assert isinstance(sample, structures.Det3DDataSample)
        boxes = sample.gt_instances_3d.bboxes_3d
        assert isinstance(boxes, structures.LiDARInstance3DBoxes)
        keep = (batch["gt_labels_3d"][row] >= 0) & batch["gt_valid"][row]
        torch.testing.assert_close(boxes.gravity_center, batch["gt_boxes_3d"][row][keep][:, :3])
        torch.testing.assert_close(boxes.tensor, plain[row]["gt_bboxes_3d"])
        assert sample.lidar2img.shape == (2, 4, 4)
