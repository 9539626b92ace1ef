from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from fuelrail import Normalize, Transforms
from fuelrail.loaders.batch.transfer import map_tensors
from fuelrail.pipeline.errors import ConfigError, StageError
from fuelrail.pipeline.settings import convert
from support.batches import batches, load

SHAPE = (2, 6, 3, 8, 10)


def some_images() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8))


def expected(images: torch.Tensor, settings: Normalize) -> np.ndarray:
    values = images.numpy().astype(np.float64)
    if settings.channel_order == "bgr":
        values = values[..., ::-1, :, :]
    mean, std = (np.array(levels)[:, None, None] for levels in (settings.mean, settings.std))
    return (values - mean) / std


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 1.6e-2)],
)
@pytest.mark.parametrize("channel_order", ["rgb", "bgr"])
def test_values_dtypes_and_layouts(
    channel_order: str, dtype: str, tolerance: float, channels_last: bool
) -> None:
    settings = Normalize(channel_order=channel_order, dtype=dtype, channels_last=channels_last)
    images = some_images()
    before = images.clone()
    got = settings.images(images)
    assert got.shape == SHAPE
    assert got.dtype == getattr(torch, dtype)
    np.testing.assert_allclose(got.float().numpy(), expected(images, settings), atol=tolerance)
    assert got.flatten(0, 1).is_contiguous(memory_format=torch.channels_last) == channels_last
    assert got.is_contiguous() == (not channels_last)
    assert torch.equal(images, before)


def test_a_single_image_and_a_temporal_batch() -> None:
    images = some_images()
    settings = Normalize(mean=(1, 2, 3), std=(4, 5, 6))
    normalized = settings.images(images)
    assert torch.equal(settings.images(images[1, 2]), normalized[1, 2])
    assert torch.equal(settings.images(images[None]), normalized[None])


def test_batches_are_those_of_the_loader_normalised(tiny) -> None:
    settings = Normalize(channel_order="bgr", dtype="bfloat16")
    with load(tiny, normalize=settings) as loader:
        for plain, normalized in zip(batches(tiny), loader, strict=True):
            assert plain["sample_key"] == normalized["sample_key"]
            assert torch.equal(settings.images(plain["img"]), normalized["img"])
        assert "normalize" in [clock.name for clock in loader.stats().stages]


def test_batches_without_such_images_are_refused(tiny) -> None:
    with pytest.raises((ConfigError, StageError), match="let transform and collate_fn keep it"):
        batches(
            tiny,
            normalize=Normalize(),
            collate_fn=lambda samples: {"n": len(samples)},
        )
    for wrong in (
        {"img": torch.zeros(2, 3, 4, 4)},
        {"img": torch.zeros(4, 4, 3, dtype=torch.uint8)},
        [1, 2],
    ):
        with pytest.raises(ConfigError, match="normalize needs batches with a uint8 'img'"):
            Normalize()(wrong)


def test_settings() -> None:
    assert convert({"dtype": "float16"}, Normalize, "x.yaml").dtype == "float16"
    with pytest.raises(
        ConfigError,
        match=r"std=\[1.0, 0.0, 1.0\] must be three numbers above 0",
    ):
        Normalize(std=(1.0, 0.0, 1.0))


MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@pytest.mark.parametrize(
    "settings",
    [
        {"mean": MEAN, "std": STD},
        {"mean": MEAN},
        {"std": STD},
        {"mean": (0.5,) * 3},
    ],
)
def test_values_of_pixels_from_0_to_1_are_refused_with_those_that_are_meant(
    settings,
):
    for make in (
        lambda: Normalize(**settings),
        lambda: Transforms(normalize=settings),
    ):
        with pytest.raises(
            ConfigError,
            match=r"of grey levels 0 to 255, by which .* if they are of pixels from 0 to 1",
        ) as caught:
            make()
    advice = str(caught.value).rpartition("multiply by 255")[2]
    matches = re.findall(r"(mean|std)=(\[[^]]*\])", advice)
    suggestion = {name: tuple(json.loads(values)) for name, values in matches}
    assert suggestion == {
        name: pytest.approx([255 * value for value in values]) for name, values in settings.items()
    }
    Normalize(**suggestion)


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0, 0, 0), (1, 1, 1)),
        ((0, 0, 0), (255, 255, 255)),
        ((103, 116, 123), (1, 1, 1)),
    ],
)
def test_values_that_are_of_grey_levels_are_taken(mean, std):
    Normalize(mean=mean, std=std)


def test_a_normalised_batch_still_goes_through_the_transfers_walk() -> None:
    batch = Normalize()({"img": some_images(), "keys": ["a"]})
    assert map_tensors(batch, lambda tensor: tensor.double())["img"].dtype == torch.float64
