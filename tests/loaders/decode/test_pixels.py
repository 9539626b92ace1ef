from __future__ import annotations

import colorsys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.loaders.decode.pixels import change_pixels
from fuelrail.pipeline.transforms.pixels import (
    NO_CHANGE,
    GridHoles,
    PixelChange,
)
from support.pictures import natural

FILL = (124, 116, 104)
PLANES = np.ascontiguousarray(natural(64, 48).transpose(2, 0, 1))


def changed(change: PixelChange, planes: np.ndarray = PLANES) -> np.ndarray:
    copy = planes.copy()
    change_pixels(copy, change, FILL)
    return copy


def reference(pixel: np.ndarray, change: PixelChange) -> np.ndarray:
    """mmdet3d's order of steps on one RGB pixel, HSV by Python's own colorsys; no clipping before the end."""
    rgb = pixel.astype(np.float64) + change.brightness
    if change.contrast_first:
        rgb = rgb * change.contrast
    hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
    hue = (hue + change.hue_deg / 360) % 1.0
    rgb = np.array(colorsys.hsv_to_rgb(hue, saturation * change.saturation, value))
    if not change.contrast_first:
        rgb = rgb * change.contrast
    return np.clip(np.rint(rgb), 0, 255)[list(change.order)]


changes = st.builds(
    PixelChange,
    brightness=st.one_of(st.just(0.0), st.floats(-32, 32)),
    contrast=st.one_of(st.just(1.0), st.floats(0.5, 1.5)),
    saturation=st.one_of(st.just(1.0), st.floats(0.5, 1.5)),
    hue_deg=st.one_of(st.just(0.0), st.floats(-18, 18)),
    contrast_first=st.booleans(),
    order=st.permutations([0, 1, 2]).map(tuple),
    holes=st.none(),
)


@given(
    changes,
    st.lists(st.tuples(*[st.integers(33, 255)] * 3), min_size=4, max_size=8),
)
@settings(max_examples=150)
def test_distortion_is_mmdet3ds(change: PixelChange, pixels: list[tuple[int, int, int]]) -> None:
    # From 33 on brightness leaves all values positive, where colorsys and OpenCV mean the same by HSV.
    row = np.array(pixels, np.uint8)
    got = changed(change, np.ascontiguousarray(row.T[:, None, :]))[:, 0].T
    expected = np.array([reference(pixel, change) for pixel in row])
    assert np.abs(got - expected).max() <= 1


@pytest.mark.parametrize("hue_deg", [0.0, 7.0])
def test_dark_pixels_stay_in_range(hue_deg: float) -> None:
    dark = (PLANES // 16).astype(np.uint8)
    got = changed(PixelChange(brightness=-30, saturation=1.5, hue_deg=hue_deg), dark)
    assert got.max() <= 16


def test_no_change_and_neutral_changes_keep_every_byte() -> None:
    assert np.array_equal(changed(NO_CHANGE), PLANES)
    assert np.array_equal(changed(PixelChange(contrast_first=True)), PLANES)
    assert np.abs(changed(PixelChange(hue_deg=1e-6)).astype(int) - PLANES).max() <= 1


def test_gray_has_no_hue_and_no_saturation() -> None:
    gray = np.repeat(PLANES[:1], 3, axis=0)
    for change in (
        PixelChange(saturation=1.4),
        PixelChange(hue_deg=18, saturation=0.6),
    ):
        assert np.abs(changed(change, gray).astype(int) - gray).max() <= 1


def test_holes_are_squares_on_a_grid() -> None:
    got = changed(PixelChange(holes=GridHoles(spacing_px=10, bar_px=4, top_px=3, left_px=7)))
    for y in range(48):
        for x in range(64):
            is_hole = (y - 3) % 10 >= 4 and (x - 7) % 10 >= 4
            assert tuple(got[:, y, x]) == (FILL if is_hole else tuple(PLANES[:, y, x]))


def test_planes_inside_a_batch() -> None:
    batch = np.full((2, 3, 48, 64), 9, np.uint8)
    batch[1] = PLANES
    change = PixelChange(
        brightness=10,
        saturation=1.2,
        hue_deg=5,
        order=(2, 0, 1),
        holes=GridHoles(8, 4, 0, 0),
    )
    change_pixels(batch[1], change, FILL)
    assert np.array_equal(batch[1], changed(change))
    assert (batch[0] == 9).all()
