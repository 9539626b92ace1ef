from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import convert
from fuelrail.pipeline.transforms.image import STREAM, ImageAugment
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.pipeline.transforms.randomness import ALL_CAMERAS, uniforms

RIG = [(1600, 900)] * 6
BEVDET = ImageAugment(
    height=256,
    width=704,
    train=True,
    resize="width",
    resize_jitter=(-0.06, 0.11),
    flip_prob=0.5,
    rotate_deg=(-5.4, 5.4),
)
STREAMPETR = ImageAugment(
    height=256,
    width=704,
    train=True,
    resize_range=(0.38, 0.55),
    flip_prob=0.5,
    scope="sample",
)


def bevdet_reference(wh: tuple[int, int], draws: np.ndarray) -> ImageMap:
    """BEVDet's `sample_augmentation`, as published, fed with our uniforms in the place of numpy's."""
    width, height = wh
    resize = 704 / width + (-0.06 + 0.17 * draws[0])
    new_width = int(width * resize)
    new_height = int(height * resize)
    crop_h = int((1 - 0.0) * new_height) - 256
    crop_w = int(draws[1] * max(0, new_width - 704))
    image_map = ImageMap.identity(wh).resize(new_width, new_height).crop(crop_w, crop_h, 704, 256)
    if draws[3] < 0.5:
        image_map = image_map.flip()
    return image_map.rotate(-5.4 + 10.8 * draws[4])


@given(st.integers(0, 2**40), st.integers(0, 100), st.integers(0, 10**9))
@settings(max_examples=50)
def test_training_draws_are_bevdets(seed: int, epoch: int, sample: int) -> None:
    maps = BEVDET.draw(RIG, seed=seed, epoch=epoch, sample=sample)
    draws = uniforms(
        seed,
        epoch=epoch,
        sample=sample,
        cameras=range(6),
        stream=STREAM,
        count=5,
    )
    for image_map, row in zip(maps, draws, strict=True):
        expected = bevdet_reference((1600, 900), row)
        assert_allclose(image_map.matrix, expected.matrix, rtol=0, atol=1e-9)
        assert image_map.visible == expected.visible
        assert image_map.out_wh == (704, 256)


GOLDEN = (
    -0.4776217442587879,
    0.0219154441297672,
    731.7326916192371,
    0.021931371051373133,
    0.47727488750914465,
    -191.75472305442082,
)


def test_golden_draw() -> None:
    # Frozen with the random stream: the map of one camera of one sample of one epoch.
    image_map = BEVDET.draw(RIG, seed=7, epoch=3, sample=12345)[1]
    assert (
        image_map == BEVDET.draw(RIG, seed=7, epoch=3, sample=12345, cameras=[1, 5, 0, 2, 3, 4])[0]
    )
    assert_allclose(image_map.coefficients, GOLDEN, rtol=0, atol=1e-9)


def test_a_loader_of_some_cameras_draws_what_one_of_all_draws() -> None:
    everything = BEVDET.draw(RIG, seed=1, epoch=0, sample=5)
    two_cameras = BEVDET.draw(RIG[:2], seed=1, epoch=0, sample=5, cameras=[4, 1])
    assert two_cameras == [everything[4], everything[1]]


def test_scope_says_who_shares_a_draw() -> None:
    maps = STREAMPETR.draw(RIG, seed=1, epoch=0, sample=5)
    assert len(set(maps)) == 1
    assert len(set(BEVDET.draw(RIG, seed=1, epoch=0, sample=5))) == 6
    row = uniforms(1, epoch=0, sample=5, cameras=(ALL_CAMERAS,), stream=STREAM, count=5)[0]
    factor = 0.38 + 0.17 * row[0]
    assert maps[0].matrix[1, 1] == int(900 * factor) / 900
    mixed = STREAMPETR.draw([(1600, 900), (1550, 2048)], seed=1, epoch=0, sample=5)
    assert mixed[0] == maps[0]  # the same draw on another size
    assert mixed[1].source_wh == (1550, 2048)


@pytest.mark.parametrize(
    ("augment", "wh", "resized", "left_top"),
    [
        (
            ImageAugment(height=256, width=704),
            (1600, 900),
            (704, 396),
            (0, 140),
        ),  # cover
        (
            ImageAugment(height=256, width=704, resize="width"),
            (1600, 900),
            (704, 396),
            (0, 140),
        ),
        (
            ImageAugment(height=256, width=704),
            (1550, 2048),
            (704, 930),
            (0, 674),
        ),  # portrait
        (
            ImageAugment(height=480, width=480, crop_x="center"),
            (1600, 900),
            (853, 480),
            (186, 0),
        ),
        (
            ImageAugment(height=256, width=704, resize=0.48),
            (1600, 900),
            (768, 432),
            (32, 176),
        ),  # bevfusion
        (
            ImageAugment(height=480, width=800, resize=0.5, crop_y="top"),
            (1600, 900),
            (800, 450),
            (0, 0),
        ),
        (
            ImageAugment(height=256, width=704, resize="contain", crop_y="top"),
            (1550, 2048),
            (193, 256),
            (0, 0),
        ),
        (
            ImageAugment(height=256, width=704, resize="stretch"),
            (1600, 900),
            (704, 256),
            (0, 0),
        ),
        (
            ImageAugment(height=256, width=704, train=False, crop_bottom=(0.0, 0.2)),
            (1600, 900),
            (704, 396),
            (0, 100),
        ),
        (
            ImageAugment(height=256, width=704, crop_y="center"),
            (1600, 900),
            (704, 396),
            (0, 70),
        ),
        (
            ImageAugment(height=300, width=500, train=False, resize=1.0, crop_y="random"),
            (600, 400),
            (600, 400),
            (50, 50),
        ),
        (
            ImageAugment(height=300, width=500, resize=1.0, crop_x="left", crop_y="top"),
            (600, 400),
            (600, 400),
            (0, 0),
        ),
    ],
)
def test_evaluation_sizes_and_crops(
    augment: ImageAugment,
    wh: tuple[int, int],
    resized: tuple[int, int],
    left_top: tuple[int, int],
) -> None:
    (image_map,) = augment.draw([wh], seed=0, epoch=0, sample=0)
    expected = ImageMap.identity(wh).resize(*resized).crop(*left_top, augment.width, augment.height)
    assert image_map == expected


def test_evaluation_is_not_random_and_never_flips_or_turns() -> None:
    fixed = BEVDET.evaluation()
    assert not fixed.train
    maps = {fixed.draw(RIG[:1], seed=s, epoch=s, sample=s)[0] for s in range(5)}
    assert len(maps) == 1
    (image_map,) = maps
    assert image_map.is_axis_aligned
    assert image_map.flips == (False, False)


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(0, 10**6))
@settings(max_examples=60)
def test_any_image_size_gives_a_map_of_the_final_size(width: int, height: int, sample: int) -> None:
    for augment in (
        BEVDET,
        STREAMPETR,
        BEVDET.evaluation(),
        ImageAugment(height=64, width=64, resize="contain"),
    ):
        (image_map,) = augment.draw([(width, height)], seed=3, epoch=1, sample=sample)
        assert image_map.out_wh == (augment.width, augment.height)
        assert image_map.source_wh == (width, height)
        assert np.isfinite(image_map.inverse_coefficients()).all()


@pytest.mark.parametrize("train", [True, False])
def test_a_camera_without_an_image_has_the_identity(train: bool) -> None:
    augment = msgspec.structs.replace(BEVDET, train=train)
    maps = augment.draw([(1600, 900), (0, 0)], seed=0, epoch=0, sample=0)
    assert maps[1] == ImageMap.identity((704, 256))
    assert np.array_equal(maps[1].ida_mat(), np.eye(4))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("resize", ["width", "cover", "contain", "stretch", 0.48])
def test_legacy_matrices_follow_the_factor_and_pixels_the_truth(resize, train: bool) -> None:
    settings_ = {
        "height": 256,
        "width": 704,
        "resize": resize,
        "train": train,
        "flip_prob": 0.5,
    }
    for sample in range(5):
        for wh in ((1600, 900), (1597, 901)):
            draws = [
                ImageAugment(**settings_, geometry=geometry).draw(
                    [wh], seed=0, epoch=0, sample=sample
                )[0]
                for geometry in ("exact", "legacy_mmdet3d")
            ]
            exact, legacy = draws
            assert exact.published is None
            assert legacy.published is not None
            assert legacy.matrix.tolist() == exact.matrix.tolist()
            assert legacy.visible == exact.visible
            factor = abs(legacy.ida_mat()[0, 0])
            assert factor == pytest.approx(0.48 if resize == 0.48 else min(1.0, factor), abs=1e-12)
            # Off by the half pixel, the cut to integers and, flipped, by one pixel: never by more than two.
            corners = np.array([(0, 0, 1), (wh[0] - 1, wh[1] - 1, 1)], float).T
            assert (
                0.0 < np.abs((exact.centre_matrix() - legacy.centre_matrix()) @ corners).max() < 2.0
            )
    # Building on keeps the truth alone.
    assert legacy.flip().published is None
    assert legacy.of_rows(10, 100).published is None


def test_settings_read_from_a_file_say_what_is_allowed() -> None:
    good = {
        "height": 256,
        "width": 704,
        "train": True,
        "resize_range": [0.38, 0.55],
    }
    assert convert(good, ImageAugment, "here.yaml").resize_range == (0.38, 0.55)
    with pytest.raises(ConfigError, match=r"here\.yaml"):
        convert({**good, "scope": "rig"}, ImageAugment, "here.yaml")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"height": 0}, "height=0 must be 1 to 16384 pixels"),
        (
            {"height": 40_000, "width": 40_000},
            "height=40000 must be 1 to 16384 pixels",
        ),
        ({"width": 10**9}, "width=1000000000 must be 1 to 16384 pixels"),
        (
            {"height": 16_384, "width": 16_384},
            "has 268435456 pixels: at most 67108864 are allowed",
        ),
        (
            {"resize": 0.0},
            "resize=0.0 must be width, cover, contain, stretch, or a factor",
        ),
        (
            {"resize_jitter": (-0.1, 0.1), "resize_range": (0.3, 0.5)},
            "exclude each other",
        ),
        (
            {"resize": "stretch", "resize_jitter": (-0.1, 0.1)},
            "no factor to vary",
        ),
        (
            {"resize": math.nan},
            "resize=nan must be .* or a factor from 0.001 to 1000",
        ),
        ({"resize": 1e300}, "or a factor from 0.001 to 1000"),
        ({"resize_range": (0.5, 1e300)}, "factors from 0.001 to 1000"),
        ({"resize_jitter": (0.0, 1e300)}, "factors from -1000 to 1000"),
        ({"rotate_deg": (0.0, math.inf)}, "both finite"),
        ({"resize_range": (0.0, 0.5)}, "factors from 0.001 to 1000"),
        (
            {"rotate_deg": (5.0, -5.0)},
            r"rotate_deg=\[5.0, -5.0\] must be \[low, high\]",
        ),
        (
            {"crop_bottom": (0.2, 1.0)},
            r"crop_bottom=\[0.2, 1.0\] must lie in \[0, 1\)",
        ),
        ({"flip_prob": 1.5}, "flip_prob=1.5 must be a probability"),
        ({"rotate_deg": (float("nan"), 1.0)}, "rotate_deg"),
        (
            {"height": "256"},
            "ImageAugment: height='256' must be 1 to 16384 pixels",
        ),
        ({"resize": None}, "ImageAugment: resize=None must be width, cover"),
        (
            {"flip_prob": "half"},
            "ImageAugment: flip_prob='half' must be a probability",
        ),
        ({"rotate_deg": 5.4}, "ImageAugment: rotate_deg=.* must be"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImageAugment(**{"height": 256, "width": 704, **wrong})


def test_the_largest_final_sizes_are_taken() -> None:
    assert ImageAugment(height=8192, width=8192).width == 8192
    assert ImageAugment(height=1, width=16384).width == 16384
