from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fuelrail.loaders.decode import decode_views, make_decoder, pillow
from fuelrail.loaders.decode.resample import two_steps
from fuelrail.pipeline.transforms.image_map import ImageMap
from support.decoder_suite import DecoderSuite
from support.image_maps import NUSCENES_WH, START, preset_map
from support.pictures import encode, natural, seen

pytestmark = pytest.mark.slow


class TestPillow(DecoderSuite):
    backend = "pillow"
    turn = 1


def test_two_views_are_one_decode_and_equal_those_of_two(monkeypatch) -> None:
    decoder = make_decoder("pillow")
    decoded = []
    true = pillow.decode_jpeg
    monkeypatch.setattr(
        pillow,
        "decode_jpeg",
        lambda *a: decoded.append(picture := true(*a)) or picture,
    )
    identity = ImageMap.identity((320, 180))
    maps = [
        identity.resize(width, 90).crop(11, 40, 80, 40).rotate(degrees)
        for width, degrees in ((160, 0.0), (120, 4.0))
    ]
    picture = natural(320, 180)
    for encoded in (
        encode(picture),
        encode(picture, restart_marker_rows=1),
        encode(picture, "png"),
    ):
        together, alone = np.empty((2, 2, 3, 40, 80), np.uint8)
        decoded.clear()
        decode_views(decoder, encoded, maps, list(together))
        assert len(decoded) <= 1
        for image_map, out in zip(maps, alone, strict=True):
            decoder.decode_into(encoded, image_map, out)
        np.testing.assert_array_equal(together, alone)


def triangle_weights(first: float, last: float, size: int, source_size: int) -> np.ndarray:
    """Weights (size, source_size), float64, of an antialiased bilinear resize of the lines [first, last)."""
    step = (last - first) / size
    centres = first + (np.arange(size)[:, None] + 0.5) * step
    distance = np.abs(np.arange(source_size)[None] + 0.5 - centres) / max(1.0, step)
    weights = np.maximum(0.0, 1.0 - distance)
    return weights / weights.sum(axis=1, keepdims=True)


def rendered(picture: np.ndarray, image_map) -> np.ndarray:
    """An antialiased resize and a bilinear affine transform in float64: (3, h, w)."""
    steps = two_steps(image_map, 2.0)
    assert steps is not None
    left, top, right, bottom = steps.box
    width, height = steps.size_wh
    planes = picture.transpose(2, 0, 1).astype(np.float64)
    down = triangle_weights(top, bottom, height, planes.shape[1])
    planes = down @ planes @ triangle_weights(left, right, width, planes.shape[2]).T
    a, b, tx, c, d, ty = steps.to_resized
    x, y = np.meshgrid(
        np.arange(image_map.out_wh[0]) + 0.5,
        np.arange(image_map.out_wh[1]) + 0.5,
    )
    u = np.clip(a * x + b * y + tx - 0.5, 0, width - 1.001)
    v = np.clip(c * x + d * y + ty - 0.5, 0, height - 1.001)
    u0 = u.astype(int)
    v0 = v.astype(int)
    wu = u - u0
    wv = v - v0
    above = planes[:, v0, u0] * (1 - wu) + planes[:, v0, u0 + 1] * wu
    below = planes[:, v0 + 1, u0] * (1 - wu) + planes[:, v0 + 1, u0 + 1] * wu
    return above * (1 - wv) + below * wv


@pytest.mark.parametrize(
    "image_map",
    [
        preset_map("bevdet"),
        START.resize(704, 396).crop(0, 140, 704, 256).rotate(17.0),
        START.crop(600, 300, 301, 203).resize(500, 371).rotate(-5.0),
    ],
)
def test_rotated_pictures_are_not_darkened(image_map) -> None:
    assert not image_map.is_axis_aligned
    picture = natural(*NUSCENES_WH)
    width, height = image_map.out_wh
    out = np.full((3, height, width), 7, np.uint8)
    make_decoder("pillow").decode_into(encode(picture, "png"), image_map, out)
    where = seen(image_map, 3.0 / min(1.0, image_map.max_scale))
    error = (out - rendered(picture, image_map))[:, where]
    assert error.size > 50_000
    assert (np.abs(error.mean(axis=1)) < 0.02).all(), error.mean(axis=1)
    assert np.abs(error).max() < 1.5  # the resize rounds twice, the transform once


@given(
    wh=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    size=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    crop=st.tuples(st.integers(-50, 50), st.integers(-50, 50)),
    degrees=st.floats(-180, 180),
    reach=st.floats(0, 4),
)
def test_the_steps_together_are_the_map(wh, size, crop, degrees, reach) -> None:
    image_map = ImageMap.identity(wh).resize(*size).crop(*crop, *size).rotate(degrees)
    steps = two_steps(image_map, reach)
    if steps is None:
        assert image_map.source_roi(reach) == (0, 0, 0, 0)
        return
    left, top, right, bottom = steps.box
    assert 0 <= left < right <= wh[0]
    assert 0 <= top < bottom <= wh[1]
    assert (left, top) == (int(left), int(top))
    width, height = steps.size_wh
    assert width <= right - left + 1
    assert height <= bottom - top + 1
    resize = np.array(
        [
            [width / (right - left), 0, 0],
            [0, height / (bottom - top), 0],
            [0, 0, 1],
        ]
    )
    shift = np.array([[1, 0, -left], [0, 1, -top], [0, 0, 1]])
    to_resized = np.vstack((np.array(steps.to_resized).reshape(2, 3), (0, 0, 1)))
    expected = np.vstack((image_map.matrix, (0, 0, 1)))
    assert_allclose(
        np.linalg.inv(to_resized) @ resize @ shift,
        expected,
        rtol=1e-6,
        atol=1e-6,
    )
