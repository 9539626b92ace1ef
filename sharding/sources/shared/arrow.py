"""Tables of research datasets: Arrow columns by name and type, and the checks on files and rows."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import feather

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.files import check_no_pointer

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.files import SourceFiles

QUATERNION: Final = ("qw", "qx", "qy", "qz")
TRANSLATION: Final = ("tx_m", "ty_m", "tz_m")


def read_file(files: SourceFiles, name: str) -> bytes:
    """All of a file; raises SourceError where it is empty, or a Git LFS pointer."""
    data = files.read(name)
    if not data:
        raise SourceError(f"file '{files.shown}/{name}' is empty")
    check_no_pointer(data, f"file '{files.shown}/{name}'")
    return data


def names_in(files: SourceFiles, folder: str, *parts: str) -> list[str]:
    """Names in the folder ``folder/parts[0]/...``, sorted; nothing where it, or one above it, is not there."""
    for part in parts:
        if part not in files.listed(folder):
            return []
        folder = f"{folder}/{part}" if folder else part
    return files.listed(folder)


def read_feather(files: SourceFiles, name: str, types: Mapping[str, pa.DataType]) -> dict[str, NDArray[Any]]:
    """These columns of a feather file, in these types (:func:`columns`)."""
    data = read_file(files, name)
    where = f"table '{files.shown}/{name}'"
    try:
        table = feather.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{where} cannot be read as feather: {' '.join(str(error).split())}") from error
    return columns(table, where, types)


def columns(table: pa.Table, where: str, types: Mapping[str, pa.DataType]) -> dict[str, NDArray[Any]]:
    """Columns of a table by name, cast where no value changes; texts are arrays of objects, lists are rows.

    Raises SourceError, naming ``where``, for a column that is missing, has nulls, or is of a type that does not go:
    floating-point numbers are never taken for integers, because times in nanoseconds do not fit into them.
    """
    if missing := [name for name in types if name not in table.column_names]:
        raise SourceError(f"{where} has no column '{missing[0]}'; it has {', '.join(table.column_names)}")
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
            raise SourceError(f"{where}: column '{name}' is {column.type}, expected {wanted}: {text}") from error
        if pa.types.is_fixed_size_list(wanted):
            parts = [chunk.flatten().to_numpy() for chunk in values.chunks]
            found[name] = np.concatenate([np.empty(0), *parts]).reshape(-1, wanted.list_size)
        else:
            found[name] = values.to_numpy() if values.num_chunks else np.empty(0, wanted.to_pandas_dtype())
    return found


def stacked(table: Mapping[str, NDArray[Any]], names: Sequence[str]) -> NDArray[np.float64]:
    """Columns of numbers as one array (rows, columns)."""
    return np.stack([table[name] for name in names], 1).astype(np.float64)


def check_unique(names: Sequence[Any], where: str, what: str) -> None:
    """Raise SourceError, naming ``where``, for a value that is there twice."""
    if len(set(names)) != len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise SourceError(f"{where} has two rows for {what} {twice}")


def read_parquet(
    files: SourceFiles, name: str, types: Mapping[str, pa.DataType], *, whole: bool = False
) -> dict[str, NDArray[Any]]:
    """These columns of a Parquet file, in these types (:func:`columns`); ``whole`` as in :func:`open_parquet`."""
    where = f"table '{files.shown}/{name}'"
    with open_parquet(files, name, whole=whole) as file:
        try:
            known = [column for column in types if column in file.schema_arrow.names]
            table = file.read(known, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{where} cannot be read: {' '.join(str(error).split())}") from error
        names = file.schema_arrow.names
    if missing := [column for column in types if column not in names]:
        raise SourceError(f"{where} has no column '{missing[0]}'; it has {', '.join(names)}")
    return columns(table, where, types)


class _Ranges(io.RawIOBase):
    """A file of a source, read by ranges."""

    def __init__(self, files: SourceFiles, name: str, num_bytes: int) -> None:
        self._files, self._name, self._num_bytes, self._at = files, name, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        length = self._num_bytes - self._at if size < 0 else size
        data = self._files.read(self._name, self._at, length) if length > 0 else b""
        self._at += len(data)
        return data


def open_parquet(files: SourceFiles, name: str, *, whole: bool = False) -> pq.ParquetFile:
    """The file; at a URL by ranges, which a scan can, or ``whole``. Raises SourceError for one that is no Parquet."""
    where = f"table '{files.shown}/{name}'"
    path = files.path(name)
    try:
        if path is None and whole:
            return pq.ParquetFile(pa.BufferReader(files.read(name)))
        facts = files.facts_of([name])[0]
        if facts is None:
            raise SourceError(f"{where} is not there")
        return pq.ParquetFile(pa.PythonFile(_Ranges(files, name, facts.num_bytes), "r") if path is None else path)
    except (pa.ArrowException, OSError) as error:
        text = " ".join(str(error).split())
        raise SourceError(f"{where} cannot be read as Parquet: {text}") from error
