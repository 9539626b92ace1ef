"""Datasets at a URL: what any fsspec file system serves, ``s3://``, ``gs://``, ``az://``,
``http(s)://``.

Opening one fetches the manifest, and the index and attribute table once into a local folder named
by the manifest's SHA-256, where the index is mapped as every local one is. The folder is for this
user only. Shards stay where they are; loaders read ranges of them. Credentials and endpoints come
by each library's own means (environment, profiles, ``storage_options``) and go into no message,
file or log.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fuelrail.pipeline.errors import ConfigError, how_to_install, needs
from fuelrail.pipeline.storage.retry import redacted

_EXTRAS: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "http": "http",
    "https": "http",
    "hf": "hf",
}

_VERSIONS: Final = ("ETag", "etag", "e_tag", "md5Hash", "generation", "blob_id")

DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk that is full."""

READ_BYTES: Final = 1 << 20


def is_url(root: str | os.PathLike[str]) -> bool:
    """Return whether a dataset's place is a URL and not a local path; ``file://`` counts as
    local.
    """
    return isinstance(root, str) and "://" in root and not root.startswith("file://")


def shown_url(url: str) -> str:
    """Return the URL as messages may show it: without user, password and query."""
    return redacted(url)


def stated_version(info: Mapping[str, Any]) -> str:
    """Return the version of an object in a store (its ETag), which changes with the object;
    empty where unknown.
    """
    return next((str(info[name]) for name in _VERSIONS if info.get(name)), "")


def filesystem(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the fsspec file system for a URL, and the dataset's path in it.

    Raises ConfigError where the protocol is unknown, its library is not installed, an option is
    wrong, the URL has a query, or a host that the file system connects to at once does not answer.
    """
    # A base requirement; but a trimmed environment may lack it.
    with needs(f"'{shown_url(url)}'", "fsspec"):
        import fsspec
    protocol = url.partition("://")[0]
    if protocol in ("http", "https") and "?" in url:
        raise ConfigError(
            f"'{shown_url(url)}' was given with a query ('?...'), which cannot follow the "
            "names of a dataset's files: leave it out, and give credentials by "
            "storage_options (for a SAS token of Azure: az://CONTAINER/PATH with "
            "account_name and sas_token)"
        )
    try:
        # An instance of our own: fsspec's shared ones keep the endpoint and credentials that they
        # met first, and belong to others too.
        fs, path = fsspec.core.url_to_fs(
            url, **{"skip_instance_cache": True, **(storage_options or {})}
        )
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = "install its fsspec implementation"
        if extra:
            hint = how_to_install(f"fuelrail[{extra}]")
        raise ConfigError(
            f"'{shown_url(url)}' needs a library that is not installed: {hint} ({error})"
        ) from error
    except (
        ValueError,
        TypeError,
        OSError,
    ) as error:  # OSError: some, such as FTP's, connect at once
        text = redacted(str(error), storage_options)
        options_text = " with these storage_options" if storage_options else ""
        raise ConfigError(f"'{shown_url(url)}' cannot be opened{options_text}: {text}") from None
    return fs, str(path).rstrip("/")


def default_cache_folder() -> Path:
    """Return the folder for manifests and indices of remote datasets: ``fuelrail`` in the user's
    cache folder (XDG).
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fuelrail"
