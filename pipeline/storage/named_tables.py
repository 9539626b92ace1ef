"""Columns of a ``.parquet`` or ``.csv`` file that a user named, limited by what they decode to.

A dictionary, or runs of one value, in a Parquet file make gigabytes of a few kilobytes. So texts
are read as numbers of dictionary entries, and their expanded size is computed before they are
expanded.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from pyarrow import parquet as pq

from fuelrail.pipeline.limits import NAMES

SUFFIXES: Final = (".parquet", ".csv")
_NUMBER_BYTES: Final = 8
_GROWING: Final = "DELTA_BYTE_ARRAY"
"""An encoding by what a text shares with the one before: a row of a byte may be of megabytes."""


class TableError(ValueError):
    """A table that cannot be read; the message is a clause."""


def read_named_columns(file: str, names: Sequence[str]) -> pa.Table:
    """Return some columns of a file whose name ends with one of :data:`SUFFIXES`, and nothing else.

    Raises OSError, pyarrow's errors for what is no such file, and TableError for what is no regular
    file, lacks a column, has lists in one, or is over the limit.
    """
    # Before it is opened: to open a FIFO would wait for a writer.
    status = Path(file).stat()
    if not stat.S_ISREG(status.st_mode):
        raise TableError("it is not a regular file")
    if Path(file).suffix == ".csv":
        _check_size(status.st_size)
        batches = []
        num_bytes = 0
        with csv.open_csv(file) as reader:
            _check_columns(reader.schema, names)
            fields = [reader.schema.field(name) for name in names]
            for batch in reader:
                columns = batch.select(list(names))
                num_bytes += columns.nbytes
                _check_size(num_bytes)
                batches.append(columns)
        return pa.Table.from_batches(batches, pa.schema(fields))
    schema = pq.read_schema(file)
    _check_columns(schema, names)
    texts = [name for name in names if is_text(schema.field(name).type)]
    with pq.ParquetFile(file, read_dictionary=texts) as parquet:
        growing = growing_column(parquet.metadata, names)
        if growing is not None:
            raise TableError(f"its column {growing!r} has the encoding {_GROWING}; write it plain")
        # Before dictionaries are expanded: a number a row, and what is stored.
        num_bytes = parquet.metadata.num_rows * _NUMBER_BYTES * len(names)
        for chunk in _column_chunks(parquet.metadata, names):
            num_bytes += max(chunk.total_uncompressed_size, 0)
        _check_size(num_bytes)
        table = parquet.read(columns=list(names))
    num_bytes = 0
    for column in table.columns:
        num_bytes += sum(map(expanded_bytes, column.chunks))
    _check_size(num_bytes)
    plain = {}
    for name in names:
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        plain[name] = column
    return pa.table(plain)


def _column_chunks(
    metadata: pq.FileMetaData,
    names: Sequence[str],
) -> Iterator[pq.ColumnChunkMetaData]:
    """Yield what a Parquet file states of these columns, row group by row group."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column_number in range(group.num_columns):
            chunk = group.column(column_number)
            if chunk.path_in_schema in names:
                yield chunk


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is of texts or bytes of any length."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def growing_column(metadata: pq.FileMetaData, names: Sequence[str]) -> str | None:
    """Return the first of these columns in whose encoding a text grows without limit, or None."""
    for chunk in _column_chunks(metadata, names):
        if _GROWING in chunk.encodings:
            return str(chunk.path_in_schema)
    return None


def expanded_bytes(array: pa.Array) -> int:
    """Return the bytes of an array when the texts of its dictionary are written out."""
    if not pa.types.is_dictionary(array.type):
        return int(array.nbytes)
    if not is_text(array.type.value_type):
        return int(array.nbytes)
    entry_lengths = pc.binary_length(array.dictionary).cast(pa.int64())
    lengths = entry_lengths.take(array.indices)
    text_bytes: int | None = pc.sum(lengths).as_py()
    return len(array) * _NUMBER_BYTES + (text_bytes or 0)


def _check_columns(schema: pa.Schema, names: Sequence[str]) -> None:
    for name in names:
        if name not in schema.names:
            raise TableError(f"it has no column {name!r}; it has: {', '.join(schema.names):.1000}")
        if pa.types.is_nested(schema.field(name).type):
            raise TableError(
                f"its column {name!r} has lists; each row must have a value of its own"
            )


def _check_size(num_bytes: int) -> None:
    reason = NAMES.broken(num_bytes)
    if reason is not None:
        raise TableError(f"it {reason}")
