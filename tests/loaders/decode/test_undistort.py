"""Undistortion through the loader: pixels, intrinsics and projections belong together."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from numpy.testing import assert_allclose

from fuelrail import ImageAugment, Undistort
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.format.dataset import open_dataset
from support.datasets import build_dataset
from support.loaders import make_loader
from support.pictures import open_with_pillow, psnr_db

DIST = [-0.3, 0.08, 0.001, -0.0005, 0.01]
IMAGE = ImageAugment(height=64, width=96, resize="stretch")  # the stored size: no other resampling


def batch_of(root, **options) -> dict:
    with make_loader(root, 4, image=IMAGE, shuffle=False, num_workers=2, **options) as loader:
        return next(iter(loader))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("bent") / "dataset"
    build_dataset(root, {"train": (4,)}, lens=("opencv_radtan", DIST))
    return root


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_pixels_and_matrices_are_those_of_the_rectified_camera(root, alpha) -> None:
    plain = batch_of(root)
    straight = batch_of(root, undistort=Undistort(alpha=alpha))
    dataset = open_dataset(root)
    reader = SampleReader(dataset)
    for row in range(4):
        sample = reader.sample(row)
        camera = sample.geometry.intrinsics[0]
        chosen = (
            camera
            if alpha is None
            else cv2.getOptimalNewCameraMatrix(camera, np.array(DIST), (96, 64), alpha)[0]
        )
        assert_allclose(straight["intrinsics"][row, 0].numpy(), chosen, atol=1e-4)
        expected = cv2.undistort(
            open_with_pillow(sample.images["cam_front"]),
            camera,
            np.array(DIST),
            None,
            chosen,
        )
        where = np.zeros((64, 96), bool)
        where[8:-8, 12:-12] = True
        assert (
            psnr_db(
                straight["img"][row, 0].numpy(),
                expected.transpose(2, 0, 1),
                where,
            )
            > 40.0
        )
        to_image = np.eye(4)
        to_image[:3, :3] = chosen
        to_ego = straight["cam2keyego"][row, 0].double().numpy()
        assert_allclose(
            straight["ego2img"][row, 0].numpy(),
            to_image @ np.linalg.inv(to_ego),
            atol=1e-2,
        )
    assert not straight["dist"].any()
    assert_allclose(plain["dist"][:, 0, :5].numpy(), np.tile(DIST, (4, 1)), rtol=1e-6)
    assert not plain["dist"][:, 1:].any()
    assert (
        plain["img"][:, 1] == straight["img"][:, 1]
    ).all()  # the camera that is straight already


def test_augmentation_and_undistortion_draw_the_same(root) -> None:
    image = ImageAugment(
        height=32,
        width=64,
        train=True,
        resize_range=(0.7, 0.9),
        flip_prob=0.5,
        rotate_deg=(-5, 5),
    )
    with (
        make_loader(root, 4, image=image, seed=3, num_workers=2) as plain,
        make_loader(root, 4, image=image, seed=3, num_workers=2, undistort=Undistort()) as straight,
    ):
        plain_batch = next(iter(plain))
        straight_batch = next(iter(straight))
    assert plain_batch["sample_key"] == straight_batch["sample_key"]
    for name in ("ida_mat", "intrinsics", "ego2img"):
        assert (plain_batch[name] == straight_batch[name]).all()
    assert (plain_batch["img"][:, 0] != straight_batch["img"][:, 0]).any()


def test_lenses_that_cannot_be_undone_are_refused(tmp_path) -> None:
    build_dataset(tmp_path / "d", {"train": (4,)}, lens=("windshield", [0.1, 0.2]))
    batch_of(tmp_path / "d")
    with pytest.raises(
        FuelrailError,
        match="dist_model 'windshield' cannot be undone, only opencv_radtan",
    ):
        batch_of(tmp_path / "d", undistort=Undistort())
    with pytest.raises(ConfigError, match=r"alpha=1\.5 must lie in 0 to 1"):
        Undistort(alpha=1.5)
