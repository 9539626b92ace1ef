"""The default size of images: that of the stored ones, pixel for pixel; where they differ, it is asked for."""

from __future__ import annotations

import io
import re

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

import fuelrail as fr
from fuelrail.__main__ import main
from fuelrail.pipeline.errors import ConfigError, StateMismatchError
from fuelrail.pipeline.format.dataset import open_dataset
from support.datasets import build_dataset, textured

SIZES = [(640, 480), (1280, 720), (239, 239), (97, 33), (8, 1)]


def encoded(size, form, seed=0) -> bytes:
    """An image of this size, in one of the forms that people store."""
    pixels = textured(np.random.default_rng(seed), *size)
    if form == "png":
        return cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()
    if form == "grey":
        return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels[..., :1]), colorspace="GRAY")
    if form == "progressive":
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", progressive=True)
        return buffer.getvalue()
    return simplejpeg.encode_jpeg(pixels, colorsubsampling=form)


def plainly(data: bytes) -> np.ndarray:
    """The pixels as a plain decode gives them, uint8 [3, H, W]."""
    if data[:2] == b"\xff\xd8":
        pixels = simplejpeg.decode_jpeg(data)
    else:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    return pixels.transpose(2, 0, 1)


def folder(root, images):
    """A folder of classes with these images, as a dataset."""
    for number, data in enumerate(images):
        ending = "jpg" if data[:2] == b"\xff\xd8" else "png"
        file = root / "images" / "abc"[number % 3] / f"{number}.{ending}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    fr.shard(f"imagefolder:{root / 'images'}", root / "out", workers=1)
    return root / "out"


def by_token(dataset, batch_size=2, **options) -> dict[str, torch.Tensor]:
    with fr.DataLoader(dataset, batch_size, world=fr.World(), **options) as loader:
        return {
            token: image
            for batch in loader
            for token, image in zip(batch["sample_token"], batch["img"].clone(), strict=True)
        }


@pytest.mark.parametrize("decoder", ["turbo", "pillow"])
@pytest.mark.parametrize("form", ["420", "444", "422", "grey", "progressive", "png"])
@pytest.mark.parametrize("size", SIZES)
def test_images_of_one_size_come_pixel_for_pixel(tmp_path, size, form, decoder) -> None:
    images = [encoded(size, form, seed) for seed in range(3)]
    dataset = folder(tmp_path, images)
    transforms = fr.Transforms(decoder=decoder)
    with fr.DataLoader(dataset, 2, transforms=transforms, world=fr.World()) as loader:
        assert loader.transforms.image == fr.ImageAugment(height=size[1], width=size[0])
    for token, image in by_token(dataset, transforms=transforms).items():
        data = images[int(re.search(r"(\d+)\.", token)[1])]
        expected = plainly(data)
        if decoder == "pillow":
            expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1)
        assert np.array_equal(image[0].numpy(), expected)


def test_matrices_of_stored_images_are_those_that_are_stored(tmp_path) -> None:
    build_dataset(tmp_path / "d", {"train": (4,)})
    with fr.DataLoader(tmp_path / "d", 4, world=fr.World()) as loader:
        (batch,) = loader
    assert torch.equal(batch["ida_mat"], torch.eye(4).expand(4, 2, 4, 4)[..., :3, :3]) or (
        torch.equal(batch["ida_mat"], torch.eye(4).expand(4, 2, 4, 4))
    )
    stored = open_dataset(tmp_path / "d")[0].geometry.intrinsics
    assert np.array_equal(batch["intrinsics"][0].numpy(), stored.astype(np.float32))


def test_images_that_differ_in_size_need_one(tmp_path, capsys) -> None:
    sizes = [(640, 480), (239, 239), (320, 240)]
    dataset = folder(tmp_path, [encoded(size, "420") for size in sizes])
    with pytest.raises(ConfigError) as caught:
        fr.DataLoader(dataset, 2)
    text = str(caught.value)
    assert text.startswith("image= is needed")
    assert "image 239x239 and 320x240 and 640x480" in text
    assert 'image={"height": 239, "width": 239}' in text and "`fuelrail presets`" in text
    loaded = by_token(dataset, transforms={"image": {"height": 60, "width": 80}})
    assert {tuple(image.shape) for image in loaded.values()} == {(1, 3, 60, 80)}
    assert main(["inspect", str(dataset), "--batch"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^img +uint8 \[2, 1, 3, 64, 64\]", out, re.MULTILINE)
    assert "img is 64 x 64 here: image= is needed" in out


def test_many_sizes_are_said_in_short(tmp_path) -> None:
    dataset = folder(tmp_path, [encoded((40 + number, 30), "420") for number in range(12)])
    with pytest.raises(ConfigError, match="image 12 sizes from 40x30 to 51x30"):
        fr.DataLoader(dataset, 2)


def test_cameras_that_differ_are_named_and_those_of_one_size_load(
    tmp_path,
) -> None:
    build_dataset(tmp_path / "d", {"train": (4,)}, size=(96, 64), back_size=(48, 80))
    with pytest.raises(ConfigError, match=r"cam_front 96x64, cam_back 48x80.*camera_groups="):
        fr.DataLoader(tmp_path / "d", 2)
    for camera, shape in (("cam_front", (64, 96)), ("cam_back", (80, 48))):
        transforms = fr.Transforms(cameras=[camera])
        with fr.DataLoader(tmp_path / "d", 2, transforms=transforms, world=fr.World()) as loader:
            assert next(iter(loader))["img"].shape == (2, 1, 3, *shape)


def test_datasets_of_a_mix_have_one_size(tmp_path) -> None:
    build_dataset(tmp_path / "a", {"train": (4,)})
    build_dataset(tmp_path / "b", {"train": (4,)}, size=(48, 80), seed=1)
    build_dataset(tmp_path / "c", {"train": (4,)}, seed=2)
    places = {name: tmp_path / name for name in "abc"}
    with pytest.raises(ConfigError, match="cam_front of 'b' 48x80"):
        fr.DataLoader({"a": places["a"], "b": places["b"]}, 2, mix={"a": 1, "b": 1})
    with fr.DataLoader({"a": places["a"], "c": places["c"]}, 2, mix={"a": 1, "c": 1}) as loader:
        assert loader.transforms.image == fr.ImageAugment(height=64, width=96)


def test_a_state_says_the_size_also_where_it_was_the_default(tmp_path) -> None:
    build_dataset(tmp_path / "d", {"train": (4,)})
    state = fr.DataLoader(tmp_path / "d", 2, world=fr.World()).state_dict()
    same = fr.Transforms(image=fr.ImageAugment(height=64, width=96))
    fr.DataLoader(tmp_path / "d", 2, transforms=same, world=fr.World()).load_state_dict(state)
    cut = fr.Transforms(image=fr.ImageAugment(height=256, width=704))
    older = fr.DataLoader(tmp_path / "d", 2, transforms=cut, world=fr.World()).state_dict()
    with pytest.raises(StateMismatchError, match=r"image\.height: state has 256, loader has 64"):
        fr.DataLoader(tmp_path / "d", 2, world=fr.World()).load_state_dict(older)


@pytest.mark.parametrize(
    ("size", "back_size", "sides"),
    [
        ((320, 240), None, (240, 2 * 320)),
        ((320, 240), (160, 280), (280, 320 + 160)),
    ],
    ids=["one size", "two sizes"],
)
def test_view_draws_whole_images(tmp_path, size, back_size, sides) -> None:
    build_dataset(
        tmp_path / "d",
        {"train": (4,)},
        size=size,
        back_size=back_size,
        labelled=False,
    )
    sheet = fr.view(tmp_path / "d").sheet
    assert sheet.shape[0] >= sides[0] and sheet.shape[1] >= sides[1]
    sample = open_dataset(tmp_path / "d")[0]
    front = plainly(bytes(sample.images["cam_front"]))
    part = np.ascontiguousarray(front[:, 80:, 8:-8].transpose(1, 2, 0))  # its name is above
    unlike = cv2.minMaxLoc(cv2.matchTemplate(sheet, part, cv2.TM_SQDIFF))[0]
    assert unlike / part.size < 1.0, "the camera's image is in the sheet, pixel for pixel"


def test_view_of_a_picture_has_no_view_from_above(tmp_path) -> None:
    dataset = folder(tmp_path, [encoded((64, 48), "420"), encoded((32, 40), "420")])
    sheet = fr.view(dataset).sheet
    assert sheet.shape[1] < 64 + 32
