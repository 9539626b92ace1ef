"""What the loader draws for a sample moves matrices, boxes, points and pixels together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fuelrail import BevAugment, ImageAugment, PixelAugment
from fuelrail.loaders.decode.pixels import change_pixels
from support.batches import batches, load

IMAGE = ImageAugment(
    height=32,
    width=64,
    train=True,
    resize_range=(0.7, 0.9),
    flip_prob=0.5,
    rotate_deg=(-5.0, 5.0),
    crop_y="random",
)
BEV = BevAugment(
    train=True,
    rotate_deg=(-22.5, 22.5),
    scale=(0.9, 1.1),
    flip_x_prob=0.5,
    flip_y_prob=0.5,
    translate_std_m=0.5,
)
PIXELS = PixelAugment(
    train=True,
    brightness=32,
    contrast=(0.5, 1.5),
    saturation=(0.5, 1.5),
    hue_deg=18,
    swap_channels=True,
    grid_mask_prob=0.5,
)


@pytest.fixture(scope="module")
def dataset(build_once):
    return build_once({"train": (6, 6)})[0]


def augmented(dataset, **options) -> list[dict]:
    return batches(dataset, 4, seed=3, image=IMAGE, points=True, **options)


def homogeneous(points: torch.Tensor) -> np.ndarray:
    return np.c_[points[:, :3].double().numpy(), np.ones(len(points))]


def test_the_world_moves_and_pixels_do_not(dataset) -> None:
    for plain, moved in zip(augmented(dataset), augmented(dataset, ego=BEV), strict=True):
        assert plain["sample_key"] == moved["sample_key"]
        assert torch.equal(plain["img"], moved["img"])
        for same in ("intrinsics", "ida_mat", "cam2ego", "lidar2ego"):
            assert torch.equal(plain[same], moved[same]), same
        assert torch.equal(plain["bda_mat"], torch.eye(4).expand(4, 4, 4))
        for b in range(4):
            bda = moved["bda_mat"][b].double().numpy()
            assert np.abs(bda - np.eye(4)).max() > 1e-3
            boxes = plain["gt_boxes_3d"][b]
            boxes_moved = moved["gt_boxes_3d"][b]
            assert_allclose(homogeneous(boxes) @ bda.T, homogeneous(boxes_moved), atol=1e-4)
            scale = abs(np.linalg.det(bda[:3, :3])) ** (1 / 3)
            assert_allclose(boxes_moved[:, 3:6], boxes[:, 3:6] * scale, rtol=1e-5)
            lidar2ego = plain["lidar2ego"][b].double().numpy()
            points = plain["points"][b]
            points_moved = moved["points"][b]
            assert torch.equal(points[:, 3:], points_moved[:, 3:])
            in_ego = homogeneous(points_moved) @ lidar2ego.T
            assert_allclose(in_ego, homogeneous(points) @ (bda @ lidar2ego).T, atol=1e-3)
            ego2global = plain["ego2global"][b].numpy()
            ego2global_moved = moved["ego2global"][b].numpy()
            assert_allclose(ego2global_moved @ bda, ego2global, atol=1e-3)
            for camera in range(plain["img"].shape[1]):
                ego2img = plain["ego2img"][b, camera].double().numpy()
                ego2img_moved = moved["ego2img"][b, camera].double().numpy()
                # A box's centre and a lidar point fall on the pixel that they fell on before.
                assert_allclose(ego2img_moved @ bda, ego2img, atol=2e-3)
                lidar2img = plain["lidar2img"][b, camera].double().numpy()
                lidar2img_moved = moved["lidar2img"][b, camera].double().numpy()
                before = homogeneous(points) @ lidar2img.T
                after = homogeneous(points_moved) @ lidar2img_moved.T
                ahead = before[:, 2] > 1.0
                uv, uv_moved = (p[ahead, :2] / p[ahead, 2:3] for p in (before, after))
                assert_allclose(uv_moved, uv, atol=0.05)
                k = np.eye(4)
                k[:3, :3] = moved["intrinsics"][b, camera].numpy()
                cam2keyego = moved["cam2keyego"][b, camera].double().numpy()
                assert_allclose(k @ np.linalg.inv(cam2keyego), ego2img_moved, atol=2e-3)


def test_pixel_values_change_as_drawn_and_nothing_else_does(dataset) -> None:
    for plain, changed in zip(augmented(dataset), augmented(dataset, pixels=PIXELS), strict=True):
        for name, value in plain.items():
            if isinstance(value, torch.Tensor) and name != "img":
                assert torch.equal(value, changed[name]), name
        for b, row in enumerate(plain["global_index"].tolist()):
            draws = PIXELS.draw(
                32,
                seed=3,
                epoch=0,
                sample=row,
                cameras=range(plain["img"].shape[1]),
            )
            for camera, change in enumerate(draws):
                expected = plain["img"][b, camera].numpy().copy()
                change_pixels(expected, change, PIXELS.grid_mask_fill)
                assert np.array_equal(changed["img"][b, camera].numpy(), expected)
        assert not torch.equal(plain["img"], changed["img"])


def test_each_epoch_draws_again(dataset) -> None:
    with load(dataset, 12, image=IMAGE, ego=BEV, shuffle=False) as loader:
        (first,) = loader
        (second,) = loader
    assert first["sample_key"] == second["sample_key"]
    assert not torch.equal(first["bda_mat"], second["bda_mat"])
    assert not torch.equal(first["ida_mat"], second["ida_mat"])
