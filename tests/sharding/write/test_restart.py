"""JPEGs prepared with restart markers: lossless, the same bytes every time, and cut by the loader."""

from __future__ import annotations

import io
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from fuelrail import ImageAugment
from fuelrail.loaders.decode.splice import splice_rows
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetExistsError,
    ImageError,
    SourceError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.sharding.write import images
from support.loaders import make_loader
from support.pictures import encode, natural
from support.sharding import digests, shard_nuscenes

if shutil.which("jpegtran") is None:
    pytest.skip("jpegtran is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def source(dataroot):
    return dataroot("a3 b3")


@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": "4:2:0"},
        {"subsampling": "4:4:4"},
        {"progressive": True},
        {"quality": 60, "optimize": True},
    ],
)
def test_nothing_is_lost_and_rows_can_be_cut(options: dict) -> None:
    encoded = encode(
        natural(325, 411),
        exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0",
        **options,
    )
    rewritten = images.with_restart_rows(encoded)
    before, after = (np.asarray(Image.open(io.BytesIO(data))) for data in (encoded, rewritten))
    assert np.array_equal(before, after)
    assert b"Exif\0\0" in rewritten
    assert len(rewritten) < (1.1 if "progressive" in options else 1.02) * len(encoded)
    info = probe(rewritten)
    assert not info.progressive
    assert splice_rows(rewritten, info, 300, 411) is not None
    assert images.with_restart_rows(rewritten) == rewritten


def test_broken_files_are_refused() -> None:
    for broken in (b"", b"no JPEG", encode(natural(64, 48))[:300]):
        with pytest.raises(ImageError, match="jpegtran cannot rewrite it"):
            images.with_restart_rows(broken)


def test_without_the_program_the_run_does_not_begin(
    source, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="libjpeg-turbo-progs"):
        shard_nuscenes(source.root, tmp_path / "out", jpeg="restart")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def datasets(source, sharded):
    return sharded(source), sharded(source, jpeg="restart")


@pytest.mark.costly
def test_datasets_hold_the_same_pixels_and_the_same_bytes_each_time(
    source, datasets, tmp_path
) -> None:
    shard_nuscenes(source.root, tmp_path / "three", num_workers=3, jpeg="restart")
    assert digests(datasets[1]) == digests(tmp_path / "three")
    plain, prepared = (SampleReader(open_dataset(out)) for out in datasets)
    for row in range(6):
        a = plain.sample(row)
        b = prepared.sample(row)
        assert a.key == b.key
        for channel, encoded in a.images.items():
            assert probe(b.images[channel]).restart_interval > 0
            pixels = [
                np.asarray(Image.open(io.BytesIO(bytes(data))))
                for data in (encoded, b.images[channel])
            ]
            assert np.array_equal(*pixels)
    with pytest.raises(DatasetExistsError, match="jpeg"):
        shard_nuscenes(source.root, datasets[0], jpeg="restart")
    recipe = open_dataset(datasets[1]).manifest.provenance["recipe"]
    assert recipe["jpegtran"].startswith("libjpeg-turbo version ")


@pytest.mark.costly
def test_loaders_give_the_same_batches(datasets) -> None:
    image = ImageAugment(height=24, width=80, train=True, resize_range=(0.5, 0.9), flip_prob=0.5)
    loaders = [make_loader(out, 1, image=image, seed=1, num_workers=1) for out in datasets]
    for a, b in zip(*loaders, strict=True):
        assert a["sample_key"] == b["sample_key"]
        assert torch.equal(a["img"], b["img"])


@pytest.mark.slow
def test_a_program_that_hangs_is_stopped_and_the_picture_named(
    source, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "jpegtran"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && exec {shutil.which("jpegtran")} -version\nexec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(images, "_TIMEOUT_S", 1.0)
    says = r"image 'samples/CAM_.*\.jpg' of nuscenes:.*\(sample [ab]-00000\d\): jpegtran has not rewritten its .* in 1 s"  # noqa: E501
    with pytest.raises(SourceError, match=says):
        shard_nuscenes(source.root, tmp_path / "out", jpeg="restart")
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ConfigError, match="jpegtran -version has not answered in 1 s"):
        shard_nuscenes(source.root, tmp_path / "other", jpeg="restart")


def test_a_damaged_picture_is_named(source, tmp_path) -> None:
    root = shutil.copytree(source.root, tmp_path / "source")
    victim = min(root.rglob("*.jpg"))
    data = bytearray(victim.read_bytes())
    position = data.index(b"\xff\xc4") + 5
    data[position] = 0xFF  # a Huffman table with more codes than fit
    victim.write_bytes(data)
    with pytest.raises(SourceError, match=f"{victim.name}.*jpegtran cannot rewrite it"):
        shard_nuscenes(root, tmp_path / "out", jpeg="restart")
