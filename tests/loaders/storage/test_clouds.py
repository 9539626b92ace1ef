"""S3 through a real server on loopback, by both clients; Google Cloud and Azure storage through emulators; the hub."""

from __future__ import annotations

import logging
import re
import shutil

import pytest

from fuelrail.loaders.storage import clients, open_storage
from fuelrail.loaders.storage.clients import (
    FsspecClient,
    ObstoreClient,
    make_client,
)
from fuelrail.pipeline.errors import (
    ChecksumError,
    ConfigError,
    DatasetError,
    DatasetNotReadyError,
    StorageError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.storage import filesystem
from fuelrail.pipeline.storage.retry import RetryPolicy
from support.batches import batches, keys, load, unlike
from support.cloud_emulators import emulated
from support.hub_server import REPOSITORY, HubServer
from support.pages import EXTRAS
from support.s3_server import s3_server, upload
from support.storage_suite import rows_of, spans_of

pytestmark = pytest.mark.network

for _name in ("moto", "flask", "boto3", "s3fs", "obstore"):
    pytest.importorskip(_name)

CLIENTS = ("fsspec", "obstore")
ENVIRONMENT = (
    "AWS_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
)
KEY = {"key": "AKIAANACCESSKEY", "secret": "a-secret-key-value"}
QUICK = RetryPolicy(deadline_s=1.0, attempt_timeout_s=0.5, first_delay_s=0.05, max_delay_s=0.2)


@pytest.fixture(scope="module")
def bucket(pristine):
    """URL of the dataset and of the server, which the environment names."""
    with s3_server() as server:
        yield upload(pristine, "datasets"), server.url


@pytest.fixture
def bare(bucket, monkeypatch):
    """An environment that says nothing about S3."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    return bucket


def read_all(url, client, tmp_path, **options):
    dataset = open_dataset(url, cache_dir=tmp_path, **options)
    storage = open_storage(dataset, client)
    spans = [bytes(take()) for take in storage.session().request(rows_of(dataset))]
    assert storage.stats().backend == client
    return spans


def test_the_better_client_is_the_default(bucket, tmp_path):
    dataset = open_dataset(bucket[0], cache_dir=tmp_path)
    assert open_storage(dataset).stats().backend == "obstore"
    assert isinstance(make_client(bucket[0]), ObstoreClient)
    # What only s3fs understands, s3fs does.
    assert isinstance(
        make_client(bucket[0], {"config_kwargs": {"max_pool_connections": 5}}),
        FsspecClient,
    )
    with pytest.raises(ConfigError, match="obstore cannot read"):
        make_client(bucket[0], {"config_kwargs": {}}, kind="obstore")


def test_bytes_are_told_while_they_come(bucket, pristine, tmp_path, monkeypatch):
    monkeypatch.setattr(clients, "_PROGRESS_BYTES", 1000)
    dataset = open_dataset(bucket[0], cache_dir=tmp_path)
    storage = open_storage(dataset)
    heard = []
    storage.on_bytes = lambda *progress: heard.append(progress)
    row = dataset.index.row(0)
    assert bytes(storage.span(0, row)) == spans_of(pristine)[0]
    assert {progress[:2] for progress in heard} == {(row.shard, row.offset)}
    counts = [progress[2] for progress in heard]
    assert counts == sorted(counts)
    assert counts[-1] == row.length


@pytest.mark.parametrize("client", CLIENTS)
class TestS3:
    def test_spans_with_credentials_of_the_environment(self, bucket, pristine, tmp_path, client):
        assert read_all(bucket[0], client, tmp_path) == spans_of(pristine)

    @pytest.mark.parametrize("nested", [False, True])
    def test_credentials_as_storage_options(self, bare, pristine, tmp_path, client, nested):
        url, endpoint = bare
        nest = {
            "client_kwargs": {
                "endpoint_url": endpoint,
                "region_name": "us-east-1",
            }
        }
        options = KEY | (nest if nested else {"endpoint_url": endpoint})
        assert read_all(url, client, tmp_path, storage_options=options) == spans_of(pristine)

    def test_credentials_of_a_profile(self, bare, pristine, tmp_path, monkeypatch, client):
        url, endpoint = bare
        (tmp_path / "config").write_text(
            f"[profile lab]\nregion = us-east-1\nendpoint_url = {endpoint}\n"
        )
        (tmp_path / "credentials").write_text(
            "[lab]\naws_access_key_id = testing\naws_secret_access_key = testing\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_PROFILE", "lab")
        assert read_all(url, client, tmp_path) == spans_of(pristine)

    def test_an_object_that_is_replaced_or_missing_is_reported_at_once(
        self, bucket, tmp_path, client
    ):
        import boto3

        dataset = open_dataset(bucket[0], cache_dir=tmp_path)
        s3 = boto3.client("s3")
        shard = {"Bucket": "datasets", "Key": "dataset/val-000000.tar"}
        content = s3.get_object(**shard)["Body"].read()
        try:
            s3.put_object(**shard, Body=bytes(len(content)))
            with pytest.raises(ChecksumError, match="twice"):
                open_storage(dataset, client).span(*rows_of(dataset)[22])
            s3.delete_object(**shard)
            with pytest.raises(StorageError, match=r"the shard is not there.*val-000000\.tar"):
                open_storage(dataset, client).span(*rows_of(dataset)[22])
        finally:
            s3.put_object(**shard, Body=content)
        with pytest.raises(DatasetNotReadyError, match=r"has no dataset\.json"):
            open_dataset("s3://datasets/elsewhere", cache_dir=tmp_path)

    def test_a_server_that_is_not_there(self, bare, tmp_path, client):
        dataset = open_dataset(
            bare[0],
            cache_dir=tmp_path,
            storage_options=KEY | {"endpoint_url": bare[1]},
        )
        gone = KEY | {"endpoint_url": "http://127.0.0.1:9"}
        with pytest.raises(StorageError, match="no answer after"):
            open_storage(dataset, client, storage_options=gone, retry=QUICK).span(
                *rows_of(dataset)[0]
            )

    def test_secrets_stay_out_of_messages_and_logs(self, bare, tmp_path, caplog, client):
        options = KEY | {"endpoint_url": bare[1]}
        with caplog.at_level(logging.DEBUG, logger="fuelrail"):
            dataset = open_dataset(bare[0], cache_dir=tmp_path, storage_options=options)
            open_storage(dataset, client).span(*rows_of(dataset)[0])
            with pytest.raises(DatasetError) as caught:
                open_dataset(
                    "s3://no-such-bucket/x",
                    cache_dir=tmp_path,
                    storage_options=options,
                )
        for text in (caplog.text, str(caught.value), repr(dataset)):
            assert not any(secret in text for secret in KEY.values())


def test_no_credentials_at_all(bare, tmp_path):
    with pytest.raises(DatasetError, match="check credentials, profile and endpoint"):
        open_dataset(
            bare[0],
            cache_dir=tmp_path,
            storage_options={"endpoint_url": bare[1]},
        )


@pytest.fixture(scope="module", params=["gs", "az"])
def cloud(request, pristine, tmp_path_factory):
    """A file system of an emulator, the dataset's URL there, the storage_options, and their secret."""
    with emulated(request.param, tmp_path_factory.mktemp("emulator")) as (
        options,
        secret,
    ):
        import fsspec

        fs = fsspec.filesystem(request.param, **options)
        for file in pristine.iterdir():
            fs.pipe_file(f"datasets/set/{file.name}", file.read_bytes())
        yield fs, f"{request.param}://datasets/set", options, secret


class TestEmulators:
    def test_spans_are_those_of_the_local_dataset(self, cloud, pristine, tmp_path):
        _, url, options, _ = cloud
        dataset = open_dataset(url, cache_dir=tmp_path, storage_options=options)
        storage = open_storage(dataset)
        assert [bytes(take()) for take in storage.session().request(rows_of(dataset))] == spans_of(
            pristine
        )
        stats = storage.stats()
        assert 0 < stats.requests < stats.spans  # neighbours come as one range

    def test_an_epoch_through_the_loader_and_its_second_from_the_cache(
        self, cloud, pristine, tmp_path
    ):
        _, url, options, _ = cloud
        expected = keys(batches(pristine, 4, seed=3))
        with load(url, 4, seed=3, options=options, cache_dir=tmp_path) as loader:
            assert keys(loader) == expected
            assert loader.stats().storage.requests > 0
            loader.set_epoch(0)
            assert keys(loader) == expected
            assert loader.stats().storage.cache_hits >= len(expected)

    def test_what_is_missing_is_reported_at_once(self, cloud, tmp_path):
        fs, url, options, secret = cloud
        with pytest.raises(DatasetNotReadyError, match=r"has no dataset\.json") as caught:
            open_dataset(f"{url}-elsewhere", cache_dir=tmp_path, storage_options=options)
        assert secret is None or secret not in str(caught.value)
        dataset = open_dataset(url, cache_dir=tmp_path, storage_options=options)
        content = fs.cat_file("datasets/set/val-000000.tar")
        fs.rm_file("datasets/set/val-000000.tar")
        try:
            storage = open_storage(dataset)
            with pytest.raises(StorageError, match=r"the shard is not there.*val-000000\.tar"):
                storage.span(*rows_of(dataset)[22])
            assert storage.stats().retries == 0
        finally:
            fs.pipe_file("datasets/set/val-000000.tar", content)

    def test_secrets_stay_out_of_messages_and_logs(self, cloud, tmp_path, caplog):
        _, url, options, secret = cloud
        if secret is None:
            pytest.skip("this emulator knows no credentials")
        wrong = {
            "connection_string": re.sub(
                r"127\.0\.0\.1:\d+", "127.0.0.1:9", options["connection_string"]
            )
        }
        with caplog.at_level(logging.DEBUG, logger="fuelrail"):
            dataset = open_dataset(url, cache_dir=tmp_path, storage_options=options)
            with pytest.raises((StorageError, DatasetError)) as caught:
                open_storage(dataset, storage_options=wrong, retry=QUICK).span(*rows_of(dataset)[0])
        for text in (caplog.text, str(caught.value), repr(dataset)):
            assert secret not in text


def test_a_dataset_on_the_hugging_face_hub_gives_the_same_batches(
    pristine, tmp_path, monkeypatch
) -> None:
    pytest.importorskip("huggingface_hub", reason="the extra hf is not installed here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(pristine, tmp_path / "repo" / "v1")
    with HubServer(tmp_path / "repo") as server:
        options = {"endpoint": server.endpoint, "token": False}
        url = f"hf://datasets/{REPOSITORY}/v1"
        assert len(open_dataset(url, storage_options=options)) == 25
        assert unlike(batches(url, seed=3, options=options), batches(pristine, seed=3)) == []
        assert any(line.startswith("GET /datasets/") and ".tar" in line for line in server.requests)


def test_what_to_install_is_an_extra_that_exists(monkeypatch) -> None:
    assert set(filesystem._EXTRAS.values()) <= EXTRAS.keys()

    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install huggingface_hub to access HfFileSystem")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[hf\]' in a checkout"):
        filesystem.filesystem("hf://datasets/someone/drives")
