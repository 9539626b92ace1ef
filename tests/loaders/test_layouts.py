"""Every layout, from every storage: the same samples, and damage that is named."""

from __future__ import annotations

import itertools

import pytest
import torch

from fuelrail.loaders import ImageAugment, World
from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import ChecksumError, FrameError, ShardError
from fuelrail.pipeline.format.codecs import train_dictionary
from fuelrail.pipeline.format.dataset import open_dataset
from support.datasets import build_dataset
from support.fault_server import FaultServer
from support.loaders import make_loader
from support.storage_suite import spoil

LENGTHS = {"train": (4, 3, 5)}
IMAGE = ImageAugment(height=32, width=48, resize=0.5)


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    base = tmp_path_factory.mktemp("layouts")
    raw = build_dataset(base / "member", LENGTHS)
    small = [data for members in raw.values() for name, data in members.items() if name.endswith(("json", "tensors"))]
    build_dataset(base / "none", LENGTHS, layout="none")
    build_dataset(base / "frame", LENGTHS, layout="frame")
    build_dataset(base / "dictionary", LENGTHS, dictionary=train_dictionary(small, 2048, 3))
    return base


def epoch(root, **options):
    loader = make_loader(
        root, 3, world=World(0, 1), image=IMAGE, num_workers=2, seed=4, points=True, drop_last=False, **options
    )
    return [
        (key, batch["img"][at], batch["points"][at], batch["ego2img"][at])
        for batch in loader
        for at, key in enumerate(batch["sample_key"])
    ]


def same(left, right):
    return all(a[0] == b[0] and all(map(torch.equal, a[1:], b[1:])) for a, b in zip(left, right, strict=True))


@pytest.mark.network
@pytest.mark.parametrize("layout", ["none", "frame", "dictionary"])
def test_every_storage_gives_the_same_batches(roots, layout, tmp_path):
    pytest.importorskip("aiohttp")
    expected = epoch(roots / "member")
    assert len({sample[0] for sample in expected}) == 12
    with FaultServer(roots / layout) as server:
        for number, (root, options) in enumerate(
            [
                (roots / layout, {"backend": "mapped"}),
                (roots / layout, {"backend": "pread"}),
                (roots / layout, {"backend": "remote", "cache_dir": tmp_path / "cache"}),
                (roots / layout, {"backend": "remote", "cache_dir": tmp_path / "cache"}),
                (server.url, {}),
            ]
        ):
            assert same(epoch(root, **options), expected), number


def test_a_frame_is_read_alone(roots):
    dataset = open_dataset(roots / "frame")
    raw = build_dataset(roots / "again", LENGTHS)
    reader = SampleReader(dataset, points=False)
    sample = reader.sample(7)
    assert bytes(sample.images["cam_front"]) == raw[sample.key]["cam_front.jpg"]
    assert sample.points == {}
    row = dataset.index.row(7)
    assert reader.fetch(7).span.nbytes == row.length < sum(member.stored_bytes for member in row.members)


@pytest.mark.parametrize("storage", ["mapped", "pread", "remote"])
@pytest.mark.parametrize("verify", [True, False])
def test_damage_to_a_frame_is_named(roots, tmp_path, storage, verify):
    root = tmp_path / "own"
    build_dataset(root, LENGTHS, layout="frame")
    dataset = open_dataset(root)
    row = dataset.index.row(5)
    spoil(root, row)
    reader = SampleReader(dataset, storage=open_storage(dataset, storage, verify=verify))
    with pytest.raises(ChecksumError if verify else FrameError) as caught:
        reader.sample(5)
    assert (caught.value.shard, caught.value.offset, caught.value.key) == ("train-000001.tar.zst", row.offset, row.key)
    assert reader.sample(4).key == dataset.index.row(4).key


@pytest.mark.parametrize("storage", ["mapped", "pread", "remote"])
def test_a_cut_frame_shard_is_named(roots, tmp_path, storage):
    root = tmp_path / "own"
    build_dataset(root, LENGTHS, layout="frame")
    dataset = open_dataset(root)
    row = dataset.index.row(5)
    path = dataset.shard_path(row)
    path.write_bytes(path.read_bytes()[: row.offset + row.length // 3])
    with pytest.raises(ShardError) as caught:
        SampleReader(dataset, storage=open_storage(dataset, storage)).sample(5)
    assert caught.value.shard == "train-000001.tar.zst"


def test_a_frame_that_does_not_decode_is_a_bad_sample(tmp_path):
    root = tmp_path / "own"
    build_dataset(root, LENGTHS, layout="frame")
    row = open_dataset(root).index.row(5)
    spoil(root, row)
    loader = make_loader(
        root, 3, world=World(0, 1), image=IMAGE, num_workers=2, verify=False, on_error="substitute", file=None
    )
    keys = list(itertools.chain.from_iterable(batch["sample_key"] for batch in loader))
    assert len(keys) == 12
    assert row.key not in keys
