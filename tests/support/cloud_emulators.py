"""Emulators of Google Cloud Storage and Azure Blob Storage on loopback, each a real HTTP server.

They need ``pip install -e ".[emulators]"``, and Azurite on the PATH (``npm install azurite``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

# Known to everybody: https://learn.microsoft.com/azure/storage/common/storage-use-azurite#well-known-storage-account
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextlib.contextmanager
def server(command, port):
    """A process that serves on a port of loopback."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 180
        while True:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 1),
            ):
                break
            assert time.monotonic() < deadline, f"{command[0]} did not start within 180 s"
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def free_port():
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def emulated(kind, folder):
    """An emulator of ``gs`` or ``az`` with a bucket ``datasets``; yields storage options and the secret in them.

    Skips the test where it is not installed.
    """
    port = free_port()
    if kind == "gs":
        # Read when gcsfs is imported: it would ask over gRPC, which the emulator does not speak, what the bucket is.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        pytest.importorskip("gcsfs", reason="pip install -e '.[emulators]'")
        pytest.importorskip("gcp_storage_emulator", reason="pip install -e '.[emulators]'")
        run = "from gcp_storage_emulator.__main__ import main; main()"
        command = [
            sys.executable,
            "-c",
            run,
            "start",
            "--host=127.0.0.1",
            f"--port={port}",
            "--in-memory",
            "--default-bucket=datasets",
        ]
        options = {
            "token": "anon",
            "endpoint_url": f"http://127.0.0.1:{port}",
            "project": "test",
        }
        secret = None
    else:
        pytest.importorskip("adlfs", reason="pip install -e '.[emulators]'")
        if shutil.which("azurite-blob") is None:
            pytest.skip("Azurite is not on the PATH: npm install azurite")
        command = [
            "azurite-blob",
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            str(port),
            "--location",
            str(folder),
            "--silent",
            "--skipApiVersionCheck",
            "--disableTelemetry",
        ]
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{AZURITE_ACCOUNT};"
        )
        options = {"connection_string": connection}
        secret = AZURITE_KEY
    with server(command, port):
        if kind == "az":
            import fsspec

            fsspec.filesystem("az", **options).mkdir("datasets")
        yield options, secret
