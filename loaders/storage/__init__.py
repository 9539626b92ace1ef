"""Storage of samples: one protocol, and the backend that fits the location.

======= ======================================== ==================================================
backend for                                      how
======= ======================================== ==================================================
pread   local disks; NFS, Lustre, FUSE, ...      ``pread`` into reused buffers, read-ahead, retries
remote  any fsspec URL; local paths with a cache concurrent ranges, retries, hedging, a cache
======= ======================================== ==================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.loaders.storage.protocol import Storage
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.storage.retry import RetryPolicy

Backend: TypeAlias = Literal["auto", "pread", "remote", "fsspec", "obstore"]
BACKENDS: Final = get_args(Backend)
"""Names that :func:`open_storage` knows; the last two are ``remote`` with that client."""


def open_storage(
    dataset: Dataset,
    backend: str = "auto",
    *,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_size: int | str | None = None,
    retry: RetryPolicy | None = None,
) -> Storage:
    """Return the storage of an open dataset.

    ``auto`` is ``remote`` for a dataset at a URL and where a cache is requested, ``pread``
    elsewhere. ``verify`` checks every span against its xxh3. ``storage_options`` go to fsspec
    (None: those the dataset was opened with). ``cache_dir`` keeps spans on a local disk, up to
    ``cache_size`` bytes.

    Raises ConfigError for an unknown backend or one that cannot read the dataset, and for a cache
    that cannot be used.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r} is not known; choose one of {', '.join(BACKENDS)}")
    if cache_dir is None and cache_size is not None:
        raise ConfigError(
            f"cache_size={cache_size!r} needs cache_dir: give the folder of the cache"
        )
    local = dataset.url is None
    if backend == "pread":
        if not local:
            raise ConfigError(
                f"backend={backend!r} reads local files; the dataset is at '{dataset.location}'"
            )
        if cache_dir is not None:
            raise ConfigError(f"cache_dir needs backend 'remote' or 'auto', got {backend!r}")
    if backend == "pread" or (backend == "auto" and local and cache_dir is None):
        from fuelrail.loaders.storage.pread import PreadShards

        return PreadShards(dataset, verify=verify, retry=retry)
    from fuelrail.loaders.storage.cache.span_cache import SpanCache
    from fuelrail.loaders.storage.remote import RemoteShards

    return RemoteShards(
        dataset,
        backend if backend in ("fsspec", "obstore") else "auto",
        verify=verify,
        storage_options=storage_options,
        retry=retry,
        make_cache=None
        if cache_dir is None
        else partial(SpanCache.open_or_warn, dataset, cache_dir, cache_size),
    )
