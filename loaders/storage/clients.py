"""Byte ranges of remote files, requested on an event loop: one small interface over fsspec and
obstore.

fsspec reaches every protocol and knows all ways to credentials. obstore (the Rust crate
``object_store``) speaks S3 at a fraction of the CPU time: it is taken for ``s3://`` where it is
installed and can be given the same credentials, see :func:`make_client`. Neither retries here: that
is :mod:`fuelrail.loaders.storage.requests`'s matter.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from fsspec.implementations.local import LocalFileSystem

from fuelrail.pipeline.errors import ConfigError, how_to_install
from fuelrail.pipeline.storage.files import open_file
from fuelrail.pipeline.storage.filesystem import filesystem, shown_url

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

    OnBytes = Callable[[int], None]

_LOG = logging.getLogger(__name__)

_BLOCKING_THREADS: Final = 16
_PROGRESS_BYTES: Final = 64 << 10
_CREDENTIALS_HELD: Final = timedelta(minutes=5)
_S3_OPTIONS: Final = {
    "key": "access_key_id",
    "aws_access_key_id": "access_key_id",
    "secret": "secret_access_key",
    "aws_secret_access_key": "secret_access_key",
    "token": "session_token",
    "aws_session_token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
}
"""s3fs's names of options, and obstore's."""


class RangeClient(Protocol):
    """Reads byte ranges of a dataset's files.

    Methods run on fsspec's event loop; any exception is a fault.
    """

    kind: str

    async def get(
        self,
        name: str,
        start: int,
        end: int,
        on_bytes: OnBytes | None = None,
    ) -> Buffer:
        """Return bytes ``start`` to ``end - 1`` of file ``name``; fewer where the file ends.

        ``on_bytes`` is told how many have come, as often as the client knows it.
        """

    def close(self) -> None:
        """Let go of threads; connections end with the process's last user of the file system."""


class FsspecClient:
    """Any fsspec file system: its coroutine where it has one, else its blocking call in a few
    threads.
    """

    kind = "fsspec"

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._read = _read_local if isinstance(fs, LocalFileSystem) else fs.cat_file
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        if getattr(fs, "async_impl", False):
            if hasattr(fs, "retries"):
                fs.retries = 1  # s3fs's own, which know neither our deadline nor hedging
        else:
            self._threads = concurrent.futures.ThreadPoolExecutor(
                _BLOCKING_THREADS, "fuelrail-read"
            )

    async def get(
        self,
        name: str,
        start: int,
        end: int,
        on_bytes: OnBytes | None = None,
    ) -> Buffer:
        """See RangeClient."""
        path = f"{self._path}/{name}"
        if self._threads is not None:
            loop = asyncio.get_running_loop()
            read = partial(self._read, path, start=start, end=end)
            data: bytes = await loop.run_in_executor(self._threads, read)
        else:
            # fsspec's asynchronous API
            data = await self._fs._cat_file(path, start=start, end=end)  # noqa: SLF001
        if on_bytes is not None:
            on_bytes(len(data))
        return data

    def close(self) -> None:
        """See RangeClient."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _read_local(path: str, start: int, end: int) -> bytes:
    """Read a range of a file in a folder: unlike an object of a store it may be a FIFO, or a
    link out of the folder.
    """
    with open_file(path) as file:
        file.seek(start)
        return file.read(end - start)


class ObstoreClient:
    """S3 through obstore."""

    kind = "obstore"

    def __init__(
        self,
        bucket: str,
        prefix: str,
        config: Mapping[str, Any],
    ) -> None:
        import obstore
        from obstore.store import S3Store

        self._get = obstore.get_range_async
        self._open = obstore.get_async
        self._prefix = prefix
        options: dict[str, Any] = {}
        if not config.get("skip_signature") and "access_key_id" not in config:
            # Where boto is not installed or finds none, obstore looks for itself.
            with contextlib.suppress(ImportError):
                import botocore.session

                credentials = botocore.session.get_session().get_credentials()
                if credentials is not None:
                    options["credential_provider"] = _BotoCredentials(credentials)
        plain_http = str(config.get("endpoint", "")).startswith("http://")
        self._store = S3Store(
            bucket,
            config=dict(config),  # type: ignore[arg-type]
            client_options={
                "timeout": "30s",
                "connect_timeout": "5s",
                "allow_http": plain_http,
            },
            retry_config={"max_retries": 0},
            **options,
        )

    async def get(
        self,
        name: str,
        start: int,
        end: int,
        on_bytes: OnBytes | None = None,
    ) -> Buffer:
        """See RangeClient."""
        path = f"{self._prefix}/{name}" if self._prefix else name
        if on_bytes is None:
            return memoryview(await self._get(self._store, path, start=start, end=end))
        answer = await self._open(self._store, path, options={"range": (start, end)})
        data = bytearray()
        async for part in answer.stream(min_chunk_size=_PROGRESS_BYTES):
            data += part
            on_bytes(len(data))
        return memoryview(data)

    def close(self) -> None:
        """See RangeClient."""


def make_client(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    kind: str = "auto",
) -> RangeClient:
    """Make the client for a dataset's URL; ``auto``: obstore for S3 if installed and if it supports
    all options.

    ``kind`` may also be "fsspec" or "obstore". Raises ConfigError for a missing library and wrong
    options.
    """
    fs, path = filesystem(url, storage_options)
    if kind == "fsspec" or (kind == "auto" and not url.startswith(("s3://", "s3a://"))):
        return FsspecClient(fs, path)
    config = _obstore_config(storage_options or {})
    if config is None:
        if kind == "obstore":
            raise ConfigError(
                f"obstore cannot read '{shown_url(url)}' with these storage_options; use 'fsspec'"
            )
        return FsspecClient(fs, path)
    bucket, _, prefix = path.partition("/")
    try:
        return ObstoreClient(bucket, prefix, config)
    except ImportError as error:
        if kind == "obstore":
            raise ConfigError(
                f"the client obstore needs {error.name}: {how_to_install('fuelrail[s3]')}"
            ) from error
        _LOG.info("obstore is not installed; reading S3 through s3fs, which costs more CPU time")
        return FsspecClient(fs, path)


def _obstore_config(
    storage_options: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Translate s3fs's options; None where one has no counterpart, so that s3fs itself must be
    used.
    """
    flat = dict(storage_options)
    nested = flat.pop("client_kwargs", None) or {}
    flat = {**nested, **flat}
    config: dict[str, Any] = {}
    anonymous = flat.pop("anon", False)
    for name, value in flat.items():
        if name not in _S3_OPTIONS:
            return None
        if value is not None:
            config[_S3_OPTIONS[name]] = value
    if anonymous:
        config["skip_signature"] = True
    # The rest of what boto would find; where that is more than obstore takes, s3fs does the
    # reading.
    try:
        import botocore.exceptions
        import botocore.session

        session = botocore.session.get_session()
        profile = session.get_scoped_config()
        region = session.get_config_variable("region")
    except ImportError:
        return config
    except botocore.exceptions.BotoCoreError:
        return None
    if "services" in profile:
        return None
    config.setdefault("region", region or "us-east-1")
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or profile.get("endpoint_url")
    )
    if endpoint:
        config.setdefault("endpoint", endpoint)
    return config


class _BotoCredentials:
    """Credentials as boto finds them (environment, profiles, SSO, instance roles), refreshed by
    boto.
    """

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        """Return credentials as obstore asks for them, and new ones after ``expires_at``."""
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_HELD,
        }
