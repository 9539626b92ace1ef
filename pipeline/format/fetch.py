"""Bring the files of a dataset at a URL here: small ones as a whole, tables of large ones range
by range.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from fuelrail.pipeline.errors import (
    DatasetError,
    DatasetNotReadyError,
    ManifestError,
)
from fuelrail.pipeline.format.codecs import DICTIONARY_FILE
from fuelrail.pipeline.format.index.blocks import BLOCKS_FILE
from fuelrail.pipeline.format.index.keys import KEYS_FILE
from fuelrail.pipeline.format.index.samples import INDEX_FILE
from fuelrail.pipeline.format.index.shards import SHARDS_FILE
from fuelrail.pipeline.format.manifest import (
    DATASETS,
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Kinds,
    Manifest,
    decode_manifest,
)
from fuelrail.pipeline.storage.files import published
from fuelrail.pipeline.storage.filesystem import (
    DISK_FULL,
    READ_BYTES,
    default_cache_folder,
    filesystem,
    shown_url,
)
from fuelrail.pipeline.storage.private import make_folder, open_file
from fuelrail.pipeline.storage.retry import (
    Fault,
    RetryPolicy,
    call_with_retries,
    read_checked,
)

_LOG = logging.getLogger(__name__)
_SIDE_FILES: Final = (
    SHARDS_FILE,
    INDEX_FILE,
    KEYS_FILE,
    BLOCKS_FILE,
    "attributes.parquet",
    DICTIONARY_FILE,
)
"""Fetched at opening, if they are small, all at once."""
WHOLE_BYTES: Final = 64 << 20
"""Tables at a URL of up to this size are fetched as a whole, larger ones by blocks."""
WHOLE_KEYS_BYTES: Final = 4 << 20
"""The same limit for the table of keys: 131,072 samples. Most loaders never ask for a key."""


def comes_whole(entry: FileEntry) -> bool:
    """Return whether a file at a URL is fetched as a whole."""
    return entry.bytes <= (
        min(WHOLE_BYTES, WHOLE_KEYS_BYTES) if entry.name == KEYS_FILE else WHOLE_BYTES
    )


def fetch_dataset(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    cache_folder: Path | None = None,
    retry: RetryPolicy | None = None,
    kinds: Kinds = DATASETS,
) -> tuple[Path, Manifest, RemoteFolder]:
    """Bring a remote dataset's manifest, tables, attributes and dictionary here; returns folder,
    manifest and origin.

    ``kinds`` are the formats that are taken.

    Files of more than 64 MiB (``keys.arrow``: 4 MiB) are left there, for the origin to fetch when
    they are needed. Files that are here already are used if their SHA-256 is the manifest's. Where
    ``cache_folder``'s disk is full they go to the user's cache folder, with a warning.

    Raises DatasetNotReadyError where there is no ``dataset.json``, DatasetError where access is
    refused or storage does not answer, ManifestError, and ConfigError (also for a folder that
    belongs to another user or is a link).
    """
    source = RemoteFolder(url, storage_options, retry or RetryPolicy())
    data, manifest = source.manifest(kinds)
    digest = hashlib.sha256(data).hexdigest()
    folder = (cache_folder or default_cache_folder()) / "datasets" / digest
    try:
        try:
            _store(source, manifest, data, folder)
        except OSError as error:
            if cache_folder is None or error.errno not in DISK_FULL:
                raise
            folder = default_cache_folder() / "datasets" / digest
            _LOG.warning(
                "cache_dir '%s' is full (%s); the index of '%s' is kept in '%s'",
                cache_folder,
                error.strerror,
                source.shown,
                folder,
            )
            _store(source, manifest, data, folder)
    except OSError as error:
        raise DatasetError(
            f"the index of '{source.shown}' cannot be stored in '{folder}': {error}; choose "
            "another folder with cache_dir"
        ) from error
    source.folder = folder
    return folder, manifest, source


def _store(
    source: RemoteFolder,
    manifest: Manifest,
    data: bytes,
    folder: Path,
) -> None:
    """Bring what is not here yet; ``data`` is the manifest's file."""
    make_folder(folder.parent.parent, restrict=False)
    make_folder(folder.parent)
    make_folder(folder)

    def bring(entry: FileEntry) -> None:
        if (
            entry.name in _SIDE_FILES
            and comes_whole(entry)
            and not _is_here(folder / entry.name, entry)
        ):
            _publish(folder / entry.name, source.checked(entry))

    with ThreadPoolExecutor(len(_SIDE_FILES)) as pool:
        list(pool.map(bring, manifest.files))
    if not _is_here(folder / MANIFEST_FILE, FileEntry(MANIFEST_FILE, len(data), folder.name)):
        _publish(folder / MANIFEST_FILE, data)


class RemoteFolder:
    """The files of a dataset at a URL, with retries, fetched into its folder in the cache when
    they are needed.
    """

    folder: Path
    """The folder in the cache, which `fetch_dataset` makes when it knows the manifest."""

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None,
        retry: RetryPolicy,
    ) -> None:
        """Open the file system; raise what :func:`filesystem` raises."""
        options = storage_options
        client_options = (storage_options or {}).get("client_kwargs", {})
        if url.startswith("http") and isinstance(client_options, Mapping):
            with contextlib.suppress(ImportError):  # said where the file system is made
                import aiohttp

                # fsspec's own wait for the next bytes is 300 s.
                silence_s = retry.attempt_timeout_s
                timeout = aiohttp.ClientTimeout(
                    total=300,
                    sock_connect=silence_s,
                    sock_read=silence_s,
                )
                options = {
                    **(storage_options or {}),
                    "client_kwargs": {"timeout": timeout, **client_options},
                }
        self._open = partial(filesystem, url, options)
        fs, self._path = self._open()
        self._opened = {os.getpid(): fs}
        self.shown = shown_url(url)
        self._options = storage_options
        self.retry = retry

    @property
    def _fs(self) -> Any:
        """The file system of this process: those of fsspec do not work in a fork of the process
        that made them.

        A fork keeps the one that it inherits: if it were closed there, the connections would leave
        the set of those that the event loop of the other process watches, which both share.
        """
        if os.getpid() not in self._opened:
            self._opened[os.getpid()] = self._open()[0]
        return self._opened[os.getpid()]

    def ensure_file(self, entry: FileEntry) -> None:
        """Have a file in the folder, as the manifest describes it.

        Raises DatasetError where it cannot be fetched or stored, ManifestError where it is another
        file.
        """
        path = self.folder / entry.name
        if _is_here(path, entry):
            return
        data = self.checked(entry)
        try:
            _publish(path, data)
        except OSError as error:
            raise DatasetError(
                f"'{path}' cannot be stored: {error}; choose another folder with cache_dir"
            ) from error

    def _read_whole(self, name: str, max_bytes: int) -> bytes:
        """Return a whole file; raise ManifestError for one of more than ``max_bytes``, of which
        no more is read.
        """
        path = f"{self._path}/{name}"

        def work() -> bytes:
            if not self.shown.startswith("http"):
                data: bytes = self._fs.cat_file(path, start=0, end=max_bytes + 1)
                return data
            # A server may ignore a range that is asked for, and have no end. Without a block size
            # it is a stream; a stated size saves the request that would ask for it.
            parts = list[bytes]()
            remaining = max_bytes + 1
            with self._fs.open(path, "rb", block_size=0, size=remaining) as file:
                while remaining > 0 and (part := file.read(min(remaining, READ_BYTES))):
                    parts.append(part)
                    remaining -= len(part)
            return b"".join(parts)

        data = call_with_retries(work, self.retry, self._on_fault(name), self._options)
        if len(data) > max_bytes:
            raise ManifestError(
                f"'{self.shown}/{name}' has more than {max_bytes} bytes, which is all that "
                "is read of it"
            )
        return data

    def read(self, name: str, first: int, end: int) -> bytes:
        """Return bytes ``first`` to ``end - 1`` of a file, by one request; raise DatasetError
        where that fails.
        """

        def work() -> bytes:
            data: bytes = self._fs.cat_file(f"{self._path}/{name}", start=first, end=end)
            return data

        data = call_with_retries(work, self.retry, self._on_fault(name), self._options)
        if len(data) > end - first:
            raise DatasetError(
                f"'{self.shown}/{name}': the server sent {len(data)} bytes for a range of "
                f"{end - first}: it does not serve byte ranges, which datasets need"
            )
        return data

    def manifest(self, kinds: Kinds) -> tuple[bytes, Manifest]:
        """Return ``dataset.json`` and its content; raise ManifestError where it stays wrong."""

        def check(data: bytes) -> tuple[bytes, Manifest]:
            return data, decode_manifest(data, f"{self.shown}/{MANIFEST_FILE}", kinds)

        return read_checked(
            lambda: self._read_whole(MANIFEST_FILE, MAX_MANIFEST_BYTES),
            check,
            self.retry,
        )

    def checked(self, entry: FileEntry) -> bytes:
        """Return a file whose SHA-256 the manifest states; raise ManifestError where it stays
        wrong.
        """

        def check(data: bytes) -> bytes:
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise ManifestError(
                    f"'{self.shown}/{entry.name}' is not the file that dataset.json "
                    f"describes ({len(data)} bytes of {entry.bytes}, SHA-256 differs): was "
                    "the dataset replaced in part?"
                )
            return data

        return read_checked(
            lambda: self._read_whole(entry.name, max(entry.bytes, 0)),
            check,
            self.retry,
        )

    def _on_fault(self, name: str) -> Callable[[Fault, float | None], None]:
        def report(fault: Fault, pause_s: float | None) -> None:
            if pause_s is not None:
                _LOG.warning(
                    "%s/%s: %s; trying again in %.1f s",
                    self.shown,
                    name,
                    fault.text,
                    pause_s,
                )
                return
            if fault.kind == "missing" and name == MANIFEST_FILE:
                raise DatasetNotReadyError(
                    f"'{self.shown}' has no dataset.json: sharding has not finished there"
                ) from None
            reason = {
                "missing": "is not there",
                "refused": f"may not be read: {fault.advice}",
                "invalid": "cannot be read",
            }.get(fault.kind, f"could not be read for {self.retry.deadline_s:g} s")
            raise DatasetError(f"'{self.shown}/{name}' {reason} ({fault.text})") from None

        return report


def _is_here(file: Path, entry: FileEntry) -> bool:
    try:
        with os.fdopen(open_file(file, os.O_RDONLY), "rb") as stream:
            if os.fstat(stream.fileno()).st_size != entry.bytes:
                return False
            return hashlib.file_digest(stream, "sha256").hexdigest() == entry.sha256
    except OSError:
        return False


def _publish(file: Path, data: bytes) -> None:
    with published(file) as stream:
        stream.write(data)
