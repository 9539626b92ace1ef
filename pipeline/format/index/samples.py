"""``index.arrow``: the place of every sample and every member. FORMAT.md has the rules.

An Arrow IPC file, memory-mapped: opening it costs the same for ten samples and for ten million, and
all processes of a host share its pages. Rows are in the order of the samples in the shards. Record
batches hold ``ROWS_PER_BATCH`` rows each (the last one fewer), so row i is found by division.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuelrail.pipeline.errors import ConfigError, IndexFileError, OrderError
from fuelrail.pipeline.format.codecs import suffix
from fuelrail.pipeline.format.index.blocks import BlockFile
from fuelrail.pipeline.format.index.checks import (
    check_caps,
    check_plain,
    check_spans,
    check_texts,
)
from fuelrail.pipeline.format.index.row import (
    IndexRow,
    MemberEntry,
    MemberKinds,
    MemberParts,
    Members,
    member_kinds,
)
from fuelrail.pipeline.settings import explain
from fuelrail.pipeline.storage.columns import Disk, numpy_dtype
from fuelrail.pipeline.text import shortened

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import F64, I32


__all__ = [
    "INDEX_FILE",
    "ROWS_PER_BATCH",
    "IndexRow",
    "IndexWriter",
    "MemberEntry",
    "SampleIndex",
    "write_index",
]

INDEX_FILE: Final = "index.arrow"
INDEX_VERSION: Final = 1
ROWS_PER_BATCH: Final = 1 << 13
"""Some 3 MB: the least that a reader at a URL fetches for a sample."""
_ROWS_PER_PART: Final = 1 << 10
_KINDS_KEPT: Final = 1 << 10
"""Different lists of members that are remembered."""
_BATCHES_KEPT: Final = 1 << 14
"""Checked batches that are kept as Python objects of some 3 kB."""

_MEMBER_NUMBERS: Final = {
    "offset": pa.int64(),
    "stored_bytes": pa.int64(),
    "raw_bytes": pa.int64(),
    "xxh3": pa.uint64(),
}
_MEMBER_TYPE: Final = pa.struct(
    [
        ("name", pa.int16()),
        ("codec", pa.int16()),
        *_MEMBER_NUMBERS.items(),
    ]
)
_COLUMNS: Final = [
    pa.field("key", pa.string(), nullable=False),
    pa.field("clip_id", pa.string(), nullable=False),
    pa.field("frame", pa.int32(), nullable=False),
    pa.field("timestamp_ns", pa.int64(), nullable=False),
    pa.field("shard", pa.int32(), nullable=False),
    pa.field("offset", pa.int64(), nullable=False),
    pa.field("length", pa.int64(), nullable=False),
    pa.field("xxh3", pa.uint64(), nullable=False),
    pa.field("members", pa.list_(_MEMBER_TYPE), nullable=False),
]
_TEXTS: Final = ("key", "clip_id")
_SCALARS: Final = ("frame", "timestamp_ns", "shard", "offset", "length", "xxh3")
_TYPES: Final = {
    "num_members": pa.int32(),
    **{field.name: field.type for field in _COLUMNS[:-1]},
    **{f"members.{field.name}": field.type for field in _MEMBER_TYPE},
}
"""The types of the columns of a batch."""
_VERSION_KEY = b"fuelrail.index.version"
_NAMES_KEY = b"fuelrail.members"
_CODECS_KEY = b"fuelrail.codecs"
_make_row = partial(tuple.__new__, IndexRow)
"""An IndexRow from a tuple, at half the price of the call."""


class IndexWriter:
    """Writes an index file row by row; use as a context manager.

    A batch is collected on disk, beside the file.

    ``names`` and ``codecs`` are all field names and codecs that any row will use. The caller
    publishes the file (writes to a temporary name, syncs, renames).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        names: Sequence[str],
        codecs: Sequence[str],
    ) -> None:
        self._name_code = {name: code for code, name in enumerate(names)}
        self._codec_code = {codec: code for code, codec in enumerate(codecs)}
        metadata = {
            _VERSION_KEY: str(INDEX_VERSION),
            _NAMES_KEY: json.dumps(list(names)),
            _CODECS_KEY: json.dumps(list(codecs)),
        }
        self._schema = pa.schema(_COLUMNS, metadata=metadata)
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self._pending: list[IndexRow] = []
        self._folder = Path(path).parent
        self._columns = self._new_columns()
        self._rows_in_batch = 0

    def append(self, row: IndexRow) -> None:
        """Add the next sample."""
        self._pending.append(row)
        self._rows_in_batch += 1
        if self._rows_in_batch == ROWS_PER_BATCH:
            self._flush()
        elif len(self._pending) == _ROWS_PER_PART:
            self._convert()

    def close(self) -> None:
        """Write what is pending and the file's footer."""
        try:
            if self._rows_in_batch:
                self._flush()
            self._writer.close()
        finally:
            self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:  # without its footer the file is not an index, as it should be
            self._sink.close()

    def _flush(self) -> None:
        if self._pending:
            self._convert()
        columns = {}
        for name, column in self._columns.items():
            if name in _TEXTS:
                texts = pa.concat_arrays(column.parts())
                columns[name] = texts.cast(pa.string())
            else:
                columns[name] = pa.array(column.values)
        self._rows_in_batch = 0
        num_members = columns["num_members"].to_numpy()
        starts = np.zeros(len(num_members) + 1, np.int32)
        np.cumsum(num_members, out=starts[1:])
        members = pa.StructArray.from_arrays(
            [columns[f"members.{field.name}"] for field in _MEMBER_TYPE],
            fields=list(_MEMBER_TYPE),
        )
        arrays = [columns[name] for name in (*_TEXTS, *_SCALARS)]
        arrays.append(pa.ListArray.from_arrays(pa.array(starts), members))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._writer.write_batch(batch)
        self._columns = self._new_columns()

    def _new_columns(self) -> dict[str, Any]:
        disk = Disk(self._folder)
        disk.release()  # what Arrow keeps of the batch before
        columns: dict[str, Any] = {}
        for name, kind in _TYPES.items():
            if name in _TEXTS:
                columns[name] = disk.texts()
            else:
                columns[name] = disk.column(numpy_dtype(kind))
        return columns

    def _convert(self) -> None:
        """Make columns of what is pending: as Python objects a whole batch would take hundreds
        of megabytes.
        """
        rows = self._pending
        self._pending = []
        members = [member for row in rows for member in row.members]
        columns: dict[str, list[Any]] = {
            "num_members": [len(row.members) for row in rows],
            "members.name": [self._name_code[member.name] for member in members],
            "members.codec": [self._codec_code[member.codec] for member in members],
        }
        for name in (*_TEXTS, *_SCALARS):
            columns[name] = [getattr(row, name) for row in rows]
        for name in _MEMBER_NUMBERS:
            columns[f"members.{name}"] = [getattr(member, name) for member in members]
        for name, values in columns.items():
            self._columns[name].append(values)


class _Texts(NamedTuple):
    """A string column as its offsets and its UTF-8 bytes."""

    starts: memoryview
    utf8: memoryview

    def __call__(self, row: int) -> str:
        start = self.starts[row]
        end = self.starts[row + 1]
        return str(self.utf8[start:end], "utf-8")


def _kinds(
    names: Sequence[str],
    codecs: Sequence[str],
    name: bytes,
    codec: bytes,
) -> MemberKinds:
    """Return a list of names and codecs by the numbers that stand for them, 16 bits each."""
    name_numbers = memoryview(name).cast("h")
    codec_numbers = memoryview(codec).cast("h")
    member_names = [names[number] for number in name_numbers]
    member_codecs = [codecs[number] for number in codec_numbers]
    return member_kinds(tuple(member_names), tuple(member_codecs))


class _Batch(NamedTuple):
    """Zero-copy views of one record batch.

    ``row_...`` are the same memory as plain memoryviews: taking single items out of those costs
    less than half of what numpy and Arrow take for it, and every sample passes here.
    """

    key: pa.StringArray
    clip_id: pa.StringArray
    scalars: tuple[NDArray[Any], ...]
    row_key: _Texts
    row_clip_id: _Texts
    row_scalars: tuple[memoryview, ...]
    row_starts: memoryview
    row_members: MemberParts


class SampleIndex:
    """A read-only, memory-mapped index; safe to use from many threads.

    ``names`` and ``codecs`` are all that occur in the dataset.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_shards: int | None = None,
        file: BlockFile | None = None,
    ) -> None:
        """Map the file; raises IndexFileError where it is not a whole index file of this version.

        Rows in shards beyond ``num_shards`` are refused too, each batch when it is first looked at.
        ``file`` is the file itself where parts of it may have to be fetched.
        """
        self._path = str(path)
        self._num_shards = num_shards
        self._lock = threading.Lock()
        self._source = file or BlockFile(Path(path))
        self.mapped = self._source.map
        self._file = self._source.open_arrow()
        metadata = self._file.schema.metadata or {}
        version = metadata.get(_VERSION_KEY, b"none").decode(errors="replace")
        if version != str(INDEX_VERSION):
            raise IndexFileError(
                f"index '{self._path}' has version {shortened(version)}; this Fuelrail "
                f"reads {INDEX_VERSION}"
            )
        if not self._file.schema.equals(pa.schema(_COLUMNS)):
            raise IndexFileError(
                f"index '{self._path}' has columns other than version {INDEX_VERSION} prescribes"
            )
        self.names = _vocabulary(metadata, _NAMES_KEY, self._path)
        self.codecs = _vocabulary(metadata, _CODECS_KEY, self._path)
        for codec in self.codecs:
            try:
                suffix(codec)
            except ConfigError as error:
                raise IndexFileError(f"index '{self._path}': {error}") from error
        # Samples rarely have different lists of members.
        find_kinds = partial(_kinds, self.names, self.codecs)
        self._kinds = lru_cache(_KINDS_KEPT)(find_kinds)
        num_batches = self._file.num_record_batches
        self._batches: list[_Batch | None] = [None] * num_batches
        self._num_kept = 0
        self._length = 0
        if num_batches:
            # Only the last batch may be short, so its length alone gives the total.
            last = num_batches - 1
            self._source.need_batch(last)
            self._length = last * ROWS_PER_BATCH + self._record_batch(last).num_rows

    def __len__(self) -> int:
        return self._length

    def row(self, index: int) -> IndexRow:
        """Return sample ``index`` (0 to len - 1); raises OrderError outside, IndexFileError for
        a damaged batch.
        """
        if not 0 <= index < self._length:
            raise OrderError(f"sample {index} is outside the index of {self._length} samples")
        number, place = divmod(index, ROWS_PER_BATCH)
        batch = self._batches[number] or self._batch(number)
        (
            _,
            _,
            _,
            key,
            clip_id,
            (frame, timestamp_ns, shard, offset, length, xxh3),
            starts,
            members,
        ) = batch
        return _make_row(
            (
                key(place),
                clip_id(place),
                frame[place],
                timestamp_ns[place],
                shard[place],
                offset[place],
                length[place],
                xxh3[place],
                Members(members, starts[place], starts[place + 1]),
                False,
            )
        )

    def has_row(self, index: int) -> bool:
        """Return whether nothing has to be fetched to read a row."""
        return self._source.has_batch(index // ROWS_PER_BATCH)

    def column(self, name: str, first: int = 0, end: int | None = None) -> NDArray[Any]:
        """Copy a scalar column (frame, timestamp_ns, shard, offset, length or xxh3) of rows
        first to end - 1.
        """
        parts = [np.empty(0, numpy_dtype(_TYPES[name]))]
        for number, low, high in self._batches_of(first, end):
            column = self._column(number, name)
            parts.append(column[low:high])
        return np.concatenate(parts)

    def strings(self, name: str, first: int = 0, end: int | None = None) -> list[str]:
        """Return the keys or clip ids (``key``, ``clip_id``) of rows first to end - 1."""
        texts: list[str] = self.texts(name, first, end).to_pylist()
        return texts

    def texts(
        self,
        name: str,
        first: int = 0,
        end: int | None = None,
    ) -> pa.ChunkedArray:
        """Return the keys or clip ids (``key``, ``clip_id``) of rows first to end - 1 as an
        Arrow array, not copied.
        """
        parts = []
        for number, low, high in self._batches_of(first, end):
            column = self._column(number, name)
            parts.append(column[low:high])
        return pa.chunked_array(parts, pa.string())

    def _batches_of(
        self,
        first: int,
        end: int | None,
    ) -> Iterator[tuple[int, int, int]]:
        """Yield each batch that has some of rows first to end - 1 (None: all behind), and the first
        and the end of these in it.
        """
        if end is None:
            end = self._length
        if first >= end:
            return
        first_batch = first // ROWS_PER_BATCH
        end_batch = -(-end // ROWS_PER_BATCH)
        for number in range(first_batch, end_batch):
            start = number * ROWS_PER_BATCH
            low = max(first - start, 0)
            high = min(end - start, ROWS_PER_BATCH)
            yield number, low, high

    def clip_ids(self, first: int = 0, end: int | None = None) -> list[str]:
        """Return the clip ids that rows first to end - 1 have, each once, sorted."""
        clip_ids = self.texts("clip_id", first, end)
        return sorted(pc.unique(clip_ids).to_pylist())

    def clip_numbers(self, first: int = 0, end: int | None = None) -> I32:
        """Return clips of rows first to end - 1 as numbers: equal where the ids are, counted by
        first appearance.
        """
        clip_ids = self.texts("clip_id", first, end)
        encoded = clip_ids.dictionary_encode().combine_chunks()
        numbers: I32 = encoded.indices.to_numpy(zero_copy_only=False)
        return numbers

    def member_totals(self) -> F64:
        """Return [3, names, codecs]: number, stored bytes and raw bytes of all members of each
        name and codec.
        """
        totals = np.zeros((3, len(self.names), len(self.codecs)))
        num_members, stored_bytes, raw_bytes = totals
        for number in range(len(self._batches)):
            columns = self._batch(number).row_members.columns
            name, codec, _, stored, raw, _ = map(np.asarray, columns)
            np.add.at(num_members, (name, codec), 1)
            np.add.at(stored_bytes, (name, codec), stored)
            np.add.at(raw_bytes, (name, codec), raw)
        return totals

    def release(self) -> None:
        """Give the pages that were looked at back to the page cache; what was handed out stays
        good.
        """
        self._source.release()

    def _batch(self, number: int) -> _Batch:
        batch = self._batches[number]
        if batch is None:
            # Not under the lock: others continue while this waits for storage.
            self._source.need_batch(number)
            with self._lock:  # Arrow's file reader has a read position
                batch = self._batches[number]
                if batch is None:
                    if self._num_kept == _BATCHES_KEPT:
                        self._batches = [None] * len(self._batches)
                        self._num_kept = 0
                    batch = self._batches[number] = self._view(number)
                    self._num_kept += 1
        return batch

    def _column(self, number: int, name: str) -> Any:
        """Return one column of a batch, checked by itself: nothing else of the mapped batch is
        read.
        """
        batch = self._batches[number]
        if batch is not None:
            if name in _TEXTS:
                return getattr(batch, name)
            return batch.scalars[_SCALARS.index(name)]
        self._source.need_batch(number)
        with self._lock:
            record = self._record_batch(number)
        with _damaged_at(self._path, number):
            record.validate()
            array = record.column(record.schema.get_field_index(name))
            if name in _TEXTS:
                check_texts(array, name)
                array.validate(full=True)
                return array
            values = array.to_numpy(zero_copy_only=True)
            check_spans(**{name: values}, num_shards=self._num_shards)
            return values

    def _record_batch(self, number: int) -> pa.RecordBatch:
        """Map one record batch, unchecked but for its number of rows; raises IndexFileError."""
        with _damaged_at(self._path, number):
            check_plain(memoryview(self.mapped), number)
            record = self._file.get_batch(number)
        is_last = number == len(self._batches) - 1
        min_rows = 1 if is_last else ROWS_PER_BATCH
        if not min_rows <= record.num_rows <= ROWS_PER_BATCH:
            raise IndexFileError(
                f"index '{self._path}': record batch {number} has {record.num_rows} rows"
            )
        return record

    def _view(self, number: int) -> _Batch:
        record = self._record_batch(number)
        with _damaged_at(self._path, number):
            # Arrow trusts offsets once a batch is accepted: a damaged one would end the process,
            # not raise. The check takes about 100 microseconds for each batch, on first use.
            record.validate()
            columns = {field.name: record.column(i) for i, field in enumerate(_COLUMNS)}
            for name in _TEXTS:
                check_texts(columns[name], name)
            record.validate(full=True)
            scalars = {}
            for name in _SCALARS:
                scalars[name] = columns[name].to_numpy(zero_copy_only=True)
            members = columns["members"]
            starts = members.offsets.to_numpy(zero_copy_only=True)
            parts = []
            for i in range(_MEMBER_TYPE.num_fields):
                part = members.values.field(i)
                parts.append(part.to_numpy(zero_copy_only=True))
            name_codes, codec_codes = parts[:2]
            _check_codes(name_codes, self.names)
            _check_codes(codec_codes, self.codecs)
            check_caps(starts, parts, self.names, self.codecs)
            check_spans(num_shards=self._num_shards, **scalars)
            return _Batch(
                key=columns["key"],
                clip_id=columns["clip_id"],
                scalars=tuple(scalars.values()),
                row_key=_texts(columns["key"]),
                row_clip_id=_texts(columns["clip_id"]),
                row_scalars=tuple(map(memoryview, scalars.values())),
                row_starts=memoryview(starts),
                row_members=MemberParts(tuple(map(memoryview, parts)), self._kinds),
            )


def _check_codes(codes: NDArray[Any], values: Sequence[str]) -> None:
    if codes.size and not 0 <= codes.min() <= codes.max() < len(values):
        raise IndexFileError("no such name or codec")


def _vocabulary(
    metadata: Mapping[bytes, bytes],
    entry: bytes,
    path: str,
) -> tuple[str, ...]:
    data = metadata.get(entry, b"")
    try:
        return msgspec.json.decode(data, type=tuple[str, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fault = explain(error, data, tuple[str, ...])
        raise IndexFileError(f"index '{path}' has no list {entry.decode()}: {fault}") from error


@contextlib.contextmanager
def _damaged_at(path: str, number: int) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, IndexFileError) as error:
        raise IndexFileError(
            f"index '{path}' is damaged at record batch {number}: {error}"
        ) from error


def _texts(column: pa.StringArray) -> _Texts:
    _, offsets, utf8 = column.buffers()
    starts = np.zeros(1, np.int32)
    if offsets:
        starts = np.frombuffer(
            offsets,
            np.int32,
            count=len(column) + 1,
            offset=column.offset * 4,
        )
    return _Texts(
        starts=memoryview(starts),  # type: ignore[arg-type]  # numpy's buffers
        utf8=memoryview(utf8 or b""),
    )


def write_index(
    path: str | os.PathLike[str],
    rows: Iterable[IndexRow],
    names: Sequence[str],
    codecs: Sequence[str],
) -> int:
    """Write all rows to a new index file; returns their number."""
    count = 0
    with IndexWriter(path, names, codecs) as writer:
        for count, row in enumerate(rows, 1):  # noqa: B007 - it is returned
            writer.append(row)
    return count
