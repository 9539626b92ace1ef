"""Open the tables of a dataset (shards, samples, keys), here or at a URL; write those that
follow from the index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from fuelrail.pipeline.errors import IndexFileError, ManifestError
from fuelrail.pipeline.format.fetch import RemoteFolder, comes_whole
from fuelrail.pipeline.format.index.attributes_file import (
    ATTRIBUTES_FILE,
    AttributesFile,
)
from fuelrail.pipeline.format.index.blocks import (
    BLOCKS_FILE,
    TABLE_FILES,
    BlockFile,
    block_digests,
    open_sparse,
    split_digests,
)
from fuelrail.pipeline.format.index.keys import KEYS_FILE, KeyTable, write_keys
from fuelrail.pipeline.format.index.samples import INDEX_FILE, SampleIndex
from fuelrail.pipeline.format.index.shards import (
    SHARDS_FILE,
    ShardEntry,
    ShardTable,
    write_shards,
)
from fuelrail.pipeline.format.manifest import FileEntry, Manifest
from fuelrail.pipeline.storage.files import open_file, read_file

MAX_BLOCKS_BYTES: Final = 64 << 20
"""The largest ``blocks.sha256``: the digests of 2 TiB of tables."""


class Tables(NamedTuple):
    """The open tables of a dataset."""

    shards: ShardTable
    samples: SampleIndex
    keys: KeyTable


def open_shards(
    folder: Path,
    manifest: Manifest,
    origin: RemoteFolder | None = None,
) -> ShardTable:
    """Open ``shards.arrow`` alone, as :func:`open_tables` does."""
    opener = _Opener(folder, manifest, origin)
    return ShardTable(opener.table(SHARDS_FILE), manifest)


def open_tables(
    folder: Path,
    manifest: Manifest,
    origin: RemoteFolder | None = None,
) -> Tables:
    """Open the tables of the dataset in a folder, or at ``origin``, whose files are kept in the
    folder.

    Raises ManifestError, IndexFileError, and DatasetError where a file cannot be fetched.
    """
    opener = _Opener(folder, manifest, origin)
    shards = open_shards(folder, manifest, origin)
    index = SampleIndex(
        folder / INDEX_FILE,
        num_shards=len(shards),
        file=opener.table(INDEX_FILE),
    )
    if len(index) != manifest.num_samples:
        raise IndexFileError(
            f"the index of '{folder}' has {len(index)} rows, the manifest {manifest.num_samples}"
        )
    checked = None
    if origin is None:
        checked = partial(opener.table, KEYS_FILE, is_checked=True)
    keys = KeyTable(
        partial(opener.table, KEYS_FILE),
        num_samples=len(index),
        checked=checked,
    )
    return Tables(shards, index, keys)


class _Opener:
    """Opens the tables of one dataset."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        origin: RemoteFolder | None,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._origin = origin

    def table(self, name: str, *, is_checked: bool = False) -> BlockFile:
        """Open a table, at a URL whole or by blocks; in a folder check the blocks of
        ``shards.arrow`` always.
        """
        entry = self._entry(name)
        path = self._folder / name
        if self._origin is not None and not comes_whole(entry):
            read: Callable[[int, int], bytes] = partial(self._origin.read, name)
            return open_sparse(path, entry.bytes, self._digests(name), read)
        if self._origin is not None:
            self._origin.ensure_file(entry)
        elif not path.exists():
            raise IndexFileError(f"'{self._folder}' has no {name}")
        if path.is_file():
            num_bytes = path.stat().st_size
            if num_bytes != entry.bytes:
                raise IndexFileError(
                    f"'{path}' has {num_bytes} bytes, the manifest says {entry.bytes}"
                )
        if name == SHARDS_FILE and self._origin is None:
            is_checked = True
        digests = self._digests(name) if is_checked else None
        return BlockFile(path, digests)

    def _entry(self, name: str) -> FileEntry:
        entry = self._manifest.file(name)
        if entry is None:
            raise ManifestError(
                f"the manifest of '{self._folder}' does not name {name}, which every dataset has"
            )
        return entry

    def _digests(self, name: str) -> bytes:
        entry = self._entry(BLOCKS_FILE)
        path = self._folder / BLOCKS_FILE
        if entry.bytes > MAX_BLOCKS_BYTES:
            raise ManifestError(
                f"'{path}' has {entry.bytes} bytes, at most {MAX_BLOCKS_BYTES} are read"
            )
        if self._origin is not None:
            self._origin.ensure_file(entry)
        try:
            data = read_file(path, MAX_BLOCKS_BYTES)
        except OSError as error:
            raise IndexFileError(f"'{path}' cannot be read: {error.strerror or error}") from error
        digest = hashlib.sha256(data).hexdigest()
        if len(data) != entry.bytes or digest != entry.sha256:
            raise IndexFileError(
                f"'{path}' is not the file that dataset.json describes (SHA-256 differs)"
            )
        sizes = []
        for table in TABLE_FILES:
            table_entry = self._manifest.file(table)
            if table_entry is not None:
                sizes.append((table_entry.name, table_entry.bytes))
        digests = split_digests(data, sizes)
        return digests[name]


def open_attributes(
    folder: Path,
    manifest: Manifest,
    origin: RemoteFolder | None = None,
) -> AttributesFile:
    """Open ``attributes.parquet``, which need not exist, as :func:`open_tables` does."""
    entry = manifest.file(ATTRIBUTES_FILE)
    path = folder / ATTRIBUTES_FILE
    if origin is None or entry is None:
        return AttributesFile(path, exists=entry is not None)
    if not comes_whole(entry):
        opener = _Opener(folder, manifest, origin)
        return AttributesFile(path, opener.table(ATTRIBUTES_FILE))
    origin.ensure_file(entry)
    return AttributesFile(path)


def write_tables(folder: Path, shards: Iterable[ShardEntry]) -> list[FileEntry]:
    """Write ``shards.arrow``, ``keys.arrow`` and ``blocks.sha256`` beside the ``index.arrow`` that
    is in the folder.

    ``attributes.parquet`` may be there too. Returns the manifest's entries of all. The caller
    publishes the files.
    """
    write_shards(folder / SHARDS_FILE, shards)
    write_keys(folder / KEYS_FILE, SampleIndex(folder / INDEX_FILE))
    return seal_tables(folder)


def seal_tables(folder: Path) -> list[FileEntry]:
    """Write ``blocks.sha256`` of the tables in the folder; returns the manifest's entries of
    all.
    """
    names = list(TABLE_FILES)
    if not (folder / ATTRIBUTES_FILE).is_file():
        names.remove(ATTRIBUTES_FILE)
    digests = [block_digests(folder / name) for name in names]
    (folder / BLOCKS_FILE).write_bytes(b"".join(digests))
    return [file_entry(folder / name) for name in (*names, BLOCKS_FILE)]


def file_entry(path: Path) -> FileEntry:
    """Return the manifest's entry of a file."""
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(name=path.name, bytes=path.stat().st_size, sha256=digest)
