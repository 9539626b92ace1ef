"""``fuelrail verify``: hold every byte of a dataset against what manifest and index say, and name what is wrong.

Each shard is read once, mapped: its SHA-256, its tar structure member by member, the xxh3 of every sample's span, and
its DALI index. ``deep`` decodes all members, checks them against the schema, and decodes every image.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from fuelrail.pipeline.attributes import ATTRIBUTES_FILE
from fuelrail.pipeline.codecs import suffix
from fuelrail.pipeline.dataset import Dataset, check_span, read_members
from fuelrail.pipeline.errors import ConfigError, FuelrailError, IndexFileError, ShardError
from fuelrail.pipeline.index import INDEX_FILE, IndexRow, SampleIndex
from fuelrail.pipeline.manifest import load_manifest
from fuelrail.pipeline.schema import IMAGE_EXTENSIONS, POINTS_EXTENSION, SWEEPS_FIELD, decode_sample
from fuelrail.pipeline.shardfile import END_OF_ARCHIVE, FoundMember, StoredMember, iter_members
from fuelrail.sharding.dali import IndexText
from fuelrail.sharding.images import check_pixels
from fuelrail.sharding.threads import in_threads
from fuelrail.sharding.writer import file_is

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from fuelrail.pipeline.manifest import FileEntry, Manifest, ShardEntry
    from fuelrail.pipeline.schema import Sample

_ROWS_AT_ONCE: Final = 1 << 16


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong: in which file, at which offset [bytes] and in which sample, where that is known."""

    file: str
    text: str
    offset: int | None = None
    key: str | None = None


@dataclass
class Report:
    """What was looked at, and everything that was found wrong, in the order of the shards."""

    dataset: str
    deep: bool
    num_shards: int = 0
    num_samples: int = 0
    num_images: int = 0
    num_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)

    def as_json(self) -> str:
        """The report as one JSON document."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    def as_text(self) -> str:
        """The report for people: a line for each fault, and one for the whole."""
        lines = []
        for fault in self.faults:
            address = [fault.file]
            if fault.offset is not None:
                address.append(f"offset {fault.offset}")
            if fault.key is not None:
                address.append(f"sample {fault.key}")
            lines.append(f"{', '.join(address)}: {fault.text}")
        images = f", {self.num_images:,} images decoded" if self.deep else ""
        verdict = f"{len(self.faults)} faults" if self.faults else "all is well"
        lines.append(
            f"{self.dataset}: {self.num_samples:,} samples in {self.num_shards:,} shards, "
            f"{self.num_bytes / 1e6:,.1f} MB{images}: {verdict}"
        )
        return "\n".join(lines) + "\n"


def _ignore(shard: ShardEntry, num_shards: int) -> None:
    """Nobody watches."""


def verify(
    root: str | os.PathLike[str],
    *,
    deep: bool,
    num_threads: int,
    checked: Callable[[ShardEntry, int], None] = _ignore,
) -> Report:
    """Check a local dataset folder. What is wrong stands in the report.

    ``checked`` is called for each shard that was, with the number of all of them. Raises ConfigError for less than one
    thread, DatasetNotReadyError or ManifestError where there is no manifest that the rest could be held against.
    """
    if num_threads < 1:
        raise ConfigError(f"{num_threads} workers are too few: 1 at least")
    folder = Path(root)
    manifest = load_manifest(folder)
    report = Report(str(folder), deep)
    dataset: Dataset | None = None
    try:
        index = SampleIndex(folder / INDEX_FILE)
        if len(index) != manifest.num_samples:
            raise IndexFileError(f"{len(index)} rows, the manifest says {manifest.num_samples}")
        dataset = Dataset(folder, manifest, index)
    except IndexFileError as error:
        report.faults.append(Fault(INDEX_FILE, str(error)))
    for faults in in_threads(lambda entry: _check_file(folder, entry), manifest.files, num_threads):
        report.faults += faults
    checks = in_threads(
        lambda number: _ShardCheck(folder, manifest, number, dataset, deep=deep).run(),
        range(len(manifest.shards)),
        num_threads,
    )
    for check in checks:
        report.num_shards += 1
        report.num_samples += check.num_samples
        report.num_images += check.num_images
        report.num_bytes += check.shard.bytes
        report.faults += check.faults
        checked(check.shard, len(manifest.shards))
    if dataset is not None and not report.faults:
        report.faults += _check_rows(dataset)
    return report


def _check_file(folder: Path, entry: FileEntry) -> list[Fault]:
    try:
        size = (folder / entry.name).stat().st_size
        if size != entry.bytes:
            return [Fault(entry.name, f"has {size} bytes, the manifest says {entry.bytes}")]
        if not file_is(folder / entry.name, entry.bytes, entry.sha256):
            return [Fault(entry.name, "its SHA-256 is not the manifest's")]
    except OSError as error:
        return [Fault(entry.name, f"cannot be read: {error.strerror}")]
    return []


class _ShardCheck:
    """The check of one shard; ``dataset`` is None where the index cannot be read."""

    def __init__(self, folder: Path, manifest: Manifest, number: int, dataset: Dataset | None, *, deep: bool) -> None:
        self.number, self.shard = number, manifest.shards[number]
        self.num_samples = self.num_images = 0
        self.faults: list[Fault] = []
        self._folder, self._dataset, self._deep = folder, dataset, deep
        self._manifest = manifest

    def run(self) -> _ShardCheck:
        """Check the file; returns itself."""
        shard = self.shard
        try:
            with (self._folder / shard.name).open("rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:  # how mmap says it
            self._fault(f"is empty, the manifest says {shard.bytes} bytes")
        except OSError as error:
            self._fault(f"cannot be read: {error.strerror}")
        else:
            self._check(shard, view)
        return self

    def _fault(self, text: str, offset: int | None = None, key: str | None = None) -> None:
        self.faults.append(Fault(self.shard.name, text, offset, key))

    def _check(self, shard: ShardEntry, view: memoryview) -> None:
        if len(view) != shard.bytes:
            self._fault(f"has {len(view)} bytes, the manifest says {shard.bytes}")
        elif hashlib.sha256(view).hexdigest() != shard.sha256:
            self._fault("its SHA-256 is not the manifest's")
        found: dict[int, FoundMember] = {}
        readable = len(view)
        try:
            for member in iter_members(view, shard=shard.name):
                found[member.offset] = member
        except ShardError as error:
            self._fault(error.message, error.offset, error.key)
            readable = error.offset or 0
        if self._dataset is None:
            return
        at, listing = 0, IndexText()
        for row in self._rows(self._dataset):
            if row.shard != self.number or row.offset != at:
                text = f"the index has it in shard number {row.shard} at {row.offset}, not in {self.number} at {at}"
                self._fault(text, at, row.key)
                return
            stored = [
                StoredMember(entry.name + suffix(entry.codec), view[at + entry.offset :][: entry.stored_bytes])
                for entry in row.members
            ]
            listing.add(row.key, at, stored, [entry.offset for entry in row.members])
            self._check_sample(row, view[at : at + row.length], found, readable)
            at += row.length
            self.num_samples += 1
        if at + len(END_OF_ARCHIVE) != shard.bytes:
            self._fault(f"the index covers {at} bytes of {shard.bytes}", at)
        for member in found.values():
            self._fault(f"member '{member.name}' is not in the index", member.header_offset)
        name = Path(shard.name).with_suffix(".idx").name
        with contextlib.suppress(OSError):  # told already, with the other files
            if not self.faults and (self._folder / name).read_bytes() != listing.encode():
                self.faults.append(Fault(name, f"does not list the members of {shard.name}"))

    def _rows(self, dataset: Dataset) -> Iterator[IndexRow]:
        first = self.shard.first_sample
        for at in range(first, first + self.shard.num_samples):
            try:
                yield dataset.index.row(at)
            except IndexFileError as error:
                self.faults.append(Fault(INDEX_FILE, str(error)))
                return

    def _check_sample(self, row: IndexRow, span: memoryview, found: dict[int, FoundMember], readable: int) -> None:
        """Check one sample and take its members out of ``found``, which has those up to the offset ``readable``."""
        for entry in row.members:
            at = row.offset + entry.offset
            name = f"{row.key}.{entry.name}{suffix(entry.codec)}"
            there = found.pop(at, None)
            if at < readable and (there is None or (there.name, there.length) != (name, entry.stored_bytes)):
                seen = "nothing" if there is None else f"'{there.name}' of {there.length} bytes"
                text = f"the index says '{name}' of {entry.stored_bytes} bytes at {at}; the tar has {seen} there"
                self._fault(text, row.offset, row.key)
        try:
            check_span(row, span, self.shard.name)
        except ShardError as error:
            self._fault(error.message, row.offset, row.key)
            return
        if self._deep:
            self._decode(row, span)

    def _decode(self, row: IndexRow, span: memoryview) -> None:
        try:
            members = read_members(row, span, self.shard.name)
            sample = decode_sample(row.key, members)
            for text in _contradictions(row, sample, self._manifest, self.shard.split):
                self._fault(text, row.offset, row.key)
            for entry in row.members:
                channel, _, extension = entry.name.partition(".")
                if extension in IMAGE_EXTENSIONS:
                    camera = sample.meta.cameras.get(channel)
                    size = None if camera is None else (camera.width, camera.height)
                    check_pixels(members[entry.name], extension, size, key=row.key, member=entry.name)
                    self.num_images += 1
        except FuelrailError as error:
            self._fault(str(error), row.offset, row.key)


def _contradictions(row: IndexRow, sample: Sample, manifest: Manifest, split: str) -> Iterator[str]:
    """What a sample's own members say otherwise than index and manifest."""
    meta, geometry = sample.meta, sample.geometry
    for name, own, other in (
        ("key", meta.key, row.key),
        ("clip_id", meta.clip_id, row.clip_id),
        ("frame_idx", meta.frame_idx, row.frame),
        ("timestamp_ns", meta.timestamp_ns, row.timestamp_ns),
        ("split", meta.split, split),
        ("dataset", meta.dataset, manifest.name),
    ):
        if own != other:
            yield f"meta.json has the {name} {own!r}, index and manifest have {other!r}"
    present = [int(camera.channel in sample.images) for camera in manifest.cameras]
    if geometry.cam_valid.tolist() != present:
        yield f"cam_valid is {geometry.cam_valid.tolist()}, but the images there are {present}"
    for lidar in manifest.lidars:
        points = sample.points.get(lidar.channel)
        if points is not None and points.shape[1] != len(lidar.columns):
            yield f"{lidar.channel}.{POINTS_EXTENSION} has {points.shape[1]} columns, not {len(lidar.columns)}"
        sweeps = sample.sweeps.get(lidar.channel)
        if sweeps is not None and sweeps.points.shape[1] != len(lidar.columns):
            yield f"{lidar.channel}{SWEEPS_FIELD} has {sweeps.points.shape[1]} columns, not {len(lidar.columns)}"


def _check_rows(dataset: Dataset) -> list[Fault]:
    """Keys are unique, no clip is in two splits, ``attributes.parquet`` has the index's rows in its order."""
    index, faults = dataset.index, list[Fault]()
    hashes = np.empty(len(index), np.uint64)
    split_of: dict[str, str] = {}
    parquet: Any = None
    if (dataset.root / ATTRIBUTES_FILE).is_file():
        parquet = pq.ParquetFile(dataset.root / ATTRIBUTES_FILE)
        if parquet.metadata.num_rows != len(index):
            return [Fault(ATTRIBUTES_FILE, f"has {parquet.metadata.num_rows} rows, the index {len(index)}")]
    batches = None if parquet is None else parquet.iter_batches(_ROWS_AT_ONCE, columns=["key", "split"])
    for split, entry in dataset.manifest.splits.items():
        for clip in set(index.strings("clip_id", entry.first_sample, entry.first_sample + entry.num_samples)):
            if split_of.setdefault(clip, split) != split:
                faults.append(Fault(INDEX_FILE, f"clip '{clip}' is in the splits {split_of[clip]} and {split}"))
    for first in range(0, len(index), _ROWS_AT_ONCE):
        keys = index.strings("key", first, min(first + _ROWS_AT_ONCE, len(index)))
        hashes[first : first + len(keys)] = [xxhash.xxh3_64_intdigest(key.encode()) for key in keys]
        if batches is not None and (at := _first_difference(next(batches), keys)) is not None:
            faults.append(Fault(ATTRIBUTES_FILE, f"row {first + at} is not of this sample", key=keys[at]))
            break
    values, counts = np.unique(hashes, return_counts=True)
    for value in values[counts > 1].tolist():
        first, second = np.flatnonzero(hashes == value)[:2].tolist()
        faults.append(Fault(INDEX_FILE, f"rows {first} and {second} have one key", key=index.row(first).key))
    return faults


def _first_difference(batch: pa.RecordBatch, keys: Sequence[str]) -> int | None:
    there = batch.column("key").to_pylist()
    return next((at for at, (own, key) in enumerate(zip(there, keys, strict=True)) if own != key), None)
