"""Columns of masks: the numbers in the PNGs are those in batches, and move with their camera."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

import fuelrail as fr
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.verify.dataset import verify
from support.batches import batches

SIZE = (24, 32)
FORMS = ("gray", "palette", "palette of 4 bits", "1 bit")


def picture(number):
    """Class numbers of pixels; of the last form 0 and 1 alone."""
    limit = (200, 200, 16, 2)[number]
    return np.random.default_rng(number).integers(0, limit, SIZE).astype(np.uint8)


def write_mask(path, number):
    pixels = picture(number)
    if FORMS[number] == "gray":
        cv2.imwrite(str(path), pixels)
    elif FORMS[number] == "1 bit":
        Image.fromarray(pixels * 255).convert("1").save(path)
    else:
        image = Image.fromarray(pixels, mode="P")
        image.putpalette(list(range(48)) if "4" in FORMS[number] else list(range(256)) * 3)
        image.save(path, **({"bits": 4} if "4" in FORMS[number] else {}))


@pytest.fixture
def drive(tmp_path):
    """A manifest with a class mask of each frame, and instances of all but the last."""
    root = tmp_path / "drive"
    root.mkdir()
    rows = []
    for number in range(len(FORMS)):
        jpeg = simplejpeg.encode_jpeg(np.full((*SIZE, 3), 60 * number, np.uint8))
        (root / f"{number}.jpg").write_bytes(jpeg)
        write_mask(root / f"{number}.png", number)
        cv2.imwrite(
            str(root / f"i{number}.png"),
            picture(number).astype(np.uint16) * 300,
        )
        row = {
            "clip_id": "a",
            "timestamp_ns": 1_600_000_000_000_000_000 + number * 100_000_000,
            "cam.Front.path": f"{number}.jpg",
            "mask.Front.path": f"{number}.png",
            "mask.Front.instance.path": f"i{number}.png" if number < 3 else None,
        }
        rows.append(row)
    write_rows(root, rows)
    return root


def write_rows(root, rows):
    (root / "frames.jsonl").write_text("\n".join(map(json.dumps, rows)))


def rows_of(root):
    return [json.loads(line) for line in (root / "frames.jsonl").read_text().splitlines()]


def test_the_numbers_are_those_of_the_files(drive, tmp_path):
    fr.shard(f"manifest:{drive}", tmp_path / "out", workers=1)
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    channels = ["mask_front", "instance_front"]
    image = {"height": SIZE[0], "width": SIZE[1]}
    (batch,) = batches(tmp_path / "out", 4, shuffle=False, channels=channels, image=image)
    for sample, number in enumerate(batch["frame"].tolist()):
        np.testing.assert_array_equal(batch["mask_front"][sample], picture(number))
        if number < 3:
            expected = picture(number).astype(np.uint16) * 300
            np.testing.assert_array_equal(batch["instance_front"][sample], expected)
    valid = dict(
        zip(
            batch["frame"].tolist(),
            batch["instance_front_valid"].tolist(),
            strict=True,
        )
    )
    assert valid == {0: True, 1: True, 2: True, 3: False}
    # A mask moves as the image does.
    flipped = {
        **image,
        "train": True,
        "flip_prob": 1.0,
        "resize_range": (1.0, 1.0),
    }
    (batch,) = batches(tmp_path / "out", 4, shuffle=False, channels=channels, image=flipped)
    for sample, number in enumerate(batch["frame"].tolist()):
        np.testing.assert_array_equal(batch["mask_front"][sample], picture(number)[:, ::-1])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"mask.Front.path": "none.png"},
            r"none.png' is not there; leave the column mask.Front",
        ),
        (
            {"mask.Frnt.path": "0.png"},
            r"of the camera 'Frnt', .*did you mean 'Front'",
        ),
        (
            {"mask.Front.path": "0.jpg"},
            r"'0.jpg' is no PNG: other formats change the numbers",
        ),
        (
            {"mask.Front.path": "rgb.png"},
            r"'rgb.png' has colours: a mask has one number a pixel",
        ),
        (
            {"mask.Front.path": "small.png"},
            r"16 x 12 pixels; on the image of 'front'",
        ),
        ({"mask.Front.path": "../x.png"}, r"is not inside the source"),
        ({"mask.Front.foo": 3}, r"the column mask.Front.foo"),
    ],
)
def test_wrong_masks_are_named(drive, tmp_path, change, match):
    cv2.imwrite(str(drive / "rgb.png"), np.zeros((*SIZE, 3), np.uint8))
    cv2.imwrite(str(drive / "small.png"), np.zeros((12, 16), np.uint8))
    rows = rows_of(drive)
    write_rows(drive, [{**row, **change} for row in rows])
    with pytest.raises(SourceError, match=match):
        fr.shard(f"manifest:{drive}", tmp_path / "out", workers=1)
