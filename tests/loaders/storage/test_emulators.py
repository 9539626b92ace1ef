"""Google Cloud Storage and Azure Blob Storage through emulators on loopback (:mod:`support.cloud_emulators`)."""

from __future__ import annotations

import logging
import re

import pytest

from fuelrail.loaders import DataLoader
from fuelrail.loaders.storage import open_storage
from fuelrail.pipeline.errors import DatasetError, DatasetNotReadyError, StorageError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.storage.retry import RetryPolicy
from support.cloud_emulators import emulated
from support.loaders import make_loader
from support.storage_suite import own, pristine, rows_of, spans_of

pytestmark = pytest.mark.network

__all__ = ["own", "pristine"]

QUICK = RetryPolicy(deadline_s=2.0, attempt_timeout_s=1.0, first_delay_s=0.05, max_delay_s=0.2)


@pytest.fixture(scope="module", params=["gs", "az"])
def cloud(request, pristine, tmp_path_factory):
    """URL of the dataset in a bucket, the storage_options for it, and the options' secret."""
    with emulated(request.param, tmp_path_factory.mktemp("emulator")) as (options, secret):
        import fsspec

        fs = fsspec.filesystem(request.param, **options)
        for file in pristine.iterdir():
            fs.pipe_file(f"datasets/set/{file.name}", file.read_bytes())
        yield f"{request.param}://datasets/set", options, secret


def test_spans_are_those_of_the_local_dataset(cloud, pristine, tmp_path):
    url, options, _ = cloud
    dataset = open_dataset(url, cache_dir=tmp_path, storage_options=options)
    storage = open_storage(dataset)
    assert [bytes(take()) for take in storage.session().request(rows_of(dataset))] == spans_of(pristine)
    stats = storage.stats()
    assert 0 < stats.requests < stats.spans  # neighbours come as one range


def test_an_epoch_through_the_loader_and_its_second_from_the_cache(cloud, pristine, tmp_path):
    url, options, _ = cloud
    expected = [batch["sample_key"] for batch in DataLoader(pristine, 4, seed=3)]
    with make_loader(url, 4, seed=3, options=options, cache_dir=tmp_path) as loader:
        assert [batch["sample_key"] for batch in loader] == expected
        fetched = loader.stats().storage.requests
        assert fetched > 0
        loader.set_epoch(0)
        assert [batch["sample_key"] for batch in loader] == expected
        assert loader.stats().storage.cache_hits >= 4 * len(expected)


def test_what_is_missing_is_reported_at_once(cloud, tmp_path):
    import fsspec

    url, options, secret = cloud
    with pytest.raises(DatasetNotReadyError, match=r"has no dataset\.json") as caught:
        open_dataset(f"{url}-elsewhere", cache_dir=tmp_path, storage_options=options)
    assert secret is None or secret not in str(caught.value)
    dataset = open_dataset(url, cache_dir=tmp_path, storage_options=options)
    fs = fsspec.filesystem(url[:2], **options)
    kept = fs.cat_file("datasets/set/val-000000.tar")
    fs.rm_file("datasets/set/val-000000.tar")
    try:
        began = open_storage(dataset)
        with pytest.raises(StorageError, match=r"the shard is not there.*val-000000\.tar"):
            began.span(*rows_of(dataset)[22])
        assert began.stats().retries == 0
    finally:
        fs.pipe_file("datasets/set/val-000000.tar", kept)


def test_secrets_stay_out_of_messages_and_logs(cloud, tmp_path, caplog):
    url, options, secret = cloud
    if secret is None:
        pytest.skip("this emulator knows no credentials")
    wrong = {"connection_string": re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:9", options["connection_string"])}
    with caplog.at_level(logging.DEBUG, logger="fuelrail"):
        dataset = open_dataset(url, cache_dir=tmp_path, storage_options=options)
        with pytest.raises((StorageError, DatasetError)) as caught:
            open_storage(dataset, storage_options=wrong, retry=QUICK).span(*rows_of(dataset)[0])
    for text in (caplog.text, str(caught.value), repr(dataset)):
        assert secret not in text
