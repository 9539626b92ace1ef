from __future__ import annotations

import numpy as np
import pytest

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.transforms.pixels import (
    NO_CHANGE,
    PixelAugment,
    PixelChange,
)

BEVFORMER = PixelAugment(
    train=True,
    brightness=32,
    contrast=(0.5, 1.5),
    saturation=(0.5, 1.5),
    hue_deg=18,
    swap_channels=True,
)
STREAMPETR = PixelAugment(train=True, grid_mask_prob=0.7)


def draw_many(augment: PixelAugment, count: int = 2000) -> list[PixelChange]:
    return [
        change
        for sample in range(count // 2)
        for change in augment.draw(256, seed=0, epoch=0, sample=sample, cameras=range(2))
    ]


def test_distortions_cover_their_ranges_each_with_its_probability() -> None:
    changes = draw_many(BEVFORMER)
    for name, neutral, low, high in (
        ("brightness", 0.0, -32, 32),
        ("contrast", 1.0, 0.5, 1.5),
        ("saturation", 1.0, 0.5, 1.5),
        ("hue_deg", 0.0, -18, 18),
    ):
        values = np.array([getattr(change, name) for change in changes])
        assert 0.45 < (values != neutral).mean() < 0.55, name
        assert low <= values.min() < low + (high - low) / 50
        assert high - (high - low) / 50 < values.max() <= high
    assert 0.45 < np.mean([change.contrast_first for change in changes]) < 0.55
    orders = {change.order for change in changes}
    assert len(orders) == 6
    assert (
        0.38 < np.mean([change.order != (0, 1, 2) for change in changes]) < 0.46
    )  # 1 in 6 orders is none
    switches = np.array(
        [
            [
                c.brightness != 0,
                c.contrast != 1,
                c.saturation != 1,
                c.hue_deg != 0,
            ]
            for c in changes
        ]
    )
    assert np.abs(np.corrcoef(switches.T) - np.eye(4)).max() < 0.08


def test_grid_masks_cover_their_ranges() -> None:
    changes = draw_many(STREAMPETR)
    holes = [change.holes for change in changes if change.holes is not None]
    assert 0.66 < len(holes) / len(changes) < 0.74
    spacing = np.array([h.spacing_px for h in holes])
    assert spacing.min() >= 2
    assert 250 < spacing.max() < 256
    for h in holes:
        assert 1 <= h.bar_px < h.spacing_px
        assert 0 <= h.top_px < h.spacing_px
        assert 0 <= h.left_px < h.spacing_px
    assert all(change._replace(holes=None, contrast_first=False) == NO_CHANGE for change in changes)


def test_draws_depend_on_their_address_alone() -> None:
    three = BEVFORMER.draw(256, seed=1, epoch=2, sample=3, cameras=(0, 4, 5))
    assert three[1:2] == BEVFORMER.draw(256, seed=1, epoch=2, sample=3, cameras=(4,))
    assert len(set(three)) == 3
    assert three != BEVFORMER.draw(256, seed=1, epoch=3, sample=3, cameras=(0, 4, 5))
    shared = PixelAugment(train=True, brightness=32, prob=1.0, scope="sample")
    assert len(set(shared.draw(256, seed=1, epoch=2, sample=3, cameras=range(6)))) == 1


def test_golden_draw() -> None:
    # Frozen with the random stream.
    (change,) = BEVFORMER.draw(256, seed=7, epoch=3, sample=12345, cameras=(1,))
    assert change == PixelChange(
        brightness=-10.924618453950593,
        contrast=1.0,
        saturation=1.0280184916642785,
        hue_deg=0.0,
        contrast_first=False,
        order=(0, 1, 2),
        holes=None,
    )


@pytest.mark.parametrize(
    "augment",
    [BEVFORMER.evaluation(), PixelAugment(train=True), PixelAugment()],
)
def test_nothing_changes_where_nothing_is_asked(augment: PixelAugment) -> None:
    assert augment.changes_nothing
    assert augment.draw(256, seed=1, epoch=2, sample=3, cameras=range(6)) == [NO_CHANGE] * 6


def test_what_changes_something_says_so() -> None:
    assert not BEVFORMER.changes_nothing
    assert not STREAMPETR.changes_nothing
    assert not PixelAugment(train=True, saturation=(0.9, 1.0)).changes_nothing


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"brightness": -1.0}, "brightness=-1.0 must be from 0 to 255"),
        ({"hue_deg": 200.0}, "hue_deg=200.0 must be from 0 to 180"),
        (
            {"contrast": (1.5, 0.5)},
            r"contrast=\[1.5, 0.5\] must be \[low, high\]",
        ),
        ({"saturation": (-0.5, 0.5)}, "saturation"),
        ({"prob": 2.0}, "prob=2.0 must be a probability"),
        ({"grid_mask_prob": -1.0}, "grid_mask_prob"),
        (
            {"grid_mask_ratio": 1.0},
            "grid_mask_ratio=1.0 must be between 0 and 1",
        ),
        ({"grid_mask_fill": (0, 0, 256)}, "three grey levels"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PixelAugment(**wrong)
