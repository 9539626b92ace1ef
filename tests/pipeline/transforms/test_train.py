"""Random fields do nothing without ``train``: so it is asked for where they are given, and shown."""

from __future__ import annotations

import msgspec
import pytest

import fuelrail as fr
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import preset_files

SIZE = {"height": 32, "width": 48}
RANDOM = [
    (fr.ImageAugment, SIZE, {"resize_range": (0.5, 0.7)}),
    (fr.ImageAugment, SIZE, {"resize_jitter": (-0.1, 0.1)}),
    (fr.ImageAugment, SIZE, {"flip_prob": 0.5}),
    (fr.ImageAugment, SIZE, {"rotate_deg": (-5.0, 5.0)}),
    (fr.ImageAugment, SIZE, {"crop_bottom": (0.0, 0.2)}),
    (fr.ImageAugment, SIZE, {"crop_y": "random"}),
    (fr.BevAugment, {}, {"rotate_deg": (-5.0, 5.0)}),
    (fr.BevAugment, {}, {"scale": (0.9, 1.1)}),
    (fr.BevAugment, {}, {"flip_x_prob": 0.5}),
    (fr.BevAugment, {}, {"flip_y_prob": 0.5}),
    (fr.BevAugment, {}, {"translate_std_m": 0.5}),
    (fr.PixelAugment, {}, {"brightness": 32.0}),
    (fr.PixelAugment, {}, {"contrast": (0.5, 1.5)}),
    (fr.PixelAugment, {}, {"saturation": (0.5, 1.5)}),
    (fr.PixelAugment, {}, {"hue_deg": 18.0}),
    (fr.PixelAugment, {}, {"swap_channels": True}),
    (fr.PixelAugment, {}, {"grid_mask_prob": 0.7}),
]
FIXED = {
    fr.ImageAugment: {
        "resize": 0.5,
        "crop_bottom": (0.1, 0.1),
        "crop_x": "left",
        "scope": "sample",
    },
    fr.BevAugment: {},
    fr.PixelAugment: {"prob": 0.7, "grid_mask_ratio": 0.4, "scope": "sample"},
}


@pytest.mark.parametrize(("kind", "required", "field"), RANDOM)
def test_a_random_field_asks_for_train(kind, required, field, tmp_path) -> None:
    (name,) = field
    with pytest.raises(ConfigError, match=rf"{kind.__name__}: {name}=.*train is not given"):
        kind(**required, **field)
    file = tmp_path / "settings.yaml"
    file.write_bytes(msgspec.yaml.encode({**required, **field}))
    argument = {
        fr.ImageAugment: "image",
        fr.BevAugment: "ego",
        fr.PixelAugment: "pixels",
    }[kind]
    for value in ({**required, **field}, str(file)):
        with pytest.raises(ConfigError, match=rf"{name}=.*train is not given"):
            fr.Transforms(**{argument: value})
    for train in (True, False):
        settings = kind(**required, **field, train=train)
        assert settings.train is train
        assert f"train={train}" in repr(settings)
        assert settings.evaluation().train is False


def test_the_table_has_all_random_fields() -> None:
    in_table = {
        kind: {name for field_kind, _, field in RANDOM if field_kind is kind for name in field}
        for kind in FIXED
    }
    for kind, fixed in FIXED.items():
        fixed_names = {
            "height",
            "width",
            "geometry",
            "grid_mask_fill",
            "train",
            "resize",
            "crop_x",
            "scope",
        }
        assert in_table[kind] >= {*kind.__struct_fields__} - fixed_names - {*fixed}


@pytest.mark.parametrize("kind", FIXED)
def test_without_random_fields_train_is_false(kind) -> None:
    settings = kind(**(SIZE if kind is fr.ImageAugment else {}), **FIXED[kind])
    assert settings.train is False and "train=False" in repr(settings)
    assert settings == msgspec.structs.replace(settings, train=False)
    assert hash(settings) == hash(msgspec.structs.replace(settings, train=False))


def test_validation_shares_transforms_of_training_without_a_word(
    recwarn,
) -> None:
    for kind, argument in (
        (fr.ImageAugment, "image"),
        (fr.BevAugment, "ego"),
        (fr.PixelAugment, "pixels"),
    ):
        for name in preset_files(kind):
            shared = fr.Transforms(**{argument: name}).evaluation()
            assert getattr(shared, argument).train is False
            encoded = msgspec.json.decode(msgspec.json.encode(shared))
            assert fr.Transforms(**encoded) == shared
    assert not recwarn.list


def test_evaluation_draws_no_sweeps() -> None:
    transforms = fr.Transforms(points=fr.PointSweeps(num_sweeps=3, choose="random"))
    assert transforms.evaluation().points == fr.PointSweeps(num_sweeps=3)
    assert fr.Transforms(points=True).evaluation().points is True
