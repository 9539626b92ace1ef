"""Google Cloud Storage and Azure Blob Storage through emulators on loopback, each a real HTTP server.

They need ``pip install "fuelrail[emulators]"``, and Azurite on the PATH (``npm install azurite``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest

from fuelrail.loaders import DataLoader
from fuelrail.loaders.storage import open_storage
from fuelrail.pipeline.dataset import open_dataset
from fuelrail.pipeline.errors import DatasetError, DatasetNotReadyError, StorageError
from fuelrail.pipeline.retry import RetryPolicy
from support.storage_suite import own, pristine, rows_of, spans_of

__all__ = ["own", "pristine"]

# Known to everybody: https://learn.microsoft.com/azure/storage/common/storage-use-azurite#well-known-storage-account
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
QUICK = RetryPolicy(deadline_s=2.0, attempt_timeout_s=1.0, first_delay_s=0.05, max_delay_s=0.2)


@contextlib.contextmanager
def server(command, port):
    """A process that serves on a port of loopback."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < deadline, f"{command[0]} did not start within 60 s"
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module", params=["gs", "az"])
def cloud(request, pristine, tmp_path_factory):
    """URL of the dataset in a bucket, the storage_options for it, and the options' secret."""
    port = free_port()
    if request.param == "gs":
        # Read when gcsfs is imported: it would ask over gRPC, which the emulator does not speak, what the bucket is.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        pytest.importorskip("gcsfs", reason="pip install 'fuelrail[emulators]'")
        pytest.importorskip("gcp_storage_emulator", reason="pip install 'fuelrail[emulators]'")
        run = "from gcp_storage_emulator.__main__ import main; main()"
        command = [
            sys.executable, "-c", run, "start", "--host=127.0.0.1", f"--port={port}", "--in-memory",
            "--default-bucket=datasets",
        ]  # fmt: skip
        options = {"token": "anon", "endpoint_url": f"http://127.0.0.1:{port}", "project": "test"}
        secret = None
    else:
        pytest.importorskip("adlfs", reason="pip install 'fuelrail[emulators]'")
        if shutil.which("azurite-blob") is None:
            pytest.skip("Azurite is not on the PATH: npm install azurite")
        folder = tmp_path_factory.mktemp("azurite")
        command = [
            "azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent",
            "--skipApiVersionCheck", "--disableTelemetry",
        ]  # fmt: skip
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{AZURITE_ACCOUNT};"
        )
        options, secret = {"connection_string": connection}, AZURITE_KEY
    with server(command, port):
        import fsspec

        fs = fsspec.filesystem(request.param, **options)
        if request.param == "az":
            fs.mkdir("datasets")
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
    with DataLoader(url, 4, seed=3, storage_options=options, cache_dir=tmp_path) as loader:
        assert [batch["sample_key"] for batch in loader] == expected
        fetched = loader.stats().storage.requests
        assert fetched > 0
        loader.set_epoch(0)
        assert [batch["sample_key"] for batch in loader] == expected
        assert loader.stats().storage.cache_hits >= 4 * len(expected)


def test_what_is_missing_is_told_at_once(cloud, tmp_path):
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
