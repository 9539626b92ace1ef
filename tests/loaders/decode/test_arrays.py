"""`fr.decode_jpeg` and `fr.decode_batch`: the pixels of libjpeg-turbo and of a loader, into memory of any kind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import simplejpeg
import torch

import fuelrail as fr
from fuelrail.loaders.decode.arrays import decode_jpeg
from fuelrail.loaders.decode.turbo import TurboDecoder
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.transforms.image_map import ImageMap
from support.pictures import encode, natural

WIDTH = 333
HEIGHT = 215
PLAIN = encode(natural(WIDTH, HEIGHT), subsampling="4:2:0", quality=90)
RESTARTS = encode(natural(WIDTH, HEIGHT), subsampling="4:2:0", quality=90, restart_marker_rows=1)
WHOLE = simplejpeg.decode_jpeg(PLAIN, "RGB")
DAMAGED = PLAIN[:900]


def by_loader(encoded: bytes, image_map: ImageMap) -> np.ndarray:
    """What a loader's decoder gives, as (height, width, 3)."""
    width, height = image_map.out_wh
    planes = np.empty((3, height, width), np.uint8)
    TurboDecoder().decode_into(encoded, image_map, planes)
    return planes.transpose(1, 2, 0)


@pytest.mark.parametrize(
    "data",
    [
        PLAIN,
        bytearray(PLAIN),
        memoryview(PLAIN),
        np.frombuffer(PLAIN, np.uint8),
        torch.frombuffer(bytearray(PLAIN), dtype=torch.uint8),
    ],
    ids=["bytes", "bytearray", "memoryview", "array", "tensor"],
)
def test_a_whole_image_has_the_pixels_of_libjpeg_turbo(data) -> None:
    assert np.array_equal(fr.decode_jpeg(data), WHOLE)
    assert np.array_equal(fr.decode_jpeg(data, order="bgr"), WHOLE[..., ::-1])


@pytest.mark.parametrize("encoded", [PLAIN, RESTARTS], ids=["plain", "restarts"])
def test_a_crop_in_its_own_size_has_them_too(encoded: bytes) -> None:
    for crop in ((0, 0, 5, 7), (17, 33, 200, 101), (0, 200, WIDTH, 15)):
        left, top, width, height = crop
        expected = WHOLE[top : top + height, left : left + width]
        assert np.array_equal(fr.decode_jpeg(encoded, crop=crop), expected)
        planes = np.empty((3, height, width), np.uint8)
        assert fr.decode_jpeg(encoded, crop=crop, out=planes) is planes
        assert np.array_equal(planes, expected.transpose(2, 0, 1))


@pytest.mark.parametrize("encoded", [PLAIN, RESTARTS], ids=["plain", "restarts"])
@pytest.mark.parametrize("crop", [None, (30, 80, 256, 128)], ids=["whole", "crop"])
@pytest.mark.parametrize("size", [(128, 64), (100, 100), (400, 300)], ids=str)
def test_a_resized_image_has_the_pixels_of_a_loader(encoded, crop, size) -> None:
    image_map = ImageMap.identity((WIDTH, HEIGHT))
    image_map = (image_map if crop is None else image_map.crop(*crop)).resize(*size)
    expected = by_loader(encoded, image_map)
    assert np.array_equal(fr.decode_jpeg(encoded, size=size, crop=crop), expected)
    bgr = np.empty((3, *size[::-1]), np.uint8)
    fr.decode_jpeg(encoded, size=size, crop=crop, out=bgr, order="bgr")
    assert np.array_equal(bgr[::-1].transpose(1, 2, 0), expected)


def test_the_size_may_be_a_scale_or_that_of_the_memory() -> None:
    expected = fr.decode_jpeg(PLAIN, size=(67, 43), crop=(0, 0, 134, 86))
    assert np.array_equal(fr.decode_jpeg(PLAIN, crop=(0, 0, 134, 86), scale=0.5), expected)
    tensor = torch.empty((43, 67, 3), dtype=torch.uint8)
    assert fr.decode_jpeg(PLAIN, crop=(0, 0, 134, 86), out=tensor) is tensor
    assert np.array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("shape", [(4, 3, 43, 67), (4, 43, 67, 3)], ids=["planes", "interleaved"])
def test_a_batch_has_the_pixels_of_each(shape: tuple[int, ...]) -> None:
    small = encode(natural(80, 60), subsampling="4:4:4")
    out = torch.zeros(shape, dtype=torch.uint8)
    assert fr.decode_batch([PLAIN, small, RESTARTS, encode(natural(90, 70), "png")], out) is out
    for number, encoded in enumerate([PLAIN, small, RESTARTS]):
        expected = np.empty(shape[1:], np.uint8)
        fr.decode_jpeg(encoded, out=expected)
        assert np.array_equal(out[number].numpy(), expected)
    assert out[3].any()


@pytest.mark.parametrize("shape", [(3, 3, 43, 67), (3, 43, 67, 3)], ids=["planes", "interleaved"])
def test_a_batch_names_what_is_damaged_and_decodes_the_others(shape: tuple[int, ...]) -> None:
    out = np.zeros(shape, np.uint8)
    with pytest.raises(ImageError, match=r"^image 0 \(and 1 others\): JPEG cannot be decoded"):
        fr.decode_batch([DAMAGED, PLAIN, b"no image"], out)
    expected = np.empty(shape[1:], np.uint8)
    fr.decode_jpeg(PLAIN, out=expected)
    assert np.array_equal(out[1], expected)


REFUSED = {
    "no image": ({"data": b"no image"}, ImageError, "neither JPEG nor PNG"),
    "damaged": ({"data": DAMAGED}, ImageError, "JPEG cannot be decoded"),
    "damaged, smaller": ({"data": DAMAGED, "size": (60, 40)}, ImageError, "JPEG cannot be decoded"),
    "text": ({"data": "name.jpg"}, ConfigError, "expected bytes, a NumPy array .* got str"),
    "array": (
        {"data": np.zeros((4, 4), np.uint8)},
        ConfigError,
        r"uint8 array of one axis, got .*\(4, 4\)",
    ),
    "order": ({"order": "gbr"}, ConfigError, "order='gbr' must be 'rgb' or 'bgr'"),
    "crop": (
        {"crop": (0, 0, WIDTH + 1, 2)},
        ConfigError,
        "must lie within the image, which has 333x215",
    ),
    "no crop": ({"crop": (0, 0, 0, 2)}, ConfigError, "must lie within the image"),
    "size": ({"size": (0, 5)}, ConfigError, "image size 0x5"),
    "both": ({"size": (5, 5), "scale": 1.0}, ConfigError, "give one of them"),
    "scale": ({"scale": float("nan")}, ConfigError, "scale=nan must be a number above 0"),
    "another size": (
        {"out": np.empty((5, 6, 3), np.uint8), "size": (5, 6)},
        ConfigError,
        r"out is for 6x5 pixels \(width x height\), the result has 5x6",
    ),
    "float": ({"out": np.empty((5, 6, 3), np.float32)}, ConfigError, "got float32"),
    "strides": (
        {"out": np.empty((9, 6, 3), np.uint8)[::2]},
        ConfigError,
        "contiguous uint8 memory",
    ),
    "channels": ({"out": np.empty((5, 6, 4), np.uint8)}, ConfigError, r"\(height, width, 3\) or"),
    "device": (
        {"out": torch.empty((5, 6, 3), dtype=torch.uint8, device="meta")},
        ConfigError,
        "a CPU tensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_decoded_is_refused(case: str) -> None:
    arguments, kind, says = REFUSED[case]
    with pytest.raises(kind, match=says):
        decode_jpeg(**{"data": PLAIN, **arguments})


def test_a_batch_of_another_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"out for 2 images must have the shape \(2, 3, height"):
        fr.decode_batch([PLAIN, PLAIN], np.empty((3, 3, 5, 5), np.uint8))


def test_threads_do_not_disturb_each_other() -> None:
    expected = [fr.decode_jpeg(PLAIN, size=(80 + n, 50)) for n in range(8)]
    start = threading.Barrier(4)

    def decode(first: int) -> bool:
        start.wait()
        return all(
            np.array_equal(fr.decode_jpeg(RESTARTS, size=(80 + n % 8, 50)), expected[n % 8])
            for n in range(first, first + 24)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(decode, range(4)))
