"""S3 through a real server on loopback: both clients, and credentials by all the usual ways."""

from __future__ import annotations

import logging

import pytest

from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.clients import FsspecClient, ObstoreClient, make_client
from fuelrail.pipeline.errors import ChecksumError, ConfigError, DatasetError, DatasetNotReadyError, StorageError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.storage.retry import RetryPolicy
from support.s3_server import s3_server, upload
from support.storage_suite import pristine, rows_of, spans_of

pytestmark = pytest.mark.network

for _name in ("moto", "flask", "boto3", "s3fs", "obstore"):
    pytest.importorskip(_name)

__all__ = ["pristine"]

CLIENTS = ("fsspec", "obstore")
ENVIRONMENT = (
    "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_PROFILE",
)  # fmt: skip


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


@pytest.mark.parametrize("client", CLIENTS)
def test_spans_with_credentials_of_the_environment(bucket, pristine, tmp_path, client):
    assert read_all(bucket[0], client, tmp_path) == spans_of(pristine)


def test_the_better_client_is_the_default(bucket, tmp_path):
    dataset = open_dataset(bucket[0], cache_dir=tmp_path)
    assert open_storage(dataset).stats().backend == "obstore"
    assert isinstance(make_client(bucket[0]), ObstoreClient)
    # What only s3fs understands, s3fs does.
    assert isinstance(make_client(bucket[0], {"config_kwargs": {"max_pool_connections": 5}}), FsspecClient)
    with pytest.raises(ConfigError, match="obstore cannot read"):
        make_client(bucket[0], {"config_kwargs": {}}, kind="obstore")
    with pytest.raises(ConfigError, match="choose one of auto, fsspec, obstore"):
        make_client(bucket[0], kind="boto")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("nested", [False, True])
def test_credentials_as_storage_options(bare, pristine, tmp_path, client, nested):
    url, endpoint = bare
    options = {"key": "an-access-key", "secret": "a-secret-key-value"}
    if nested:
        options["client_kwargs"] = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    else:
        options["endpoint_url"] = endpoint
    assert read_all(url, client, tmp_path, storage_options=options) == spans_of(pristine)


@pytest.mark.parametrize("client", CLIENTS)
def test_credentials_of_a_profile(bare, pristine, tmp_path, monkeypatch, client):
    url, endpoint = bare
    (tmp_path / "config").write_text(f"[profile lab]\nregion = us-east-1\nendpoint_url = {endpoint}\n")
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = testing\naws_secret_access_key = testing\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert read_all(url, client, tmp_path) == spans_of(pristine)


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_missing_is_reported_at_once(bucket, tmp_path, client):
    import boto3

    dataset = open_dataset(bucket[0], cache_dir=tmp_path)
    s3 = boto3.client("s3")
    kept = s3.get_object(Bucket="datasets", Key="dataset/val-000000.tar")["Body"].read()
    s3.delete_object(Bucket="datasets", Key="dataset/val-000000.tar")
    try:
        with pytest.raises(StorageError, match=r"the shard is not there.*val-000000\.tar"):
            open_storage(dataset, client).span(*rows_of(dataset)[22])
    finally:
        s3.put_object(Bucket="datasets", Key="dataset/val-000000.tar", Body=kept)
    with pytest.raises(DatasetNotReadyError, match=r"has no dataset\.json"):
        open_dataset("s3://datasets/elsewhere", cache_dir=tmp_path)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_replaced_object_is_named_by_fingerprint(bucket, tmp_path, client):
    import boto3

    dataset = open_dataset(bucket[0], cache_dir=tmp_path)
    s3 = boto3.client("s3")
    kept = s3.get_object(Bucket="datasets", Key="dataset/val-000000.tar")["Body"].read()
    s3.put_object(Bucket="datasets", Key="dataset/val-000000.tar", Body=bytes(len(kept)))
    try:
        with pytest.raises(ChecksumError, match="twice"):
            open_storage(dataset, client).span(*rows_of(dataset)[22])
    finally:
        s3.put_object(Bucket="datasets", Key="dataset/val-000000.tar", Body=kept)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_is_not_there(bare, tmp_path, client):
    options = {"key": "an-access-key", "secret": "a-secret-key-value", "endpoint_url": bare[1]}
    dataset = open_dataset(bare[0], cache_dir=tmp_path, storage_options=options)
    gone = {**options, "endpoint_url": "http://127.0.0.1:9"}
    storage = open_storage(
        dataset, client, storage_options=gone,
        retry=RetryPolicy(deadline_s=1.0, attempt_timeout_s=0.5, first_delay_s=0.05, max_delay_s=0.2),
    )  # fmt: skip
    with pytest.raises(StorageError, match="no answer after"):
        storage.span(*rows_of(dataset)[0])


def test_no_credentials_at_all(bare, tmp_path):
    with pytest.raises(DatasetError, match="check credentials, profile and endpoint"):
        open_dataset(bare[0], cache_dir=tmp_path, storage_options={"endpoint_url": bare[1]})


@pytest.mark.parametrize("client", CLIENTS)
def test_secrets_stay_out_of_messages_and_logs(bare, tmp_path, caplog, client):
    options = {"key": "AKIAANACCESSKEY", "secret": "a-secret-key-value", "endpoint_url": bare[1]}
    with caplog.at_level(logging.DEBUG, logger="fuelrail"):
        dataset = open_dataset(bare[0], cache_dir=tmp_path, storage_options=options)
        storage = open_storage(dataset, client)
        storage.span(*rows_of(dataset)[0])
        with pytest.raises(DatasetError) as caught:
            open_dataset("s3://no-such-bucket/x", cache_dir=tmp_path, storage_options=options)
    for text in (caplog.text, str(caught.value), repr(dataset)):
        assert "AKIAANACCESSKEY" not in text
        assert "a-secret-key-value" not in text
