"""The main path by its commands, as `make demo` runs it, on a small world: each step takes what the last one left."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess

import cv2
import numpy as np
import pytest

from fuelrail import ImageAugment, World
from fuelrail.__main__ import main
from fuelrail.pipeline.format.dataset import open_dataset
from support.loaders import make_loader

pytestmark = [pytest.mark.process, pytest.mark.slow]

SHARD = ["-o", "version=v1.0-mini", "--seed", "7", "--shard-size", "100KB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("main-path")


@pytest.fixture(scope="module")
def world(folder):
    options = [
        "--seed",
        "7",
        "--clips",
        "3",
        "--frames",
        "2",
        "--size",
        "320x180",
        "--workers",
        "2",
    ]
    assert main(["synth", str(folder / "nuscenes"), *options]) == 0
    return folder / "nuscenes"


@pytest.fixture(scope="module")
def dataset(folder, world):
    assert (
        main(
            [
                "shard",
                f"nuscenes:{world}",
                str(folder / "dataset"),
                *SHARD,
                "--workers",
                "2",
            ]
        )
        == 0
    )
    return folder / "dataset"


def digests(root):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.iterdir()
        if path.is_file()
    }


def test_one_worker_writes_the_same_files_and_another_seed_another_order(folder, world, dataset):
    assert (
        main(
            [
                "shard",
                f"nuscenes:{world}",
                str(folder / "again"),
                *SHARD,
                "--workers",
                "1",
            ]
        )
        == 0
    )
    assert digests(folder / "again") == digests(dataset)
    command = [
        "shard",
        f"nuscenes:{world}",
        str(folder / "other"),
        *SHARD[:2],
        "--seed",
        "8",
    ]
    assert main(command) == 0
    first = open_dataset(dataset)
    second = open_dataset(folder / "other")
    names = [
        [opened.index.row(row).key for row in range(opened.manifest.num_samples)]
        for opened in (first, second)
    ]
    assert names[0] != names[1]
    assert sorted(names[0]) == sorted(names[1])


def test_verify_finds_all_well_and_a_flipped_bit(dataset, folder, capsys):
    assert main(["verify", str(dataset), "--deep"]) == 0
    damaged = folder / "damaged"
    subprocess.run(["cp", "-r", dataset, damaged], check=True)
    shard = next(damaged.glob("train-*.tar"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert main(["verify", str(damaged)]) != 0
    streams = capsys.readouterr()
    assert shard.name in streams.out + streams.err


def test_the_sources_images_come_out_of_gnu_tar(dataset, world, tmp_path):
    shard = next(dataset.glob("train-*.tar"))
    listed = subprocess.run(
        ["tar", "tf", shard], check=True, capture_output=True, text=True
    ).stdout.split()
    subprocess.run(["tar", "xf", shard, "-C", tmp_path], check=True)
    assert sorted(listed) == sorted(path.name for path in tmp_path.iterdir())
    sources = {
        hashlib.sha256(path.read_bytes()).digest() for path in (world / "samples").rglob("*.jpg")
    }
    images = [path for path in tmp_path.iterdir() if path.suffix == ".jpg"]
    assert images
    assert {hashlib.sha256(path.read_bytes()).digest() for path in images} <= sources


def test_two_ranks_share_an_epoch_of_it(dataset):
    image = ImageAugment(height=64, width=176)
    ranks = [
        make_loader(dataset, 2, world=World(rank, 2), image=image, num_workers=1)
        for rank in range(2)
    ]
    keys_by_rank = [[key for batch in loader for key in batch["sample_key"]] for loader in ranks]
    assert not set(keys_by_rank[0]) & set(keys_by_rank[1])
    assert len(set(keys_by_rank[0]) | set(keys_by_rank[1])) == 4 * len(ranks[0])


def test_a_sample_is_drawn(dataset, tmp_path):
    picture = tmp_path / "sample.png"
    command = ["view", str(dataset), "--train", "--image", "bevdet-704x256"]
    assert main([*command, "--output", str(picture)]) == 0
    assert np.asarray(cv2.imread(str(picture))).std() > 20


def test_two_ranks_train_from_it_and_report(dataset, tmp_path):
    options = [
        "--ranks",
        "2",
        "--batch-size",
        "1",
        "--steps",
        "10",
        "--warmup",
        "2",
        "--workers",
        "1",
    ]
    assert main(["bench", "train", str(dataset), *options, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert 0 < report["figures"]["occupancy"]["mean"] <= 1
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page), (
        "the page must stand by itself"
    )
