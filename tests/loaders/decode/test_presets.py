"""The presets in ``configs`` give the sizes, matrices and pixels of the trainers that they are named after."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
from PIL import Image

from fuelrail.loaders.decode import make_decoder
from fuelrail.pipeline.settings import load_yaml
from fuelrail.pipeline.transforms.ego import BevAugment
from fuelrail.pipeline.transforms.image import STREAM, ImageAugment
from fuelrail.pipeline.transforms.pixels import PixelAugment
from fuelrail.pipeline.transforms.randomness import ALL_CAMERAS, uniforms
from support.backends import BACKENDS
from support.image_maps import photograph
from support.pictures import open_with_pillow, psnr_db, seen

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
IMAGES = sorted((CONFIGS / "images").glob("*.yaml"))
STORED_WH = (1600, 900)
LEAST_DB = {
    ("pillow", "bicubic"): 43.0,
    ("pillow", "bilinear"): 43.0,
    ("turbo", "bicubic"): 34.0,
    ("turbo", "bilinear"): 36.0,
    ("dali", "bicubic"): 43.0,
    ("dali", "bilinear"): 40.0,
}
"""On a made picture."""


@pytest.mark.parametrize("file", IMAGES, ids=lambda file: file.stem)
def test_image_presets_load_and_their_names_say_their_size(file: Path) -> None:
    augment = load_yaml(file, ImageAugment)
    assert file.stem.endswith(f"-{augment.width}x{augment.height}")
    assert augment.evaluation().draw([STORED_WH], seed=0, epoch=0, sample=0)[0].is_axis_aligned


@pytest.mark.parametrize("folder", ["pixels", "bev"])
def test_other_presets_load_and_change_something(folder: str) -> None:
    files = sorted((CONFIGS / folder).glob("*.yaml"))
    assert len(files) >= 2
    for file in files:
        if folder == "pixels":
            assert not load_yaml(file, PixelAugment).changes_nothing
        else:
            assert not np.array_equal(
                load_yaml(file, BevAugment).draw(seed=0, epoch=0, sample=0).matrix,
                np.eye(4),
            )


def trainers_draw(
    name: str, sample: int
) -> tuple[float, tuple[int, int], tuple[int, int, int, int], bool, float]:
    """`sample_augmentation` of BEVDet, bevfusion, StreamPETR and SparseDrive, as published, on our uniforms.

    Returns what it returns: resize, resize_dims, crop, flip, rotate.
    """
    ranges = {
        "bevdet-704x256": (704 / 1600 - 0.06, 704 / 1600 + 0.11),
        "bevfusion-704x256": (0.38, 0.55),
        "streampetr-704x256": (0.38, 0.55),
        "streampetr-800x320": (0.47, 0.625),
        "sparsedrive-704x256": (0.40, 0.47),
    }
    camera = 0 if name.startswith("bev") else ALL_CAMERAS
    u_resize, u_x, u_y, u_flip, u_rotate = uniforms(
        0, epoch=0, sample=sample, cameras=(camera,), stream=STREAM, count=5
    )[0]
    final_width, final_height = map(int, name.rpartition("-")[2].split("x"))
    low, high = ranges[name]
    resize = low + (high - low) * u_resize
    new_width = int(1600 * resize)
    new_height = int(900 * resize)
    crop_h = int((1 - 0.0 * u_y) * new_height) - final_height
    crop_w = int(u_x * max(0, new_width - final_width))
    crop = (crop_w, crop_h, crop_w + final_width, crop_h + final_height)
    rotate = 0.0 if name.startswith("streampetr") else -5.4 + 10.8 * u_rotate
    return resize, (new_width, new_height), crop, bool(u_flip < 0.5), rotate


def trainers_evaluation(
    name: str,
) -> tuple[float, tuple[int, int], tuple[int, int, int, int], bool, float]:
    """The same without randomness: what `sample_augmentation` of these code bases returns in evaluation."""
    final_width, final_height = map(int, name.rpartition("-")[2].split("x"))
    by_width = final_width / 1600
    resize = {"bevdet": by_width, "bevfusion": 0.48}.get(
        name.split("-")[0], max(final_height / 900, by_width)
    )
    new_width = int(1600 * resize)
    new_height = int(900 * resize)
    crop_h = int(1.0 * new_height) - final_height
    crop_w = int(max(0, new_width - final_width) / 2)
    return (
        resize,
        (new_width, new_height),
        (crop_w, crop_h, crop_w + final_width, crop_h + final_height),
        False,
        0.0,
    )


RANDOM_PRESETS = [file.stem for file in IMAGES if "bevformer" not in file.stem]


@pytest.mark.parametrize("name", RANDOM_PRESETS)
def test_random_presets_have_the_trainers_matrices(name: str) -> None:
    augment = load_yaml(CONFIGS / "images" / f"{name}.yaml", ImageAugment)
    for sample in range(20):
        resize, dims, crop, flip, rotate = trainers_draw(name, sample)
        # `img_transform` of the same code bases: post_rot and post_tran, on centre-origin pixels, by the drawn factor.
        post_rot = np.eye(2) * resize
        post_tran = -np.array(crop[:2], float)
        size = np.array((crop[2] - crop[0], crop[3] - crop[1]), float)
        if flip:
            a = np.diag([-1.0, 1.0])
            b = np.array([size[0], 0.0])
            post_rot = a @ post_rot
            post_tran = a @ post_tran + b
        h = np.radians(rotate)
        a = np.array([[np.cos(h), np.sin(h)], [-np.sin(h), np.cos(h)]])
        b = size / 2
        post_rot = a @ post_rot
        post_tran = a @ (post_tran - b) + b
        legacy = msgspec.structs.replace(augment, geometry="legacy_mmdet3d")
        (published,) = legacy.draw([STORED_WH], seed=0, epoch=0, sample=sample)
        np.testing.assert_allclose(published.centre_matrix()[:2, :2], post_rot, atol=1e-9)
        np.testing.assert_allclose(published.centre_matrix()[:2, 2], post_tran, atol=1e-6)
        (exact,) = augment.draw([STORED_WH], seed=0, epoch=0, sample=sample)
        assert published == dataclasses.replace(
            exact, published=published.published
        )  # the same pixels
        ours = exact.centre_matrix()
        pixels = np.array([(u, v) for u in (0.0, 800.0, 1599.0) for v in (400.0, 899.0)])
        distance = np.linalg.norm(
            (pixels @ ours[:2, :2].T + ours[:2, 2]) - (pixels @ post_rot.T + post_tran),
            axis=1,
        )
        # They leave out the half pixel and the cut of sizes to integers: below two pixels, and not nothing.
        assert 0.1 < distance.max() < 2.0
        truth = np.array(dims) / STORED_WH
        assert ours[:2, :2] == pytest.approx(
            a @ (np.diag([-1.0, 1.0]) if flip else np.eye(2)) @ np.diag(truth),
            abs=1e-12,
        )


@pytest.mark.parametrize("name", RANDOM_PRESETS)
def test_evaluation_has_the_trainers_matrices(name: str) -> None:
    augment = load_yaml(CONFIGS / "images" / f"{name}.yaml", ImageAugment).evaluation()
    resize, dims, crop, _, _ = trainers_evaluation(name)
    assert (crop[2] - crop[0], crop[3] - crop[1]) == (
        augment.width,
        augment.height,
    )
    (published,) = msgspec.structs.replace(augment, geometry="legacy_mmdet3d").draw(
        [STORED_WH], seed=0, epoch=0, sample=0
    )
    theirs = [[resize, 0.0, -crop[0]], [0.0, resize, -crop[1]], [0.0, 0.0, 1.0]]
    np.testing.assert_allclose(published.centre_matrix(), theirs, atol=1e-9)
    (exact,) = augment.draw([STORED_WH], seed=0, epoch=0, sample=0)
    sx, sy = np.array(dims) / STORED_WH
    truth = [
        [sx, 0.0, sx / 2 - 0.5 - crop[0]],
        [0.0, sy, sy / 2 - 0.5 - crop[1]],
        [0.0, 0.0, 1.0],
    ]
    np.testing.assert_allclose(exact.centre_matrix(), truth, atol=1e-9)


@functools.cache
def trainers_picture(name: str, sample: int | None) -> np.ndarray:
    """`img_transform` of these code bases, planes (3, h, w), as drawn for a sample, or None: as in evaluation.

    Theirs is PIL's default resize, bicubic. They rotate by PIL's default, nearest, which is off by up to half a pixel
    where no interpolation is; bilinear shows that all else agrees.
    """
    _, dims, crop, flip, rotate = (
        trainers_evaluation(name) if sample is None else trainers_draw(name, sample)
    )
    image = (
        Image.fromarray(open_with_pillow(photograph()))
        .resize(dims, Image.Resampling.BICUBIC)
        .crop(crop)
    )
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image
    return np.asarray(image.rotate(rotate, Image.Resampling.BILINEAR)).transpose(2, 0, 1)


@pytest.mark.costly
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RANDOM_PRESETS)
def test_random_presets_give_the_trainers_pixels(
    name: str, backend: str, interpolation: str
) -> None:
    preset = load_yaml(CONFIGS / "images" / f"{name}.yaml", ImageAugment)
    decoder = make_decoder(backend)
    for sample in (None, 0, 1, 2):
        augment = preset.evaluation() if sample is None else preset
        (image_map,) = augment.draw([STORED_WH], seed=0, epoch=0, sample=sample or 0)
        ours = np.empty((3, augment.height, augment.width), np.uint8)
        decoder.decode_into(photograph(), image_map, ours, interpolation)
        theirs = trainers_picture(name, sample)
        assert ours.shape == theirs.shape
        assert psnr_db(ours, theirs, seen(image_map, 6.0)) > LEAST_DB[backend, interpolation]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        "bevformer-base-1600x928",
        "bevformer-small-1280x736",
        "bevformer-tiny-800x480",
    ],
)
def test_bevformers_images_are_scaled_and_padded_below(name: str, backend: str) -> None:
    augment = load_yaml(CONFIGS / "images" / f"{name}.yaml", ImageAugment)
    scale = {"base": 1.0, "small": 0.8, "tiny": 0.5}[name.split("-")[1]]
    (image_map,) = augment.draw([STORED_WH], seed=0, epoch=0, sample=0)
    assert augment.evaluation().draw([STORED_WH], seed=0, epoch=0, sample=0) == [image_map]
    rows = int(900 * scale)
    assert image_map.matrix.tolist() == [[scale, 0, 0], [0, scale, 0]]
    out = np.empty((3, augment.height, augment.width), np.uint8)
    make_decoder(backend).decode_into(photograph(), image_map, out)
    assert not out[:, rows:].any()
    stored = open_with_pillow(photograph())
    # mmcv's: OpenCV's bilinear without antialiasing; PIL's has it.
    by_mmcv = cv2.resize(stored, (int(1600 * scale), rows), interpolation=cv2.INTER_LINEAR)
    by_pil = Image.fromarray(stored).resize((int(1600 * scale), rows), Image.Resampling.BILINEAR)
    for theirs in (by_mmcv, np.asarray(by_pil)):
        assert psnr_db(out[:, :rows], theirs.transpose(2, 0, 1)) > 36.0
