"""The whole DataLoader where storage or cache is not what it should be: what it rides out, and what it says."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from fuelrail.loaders import ImageAugment
from fuelrail.pipeline.errors import ChecksumError, ConfigError, FuelrailError, StorageError
from fuelrail.pipeline.storage.retry import RetryPolicy
from support.datasets import build_dataset
from support.fault_server import FaultServer, Misbehaviour
from support.loaders import make_loader

pytestmark = pytest.mark.network

pytest.importorskip("aiohttp")

NUM_TRAIN = 21


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad-storage") / "tiny"
    build_dataset(root, {"train": (5, 7, 9)})
    return root


def make(root, tmp_path, **options):
    image = ImageAugment(height=32, width=48, resize=0.5)
    return make_loader(root, 3, image=image, num_workers=2, cache_dir=tmp_path / "cache", **options)


def keys(loader):
    return [key for batch in loader for key in batch["sample_key"]]


def test_a_server_that_is_gone_for_some_time_is_waited_for(tiny, tmp_path):
    with FaultServer(tiny) as server:
        policy = RetryPolicy(first_delay_s=0.05, max_delay_s=0.2)
        with make(tiny, tmp_path / "a") as local:
            expected = keys(local)
        with make(server.url, tmp_path, retry=policy, look_ahead_bytes=1) as loader:
            batches = iter(loader)
            found = list(next(batches)["sample_key"])
            server.go_down()
            back = threading.Timer(1.5, server.come_up)
            back.start()
            found += [key for batch in batches for key in batch["sample_key"]]
            back.join()
            assert found == expected
            assert loader.stats().storage.retries > 0


def test_a_server_that_is_gone_for_good_ends_the_run_after_the_deadline(tiny, tmp_path):
    with FaultServer(tiny) as server:
        policy = RetryPolicy(deadline_s=1.0, first_delay_s=0.05, max_delay_s=0.2)
        with make(server.url, tmp_path, retry=policy, look_ahead_bytes=1) as loader:
            batches = iter(loader)
            next(batches)
            server.go_down()
            with pytest.raises(StorageError, match=r"no answer after \d+ attempts"):
                list(batches)
        server.come_up()


@pytest.mark.parametrize(("status", "words"), [(403, "access is refused"), (404, "the shard is not there")])
def test_what_is_refused_or_missing_ends_it_at_once(tiny, tmp_path, status, words):
    def misbehave(request):
        return Misbehaviour(status=status if request.name.endswith(".tar") else None)

    with FaultServer(tiny, misbehave) as server, make(server.url, tmp_path) as loader:
        started = time.monotonic()
        with pytest.raises(StorageError, match=words):
            keys(loader)
        assert time.monotonic() - started < 60  # the deadline is 120 s
        assert loader.stats().storage.retries == 0


def test_corrupt_cache_files_are_fetched_again(tiny, tmp_path):
    with FaultServer(tiny) as server:
        with make(server.url, tmp_path) as loader:
            expected = keys(loader)
        cached = sorted((tmp_path / "cache").glob("spans/*/data/*/*"))
        assert len(cached) == NUM_TRAIN
        for number, path in enumerate(cached):
            data = path.read_bytes()
            path.write_bytes(bytes(len(data)) if number % 2 else data[:100])
        with make(server.url, tmp_path) as loader:
            assert keys(loader) == expected
            assert loader.stats().storage.cache_damaged >= NUM_TRAIN  # more where the next epoch asked for it already


def test_a_cache_of_another_dataset_is_reported(tiny, tmp_path):
    other = tmp_path / "other"
    build_dataset(other, {"train": (4,)})
    with make(other, tmp_path) as loader:
        keys(loader)
    with make(tiny, tmp_path) as loader:
        assert len(keys(loader)) == NUM_TRAIN
    first, second = sorted((tmp_path / "cache" / "spans").iterdir())
    shutil.rmtree(first)
    second.rename(first)  # the folder of one, under the other's name
    with pytest.raises(ConfigError, match=r"is the cache of dataset .*, not of"):
        with make(other, tmp_path) as loader:
            keys(loader)
        with make(tiny, tmp_path) as loader:
            keys(loader)


@pytest.mark.parametrize("options", [{"backend": "mapped"}, {"backend": "pread"}, {"backend": "remote"}])
def test_a_dataset_replaced_under_the_loaders_feet_is_named_by_its_fingerprint(tmp_path, options):
    root, other = tmp_path / "own", tmp_path / "other"
    build_dataset(root, {"train": (5, 7, 9)})
    build_dataset(other, {"train": (5, 7, 9)}, seed=8)
    image = ImageAugment(height=32, width=48, resize=0.5)
    with make_loader(root, 3, image=image, num_workers=2, **options) as loader:
        for file in other.iterdir():
            if file.name != "index.arrow":
                shutil.copyfile(file, root / file.name)
        with pytest.raises(FuelrailError, match="fingerprint") as caught:
            keys(loader)
        assert isinstance(caught.value, ChecksumError) or "train-" in str(caught.value)
