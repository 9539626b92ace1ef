"""Open a dataset: manifest and index, checked against each other; turn a span's bytes into members.

The reader provides the bytes, from mapped files, object storage or a cache. This module turns a
span into checked members.
"""

from __future__ import annotations

import errno
import hashlib
import operator
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import numpy as np
import pyarrow as pa
import xxhash

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.selection import decode_values, select
from fuelrail.pipeline.errors import (
    ChecksumError,
    CodecError,
    ConfigError,
    DatasetError,
    IndexFileError,
    ManifestError,
    MemberError,
    SchemaError,
    StorageError,
    TruncatedShardError,
)
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.codecs import (
    DICTIONARY_FILE,
    MAX_DICTIONARY_BYTES,
    Dictionary,
)
from fuelrail.pipeline.format.fetch import RemoteFolder, fetch_dataset
from fuelrail.pipeline.format.index.row import IndexRow
from fuelrail.pipeline.format.index.tables import open_attributes, open_tables
from fuelrail.pipeline.format.manifest import (
    BRING_BACK,
    DATASETS,
    FORMAT,
    Kinds,
    Manifest,
    SplitEntry,
    load_manifest,
)
from fuelrail.pipeline.format.rules import Rig, check_arrays
from fuelrail.pipeline.format.tar import BLOCK_BYTES, are_members
from fuelrail.pipeline.format.zstd_frames import is_framed, open_span
from fuelrail.pipeline.sample.notebook import dataset_html
from fuelrail.pipeline.sample.schema import Sample, decode_member, decode_sample
from fuelrail.pipeline.storage.files import open_file, read_file
from fuelrail.pipeline.storage.filesystem import is_url, shown_url
from fuelrail.pipeline.text import shortened

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.attributes_file import AttributesFile
    from fuelrail.pipeline.format.index.keys import KeyTable
    from fuelrail.pipeline.format.index.samples import SampleIndex
    from fuelrail.pipeline.format.index.shards import ShardTable
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.storage.retry import RetryPolicy


_NOT_THE_FILE: Final = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES)
"""Errors at opening a file that are not about the file."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Dataset:
    """An open dataset: its manifest and its tables, of which what is needed is read.

    ``len(dataset)`` is the number of samples of all splits, ``dataset[number]`` and
    ``dataset[key]`` one of them as stored, ``dataset.read(key, channels=...)`` a part of one. It
    can be pickled, and is opened again where it is unpickled.

    ``root`` is the local folder, an absolute path; of a dataset at ``url`` it is where manifest,
    index and attributes were fetched to, and the shards are not in it. ``storage_options`` are what
    fsspec was given; they may hold credentials.
    """

    root: Path
    manifest: Manifest
    shards: ShardTable
    index: SampleIndex
    keys: KeyTable
    url: str | None = None
    storage_options: Mapping[str, Any] | None = None
    dictionary: Dictionary | None = None
    origin: RemoteFolder | None = None

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, key: object) -> bool:
        """Return whether a sample has this key."""
        return isinstance(key, str) and self.find(key) is not None

    def __getitem__(self, number_or_key: SupportsIndex | str) -> Sample:
        """Read one sample as stored, by number or key, with its images still encoded.

        Negative numbers count from the end. It is for looking at samples; a loader reads many at a
        time. Raises IndexError outside the dataset, KeyError for a key that it does not have, and
        ShardError or MemberError for bad bytes, each with the address.
        """
        row, span = self._locate(number_or_key)
        path = self.shard_path(row)
        if span is None:
            span = _read(self.origin, path, row)
        check_span(row, span, path.name)
        rig = Rig.from_manifest(self.manifest)
        sample = decode_sample(
            row.key,
            read_members(row, span, path.name, dictionary=self.dictionary),
            rig.fields,
        )
        check_arrays(sample, rig)
        return sample

    def read(
        self,
        number_or_key: SupportsIndex | str,
        channels: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Read some channels of one sample, by number or key: one range of its shard, and no more.

        ``channels`` are ``meta``, ``geometry``, ``boxes``, ``{lidar}_sweeps``, the names of the
        manifest's table, and the user's ``x_...``, or one of them; None: all. Returns channel to
        Meta, Geometry, Boxes, the encoded image of a camera, points (P, C) as float32 in the
        lidar's axes, Sweeps, the value of the channel's kind, or bytes; a channel that the sample
        lacks is absent. A sample is checked against its digest, a part by those of its members.
        Raises ConfigError for a channel that no sample has, ManifestError for a named channel of an
        unknown kind, else what ``dataset[key]`` raises.
        """
        if channels is not None:
            channels = (channels,) if isinstance(channels, str) else tuple(channels)
        parts = dict.fromkeys(name.partition(".")[0] for name in self.index.names)
        unknown = [channel for channel in channels or () if channel not in parts]
        if unknown:
            if unknown[0] in {extra_channel.name for extra_channel in self.manifest.channels}:
                noun = "sample with channel"
            else:
                noun = "channel"
            raise ConfigError(
                f"dataset '{self.location}' has no {noun} {shortened(unknown[0])!r}; it "
                f"has: {', '.join(parts)}"
            )
        row, span = self._locate(number_or_key)
        path = self.shard_path(row)
        entries = []
        for entry in row.members:
            channel, _, _ = entry.name.partition(".")
            if channels is None or channel in channels:
                entries.append(entry)
        if not entries:
            return {}
        if span is None and len(entries) < len(row.members) and not is_framed(path.name):
            part = row.only({entry.name for entry in entries})
            if part is row:
                raise IndexFileError(
                    f"a member of {row.key} lies outside its span of {row.length} bytes"
                )
            row = part
        if span is None:
            span = _read(self.origin, path, row)
        check_span(row, span, path.name)
        names = [entry.name for entry in entries]
        members = read_members(
            row,
            span,
            shard=path.name,
            fields_wanted=names,
            dictionary=self.dictionary,
        )
        extra_names = []
        for extra_channel in self.manifest.extra_channels:
            if extra_channel.field not in members:
                continue
            if channels is not None or KINDS.find(extra_channel.kind) is not None:
                extra_names.append(extra_channel.name)
        extra = select(self.manifest.known_channels, extra_names, self.location)
        values = decode_values(members, extra, row.key)
        sample = {}
        for name, data in members.items():
            channel, _, _ = name.partition(".")
            if channel not in values:
                sample[channel] = decode_member(name, data)
        return sample | values

    def position(self, number_or_key: SupportsIndex | str) -> int:
        """Return the row of a sample by number or key.

        Raises IndexError or KeyError where there is none, TypeError for what is neither a number
        nor a key.
        """
        if isinstance(number_or_key, str):
            # As `find`, but by whole rows: the row is what is read next, and its part of the index
            # is checked once.
            key_row = self.keys.row(number_or_key, lambda row: self.index.row(row).key)
            if key_row is None:
                raise KeyError(
                    f"dataset '{self.location}' has no sample with the key "
                    f"{shortened(number_or_key)!r}"
                )
            return key_row
        try:
            number = operator.index(number_or_key)
        except TypeError as error:
            raise TypeError(
                f"dataset[...] takes one sample's number or key, not {type(number_or_key).__name__}"
            ) from error
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(
                f"sample {number_or_key} is not in the dataset: it has samples 0 to {len(self) - 1}"
            )
        return number

    def _locate(self, number_or_key: SupportsIndex | str) -> tuple[IndexRow, bytes | None]:
        """Return the row of a sample; and its span, where a key was given and the span came with
        the row.
        """
        if self.url is not None and isinstance(number_or_key, str):
            entry = next(iter(self.keys.find(number_or_key)), None)
        else:
            entry = None
        if entry is None or self.index.has_row(entry.row):
            return self.index.row(self.position(number_or_key)), None
        place = IndexRow(
            key=str(number_or_key),
            clip_id="",
            frame=0,
            timestamp_ns=0,
            shard=entry.shard,
            offset=entry.offset,
            length=entry.length,
            xxh3=0,
            members=(),
        )
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(_read, self.origin, self.shard_path(place), place)
            row = self.index.row(self.position(number_or_key))
            span = coming.result()
        # The index is right where they differ: `fuelrail verify` finds that.
        return row, span if (row.key, *row[4:7]) == (
            number_or_key,
            *place[4:7],
        ) else None

    def attributes_file(self) -> AttributesFile:
        """Return ``attributes.parquet``, which need not exist; what was left at the URL is fetched
        when it is read.

        Raises IndexFileError for a damaged dataset, DatasetError where it cannot be fetched.
        """
        return open_attributes(self.root, self.manifest, self.origin)

    @property
    def table(self) -> pa.Table:
        """All samples as an Arrow table: key, clip_id, split, frame, timestamp_ns, and the
        attributes. Reads them all.

        Raises IndexFileError for damaged files, DatasetError where they cannot be fetched.
        """
        splits = sorted(self.splits.items(), key=lambda item: item[1].first_sample)
        split_names = pa.array([name for name, _ in splits], pa.string())
        split_sizes = [entry.num_samples for _, entry in splits]
        split_numbers = np.repeat(np.arange(len(splits)), split_sizes)
        columns: dict[str, Any] = {
            "key": self.index.texts("key"),
            "clip_id": self.index.texts("clip_id"),
            "split": split_names.take(pa.array(split_numbers)),
            "frame": self.index.column("frame"),
            "timestamp_ns": self.index.column("timestamp_ns"),
        }
        file = self.attributes_file()
        if file.exists:
            schema = file.schema(len(self))
            names = [name for name in schema.names if name not in columns]
            if names:
                fields = pa.schema([schema.field(name) for name in names])
                attributes = pa.Table.from_batches(file.batches(names), fields)
                for name in names:
                    columns[name] = attributes[name]
        return pa.table(columns)

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Any, ...]]:
        """Open it again elsewhere: what is mapped stays where it is."""
        if self.origin is None:  # another process may have another working folder
            return open_dataset, (str(self.root.resolve()),)
        cache_dir = self.root.parent.parent
        retry = self.origin.retry
        opened = partial(
            open_dataset,
            storage_options=self.storage_options,
            cache_dir=cache_dir,
            retry=retry,
        )
        return opened, (self.url,)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: sizes, splits, and the first sample's cameras."""
        cameras = [camera.channel for camera in self.manifest.cameras]
        splits = [
            (name, split.num_samples, split.num_clips, split.num_shards)
            for name, split in self.splits.items()
        ]
        return dataset_html(
            repr(self),
            splits,
            lambda: self.read(0, cameras) if len(self) else {},
        )

    @property
    def splits(self) -> dict[str, SplitEntry]:
        """The splits by name: first sample, number of samples, shards."""
        return dict(self.manifest.splits)

    def __repr__(self) -> str:
        """Name, place and sizes in a line."""
        shards = f"{len(self.shards)} shard{'' if len(self.shards) == 1 else 's'}"
        splits = ", ".join(
            f"{name} {entry.num_samples}" for name, entry in self.manifest.splits.items()
        )
        return (
            f"Dataset({self.manifest.name} at '{self.location}': {len(self)} samples in "
            f"{shards}; {splits})"
        )

    @property
    def location(self) -> str:
        """The place of the dataset, for messages: folder, or URL without credentials."""
        if self.url is None:
            return str(self.root)
        return shown_url(self.url)

    def split(self, name: str) -> SplitEntry:
        """Return the entry of a split; raise ConfigError naming the splits there are."""
        entry = self.manifest.splits.get(name)
        if entry is None:
            names = ", ".join(self.manifest.splits)
            raise ConfigError(f"dataset '{self.location}' has no split {name!r}; it has: {names}")
        return entry

    def shard_path(self, row: IndexRow) -> Path:
        """Return the file that holds a sample; raise IndexFileError where the index points
        outside the shards.
        """
        return self.root / self.shards.name_of(row)

    def find(self, key: str) -> int | None:
        """Return the row of a key, None where there is none; raise IndexFileError where the
        tables are damaged.
        """
        return self.keys.row(key, lambda row: self.index.strings("key", row, row + 1)[0])


def open_dataset(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    retry: RetryPolicy | None = None,
) -> Dataset:
    """Open a dataset folder, or a dataset at a URL that fsspec knows; in constant time for any
    size.

    Of a dataset at a URL the manifest is fetched, and unless they are here already tables and
    attributes, into ``cache_dir`` (None: the user's cache folder). Files of more than 64 MiB
    (``keys.arrow``: 4 MiB) are fetched when they are needed, the tables by blocks of 1 MiB. All
    requests, those for samples too, are tried again as ``retry`` says.

    Raises DatasetNotReadyError, ManifestError, IndexFileError; at a URL also DatasetError where
    storage refuses or does not answer, and ConfigError. Contents are not read: that is what
    `fuelrail verify` does.
    """
    return open_kind(
        root,
        DATASETS,
        storage_options=storage_options,
        cache_dir=cache_dir,
        retry=retry,
    )


def open_kind(
    root: str | os.PathLike[str],
    kinds: Kinds,
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    retry: RetryPolicy | None = None,
) -> Dataset:
    """Open what is stored as a dataset is, of one of these formats; else as
    :func:`open_dataset`.
    """
    url = str(root) if is_url(root) else None
    if url is not None:
        folder, manifest, origin = fetch_dataset(
            url,
            storage_options=storage_options,
            cache_folder=None if cache_dir is None else Path(cache_dir),
            retry=retry,
            kinds=kinds,
        )
    else:
        folder = Path(str(root).removeprefix("file://"))
        origin = None
        manifest = load_manifest(folder, kinds)
    # Files are opened later, and the process may change its working directory.
    folder = folder.absolute()
    try:
        tables = open_tables(folder, manifest, origin)
    except IndexFileError as error:
        if url is not None or getattr(error.__cause__, "errno", None) in _NOT_THE_FILE:
            raise
        hint = f"`fuelrail verify {folder} --repair KIND:PATH` makes it again from the source"
        hint = hint if FORMAT in kinds else BRING_BACK
        raise IndexFileError(f"{error}; {hint}") from error
    dictionary = load_dictionary(folder, manifest, tables.samples)
    return Dataset(
        folder,
        manifest,
        *tables,
        url=url,
        storage_options=storage_options,
        dictionary=dictionary,
        origin=origin,
    )


def _read(origin: RemoteFolder | None, path: Path, row: IndexRow) -> bytes:
    try:
        if origin is not None:
            return origin.read(path.name, row.offset, row.offset + row.length)
        with open_file(path) as file:
            file.seek(row.offset)
            return file.read(row.length)
    except (OSError, DatasetError) as error:
        raise StorageError(
            f"cannot be read: {error}",
            shard=path.name,
            offset=row.offset,
            key=row.key,
        ) from error


def load_dictionary(
    folder: Path,
    manifest: Manifest,
    index: SampleIndex,
) -> Dictionary | None:
    """Return the dataset's zstd dictionary, checked against its digest; None where it has none.

    Raises ManifestError where it is not the manifest's, or where members need it and it does not
    exist.
    """
    file = folder / DICTIONARY_FILE
    entry = manifest.file(DICTIONARY_FILE)
    if entry is None:
        if codecs.ZSTD_DICT in index.codecs:
            raise ManifestError(
                f"members in '{folder}' need {DICTIONARY_FILE}, which the manifest does not name"
            )
        return None
    hint = (
        "bring it back from a copy, or run `fuelrail verify` with --repair: without it some "
        "members cannot be read"
    )
    try:
        data = read_file(file, MAX_DICTIONARY_BYTES)
    except OSError as error:
        raise ManifestError(f"'{file}' cannot be read: {error.strerror}; {hint}") from error
    if len(data) != entry.bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ManifestError(
            f"'{file}' is not the file that dataset.json describes (SHA-256 differs); {hint}"
        )
    try:
        return Dictionary(data, f"'{file}'")
    except CodecError as error:
        raise ManifestError(error.message) from error


def check_span(row: IndexRow, span: Buffer, shard: str) -> None:
    """Check a span, or each member of a part of one, against the index.

    Raises TruncatedShardError or ChecksumError with the address.
    """
    size = memoryview(span).nbytes
    if size != row.length:
        raise TruncatedShardError(
            f"got {size} of {row.length} bytes of a sample",
            shard=shard,
            offset=row.offset,
            key=row.key,
        )
    if row.is_part:
        check_digests(row, span, shard)
    elif xxhash.xxh3_64_intdigest(span) != row.xxh3:
        raise ChecksumError(
            "checksum mismatch (xxh3): the data is corrupt",
            shard=shard,
            offset=row.offset,
            key=row.key,
        )


def check_digests(row: IndexRow, span: Buffer, shard: str) -> None:
    """Check the stored bytes of each member of a span (decoded, of a ``.tar.zst``) against the
    index.

    Raises ChecksumError with the address.
    """
    view = memoryview(span)
    for entry in row.members:
        end = entry.offset + entry.stored_bytes
        stored = view[entry.offset : end]
        if xxhash.xxh3_64_intdigest(stored) != entry.xxh3:
            raise ChecksumError(
                f"member '{entry.name}': checksum mismatch (xxh3): the data is corrupt",
                shard=shard,
                offset=row.offset,
                key=row.key,
            )


def read_members(
    row: IndexRow,
    span: Buffer,
    shard: str,
    fields_wanted: Collection[str] | None = None,
    *,
    dictionary: Dictionary | None = None,
) -> dict[str, memoryview]:
    """Decode the members of a span as stored: field name to raw bytes, in stored order; raw ones
    are views of the span.

    ``shard`` is the shard's name: that of a ``.tar.zst`` says that the span is one zstd frame,
    which is decoded first. ``fields_wanted`` restricts it to some field names. Raises FrameError,
    IndexFileError for an entry outside the span or at odds with the tar header there (the span's
    digest says nothing about the index), SchemaError for a field that occurs twice, and the codec's
    errors with key and member.
    """
    if is_framed(shard):
        span = open_span(row, span, shard)
    view = memoryview(span)
    (names, kinds, fields), offsets, stored_bytes, all_raw_bytes = row.columns()
    if not are_members(
        view,
        key=row.key,
        fields=fields,
        offsets=offsets,
        sizes=stored_bytes,
    ):
        # The error is for the first member whose header is not where the index has it.
        for name, stored, offset, size in zip(names, fields, offsets, stored_bytes, strict=True):
            end = offset + size
            if not BLOCK_BYTES <= offset <= end <= len(view):
                raise _outside(
                    row,
                    name=name,
                    offset=offset,
                    end=end,
                    view=view,
                    shard=shard,
                )
            if not are_members(
                view,
                key=row.key,
                fields=(stored,),
                offsets=(offset,),
                sizes=(size,),
            ):
                break
        raise IndexFileError(
            f"index entry of {row.key}.{name}: no member '{row.key}.{stored}' of {size} bytes lies "
            f"at {_address(row, offset, shard)}"
        )
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SchemaError(
            "the sample has this field twice; each occurs once",
            key=row.key,
            member=twice,
        )
    members: dict[str, memoryview] = {}
    for name, codec, offset, size, raw_bytes in zip(
        names,
        kinds,
        offsets,
        stored_bytes,
        all_raw_bytes,
        strict=True,
    ):
        if fields_wanted is not None and name not in fields_wanted:
            continue
        end = offset + size
        if not BLOCK_BYTES <= offset <= end <= len(view):
            raise _outside(
                row,
                name=name,
                offset=offset,
                end=end,
                view=view,
                shard=shard,
            )
        if codec == codecs.RAW and size == raw_bytes:
            members[name] = view[offset:end]
            continue
        try:
            raw = codecs.decode(
                codec,
                view[offset:end],
                raw_bytes,
                dictionary=dictionary,
            )
        except MemberError as error:
            message = f"{error.message} ({_address(row, offset, shard)})"
            raise type(error)(message, key=row.key, member=name) from error
        members[name] = memoryview(raw)
    return members


def _outside(
    row: IndexRow,
    name: str,
    offset: int,
    end: int,
    view: memoryview,
    shard: str,
) -> IndexFileError:
    return IndexFileError(
        f"index entry of {row.key}.{name} in shard {shard} covers bytes {offset} to {end} "
        f"of a span of {len(view)} bytes"
    )


def _address(row: IndexRow, offset: int, shard: str) -> str:
    """Return the place of a member: in the shard, or in the sample that one of its frames holds."""
    if is_framed(shard):
        return f"shard {shard}, frame at offset {row.offset}, {offset} bytes into it"
    return f"shard {shard}, offset {row.offset + offset}"
