"""Undistortion against OpenCV's own, and against a world seen through a bent lens, for every backend."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from itertools import product

import cv2
import numpy as np
import pytest
import torch

from fuelrail.loaders.decode import (
    decode_views,
    make_decoder,
    splice,
    turbo,
)
from fuelrail.loaders.decode.lens import rectified_camera, sampling, source_rows
from fuelrail.loaders.decode.splice import splice_rows
from fuelrail.pipeline import native
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.pipeline.transforms.lens import Lens, read_lens
from support.backends import BACKENDS, needs_dali
from support.image_maps import EVERY_PRESET, NUSCENES_WH, photograph, preset_map
from support.pictures import encode, natural, psnr_db, seen, shift_px

pytestmark = pytest.mark.slow

K = ((1110.0, 0.0, 812.3), (0.0, 1105.0, 446.1), (0.0, 0.0, 1.0))
WIDE = ((620.0, 0.0, 790.0), (0.0, 622.0, 455.0), (0.0, 0.0, 1.0))
LENSES = {
    "radtan": Lens("pinhole", (-0.33, 0.11, 0.0007, -0.0004, -0.012), K, K),
    "rational": Lens("pinhole", (0.9, 0.3, 0.0004, -0.0003, 0.02, 1.25, 0.55, 0.06), K, K),
    "fisheye": Lens("fisheye", (0.05, -0.012, 0.004, -0.0009), WIDE, WIDE),
}

PAIRS = [
    *(("radtan", preset) for preset in EVERY_PRESET),
    *((name, preset) for name in ("rational", "fisheye") for preset in ("bevdet", "eval")),
]
SQUARE = 100
DALI_PAIRS = [pytest.param(("dali", backend), marks=needs_dali) for backend in ("turbo", "pillow")]


def project(lens: Lens, rectified: np.ndarray) -> np.ndarray:
    """Rectified pixels (n, 2) to stored ones, by OpenCV's projection of the rays that they see."""
    rays = np.c_[rectified, np.ones(len(rectified))] @ np.linalg.inv(np.array(lens.rectified)).T
    camera = np.array(lens.stored)
    dist = np.array(lens.coefficients)
    zero = np.zeros(3)
    if lens.kind == "fisheye":
        return cv2.fisheye.projectPoints(rays[None], zero, zero, camera, dist)[0][0]
    return cv2.projectPoints(rays, zero, zero, camera, dist)[0][:, 0]


def straightened(lens: Lens, picture: np.ndarray) -> np.ndarray:
    camera = np.array(lens.stored)
    dist = np.array(lens.coefficients)
    if lens.kind == "fisheye":
        return cv2.fisheye.undistortImage(picture, camera, dist, Knew=np.array(lens.rectified))
    return cv2.undistort(picture, camera, dist, newCameraMatrix=np.array(lens.rectified))


@functools.cache
def camera_file(kind: str = "jpeg", **options: object) -> bytes:
    return encode(natural(*NUSCENES_WH), kind, **options)


@functools.cache
def straightened_picture(lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    """What OpenCV makes of the picture (3, h, w), and of a white one (h, w)."""
    picture = natural(*NUSCENES_WH)
    white = straightened(lens, np.full_like(picture, 255))[..., 0]
    return straightened(lens, picture).transpose(2, 0, 1), white


@functools.cache
def board(name: str) -> bytes:
    """What the lens makes of a checkerboard whose corners lie at multiples of `SQUARE` in the rectified image."""
    lens = LENSES[name]
    (width, height) = NUSCENES_WH
    grid = np.stack(
        np.meshgrid(np.arange(width, dtype=float), np.arange(height, dtype=float)),
        -1,
    ).reshape(-1, 1, 2)
    camera = np.array(lens.stored)
    dist = np.array(lens.coefficients)
    to = np.array(lens.rectified)
    criteria = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 30, 1e-7)
    if lens.kind == "fisheye":
        places = cv2.fisheye.undistortPoints(grid, camera, dist, P=to, criteria=criteria)
    elif hasattr(cv2, "undistortPointsIter"):  # OpenCV 4
        places = cv2.undistortPointsIter(grid, camera, dist, np.eye(3), to, criteria)
    else:
        places = cv2.undistortPoints(grid, camera, dist, P=to, criteria=criteria)
    waves = np.sin(np.pi * places.reshape(height, width, 2) / SQUARE).prod(axis=-1)
    gray = 128 + 100 * np.tanh(30 * waves)
    return encode(
        np.repeat(np.rint(gray).astype(np.uint8)[..., None], 3, axis=2),
        subsampling="4:2:0",
    )


@functools.cache
def corners(name: str, preset: str) -> tuple[ImageMap, int, np.ndarray]:
    """A map with a lens, how far around them corners are looked for [px], and where whole ones are shown (n, 1, 2)."""
    image_map = with_lens(preset_map(preset, sample=5), LENSES[name])
    reach = max(
        5, round(12 * image_map.max_scale)
    )  # the board's edges are soft: as much of each at every scale
    width, height = NUSCENES_WH
    grid = np.array(
        [(u, v) for u in range(SQUARE, width, SQUARE) for v in range(SQUARE, height, SQUARE)],
        np.float64,
    )
    stored = project(LENSES[name], grid)
    pixels = (np.c_[grid, np.ones(len(grid))] @ image_map.centre_matrix().T)[:, :2]
    inside = ((pixels > reach + 7) & (pixels < np.array(image_map.out_wh) - reach - 8)).all(1)
    inside &= (stored > 40).all(1) & (stored < np.array(NUSCENES_WH) - 40).all(1)
    mask = seen(image_map, 40)
    visible_pixels = [place for place in pixels[inside] if mask[round(place[1]), round(place[0])]]
    assert len(visible_pixels) >= 10
    return image_map, reach, np.array(visible_pixels, np.float32)[:, None]


def decode(backend: str, encoded: bytes, image_map: ImageMap) -> np.ndarray:
    out = np.full((3, image_map.out_wh[1], image_map.out_wh[0]), 99, np.uint8)
    make_decoder(backend).decode_into(encoded, image_map, out)
    return out


def with_lens(image_map: ImageMap, lens: Lens) -> ImageMap:
    return dataclasses.replace(image_map, lens=lens)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        ("radtan", None),
        ("rational", None),
        ("fisheye", None),
        ("fisheye", 0.0),
        ("rational", 0.0),
        ("radtan", 1.0),
    ],
)
def test_at_full_size_it_is_opencvs_undistortion(
    backend: str, name: str, alpha: float | None
) -> None:
    lens = LENSES[name]
    if alpha is not None:
        lens = dataclasses.replace(lens, rectified=rectified_camera(lens, NUSCENES_WH, alpha))
    out = decode(
        backend,
        camera_file("png"),
        with_lens(ImageMap.identity(NUSCENES_WH), lens),
    )
    expected, white = straightened_picture(lens)
    inside = cv2.erode(white, np.ones((5, 5))) == 255
    assert inside.mean() > (0.3 if alpha == 1.0 else 0.6)
    assert psnr_db(out, expected, inside) > 50.0
    assert (out[:, white == 0] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("preset", ["bevdet", "eval"])
def test_f_theta_shows_what_the_fisheye_shows(backend: str, preset: str) -> None:
    k1, k2, _, _ = LENSES["fisheye"].coefficients
    fisheye = Lens("fisheye", (k1, k2, 0.0, 0.0), WIDE, WIDE)
    image_map = preset_map(preset)
    ftheta = Lens("ftheta", (0.0, 1.0, 0.0, k1, 0.0, k2), WIDE, WIDE)
    ftheta_image, fisheye_image = (
        decode(backend, photograph(), with_lens(image_map, lens)) for lens in (ftheta, fisheye)
    )
    assert psnr_db(ftheta_image, fisheye_image) > 50.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "preset"), PAIRS)
def test_checkerboard_corners_land_within_a_tenth_of_a_pixel(
    backend: str, name: str, preset: str
) -> None:
    image_map, reach, expected = corners(name, preset)
    gray = decode(backend, board(name), image_map).mean(axis=0).astype(np.float32)
    criteria = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 100, 1e-4)
    detected = cv2.cornerSubPix(
        gray.astype(np.uint8),
        expected.copy(),
        (reach, reach),
        (-1, -1),
        criteria,
    )
    errors = np.abs(detected - expected)[:, 0]
    assert errors.max() < 0.1, f"{errors.max(axis=0)} px"


@pytest.mark.parametrize("pair", [("turbo", "pillow"), *DALI_PAIRS])
@pytest.mark.parametrize(("name", "preset"), PAIRS)
def test_backends_agree(name: str, preset: str, pair: tuple[str, str]) -> None:
    image_map = with_lens(preset_map(preset), LENSES[name])
    first, second = (decode(backend, photograph(), image_map) for backend in pair)
    where = (
        cv2.erode(
            ((first.max(0) > 0) & (second.max(0) > 0)).astype(np.uint8),
            np.ones((9, 9)),
        )
        > 0
    )
    where &= seen(image_map, 6.0)
    assert where.mean() > 0.25
    assert psnr_db(first, second, where) > 38.0
    assert max(map(abs, shift_px(first, second, where))) < 0.05


@pytest.mark.parametrize(("name", "preset"), PAIRS)
def test_the_rows_that_are_needed_are_known_beforehand(name: str, preset: str) -> None:
    lens = LENSES[name]
    for sample in range(6):
        image_map = with_lens(preset_map(preset, sample), lens)
        places = sampling(image_map, lens, (1.0, 1.0), NUSCENES_WH)
        rows = places.y if places.unseen is None else places.y[~places.unseen]
        top, bottom = source_rows(image_map, lens, 0.0)
        assert 0 <= top <= max(0.0, rows.min())
        assert min(900.0, rows.max() + 1.0) <= bottom <= 900
        # Corners that a rotation turns in are not seen, but counted.
        assert rows.min() - top < 40.0
        assert bottom - rows.max() < 40.0


@pytest.mark.parametrize("backend", ["pillow", "turbo"])
@pytest.mark.parametrize("name", LENSES)
@pytest.mark.parametrize("preset", ["eval", "bevdet", "streampetr"])
def test_only_the_rows_that_are_needed_are_decoded(name, preset, backend, monkeypatch) -> None:
    image_map = with_lens(preset_map(preset), LENSES[name])
    encoded = photograph(restart_marker_rows=1)
    monkeypatch.setattr(turbo, "load_native", lambda: "not this time")
    heights = []

    def spy(*arguments, **options):
        spliced = splice_rows(*arguments, **options)
        heights.append(None if spliced is None else spliced.height)
        return spliced

    monkeypatch.setattr(splice, "splice_rows", spy)
    cut = decode(backend, encoded, image_map)
    assert [height is not None and height < 800 for height in heights] == [True]
    monkeypatch.setattr(splice, "splice_rows", lambda *arguments, **options: None)
    full_image = decode(backend, encoded, image_map)
    assert np.array_equal(cut.max(0) == 0, full_image.max(0) == 0)
    # The same pixels go in; a picture of another height is resized on another grid.
    assert psnr_db(cut, full_image) > 44.0
    assert max(map(abs, shift_px(cut, full_image, cut.max(0) > 0))) < 0.01


@pytest.mark.parametrize("name", LENSES)
@pytest.mark.parametrize("preset", ["eval", "bevdet", "streampetr", "stretched"])
def test_compiled_code_decodes_enough_rows(
    name: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_map = with_lens(preset_map(preset), LENSES[name])
    needed_rows = decode("turbo", photograph(), image_map)
    monkeypatch.setattr(turbo, "source_rows", lambda image_map, *_: (0, image_map.source_wh[1]))
    assert np.array_equal(needed_rows, decode("turbo", photograph(), image_map))


@pytest.mark.parametrize(
    "backend",
    [
        "pillow",
        "turbo",
        "turbo without native",
        pytest.param("dali", marks=needs_dali),
    ],
)
def test_two_views_are_one_decode_and_equal_those_of_two(backend: str, monkeypatch) -> None:
    if backend == "turbo without native":
        monkeypatch.setattr(turbo, "load_native", lambda: "not this time")
    decoder = make_decoder(backend.partition(" ")[0])
    decoded = []
    module = importlib.import_module(
        f"fuelrail.loaders.decode.{'pillow' if backend == 'pillow' else 'turbo'}"
    )
    for owner, name in (
        (module, "decode_jpeg"),
        (native.CameraJpeg, "picture"),
    ):
        true = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *a, true=true, **k: decoded.append(picture := true(*a, **k)) or picture,
        )
    files = photograph(), photograph(restart_marker_rows=1), camera_file("png")
    identity = ImageMap.identity(NUSCENES_WH)
    for encoded, lens, widths in product(
        files, LENSES.values(), ((700, 620), (200, 130), (900, 500))
    ):
        maps = [
            with_lens(
                identity.resize(width, round(width * 0.5625)).crop(9, top, 100, 50).rotate(degrees),
                lens,
            )
            for width, top, degrees in zip(widths, (20, 40), (0.0, 4.0), strict=True)
        ]
        together, alone = np.empty((2, 2, 3, 50, 100), np.uint8)
        decoded.clear()
        if backend == "dali":
            assert decoder.decode_batch([encoded] * 2, maps, torch.from_numpy(together)) == [
                None,
                None,
            ]
        else:
            decode_views(decoder, encoded, maps, list(together))
        assert len(decoded) == (encoded is not files[2])  # a PNG is decoded by others
        for image_map, out in zip(maps, alone, strict=True):
            decoder.decode_into(encoded, image_map, out)
        if len({image.shape[1] for image in decoded}) < 2:
            np.testing.assert_array_equal(together, alone)
        else:  # the larger view's resolution, averaged for the smaller
            np.testing.assert_array_equal(together[0], alone[0])
            assert psnr_db(together[1], alone[1]) > 50.0


def test_a_lens_that_bends_nothing_changes_nothing() -> None:
    image_map = preset_map("bevdet")
    straight = Lens("pinhole", (0.0,) * 5, K, K)
    for backend in ("turbo", "pillow"):
        plain, bent = (
            decode(backend, photograph(), view_map)
            for view_map in (image_map, with_lens(image_map, straight))
        )
        where = seen(image_map, 3.0)
        assert psnr_db(plain, bent, where) > 42.0
        assert ((plain.max(0) == 0) == (bent.max(0) == 0)).mean() > 0.999


def test_models_are_read_by_name() -> None:
    nan = np.full(14, np.nan)
    camera = np.array(K)
    assert read_lens("opencv_radtan", nan, camera) is None
    assert read_lens("none", np.arange(14.0), camera) is None
    three = nan.copy()
    three[:3] = 0.1, 0.2, 0.3
    lens = read_lens("opencv_radtan", three, camera)
    assert lens is not None
    assert lens.coefficients == (0.1, 0.2, 0.3, 0.0)
    assert lens.stored == lens.rectified == K
    with pytest.raises(ConfigError, match="dist_model 'windshield' cannot be undone"):
        read_lens("windshield", three, camera)
    with pytest.raises(ConfigError, match="at most 4 coefficients, got 14"):
        read_lens("kannala_brandt", np.arange(14.0), camera)
