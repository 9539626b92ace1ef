"""An S3 server on loopback, for tests of storage: moto answers all that S3 does, in Python, slower than its clients."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class S3Server(NamedTuple):
    """A running server."""

    name: str
    url: str
    pid: int


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """A moto server in a process of its own, which the environment names too while it runs."""
    port = _free_port()
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with _serving("moto", [sys.executable, "-c", code], port) as server:
        yield server


def upload(source: Path, bucket: str) -> str:
    """Put a dataset's files into a new bucket; the dataset's URL."""
    import s3fs

    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    fs.mkdir(bucket)
    for file in source.iterdir():
        fs.pipe_file(f"{bucket}/dataset/{file.name}", file.read_bytes())
    return f"s3://{bucket}/dataset"


@contextlib.contextmanager
def s3_environment(url: str) -> Iterator[None]:
    """Clients of this process and of its children find the server at ``url`` while the block runs."""
    ours = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with mock.patch.dict(os.environ, ours):
        yield


@contextlib.contextmanager
def _serving(name: str, command: Sequence[str], port: int) -> Iterator[S3Server]:
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with s3_environment(url):
            deadline = time.monotonic() + 60
            while True:
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", port), 1),
                ):
                    break
                if time.monotonic() > deadline or server.poll() is not None:
                    raise RuntimeError(f"the S3 server ({name}) did not start within 60 s")
                time.sleep(0.1)
            yield S3Server(name, url, server.pid)
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
