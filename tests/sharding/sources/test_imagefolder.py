"""Folders of classes: numbers of classes, splits, what is left out, hostile names.

`tests/docs/test_migrations.py` compares them with torchvision's own reading.
"""

from __future__ import annotations

import os

import cv2
import fsspec
import numpy as np
import pytest
import simplejpeg
import torch

import fuelrail as fr
from fuelrail.loaders.integrations.map_style import MapView
from fuelrail.pipeline.errors import ConfigError, OrderError, SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec, parse_source
from fuelrail.sharding.verify.dataset import verify
from support.batches import batches, load

JPEG = simplejpeg.encode_jpeg(np.zeros((24, 32, 3), np.uint8))
MATRICES = {"intrinsics", "cam2ego", "cam2keyego", "ego2img", "lidar2img", "ego2global"}


def write(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(JPEG)
    return root


def scan(root, **options):
    return scan_source(SourceSpec("imagefolder", str(root), options))


def labels(dataset, split):
    loaded = batches(
        dataset,
        1,
        split=split,
        shuffle=False,
        attributes=["cls"],
        image={"height": 24, "width": 32},
    )
    return {batch["sample_token"][0]: int(batch["cls"]) for batch in loaded}


@pytest.mark.costly
def test_folders_of_splits_and_classes(tmp_path):
    names = [
        f"{split}/{name}/{at}.JPEG"
        for split in ("training", "val")
        for name in ("dog", "Cat", "bird")
        for at in "12"
    ]
    root = write(tmp_path / "images", names)
    (root / "val" / "empty").mkdir()
    (root / "val" / "dog" / "notes.txt").touch()
    (root / "README").touch()
    report = fr.shard(f"imagefolder:{root}", tmp_path / "out", workers=1)
    assert report.scan.noted == {
        "training: no folder of class empty": 1,
        "val/dog: files and folders left out, no JPEG or PNG": 1,
        "val/empty: a class without an image": 1,
    }
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    dataset = fr.open(tmp_path / "out")
    assert dataset.manifest.classes == ("Cat", "bird", "dog", "empty")
    assert not [
        name
        for name in dataset.table.column_names
        if name.startswith("num_") and name.endswith("dog")
    ]
    for split, folder in (("train", "training"), ("val", "val")):
        wanted = {
            name: dataset.manifest.classes.index(name.split("/")[1])
            for name in names
            if name.startswith(folder)
        }
        assert labels(dataset, split) == wanted
    (item,) = torch.utils.data.Subset(MapView(dataset, ["image"], attributes=["cls"]), [3])
    assert (item["cls"], item["image"].shape) == (dataset.table["cls"][3].as_py(), (3, 24, 32))
    fr.reshard(tmp_path / "out", tmp_path / "again", workers=1)
    assert not fr.open(tmp_path / "again").manifest.has_calibration
    with load(tmp_path / "again", 2, transform=lambda sample: sample) as loader:
        assert not MATRICES & next(iter(loader)).keys()
    with pytest.raises(OrderError, match="its clips are too short, or it stores single frames"):
        load(tmp_path / "again", 2, window={"frames": [-1, 0]})
    with load(dataset, 2, order={"filter": "cls == 2"}, drop_last=False) as loader:
        (batch,) = loader
        assert len(batch["sample_key"]) == 2 and not MATRICES & batch.keys()
        assert loader.show(batch).pixels.any()


def test_folders_of_classes_and_of_names_that_are_splits(tmp_path):
    write(tmp_path / "a", ["train/1.jpg", "car/1.png.jpg", "bus/2.jpg"])  # a class called train
    info = scan(tmp_path / "a")
    assert (info.classes, info.splits) == (["bus", "car", "train"], None)
    write(tmp_path / "b", ["train/1.jpg", "test/1.jpg"])  # images in them: classes
    assert scan(tmp_path / "b").classes == ["test", "train"]
    assert parse_source(f"imagefolder:{tmp_path / 'b'}", {}).kind == "imagefolder"
    with pytest.raises(ConfigError, match=r"looks like imagefolder:"):
        parse_source(str(tmp_path / "b"), {})
    report = fr.shard(
        f"imagefolder:{tmp_path / 'a'}",
        tmp_path / "out",
        workers=1,
        splits={"train": 0.7, "val": 0.3},
    )
    assert (report.num_samples, report.num_clips) == (3, 3)


def test_a_mapping_of_classes(tmp_path):
    root = write(tmp_path / "images", ["cat/1.jpg", "dog/1.jpg", "car/1.jpg"])
    options = {"classes": {"cat": "animal", "dog": "animal", "car": None}}
    fr.shard(f"imagefolder:{root}", tmp_path / "out", workers=1, options=options)
    assert fr.open(tmp_path / "out").manifest.classes == ("animal",)
    assert labels(tmp_path / "out", "train") == {"cat/1.jpg": 0, "dog/1.jpg": 0, "car/1.jpg": -1}


def outside(root):
    (root.parent / "secret.jpg").write_bytes(JPEG)
    (root / "cat" / "2.jpg").symlink_to(root.parent / "secret.jpg")


def outside_folder(root):
    write(root.parent / "other", ["1.jpg"])
    (root / "dog").symlink_to(root.parent / "other")


def undecodable(root):
    (root / "cat" / os.fsdecode(b"\xff.jpg")).write_bytes(JPEG)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (outside, r"cat/2.jpg' leads to .*outside of the source"),
        (outside_folder, r"dog' leads to .*outside of the source"),
        (undecodable, r"cat/.*cannot be printed: rename it"),
        (lambda root: write(root, ["made:x/1.jpg"]), r"'made:x/1.jpg' begins with .* rename it"),
        (lambda root: os.mkfifo(root / "cat" / "2.jpg"), r"cat/2.jpg' is a FIFO"),
        (lambda root: (root / "cat" / "2.jpg").write_bytes(b""), r"cat/2.jpg': image is empty"),
        (lambda root: (root / "cat" / "2.jpg").write_bytes(b"GIF89a"), r"cat/2.jpg"),
        (
            lambda root: (root / "cat" / "1.jpg").unlink(),
            r"has no clips; looked for .*in it is cat",
        ),
        (lambda root: (root / "cat" / "1.jpg").rename(root / "1.jpg"), r"has no clips"),
    ],
)
def test_hostile_and_empty_folders_are_named(tmp_path, spoil, match):
    root = write(tmp_path / "images", ["cat/1.jpg"])
    spoil(root)
    with pytest.raises(SourceError, match=match):
        scan(root)


def test_at_a_url(tmp_path):
    memory = fsspec.filesystem("memory")
    for name in ("train/cat/1.jpg", "train/dog/1.jpg", "val/dog/2.jpg", "train/README"):
        memory.pipe(f"/classes/{name}", JPEG)
    info = scan("memory://classes")
    assert info.classes == ["cat", "dog"]
    assert {split: len(clips) for split, clips in info.splits.items()} == {"train": 2, "val": 1}


def test_pictures_of_every_form_and_size_are_in_one_batch(tmp_path):
    """Gray and RGB, JPEG and PNG, with and without alpha, each of one colour, which the batch has too."""
    colours = {
        "a/gray.jpg": (90,) * 3,
        "a/gray.png": (200,) * 3,
        "b/rgb.jpg": (40, 40, 40),
        "b/rgba.png": (250, 120, 30),
    }
    sizes = {
        "a/gray.jpg": (40, 60),
        "a/gray.png": (64, 48),
        "b/rgb.jpg": (100, 32),
        "b/rgba.png": (48, 64),
    }
    for name, (red, green, blue) in colours.items():
        pixels = np.full((*sizes[name], 4), (blue, green, red, 255), np.uint8)
        form = {"gray": pixels[..., 0], "rgb": pixels[..., :3], "rgba": pixels}[
            name[2:].partition(".")[0]
        ]
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(tmp_path / "source" / name), form)
    fr.shard(f"imagefolder:{tmp_path / 'source'}", tmp_path / "out")
    (batch,) = batches(tmp_path / "out", 4, image={"height": 24, "width": 24}, shuffle=False)
    found = dict(zip(batch["sample_token"], batch["img"][:, 0], strict=True))
    for name, colour in colours.items():
        middle = found[name][:, 12, 12].tolist()
        assert np.allclose(middle, colour, atol=3), (name, middle)


def test_one_image_is_a_dataset(tmp_path):
    fr.shard(f"imagefolder:{write(tmp_path / 'source', ['cat/only.jpg'])}", tmp_path / "out")
    (batch,) = batches(
        tmp_path / "out", 1, shuffle=True, attributes=["cls"], image={"height": 24, "width": 32}
    )
    assert (batch["sample_token"], batch["cls"].tolist()) == (["cat/only.jpg"], [0])
