"""Images are looked at before they are stored: header, size, end."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from fuelrail.loaders.decode import make_decoder
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.sharding.write.images import check_pixels, image_size
from support.nuscenes_tables import encode_image
from support.shared_data import shared_data

JPEG = encode_image(1, 64, 48)
SIZE_AT = JPEG.index(b"\xff\xc0") + 5


def png(width=20, height=10) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(buffer, "PNG")
    return buffer.getvalue()


def test_sizes():
    assert image_size(JPEG, "jpg") == (64, 48)
    assert image_size(memoryview(JPEG), "jpg") == (64, 48)
    assert image_size(png(), "png") == (20, 10)


def test_padding_after_the_end_is_let_through():
    assert image_size(JPEG + bytes(100), "jpg") == (64, 48)


@pytest.mark.parametrize("keep", [*range(0, 600, 37), len(JPEG) - 2, len(JPEG) - 1])
def test_every_truncation_is_seen(keep):
    with pytest.raises(ImageError, match=r"truncated|not a JPEG|header"):
        image_size(JPEG[:keep], "jpg")


@pytest.mark.parametrize("keep", [0, 7, 8, 20, 33, len(png()) - 1])
def test_every_truncation_of_a_png_is_seen(keep):
    with pytest.raises(ImageError, match=r"truncated|not a PNG|header"):
        image_size(png()[:keep], "png")


@pytest.mark.parametrize(
    ("data", "extension", "says"),
    [
        (png(), "jpg", "not a JPEG: it starts with 89 50 4e 47"),
        (JPEG, "png", "not a PNG"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "jpg", "git-LFS pointer"),
        (b"\xff\xd8" + b"\x00" * 50 + b"\xff\xd9", "jpg", "expected a marker at byte 2"),
        (b"\xff\xd8\xff\xe0\x00\x01\x00\x00\xff\xd9", "jpg", "segment 0xffe0 at byte 2 claims 1 bytes"),
        (JPEG[:SIZE_AT] + b"\0\0" + JPEG[SIZE_AT + 2 :], "jpg", "64x0 pixels"),
    ],
)
def test_other_bytes_are_refused(data, extension, says):
    with pytest.raises(ImageError, match=says):
        image_size(data, extension)


def test_pixels_are_decoded():
    check_pixels(JPEG, "jpg", (64, 48))
    check_pixels(png(), "png", (20, 10))
    with pytest.raises(ImageError, match=r"k\.m: 64 x 48 pixels, meta.json says 48 x 64"):
        check_pixels(JPEG, "jpg", (48, 64), key="k", member="m")
    damaged = bytearray(JPEG)
    scan = damaged.index(b"\xff\xda")
    damaged[scan + 20 : -2] = bytes(len(damaged) - scan - 22)
    assert image_size(damaged, "jpg") == (64, 48)
    with pytest.raises(ImageError, match="damaged JPEG"):
        check_pixels(bytes(damaged), "jpg", None)
    broken = bytearray(png(40, 40))
    broken[41:60] = bytes(19)
    with pytest.raises(ImageError, match="fails its checksum: the file is damaged"):
        check_pixels(bytes(broken), "png", None)


HUGE_PNG = png()[:16] + (65535).to_bytes(4, "big") * 2 + png()[24:]
ARITHMETIC = JPEG.replace(b"\xff\xc0", b"\xff\xc9", 1)


@pytest.mark.parametrize(
    ("data", "extension", "says"),
    [
        (HUGE_PNG, "png", "65535x65535 pixels is over the limit"),
        (ARITHMETIC, "jpg", "arithmetic-coded JPEG is not supported"),
    ],
)
def test_l1_m3_what_the_loader_refuses_is_refused_by_the_writer_and_verify_deep(data, extension, says):
    for refuse in (
        lambda: image_size(data, extension),
        lambda: check_pixels(data, extension, None),
        lambda: make_decoder("turbo").decode_into(data, ImageMap.identity((8, 8)), np.empty((3, 8, 8), np.uint8)),
    ):
        with pytest.raises(ImageError, match=says):
            refuse()


@pytest.mark.real
def test_sizes_agree_with_pillow_on_real_files():
    folder = shared_data("jpeg-pillow")
    compared = 0
    for path in sorted(folder.rglob("*.jp*g")):
        data = path.read_bytes()
        try:
            with Image.open(io.BytesIO(data)) as image:
                expected = image.size if image.format in ("JPEG", "MPO") else None
        except (OSError, SyntaxError, Warning):
            continue
        try:
            size = image_size(data, "jpg")
        except ImageError:
            continue
        assert size == expected, path.name
        compared += 1
    assert compared >= 5


@pytest.mark.real
def test_pointers_of_git_lfs_are_named():
    pointers = sorted(shared_data("lfs-pointers").rglob("*.jpg"))
    assert pointers
    for path in pointers:
        with pytest.raises(ImageError, match="git lfs pull"):
            image_size(path.read_bytes(), "jpg")
