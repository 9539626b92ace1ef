"""Every layout, from every storage: the same samples, and damage that is named."""

from __future__ import annotations

import shutil

import pytest

from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.layers import LayeredStorage
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import ChecksumError, FrameError, ShardError
from fuelrail.pipeline.format.codecs import train_dictionary
from fuelrail.pipeline.format.dataset import open_dataset
from support.batches import batches, keys, unlike
from support.datasets import build_dataset
from support.fault_server import FaultServer
from support.storage_suite import spoil

LENGTHS = {"train": (4, 3, 5)}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    base = tmp_path_factory.mktemp("layouts")
    raw = build_dataset(base / "member", LENGTHS)
    small = []
    for members in raw.values():
        small += [data for name, data in members.items() if name.endswith(("json", "tensors"))]
    build_dataset(base / "none", LENGTHS, layout="none")
    build_dataset(base / "frame", LENGTHS, layout="frame")
    build_dataset(
        base / "dictionary",
        LENGTHS,
        dictionary=train_dictionary(small, 2048, 3),
    )
    return base


def epoch(root, **options):
    return batches(root, seed=4, points=True, drop_last=False, **options)


@pytest.mark.network
@pytest.mark.parametrize("layout", ["none", "frame", "dictionary"])
def test_every_storage_gives_the_same_batches(roots, layout, tmp_path):
    pytest.importorskip("aiohttp")
    expected = epoch(roots / "member")
    assert len(set(keys(expected))) == 12
    cached = {"backend": "remote", "cache_dir": tmp_path / "cache"}
    for options in ({"backend": "pread"}, cached, cached):
        assert unlike(epoch(roots / layout, **options), expected) == [], options
    with FaultServer(roots / layout) as server:
        assert unlike(epoch(server.url), expected) == []


def test_a_frame_is_read_alone(roots, build_once):
    dataset = open_dataset(roots / "frame")
    raw = build_once(LENGTHS)[1]
    reader = SampleReader(dataset, points=False)
    sample = reader.sample(7)
    assert bytes(sample.images["cam_front"]) == raw[sample.key]["cam_front.jpg"]
    assert sample.points == {}
    row = dataset.index.row(7)
    assert (
        reader.fetch(7).span.base.nbytes
        == row.length
        < sum(member.stored_bytes for member in row.members)
    )


@pytest.fixture
def framed(roots, tmp_path):
    """A dataset of frames that the test may spoil, and its sixth row."""
    dataset = open_dataset(shutil.copytree(roots / "frame", tmp_path / "own"))
    return dataset, dataset.index.row(5)


@pytest.mark.parametrize("storage", ["pread", "remote"])
@pytest.mark.parametrize("verify", [True, False])
def test_damage_to_a_frame_is_named(framed, storage, verify):
    dataset, row = framed
    spoil(dataset.root, row)
    reader = SampleReader(
        dataset,
        storage=LayeredStorage(open_storage(dataset, storage, verify=verify)),
    )
    with pytest.raises(ChecksumError if verify else FrameError) as caught:
        reader.sample(5)
    assert (caught.value.shard, caught.value.offset, caught.value.key) == (
        "train-000001.tar.zst",
        row.offset,
        row.key,
    )
    assert reader.sample(4).key == dataset.index.row(4).key


@pytest.mark.parametrize("storage", ["pread", "remote"])
def test_a_cut_frame_shard_is_named(framed, storage):
    dataset, row = framed
    path = dataset.shard_path(row)
    path.write_bytes(path.read_bytes()[: row.offset + row.length // 3])
    with pytest.raises(ShardError) as caught:
        SampleReader(dataset, storage=LayeredStorage(open_storage(dataset, storage))).sample(5)
    assert caught.value.shard == "train-000001.tar.zst"


def test_a_frame_that_does_not_decode_is_a_bad_sample(framed):
    dataset, row = framed
    spoil(dataset.root, row)
    loaded_keys = keys(batches(dataset.root, verify=False, on_error="substitute", file=None))
    assert len(loaded_keys) == 12
    assert row.key not in loaded_keys
