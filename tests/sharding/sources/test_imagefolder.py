"""Folders of classes: numbers of classes, splits, what is left out, hostile names.

`tests/docs/test_migrations.py` compares them with torchvision's own reading.
"""

from __future__ import annotations

import io
import os
import tarfile

import cv2
import fsspec
import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

import fuelrail as fr
from fuelrail.loaders.integrations.map_style import MapView
from fuelrail.pipeline.errors import ConfigError, OrderError, SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec, parse_source
from fuelrail.sharding.verify.dataset import verify
from support.batches import batches, load
from support.source_suite import SourceSuite
from support.source_world import make_world, samples_of

JPEG = simplejpeg.encode_jpeg(np.zeros((24, 32, 3), np.uint8))
MATRICES = {
    "intrinsics",
    "cam2ego",
    "cam2keyego",
    "ego2img",
    "lidar2img",
    "ego2global",
}


class TestImageFolder(SourceSuite):
    """A class a clip, an image a frame; there are no times, poses and calibration."""

    kind = "imagefolder"
    compare = None
    impossible = ("no record", "no file")
    states_sizes = False

    def world(self, **changes):
        changes["cameras"] = {"image": next(iter(changes.get("cameras", {"": (96, 64)}).values()))}
        return make_world(**{"lidars": (), "num_boxes": 0, **changes})

    def write(self, world, root):
        for clip, number, frame in world.frames():
            (root / clip.name).mkdir(exist_ok=True)
            (root / clip.name / f"{number}.jpg").write_bytes(frame.images["image"].jpeg)
        return str(root)


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
        select=["cls"],
        image={"height": 24, "width": 32},
    )
    return {batch["sample_token"][0]: int(batch["cls"]) for batch in loaded}


@pytest.mark.costly
def test_folders_of_splits_and_classes(tmp_path):
    names = [
        f"{split}/{name}/{number}.JPEG"
        for split in ("training", "val")
        for name in ("dog", "Cat", "bird")
        for number in "12"
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
        expected = {
            name: dataset.manifest.classes.index(name.split("/")[1])
            for name in names
            if name.startswith(folder)
        }
        assert labels(dataset, split) == expected
    (item,) = torch.utils.data.Subset(MapView(dataset, ["image", "cls"]), [3])
    assert (item["cls"], item["image"].shape) == (
        dataset.table["cls"][3].as_py(),
        (3, 24, 32),
    )
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
    assert labels(tmp_path / "out", "train") == {
        "cat/1.jpg": 0,
        "dog/1.jpg": 0,
        "car/1.jpg": -1,
    }


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
        (
            lambda root: write(root, ["made:x/1.jpg"]),
            r"'made:x/1.jpg' begins with .* rename it",
        ),
        (
            lambda root: os.mkfifo(root / "cat" / "2.jpg"),
            r"cat/2.jpg' is a FIFO",
        ),
        (
            lambda root: (root / "cat" / "2.jpg").write_bytes(b""),
            r"cat/2.jpg': image is empty",
        ),
        (
            lambda root: (root / "cat" / "2.jpg").write_bytes(b"GIF89a"),
            r"cat/2.jpg",
        ),
        (
            lambda root: (root / "cat" / "1.jpg").unlink(),
            r"has no clips; looked for .*in it is cat",
        ),
        (
            lambda root: (root / "cat" / "1.jpg").rename(root / "1.jpg"),
            r"has no clips",
        ),
    ],
)
def test_hostile_and_empty_folders_are_named(tmp_path, spoil, match):
    root = write(tmp_path / "images", ["cat/1.jpg"])
    spoil(root)
    with pytest.raises(SourceError, match=match):
        scan(root)


def test_at_a_url(tmp_path):
    memory = fsspec.filesystem("memory")
    for name in (
        "train/cat/1.jpg",
        "train/dog/1.jpg",
        "val/dog/2.jpg",
        "train/README",
    ):
        memory.pipe(f"/classes/{name}", JPEG)
    info = scan("memory://classes")
    assert info.classes == ["cat", "dog"]
    assert {split: len(clips) for split, clips in info.splits.items()} == {
        "train": 2,
        "val": 1,
    }


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
    images = dict(zip(batch["sample_token"], batch["img"][:, 0], strict=True))
    for name, colour in colours.items():
        middle = images[name][:, 12, 12].tolist()
        assert np.allclose(middle, colour, atol=3), (name, middle)


def test_one_image_is_a_dataset(tmp_path):
    fr.shard(
        f"imagefolder:{write(tmp_path / 'source', ['cat/only.jpg'])}",
        tmp_path / "out",
    )
    (batch,) = batches(
        tmp_path / "out",
        1,
        shuffle=True,
        select=["cls"],
        image={"height": 24, "width": 32},
    )
    assert (batch["sample_token"], batch["cls"].tolist()) == (
        ["cat/only.jpg"],
        [0],
    )


@pytest.mark.parametrize("splits", ["", "train/"])
def test_what_systems_and_editors_leave_is_no_image_and_no_class(tmp_path, splits):
    root = write(
        tmp_path / "source",
        [f"{splits}{name}/{number}.jpg" for name in "ab" for number in "12"],
    )
    folders = [".ipynb_checkpoints", "__MACOSX", "a/.thumbs"]
    files = ["a/._1.jpg", "a/.DS_Store", "b/Thumbs.db", ".DS_Store"]
    for name in [f"{folder}/1.jpg" for folder in folders] + files:
        for place in {splits, ""}:
            if place == splits or not name.startswith(("a/", "b/")):
                (root / place / name).parent.mkdir(parents=True, exist_ok=True)
                (root / place / name).write_bytes(b"\0\5\x16\7")
    info = scan(root)
    assert [clip.clip_name for clip in info.clips] == [
        f"{splits}{name}/{number}.jpg" for name in "ab" for number in "12"
    ]
    (hidden,) = [text for text in info.report.noted if text.startswith("hidden files and folders")]
    assert info.report.noted[hidden] == (7 if not splits else 10)
    assert not [text for text in info.report.noted if "no JPEG" in text]


TRAILERS = {
    "line feed": b"\n",
    "zeros": bytes(9),
    "film": b"MotionPhoto_Data\0\0\0\x18ftypmp42" + bytes(range(255)) * 1200,
    "second picture": JPEG,
}


@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_bytes_behind_the_end_of_an_image_are_kept(tmp_path, ending):
    picture = np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)
    encoded = cv2.imencode(f".{ending}", picture)[1].tobytes()
    root = write(tmp_path / "source", ["a/other.jpg"])
    for name, trailer in TRAILERS.items():
        (root / "a" / f"{name}.{ending}").write_bytes(encoded + trailer)
    for check_images in ("head", "ends", "pixels"):
        assert scan(root, check_images=check_images).num_samples == 5
    fr.shard(f"imagefolder:{root}", tmp_path / "out", workers=1)
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    expected = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
    for decoder in ("turbo", "pillow"):
        for batch in batches(
            tmp_path / "out",
            1,
            shuffle=False,
            image={"height": 24, "width": 32},
            decoder=decoder,
        ):
            if batch["sample_token"] != ["a/other.jpg"]:
                loaded = batch["img"][0, 0].permute(1, 2, 0).numpy()
                assert np.abs(loaded.astype(int) - expected).max() <= 2

    (root / "a" / f"cut.{ending}").write_bytes(encoded[:-1] + b"\n")
    with pytest.raises(SourceError, match=rf"cut.{ending}': a truncated"):
        scan(root, check_images="ends")


def odd_pngs() -> dict[str, Image.Image]:
    """PNGs that decoders of 8 bits do not take, and that lose nothing when they become such."""
    rng = np.random.default_rng(3)
    palette = Image.fromarray(rng.integers(0, 255, (24, 32, 3), np.uint8)).quantize(200)
    small = Image.fromarray(rng.integers(0, 255, (24, 33, 3), np.uint8)).quantize(11)
    clear = palette.copy()
    clear.info["transparency"] = 3
    bits = Image.fromarray((rng.random((24, 31)) > 0.5).astype(np.uint8) * 255).convert("1")
    return {
        "palette": palette,
        "small palette": small,
        "clear": clear,
        "bits": bits,
    }


@pytest.mark.parametrize("form", ["imagefolder", "tar", "tar.gz"])
def test_pngs_with_a_palette_or_of_few_bits_become_pngs_of_8_bits(tmp_path, form):
    root = tmp_path / "source"
    (root / "a").mkdir(parents=True)
    for name, image in odd_pngs().items():
        image.save(root / "a" / f"{name}.png")
    source = f"imagefolder:{root}"
    if form != "imagefolder":
        (tmp_path / "tars").mkdir()
        mode = "w:gz" if form.endswith("gz") else "w"
        with tarfile.open(tmp_path / "tars" / f"x.{form}", mode) as tar:
            for name in odd_pngs():
                tar.add(root / "a" / f"{name}.png", f"a/{name}.png")
        source = f"webdataset:{tmp_path / 'tars'}"
    report = fr.shard(source, tmp_path / "out", workers=1)
    assert sum(n for text, n in report.scan.noted.items() if "with a palette" in text) == 4
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    for sample in samples_of(tmp_path / "out").values():
        name = sample.meta.sample_token.rpartition("/")[2].removesuffix(".png")
        stored = Image.open(io.BytesIO(bytes(sample.images["image"]))).convert("RGBA")
        assert np.array_equal(stored, odd_pngs()[name].convert("RGBA")), name
    batches(tmp_path / "out", 1, shuffle=False, image={"height": 24, "width": 32})

    if form == "imagefolder":
        content = (root / "a" / "palette.png").read_bytes()
        (root / "a" / "palette.png").write_bytes(content[:-200])
        with pytest.raises(SourceError, match=r"palette.png'"):
            scan(root, check_images="ends")


def test_a_folder_too_high_or_too_low_is_named(tmp_path):
    root = write(tmp_path / "source", ["set/a/1.jpg", "set/b/1.jpg"])
    with pytest.raises(
        SourceError,
        match=rf"below them, such as 'set/a': .*imagefolder:{root}/set",
    ):
        scan(root)
    with pytest.raises(SourceError, match=rf"is it imagefolder:{root}/set\?"):
        scan(root / "set" / "a")
