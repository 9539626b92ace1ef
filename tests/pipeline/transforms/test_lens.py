"""The lenses that OpenCV lacks, f-theta and Mei: against the lenses of OpenCV that they contain, and other code."""

from __future__ import annotations

import dataclasses

import cv2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuelrail.loaders.decode.lens import rectified_camera
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.transforms.lens import (
    Lens,
    bent,
    read_lens,
    rectified_places,
    source_places,
    straight,
)

K = np.array([[620.0, 0.0, 790.0], [0.0, 622.0, 455.0], [0.0, 0.0, 1.0]])
WH = (1600, 900)
FISHEYE = (0.05, -0.012)
RADTAN = (-0.12, 0.02, 0.0007, -0.0004)


def make_lens(model, *coefficients, camera=K):
    dist = np.full(14, np.nan)
    dist[: len(coefficients)] = coefficients
    lens = read_lens(model, dist, camera)
    assert lens is not None
    return lens


PAIRS = {
    "f-theta and the fisheye": (
        make_lens("ftheta", 0, 1, 0, FISHEYE[0], 0, FISHEYE[1]),
        make_lens("kannala_brandt", *FISHEYE),
    ),
    "Mei and the pinhole": (
        make_lens("mei", 0, *RADTAN),
        make_lens("opencv_radtan", *RADTAN),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_lens_that_opencv_has_is_as_opencv_has_it(name):
    lens, theirs = PAIRS[name]
    moved = np.array([[0.5, 0.02, 30.0], [-0.01, 0.55, 20.0], [0.0, 0.0, 1.0]])
    for mine, their_places in zip(
        source_places(moved, lens, (704, 256)),
        source_places(moved, theirs, (704, 256)),
        strict=True,
    ):
        np.testing.assert_allclose(mine, their_places, atol=1e-3)
    grid = np.stack(np.meshgrid(np.linspace(200, 1400, 13), np.linspace(100, 800, 9)), -1).reshape(
        -1, 2
    )
    tight = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 200, 1e-12)
    undo = cv2.fisheye.undistortPoints if theirs.kind == "fisheye" else cv2.undistortPoints
    expected = undo(
        grid[:, None],
        K,
        np.array(theirs.coefficients),
        R=np.eye(3),
        P=K,
        criteria=tight,
    )[:, 0]
    np.testing.assert_allclose(rectified_places(grid, lens), expected, atol=1e-6)
    for alpha in (0.0, 1.0):
        if theirs.kind == "pinhole":  # the fisheye's own rule is another
            np.testing.assert_allclose(
                rectified_camera(lens, WH, alpha),
                rectified_camera(theirs, WH, alpha),
                rtol=0.01,
            )


@given(
    st.lists(st.floats(-0.02, 0.02), min_size=4, max_size=4),
    st.floats(0.5, 1.0),  # below, such a wide lens may fold
    st.floats(-3.1, 3.1),
    st.floats(0.0, 1.3),
    st.sampled_from(["ftheta", "mei"]),
)
@example(values=[0.0, 0.015625, 0.0, 0.0], xi=0.0, turn=0.0, theta=1.25, kind="mei")
def test_there_and_back_is_where_it_began(values, xi, turn, theta, kind):
    coefficients = (
        (0.0, 1.0, *values) if kind == "ftheta" else (xi, *(0.2 * value for value in values))
    )
    lens = make_lens(kind, *coefficients)
    flat = np.tan(theta) * np.array([[np.cos(turn), np.sin(turn)]])
    np.testing.assert_allclose(straight(bent(flat, lens), lens), flat, rtol=1e-6, atol=1e-9)


def test_the_centre_and_what_lies_behind_have_places():
    for lens in (
        make_lens("ftheta", 0.0, 0.9, 0.01),
        make_lens("mei", 1.4, *RADTAN),
    ):
        assert bent(np.zeros((1, 2)), lens).tolist() == [[0.0, 0.0]]
        assert straight(np.zeros((1, 2)), lens).tolist() == [[0.0, 0.0]]
        assert np.isfinite(rectified_places(np.array([[0.0, 0.0], [1e4, -1e4]]), lens)).all()
        # A small step at the centre is as long in the straightened image as in the stored one.
        step = np.array([[K[0, 2], K[1, 2]], [K[0, 2] + 0.01, K[1, 2]]])
        np.testing.assert_allclose(
            np.diff(rectified_places(step, lens), axis=0),
            [[0.01, 0.0]],
            atol=1e-5,
        )


def test_mei_is_the_projection_from_a_point_above_the_sphere():
    rng = np.random.default_rng(5)
    xi = 1.2
    rays = rng.normal(size=(200, 3)) + np.array([0, 0, 2.5])
    rays = rays[rays[:, 2] > 0.2]
    lens = make_lens("mei", xi, *RADTAN)
    unit = rays / np.linalg.norm(rays, axis=1, keepdims=True)
    points = np.c_[unit[:, :2] / (unit[:, 2:] + xi), np.ones(len(unit))]
    expected = cv2.projectPoints(points, np.zeros(3), np.zeros(3), K, np.array(RADTAN))[0][:, 0]
    pixels = bent(rays[:, :2] / rays[:, 2:], lens) @ K[:2, :2].T + K[:2, 2]
    np.testing.assert_allclose(pixels, expected, atol=1e-6)


def test_f_theta_is_that_of_the_physical_ai_developer_kit():
    models = pytest.importorskip(
        "physical_ai_av.utils.camera_models",
        reason="pip install physical_ai_av",
    )
    forward = [
        0.0,
        930.0,
        4.0,
        -21.0,
        3.0,
    ]  # pixels per radian^n, as its calibration has them
    row = {
        "width": 1920,
        "height": 1080,
        "cx": 961.3,
        "cy": 542.7,
        **{f"fw_poly_{n}": k for n, k in enumerate(forward)},
    }
    theta = np.linspace(0.0, 1.2, 400)
    radius = np.polynomial.Polynomial(forward)(theta)
    back = np.polynomial.Polynomial.fit(radius, theta, 4).convert().coef
    kit = models.FThetaCameraModel.from_camera_row(
        {**row, **{f"bw_poly_{n}": k for n, k in enumerate(back)}}
    )
    camera = np.array([[930.0, 0, 961.3], [0, 930.0, 542.7], [0, 0, 1]])
    lens = make_lens("ftheta", *(k / 930.0 for k in forward), camera=camera)
    rng = np.random.default_rng(2)
    rays = np.c_[rng.uniform(-2, 2, (500, 2)), np.ones(500)]
    pixels = bent(rays[:, :2], lens) @ camera[:2, :2].T + camera[:2, 2]
    np.testing.assert_allclose(pixels, kit.ray2pixel(rays), atol=1e-3)
    kit_rays = kit.pixel2ray(pixels)
    mine = straight((pixels - camera[:2, 2]) / 930.0, lens)
    # Its polynomial back is a fit: its own way there and back is off by as much.
    off = np.linalg.norm(kit.ray2pixel(kit_rays) - pixels, axis=1).max()
    assert (
        np.linalg.norm((kit_rays[:, :2] / kit_rays[:, 2:] - mine) * 930.0, axis=1).max()
        < 20 * off + 1e-3
    )
    np.testing.assert_allclose(mine, rays[:, :2], atol=1e-9)


def test_what_is_shown_with_alpha():
    lens = make_lens("ftheta", 0.0, 1.0, 0.0, -0.05)
    corners = np.array(
        [
            [0.0, 0.0],
            [WH[0] - 1.0, 0.0],
            [0.0, WH[1] - 1.0],
            [WH[0] - 1.0, WH[1] - 1.0],
        ]
    )
    full_view = dataclasses.replace(lens, rectified=rectified_camera(lens, WH, 1.0))
    assert (rectified_places(corners, full_view) >= -1e-6).all()
    assert (rectified_places(corners, full_view) <= np.array(WH) - 1 + 1e-6).all()
    full = dataclasses.replace(lens, rectified=rectified_camera(lens, WH, 0.0))
    x, y = source_places(np.eye(3), full, WH)
    assert min(x.min(), y.min()) > -1
    assert (x.max() < WH[0]) & (y.max() < WH[1])


def test_too_many_coefficients_are_refused():
    with pytest.raises(ConfigError, match="at most 5"):
        make_lens("mei", *range(6))
    assert isinstance(make_lens("mei", 1.0), Lens)
