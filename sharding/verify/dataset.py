"""``fuelrail verify``: check every byte of a dataset against manifest and index, and report what is
wrong.

Each shard is read once, mapped: its SHA-256, its tar structure member by member, the xxh3 of every
sample's span, and its DALI index. ``deep`` decodes all members, checks them against the schema, and
decodes every image. Of a dataset at a URL, each file is fetched for its check into a temporary
folder, as many at a time as there are threads.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import xxhash

from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError, IndexFileError, ManifestError
from fuelrail.pipeline.format.attributes import TEXTS
from fuelrail.pipeline.format.codecs import DICTIONARY_FILE
from fuelrail.pipeline.format.dataset import Dataset, load_dictionary
from fuelrail.pipeline.format.fetch import fetch_dataset
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.index.blocks import (
    BLOCKS_FILE,
    TABLE_FILES,
    block_digests,
)
from fuelrail.pipeline.format.index.keys import KEYS_FILE
from fuelrail.pipeline.format.index.samples import INDEX_FILE
from fuelrail.pipeline.format.index.shards import SHARDS_FILE, ShardEntry
from fuelrail.pipeline.format.index.tables import (
    MAX_BLOCKS_BYTES,
    open_shards,
    open_tables,
)
from fuelrail.pipeline.format.layers import (
    EITHER,
    INDEXED,
    NO_ROW,
    ROWS_FILE,
    LayerManifest,
    read_rows,
)
from fuelrail.pipeline.format.manifest import (
    MANIFEST_FILE,
    FileEntry,
    load_manifest,
)
from fuelrail.pipeline.runtime.workers import in_threads
from fuelrail.pipeline.storage.files import open_file, read_file
from fuelrail.pipeline.storage.filesystem import is_url, shown_url
from fuelrail.pipeline.text import Printed, escaped, message, shortened
from fuelrail.sharding.output.folder import file_is
from fuelrail.sharding.output.url import UrlOutput
from fuelrail.sharding.verify.shard import Fault, ShardCheck, make_check
from fuelrail.sharding.write.layers.finish import scalar_channels

_ROWS_AT_ONCE: Final = 1 << 16


@dataclass
class VerifyReport(Printed):
    """What was checked, and every fault that was found, in the order of the shards."""

    dataset: str
    deep: bool
    num_shards: int = 0
    num_samples: int = 0
    num_images: int = 0
    num_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)

    def as_text(self) -> str:
        """Return the report for people: a line for each fault, and one for the whole."""
        lines = []
        for fault in self.faults:
            address = [shortened(fault.file)]
            if fault.offset is not None:
                address.append(f"offset {fault.offset}")
            if fault.key is not None:
                address.append(f"sample {shortened(fault.key)}")
            lines.append(f"{', '.join(address)}: {message(fault.text)}")
        images = f", {counted(self.num_images, 'image')} decoded" if self.deep else ""
        verdict = counted(len(self.faults), "fault") if self.faults else "OK, no errors found"
        lines.append(
            f"{escaped(self.dataset)}: {counted(self.num_samples, 'sample')} in "
            f"{counted(self.num_shards, 'shard')}, {self.num_bytes / 1e6:,.1f} MB{images}: "
            f"{verdict}"
        )
        return "\n".join(lines) + "\n"


Checked: TypeAlias = Callable[[ShardEntry, int], object]
"""A callback that gets each checked shard, and the number of shards in the dataset."""


def verify(
    root: str | os.PathLike[str],
    *,
    deep: bool,
    num_threads: int,
    checked: Checked = lambda _shard, _num_shards: None,
) -> VerifyReport:
    """Check a dataset, in a folder or at a URL; the report has the faults.

    Raises ConfigError for less than one thread, DatasetNotReadyError or ManifestError where there
    is no manifest that the rest could be checked against, and DatasetError where a URL cannot be
    read.
    """
    if num_threads < 1:
        raise ConfigError(f"workers must be >= 1, got {num_threads}")
    output: UrlOutput | None = None
    if is_url(root):
        folder, manifest, origin = fetch_dataset(str(root), kinds=EITHER)
        report = VerifyReport(shown_url(str(root)), deep)
        output = UrlOutput(str(root))
    else:
        folder = Path(str(root).removeprefix("file://"))
        manifest = load_manifest(folder, EITHER)
        origin = None
        report = VerifyReport(str(folder), deep)
    files_here = _FilesHere(output, folder)
    dataset: Dataset | None = None
    shards: Sequence[ShardEntry] = ()
    try:
        table = open_shards(folder, manifest, origin)
        table.check(manifest.num_bytes)
        shards = table
    except (IndexFileError, ManifestError) as error:
        report.faults.append(Fault(SHARDS_FILE, str(error)))
    try:
        if shards:
            dataset = Dataset(
                folder,
                manifest,
                *open_tables(folder, manifest, origin),
                origin=origin,
            )
    except IndexFileError as error:
        report.faults.append(Fault(INDEX_FILE, str(error)))
    if dataset is not None:
        try:
            dataset = replace(
                dataset,
                dictionary=load_dictionary(folder, manifest, dataset.index),
            )
        except ManifestError as error:
            # Members are not decoded then: each of them would be a fault.
            report.faults.append(Fault(DICTIONARY_FILE, str(error)))
            deep = False

    def check_file(entry: FileEntry) -> list[Fault]:
        with files_here(entry.name) as place:
            return _check_file(place, entry)

    def check_shard(number: int) -> ShardCheck:
        shard = shards[number]
        with files_here(shard.name, shard.idx_name) as place:
            check = make_check(
                place,
                manifest=manifest,
                shard=(number, shard),
                dataset=dataset,
                deep=deep,
            ).run()
            if shard.idx_bytes:
                check.faults += _check_file(
                    place,
                    FileEntry(shard.idx_name, shard.idx_bytes, shard.idx_sha256),
                )
            return check

    sizes: dict[str, set[tuple[int, int]]] = {camera.channel: set() for camera in manifest.cameras}
    for faults in in_threads(check_file, manifest.files, num_threads):
        report.faults += faults
    for check in in_threads(check_shard, range(len(shards)), num_threads):
        report.num_shards += 1
        report.num_samples += check.num_samples
        report.num_images += check.num_images
        report.num_bytes += check.shard.bytes
        report.faults += check.faults
        for channel, image_sizes in check.sizes.items():
            sizes[channel] |= image_sizes
        checked(check.shard, len(shards))
    if dataset is not None and not report.faults:
        report.faults += _check_rows(dataset)
        with files_here(*TABLE_FILES, BLOCKS_FILE) as place:
            report.faults += _check_tables(dataset, place)
        if isinstance(manifest, LayerManifest):
            report.faults += _check_layer_rows(dataset)
        if deep and not report.faults:
            report.faults += [
                Fault(MANIFEST_FILE, text) for text in _find_manifest_faults(dataset, sizes)
            ]
    return report


class _FilesHere(threading.local):
    """Files of a dataset in a folder on this machine.

    Threads share the connections of a file system that is made for it; of another each thread has
    one, made once.
    """

    def __init__(self, output: UrlOutput | None, folder: Path) -> None:
        self._folder = folder
        self._output = output
        if output is not None and not getattr(output.fs, "async_impl", False):
            self._output = UrlOutput(output.location)

    @contextlib.contextmanager
    def __call__(self, *names: str) -> Iterator[Path]:
        """Yield the folder with those of the files that exist."""
        if self._output is None:
            yield self._folder
            return
        with tempfile.TemporaryDirectory(prefix="fuelrail-verify-") as scratch:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._output.fetch(name, Path(scratch) / name)
            yield Path(scratch)


def _check_file(folder: Path, entry: FileEntry) -> list[Fault]:
    try:
        with open_file(folder / entry.name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != entry.bytes:
            return [
                Fault(
                    entry.name,
                    f"has {size} bytes, the manifest says {entry.bytes}",
                )
            ]
        if not file_is(folder / entry.name, entry.bytes, entry.sha256):
            return [Fault(entry.name, "SHA-256 does not match the manifest")]
    except OSError as error:
        return [Fault(entry.name, f"cannot be read: {error.strerror}")]
    return []


def _check_rows(dataset: Dataset) -> list[Fault]:
    """Check that keys are unique, no clip is in two splits, and the rows of
    ``attributes.parquet`` match the index.
    """
    index = dataset.index
    faults = list[Fault]()
    hashes = np.empty(len(index), np.uint64)
    split_of: dict[str, str] = {}
    for split, entry in dataset.manifest.splits.items():
        end = entry.first_sample + entry.num_samples
        for clip in index.clip_ids(entry.first_sample, end):
            if split_of.setdefault(clip, split) != split:
                faults.append(
                    Fault(
                        INDEX_FILE,
                        f"clip '{clip}' is in the splits {split_of[clip]} and {split}",
                    )
                )
    for first in range(0, len(index), _ROWS_AT_ONCE):
        end = min(first + _ROWS_AT_ONCE, len(index))
        keys = index.strings("key", first, end)
        hashes[first:end] = [xxhash.xxh3_64_intdigest(key.encode()) for key in keys]
    values, counts = np.unique(hashes, return_counts=True)
    for value in values[counts > 1].tolist():
        rows = np.flatnonzero(hashes == value)
        first, second = rows[:2].tolist()
        faults.append(
            Fault(
                INDEX_FILE,
                f"rows {first} and {second} have one key",
                key=index.row(first).key,
            )
        )
    return faults + _check_attributes(dataset)


def _check_tables(dataset: Dataset, folder: Path) -> list[Fault]:
    """Check that ``keys.arrow`` and ``blocks.sha256`` match the other tables, which are in the
    folder too.
    """
    with tempfile.TemporaryDirectory(prefix="fuelrail-verify-") as scratch:
        try:
            dataset.keys.check(dataset.index, Path(scratch))
        except IndexFileError as error:
            return [Fault(KEYS_FILE, str(error))]
    names = [name for name in TABLE_FILES if dataset.manifest.file(name) is not None]
    if read_file(folder / BLOCKS_FILE, MAX_BLOCKS_BYTES) != b"".join(
        block_digests(folder / name) for name in names
    ):
        return [
            Fault(
                BLOCKS_FILE,
                f"does not hold the digests of the blocks of {', '.join(names)}",
            )
        ]
    return []


def _check_attributes(dataset: Dataset) -> list[Fault]:
    """Check that ``attributes.parquet``, where it exists, has the index's rows in their order."""
    index = dataset.index
    file = dataset.attributes_file()
    row = 0
    if not file.exists:
        return []
    entries = sorted(dataset.manifest.splits.items(), key=lambda item: item[1].first_sample)
    splits = [name for name, entry in entries for _ in range(entry.num_samples)]
    try:
        schema = file.schema(len(index))
        if isinstance(dataset.manifest, LayerManifest):
            fields = [field for field in schema if field.name not in INDEXED]
            scalars = scalar_channels(dataset.manifest.channels)
            if {field.name: field.type for field in fields} != scalars:
                text = (
                    f"has the columns {shortened(fields)} beside {', '.join(INDEXED)}; the "
                    f"channels of the layer make {scalars}"
                )
                return [Fault(ATTRIBUTES_FILE, text)]
        absent = [name for name in INDEXED if name not in schema.names]
        if absent:
            return [Fault(ATTRIBUTES_FILE, f"has no column '{absent[0]}'")]
        for batch in file.batches(INDEXED):
            end = row + len(batch)
            for name, column in zip(INDEXED, batch.columns, strict=True):
                if name == "split":
                    expected: Sequence[object] = splits[row:end]
                else:
                    expected = (
                        index.strings(name, row, end)
                        if name in TEXTS
                        else index.column(name, row, end).tolist()
                    )
                for number, (value, index_value) in enumerate(
                    zip(column.to_pylist(), expected, strict=True)
                ):
                    if value != index_value:
                        key = index.row(row + number).key
                        text = (
                            f"row {row + number} has the {name} {shortened(value)}, the index "
                            f"has {shortened(index_value)}"
                        )
                        return [Fault(ATTRIBUTES_FILE, text, key=key)]
            row = end
    except IndexFileError as error:
        return [Fault(ATTRIBUTES_FILE, str(error))]
    if row == len(index):
        return []
    return [Fault(ATTRIBUTES_FILE, f"has {row} rows, the index {len(index)}")]


def _check_layer_rows(layer: Dataset) -> list[Fault]:
    """Check that each row of a layer belongs to one position of its base."""
    try:
        if layer.origin is not None and (entry := layer.manifest.file(ROWS_FILE)) is not None:
            layer.origin.ensure_file(entry)
        rows = read_rows(layer)
    except (IndexFileError, ManifestError) as error:
        return [Fault(ROWS_FILE, str(error))]
    if rows is None:
        return []
    rows_used = rows[rows != NO_ROW]
    if len(rows_used) and not 0 <= rows_used.min() <= rows_used.max() < len(layer):
        return [
            Fault(
                ROWS_FILE,
                f"names rows {rows_used.min()} to {rows_used.max()}; the index has 0 to "
                f"{len(layer) - 1}",
            )
        ]
    if len(np.unique(rows_used)) != len(rows_used):
        return [Fault(ROWS_FILE, "gives one row to several positions of the base")]
    return []


def _find_manifest_faults(
    dataset: Dataset, sizes: Mapping[str, set[tuple[int, int]]]
) -> Iterator[str]:
    """Yield the faults of the manifest; ``sizes`` are those of the decoded images, by camera."""
    manifest = dataset.manifest
    index = dataset.index
    for kind, names in (
        ("classes", manifest.classes),
        ("attributes", manifest.attributes),
        *((f"columns of {lidar.channel}", lidar.columns) for lidar in manifest.lidars),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                yield f"the {kind} have {name!r:.80} {count} times; each is allowed once"
    total = 0
    for name, split in manifest.splits.items():
        end = split.first_sample + split.num_samples
        num_clips = len(index.clip_ids(split.first_sample, end))
        total += num_clips
        if num_clips != split.num_clips:
            yield f"num_clips of split '{name}' is {split.num_clips}, the index has {num_clips}"
    if total != manifest.num_clips:
        yield f"num_clips is {manifest.num_clips}, the index has {total}"
    for camera in manifest.cameras:
        decoded_sizes = sorted(sizes[camera.channel])
        if sorted(camera.sizes) != decoded_sizes:
            yield (
                f"sizes of camera '{camera.channel}' are {list(map(list, camera.sizes))!s:.160}, "
                f"its images have {list(map(list, decoded_sizes))!s:.160}"
            )
