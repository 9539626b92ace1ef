"""Images before they are stored: header, size and end; stored smaller, pixels and calibration by the same map."""

from __future__ import annotations

import io

import cv2
import msgspec
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from fuelrail.loaders.decode import make_decoder
from fuelrail.pipeline.errors import ConfigError, DatasetExistsError, ImageError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.transforms.image_map import ImageMap
from fuelrail.sharding.planning.recipe import parse_images
from fuelrail.sharding.sources.shared.pictures import check_pixels, image_size
from fuelrail.sharding.sources.shared.scan_table import Reference
from fuelrail.sharding.verify.dataset import verify
from fuelrail.sharding.write.images import (
    stored_field,
    stored_share,
    stored_size,
    transcode,
)
from support.nuscenes_tables import build_nuscenes, encode_image
from support.sharding import digests, shard_nuscenes
from support.shared_data import shared_data
from support.source_world import samples_of

JPEG = encode_image(1, 64, 48)
SIZE_AT = JPEG.index(b"\xff\xc0") + 5


def png(width=20, height=10) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(buffer, "PNG")
    return buffer.getvalue()


def test_sizes_and_padding_after_the_end():
    for data in (JPEG, memoryview(JPEG), JPEG + bytes(100)):
        assert image_size(data, "jpg") == (64, 48)
    assert image_size(png(), "png") == (20, 10)


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
        (png(), "jpg", "a PNG, not a JPEG as its name says; name it .png"),
        (JPEG, "png", "a JPEG, not a PNG as its name says; name it .jpg"),
        (b"RIFF", "png", "not a PNG: it starts with 52 49 46 46"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "jpg",
            "git-LFS pointer",
        ),
        (
            b"\xff\xd8" + b"\x00" * 50 + b"\xff\xd9",
            "jpg",
            "expected a marker at byte 2",
        ),
        (
            b"\xff\xd8\xff\xe0\x00\x01\x00\x00\xff\xd9",
            "jpg",
            "segment 0xffe0 at byte 2 claims 1 bytes",
        ),
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
def test_what_the_loader_refuses_is_refused_by_the_writer_and_verify_deep(data, extension, says):
    for refuse in (
        lambda: image_size(data, extension),
        lambda: check_pixels(data, extension, None),
        lambda: make_decoder("turbo").decode_into(
            data, ImageMap.identity((8, 8)), np.empty((3, 8, 8), np.uint8)
        ),
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


def test_what_may_be_written():
    assert parse_images("resize=0.5,quality=92").resize == 0.5
    assert parse_images("size=800x450").size == (800, 450)
    assert (
        parse_images("quality=75").quality,
        parse_images("resize=1").quality,
    ) == (75, 92)
    assert "simplejpeg " in parse_images("quality=75").by


@pytest.mark.parametrize(
    "text",
    (
        "",
        "resize",
        "resize=2",
        "resize=0",
        "resize=x",
        "resize=-1",
        "resize=nan",
        "resize=0.5,resize=0.5",
        "resize=0.5,size=10x10",
        "size=0x5",
        "size=800",
        "quality=0",
        "quality=101",
        "colour=1",
        "by=1",
    ),
)
def test_what_may_not(text):
    with pytest.raises(ConfigError, match=r"images|write resize=FACTOR"):
        parse_images(text)


def test_sizes_of_what_is_stored():
    half = parse_images("resize=0.5")
    fixed = parse_images("size=800x450")
    assert stored_size(half, (1600, 900)) == (800, 450)
    assert stored_size(half, (1555, 901)) == (778, 450)
    assert stored_size(fixed, (1920, 1280)) == (800, 450)
    assert stored_size(parse_images("quality=50"), (31, 17)) == (31, 17)
    with pytest.raises(ImageError, match="images only shrink"):
        stored_size(fixed, (640, 480))
    with pytest.raises(ImageError, match="images only shrink"):
        stored_size(parse_images("resize=0.1"), (4, 4))
    members = (
        Reference("lidar.npy", "", 5),
        Reference(name="cam.jpg", ref="", bytes=5, width=1600, height=900),
    )
    assert stored_share(half, members) == 0.25
    assert stored_share(None, members) == stored_share(half, members[:1]) == 1.0
    assert stored_field("cam.png", half) == "cam.jpg"
    assert stored_field("cam.png", None) == "cam.png"


def spots(width, height, centres):
    """A dark image with soft white spots at given pixel coordinates (centre of the top-left pixel is 0, 0)."""
    y, x = np.mgrid[:height, :width]
    image = np.zeros((height, width))
    for u, v in centres:
        image += 230 * np.exp(-((x - u) ** 2 + (y - v) ** 2) / (2 * 6.0**2))
    return np.repeat(np.clip(image, 0, 255).astype(np.uint8)[..., None], 3, 2)


def centroid(image, near, radius):
    u, v = (round(value) for value in near)
    part = image[v - radius : v + radius + 1, u - radius : u + radius + 1].astype(float)
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return u + (part * x).sum() / part.sum(), v + (part * y).sum() / part.sum()


@pytest.mark.parametrize("spec", ["resize=0.5", "resize=0.37", "size=160x120", "size=201x97"])
@pytest.mark.parametrize("extension", ["jpg", "png"])
def test_pixels_land_where_the_calibration_says(dataroot, tmp_path, spec, extension):
    width = 400
    height = 240
    centres = [(60.0, 50.0), (333.0, 61.5), (199.5, 180.0)]
    image = spots(width, height, centres)
    recipe = parse_images(f"{spec},quality=95")
    encoded = (
        simplejpeg.encode_jpeg(image, 98, "RGB", "444")
        if extension == "jpg"
        else cv2.imencode(".png", image)[1]
    )
    small = simplejpeg.decode_jpeg(transcode(bytes(encoded), extension, recipe), "GRAY")[..., 0]
    nuscenes = dataroot("a1", cameras=("CAM_FRONT",), size=(width, height))
    shard_nuscenes(nuscenes.root, tmp_path / "plain")
    shard_nuscenes(nuscenes.root, tmp_path / "small", images=msgspec.to_builtins(recipe))
    (old,), (new,) = (samples_of(tmp_path / name).values() for name in ("plain", "small"))
    assert new.geometry.img_wh[0].tolist() == list(reversed(small.shape))
    # What was at pixel p is at K' K^-1 p.
    moved = new.geometry.intrinsics[0] @ np.linalg.inv(old.geometry.intrinsics[0])
    for u, v in centres:
        expected = (moved @ [u, v, 1])[:2]
        centre = centroid(small, expected, round(3 * 6 * max(small.shape) / width) + 2)
        np.testing.assert_allclose(centre, expected, atol=0.08)


def test_a_transcoded_dataset(dataroot, tmp_path):
    nuscenes = dataroot("a2 b2", cameras=("CAM_FRONT", "CAM_BACK"), size=(96, 64))
    options = {
        "images": {"resize": 0.5, "quality": 80},
        "splits": {"train": 0.5, "val": 0.5},
    }
    manifest = shard_nuscenes(nuscenes.root, tmp_path / "one", **options).manifest
    shard_nuscenes(nuscenes.root, tmp_path / "two", num_workers=2, **options)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert verify(tmp_path / "one", deep=True, num_threads=1).faults == []
    assert [camera.sizes for camera in manifest.cameras] == [
        ((48, 32),),
        ((48, 32),),
    ]
    assert manifest.provenance["recipe"]["images"]["quality"] == 80
    for sample in samples_of(tmp_path / "one").values():
        for channel, data in sample.images.items():
            with Image.open(io.BytesIO(data)) as image:
                assert image.size == (48, 32)
            assert (
                sample.meta.cameras[channel].width,
                sample.meta.cameras[channel].height,
            ) == (
                48,
                32,
            )
    with pytest.raises(DatasetExistsError, match=r"images: .* there, none here"):
        shard_nuscenes(nuscenes.root, tmp_path / "one", splits=options["splits"])


def test_images_that_would_grow_are_refused(dataroot, tmp_path):
    nuscenes = dataroot("a1")
    with pytest.raises(ImageError, match="48 x 32 pixels cannot be stored as 64 x 32"):
        shard_nuscenes(nuscenes.root, tmp_path / "out", images={"size": [64, 32]})
    assert not (tmp_path / "out").exists()


def test_pngs_become_jpegs(tmp_path):
    nuscenes = build_nuscenes(tmp_path / "source", {"a": 1}, cameras=("CAM_FRONT",), size=(64, 48))
    row = next(
        row
        for row in nuscenes.tables["sample_data"]
        if row["is_key_frame"] and "CAM" in row["filename"]
    )
    pixels = cv2.imread(str(nuscenes.root / row["filename"]))
    row["filename"] = row["filename"].replace(".jpg", ".png")
    cv2.imwrite(str(nuscenes.root / row["filename"]), pixels)
    nuscenes.write("sample_data")
    shard_nuscenes(nuscenes.root, tmp_path / "png")
    shard_nuscenes(nuscenes.root, tmp_path / "jpg", images={"quality": 97})
    assert "cam_front.png" in open_dataset(tmp_path / "png").index.names
    assert "cam_front.jpg" in open_dataset(tmp_path / "jpg").index.names
    (sample,) = samples_of(tmp_path / "jpg").values()
    decoded = simplejpeg.decode_jpeg(sample.images["cam_front"], "BGR")
    assert np.median(np.abs(decoded.astype(int) - pixels)) <= 3  # colours in their places
    assert verify(tmp_path / "png", deep=True, num_threads=1).faults == []


def test_damage_is_refused(tmp_path):
    image = bytearray(simplejpeg.encode_jpeg(spots(64, 64, [(30, 30)]), 90, "RGB", "420"))
    begin = image.index(b"\xff\xda") + 14
    image[begin : begin + 30] = bytes(30)
    with pytest.raises(ImageError, match="damaged JPEG"):
        transcode(bytes(image[:-40]) + b"\xff\xd9", "jpg", parse_images("resize=0.5"))
