"""Tables of research datasets: Arrow columns by name and type, and the checks on files and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import feather

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.files import check_most, check_no_pointer
from fuelrail.sharding.sources.shared.foreign import parsing
from fuelrail.sharding.sources.shared.windows import open_file

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.files import SourceFiles

QUATERNION: Final = ("qw", "qx", "qy", "qz")
TRANSLATION: Final = ("tx_m", "ty_m", "tz_m")
_MOST_COLUMN: Final = 512 << 20
"""Bytes of one column in one row group of Parquet, before compression."""


def read_file(files: SourceFiles, name: str) -> bytes:
    """Read all of a file; raise SourceError where it is empty, or a Git LFS pointer."""
    data = files.read(name)
    if not data:
        raise SourceError(f"file '{files.shown}/{name}' is empty")
    check_no_pointer(data, f"file '{files.shown}/{name}'")
    return data


def names_in(files: SourceFiles, folder: str, *parts: str) -> list[str]:
    """Return the names in the folder ``folder/parts[0]/...``, sorted; none where it, or one above it, is missing."""
    for part in parts:
        if part not in files.listed(folder):
            return []
        folder = f"{folder}/{part}" if folder else part
    return files.listed(folder)


def read_feather(
    files: SourceFiles, name: str, types: Mapping[str, pa.DataType]
) -> dict[str, NDArray[Any]]:
    """Read these columns of a feather file, in these types (:func:`columns`)."""
    data = read_file(files, name)
    where = f"table '{files.shown}/{name}'"
    with parsing(where, "cannot be read as feather"):
        table = feather.read_table(pa.BufferReader(data))
        table.validate()
    return columns(table, where, types)


def byte_ranges(data: pa.Array, mapped: pa.Buffer, advice: str) -> list[tuple[int, int]]:
    """Return offset and length in a mapped Arrow file of each value of a column of bytes; the length of null is 0.

    Raises ValueError, with ``advice``, for a file whose record batches are compressed.
    """
    _, offsets, content = data.buffers()
    dtype = np.int64 if pa.types.is_large_binary(data.type) else np.int32
    ends = np.frombuffer(offsets, dtype)[data.offset : data.offset + len(data) + 1].astype(np.int64)
    begin = content.address - mapped.address if content is not None else 0
    if ends[0] < ends[-1] and not 0 <= begin + ends[0] <= begin + ends[-1] <= mapped.size:
        raise ValueError(f"its record batches are compressed: {advice}")
    sizes = np.where(data.is_valid().to_numpy(zero_copy_only=False), np.diff(ends), 0)
    return list(zip((begin + ends[:-1]).tolist(), sizes.tolist(), strict=True))


def columns(
    table: pa.Table, where: str, types: Mapping[str, pa.DataType]
) -> dict[str, NDArray[Any]]:
    """Return columns of a table by name, cast where no value changes; texts are arrays of objects, lists are rows.

    Raises SourceError, naming ``where``, for a column that is missing, has nulls, or is of a type that does not go:
    floating-point numbers are never taken for integers, because times in nanoseconds do not fit into them.
    """
    if missing := [name for name in types if name not in table.column_names]:
        raise SourceError(
            f"{where} has no column '{missing[0]}'; it has {', '.join(table.column_names)}"
        )
    found: dict[str, NDArray[Any]] = {}
    for name, wanted in types.items():
        column = table.column(name)
        if column.null_count:
            raise SourceError(f"{where}: column '{name}' has {column.null_count} nulls")
        try:
            if pa.types.is_integer(wanted) and pa.types.is_floating(column.type):
                raise pa.ArrowInvalid("integers are needed")
            values = column.cast(wanted)
        except pa.ArrowException as error:
            text = " ".join(str(error).split())
            raise SourceError(
                f"{where}: column '{name}' is {column.type}, expected {wanted}: {text}"
            ) from error
        if pa.types.is_fixed_size_list(wanted):
            parts = [chunk.flatten().to_numpy() for chunk in values.chunks]
            found[name] = np.concatenate([np.empty(0), *parts]).reshape(-1, wanted.list_size)
        else:
            found[name] = (
                values.to_numpy() if values.num_chunks else np.empty(0, wanted.to_pandas_dtype())
            )
    return found


def stacked(table: Mapping[str, NDArray[Any]], names: Sequence[str]) -> NDArray[np.float64]:
    """Return columns of numbers as one array (rows, columns)."""
    return np.stack([table[name] for name in names], 1).astype(np.float64)


def check_unique(names: Sequence[Any], where: str, what: str) -> None:
    """Raise SourceError, naming ``where``, for a value that is there twice."""
    if len(set(names)) != len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise SourceError(f"{where} has two rows for {what} {twice}")


def read_parquet(
    files: SourceFiles, name: str, types: Mapping[str, pa.DataType], *, whole: bool = False
) -> dict[str, NDArray[Any]]:
    """Read these columns of a Parquet file, in these types (:func:`columns`); ``whole`` as in :func:`open_parquet`."""
    where = f"table '{files.shown}/{name}'"
    with open_parquet(files, name, whole=whole) as file:
        with parsing(where):
            known = [column for column in types if column in file.schema_arrow.names]
            table = file.read(known, use_threads=False)
        names = file.schema_arrow.names
    if missing := [column for column in types if column not in names]:
        raise SourceError(f"{where} has no column '{missing[0]}'; it has {', '.join(names)}")
    return columns(table, where, types)


def open_parquet(files: SourceFiles, name: str, *, whole: bool = False) -> pq.ParquetFile:
    """Open a file; at a URL by ranges, or ``whole``, which no scan needs. Raise SourceError for other files."""
    where = f"table '{files.shown}/{name}'"
    path = files.path(name)
    if path is not None and files.facts(name) is None:
        raise SourceError(f"{where} is not there")
    with parsing(where, "cannot be read as Parquet"):
        if path is None and whole:
            return pq.ParquetFile(pa.BufferReader(files.read(name)))
        found = pq.ParquetFile(path or pa.PythonFile(open_file(files, name), "r"))
        check_columns(found.metadata, where)
        return found


def check_columns(about: pq.FileMetaData, where: str) -> None:
    """Raise SourceError, naming ``where``, for a Parquet file with a column that is too large in one row group."""
    for group in range(about.num_row_groups):
        part = about.row_group(group)
        for number in range(about.num_columns):
            column = part.column(number)
            check_most(
                column.total_uncompressed_size,
                f"{where}: column '{column.path_in_schema}'",
                _MOST_COLUMN,
            )
