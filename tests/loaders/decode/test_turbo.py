from __future__ import annotations

import gc

import cv2
import numpy as np
import pytest
import simplejpeg

from fuelrail.loaders.decode import make_decoder, turbo
from fuelrail.loaders.decode.turbo import TurboDecoder
from fuelrail.pipeline import native
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.transforms.image_map import ImageMap
from support.decoder_suite import DecoderSuite
from support.pictures import encode, natural, psnr_db, shift_px

pytestmark = pytest.mark.slow


class TestTurbo(DecoderSuite):
    backend = "turbo"


@pytest.mark.skipif(
    isinstance(native.load(), str),
    reason="the other class has tested this: no native decoder is built",
)
class TestTurboWithoutNative(DecoderSuite):
    backend = "turbo"
    turn = 1

    @pytest.fixture
    def decoder(self) -> TurboDecoder:
        return TurboDecoder(native=False)


def test_opencv_has_one_thread_while_a_decoder_lives_and_its_own_number_after(
    monkeypatch,
) -> None:
    gc.collect()
    monkeypatch.setattr(turbo, "_opencv_holds", [])  # not those of other tests' loaders
    before = cv2.getNumThreads()
    cv2.setNumThreads(2)
    try:
        chosen = cv2.getNumThreads()
        first = make_decoder("turbo")
        second = make_decoder("turbo")
        assert cv2.getNumThreads() == 1
        del first
        gc.collect()
        assert cv2.getNumThreads() == 1
        del second
        gc.collect()
        assert cv2.getNumThreads() == chosen
    finally:
        cv2.setNumThreads(before)


@pytest.mark.parametrize("scale", [0.5 - 1 / 1600, 0.25 + 1 / 1600, 0.9999, 1 / 3, 0.44])
def test_the_fast_path_equals_the_general_one(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = TurboDecoder(native=False)
    encoded = encode(natural(1600, 900), subsampling="4:2:0", quality=92)
    image_map = (
        ImageMap.identity((1600, 900))
        .resize(round(1600 * scale), round(900 * scale))
        .crop(37, 21, 300, 170)
    )
    fast = np.empty((3, 170, 300), np.uint8)
    general = np.empty((3, 170, 300), np.uint8)
    decoder.decode_into(encoded, image_map, fast)
    monkeypatch.setattr(turbo, "resize_grid", lambda *arguments: None)
    decoder.decode_into(encoded, image_map, general)
    # The warp has steps of 1/32 pixel, the resize may be off by 1/50.
    assert psnr_db(fast, general) > 40.0
    assert max(map(abs, shift_px(fast, general, np.ones((170, 300), bool)))) < 0.02


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        (1.2, 1),
        (0.51, 1),
        (0.5, 2),
        (0.26, 2),
        (0.25, 4),
        (0.125, 8),
        (0.05, 8),
    ],
)
def test_the_decoder_never_goes_below_the_resolution_asked_for(scale, factor, monkeypatch) -> None:
    sizes = []
    true_decode = simplejpeg.decode_jpeg

    def spy(*arguments, **options):
        picture = true_decode(*arguments, **options)
        sizes.append(picture.shape[:2])
        return picture

    monkeypatch.setattr(simplejpeg, "decode_jpeg", spy)
    wh = (801, 451)
    image_map = ImageMap.identity(wh).resize(max(1, int(801 * scale)), max(1, int(451 * scale)))
    width, height = image_map.out_wh
    decoder = TurboDecoder(native=False)
    decoder.decode_into(encode(natural(*wh)), image_map, np.empty((3, height, width), np.uint8))
    assert sizes == [(-(-451 // factor), -(-801 // factor))]


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("scales", [(0.5, 0.4), (0.44, 0.3), (0.25, 0.49), (0.9, 0.12)])
def test_two_views_are_one_decode_and_equal_those_of_two(
    scales, is_native: bool, monkeypatch
) -> None:
    encoded = encode(natural(1600, 900), subsampling="4:2:0", quality=92)
    decoder = TurboDecoder(native=is_native)
    decoded = []
    for owner, name in ((turbo, "decode_jpeg"), (native.CameraJpeg, "picture")):
        true = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *a, true=true, **k: decoded.append(picture := true(*a, **k)) or picture,
        )
    identity = ImageMap.identity((1600, 900))
    maps = [
        identity.resize(round(1600 * scale), round(900 * scale))
        .crop(11, 7, 180, 100)
        .rotate(degrees)
        for scale, degrees in zip(scales, (0.0, 4.0), strict=True)
    ]
    together = [np.empty((3, 100, 180), np.uint8) for _ in maps]
    decoder.decode_views(encoded, maps, together)
    assert len(decoded) == 1
    for image_map, view in zip(maps, together, strict=True):
        alone = np.empty_like(view)
        decoder.decode_into(encoded, image_map, alone)
        assert psnr_db(view, alone) > 35.0


def test_views_of_a_png_and_of_an_unscaled_jpeg_are_those_of_one() -> None:
    decoder = TurboDecoder()
    maps = [ImageMap.identity((96, 64)).crop(x, 3, 40, 30) for x in (0, 20)]
    for encoded in (encode(natural(96, 64), "png"), encode(natural(96, 64))):
        together = np.empty((2, 3, 30, 40), np.uint8)
        alone = np.empty((2, 3, 30, 40), np.uint8)
        decoder.decode_views(encoded, maps, list(together))
        for image_map, out in zip(maps, alone, strict=True):
            decoder.decode_into(encoded, image_map, out)
        assert np.array_equal(together, alone)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("is_native", [True, False])
def test_several_images_are_decoded_as_each_alone_in_one_call(
    is_native: bool, interpolation, monkeypatch
) -> None:
    """Also beside damaged ones, of which each gets an error of its own."""
    decoder = TurboDecoder(native=is_native)
    camera = encode(natural(320, 192), subsampling="4:2:0", quality=92)
    identity = ImageMap.identity((320, 192))
    half = identity.resize(160, 96).crop(3, 5, 120, 80)
    turned = identity.resize(160, 96).crop(3, 5, 120, 80).rotate(4.0)
    inputs = [
        (camera, half),
        (encode(natural(320, 192), "png"), half),
        (camera[:3000], half),
        (camera, turned),
        (b"no image", half),
        (encode(natural(320, 192), progressive=True), half),
        (camera, half.flip()),
    ]
    alone, together = np.full((2, len(inputs), 3, 80, 120), 7, np.uint8)
    expected = []
    for (encoded, image_map), out in zip(inputs, alone, strict=True):
        try:
            decoder.decode_into(encoded, image_map, out, interpolation)
            expected.append(None)
        except ImageError as error:
            expected.append(str(error))
    calls = []
    resize = native.CameraJpeg.resize
    monkeypatch.setattr(
        native.CameraJpeg,
        "resize",
        lambda *a, **k: calls.append(len(a[1])) or resize(*a, **k),
    )
    errors = decoder.decode_images(*zip(*inputs, strict=True), list(together), interpolation)
    assert [None if error is None else str(error) for error in errors] == expected
    assert [number for number, error in enumerate(errors) if error is not None] == [2, 4]
    assert np.array_equal(together, alone)
    assert calls == ([6] if decoder._native is not None and interpolation == "bilinear" else [])
