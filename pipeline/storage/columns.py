"""Columns on disk: written to unnamed temporary files, read back through the page cache.

What is collected row by row and looked up in any order would take memory for every row. Here it
takes disk: a column is a file without a name in a folder of the caller's, gone with the process
however that ends, mapped into memory when it is read. :meth:`Disk.used` gives pages back to the
page cache, so that the memory of this process stays the same however long the columns are. For one
thread.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I64


_ROWS_BETWEEN: Final = 1 << 15
ROWS_AT_ONCE: Final = 1 << 16
"""What loops over a long column take at once."""


def numpy_dtype(kind: pa.DataType) -> np.dtype[Any]:
    """Return the numpy type of an Arrow type; its own ``to_pandas_dtype`` needs pandas in
    pyarrow 23 and older.
    """
    empty = pa.array([], kind).to_numpy(zero_copy_only=False)
    dtype: np.dtype[Any] = empty.dtype
    return dtype


class Disk:
    """Columns with their files in ``folder``, which must exist and may be on any disk."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder
        self._maps: list[mmap.mmap] = []
        self._num_used = 0

    def column(self, dtype: DTypeLike, shape: tuple[int, ...] = ()) -> Column:
        """Return a column of rows of that type and shape, empty."""
        return Column(self, np.dtype(dtype), shape)

    def filled(
        self,
        value: float,
        num_rows: int,
        dtype: DTypeLike,
        shape: tuple[int, ...] = (),
    ) -> NDArray[Any]:
        """Return a column of ``num_rows`` rows of ``value`` as an array, to be written to in
        place.
        """
        column = self.column(dtype, shape)
        for first in range(0, num_rows, ROWS_AT_ONCE):
            num_part_rows = min(ROWS_AT_ONCE, num_rows - first)
            part = np.full((num_part_rows, *shape), value, dtype)
            column.append(part)
        return column.values

    def texts(self) -> Texts:
        """Return a column of texts, empty."""
        return Texts(self)

    def table(self, parts: Iterable[pa.RecordBatch | pa.Table]) -> pa.Table:
        """Return the parts, one at least, as one table."""
        file = self.new_file()
        rest = iter(parts)
        first = next(rest)
        with pa.ipc.new_file(file, first.schema) as writer:
            writer.write(first)
            for part in rest:
                writer.write(part)
        buffer = pa.py_buffer(self.map(file))
        return pa.ipc.open_file(buffer).read_all()

    def take(self, table: pa.Table, rows: I64) -> pa.Table:
        """Copy rows of a :meth:`table`, batch by batch: Arrow's own ``take`` would copy whole
        columns first.
        """
        batches = table.to_batches()
        lengths = np.array([len(batch) for batch in batches], np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        numbers = np.searchsorted(ends, rows, "right")
        parts = []
        for number in np.unique(numbers).tolist():
            rows_in_batch = rows[numbers == number] - starts[number]
            parts.append(batches[number].take(pa.array(rows_in_batch)))
        by_batch = pa.Table.from_batches(parts, table.schema)
        place_in_parts = np.argsort(np.argsort(numbers, kind="stable"))
        copied = by_batch.combine_chunks().take(pa.array(place_in_parts))
        self.used(copied.num_rows * copied.num_columns)
        return copied

    def used(self, num_rows: int) -> None:
        """Count rows that were looked at; every 32,768 of them pages are given back to the page
        cache.
        """
        self._num_used += num_rows
        if self._num_used >= _ROWS_BETWEEN:
            self.release()

    def release(self) -> None:
        """Give the pages of all columns back.

        What was written to them is not lost, and arrays stay good.

        Arrow's pool gives back too what it keeps of freed arrays: tens of megabytes otherwise.
        """
        self._num_used = 0
        pa.default_memory_pool().release_unused()
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def new_file(self) -> IO[bytes]:
        """Return a temporary file without a name."""
        return tempfile.TemporaryFile(dir=self.folder, buffering=1 << 16)

    def map(self, file: IO[bytes]) -> mmap.mmap | bytearray:
        """Map a file's bytes, and close it."""
        with file:
            if not file.tell():
                return bytearray()
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0)
        self._maps.append(mapped)
        return mapped


class Column:
    """A column of numbers, all rows of one shape."""

    def __init__(
        self,
        disk: Disk,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
    ) -> None:
        self._disk = disk
        self._dtype = dtype
        self._shape = shape
        self._file = disk.new_file()
        self._length = 0

    def __del__(self) -> None:
        # There was no place for the file, or is none for its rest.
        with contextlib.suppress(AttributeError, OSError):
            self._file.close()  # of a column that was not read

    def __len__(self) -> int:
        return self._length

    def append(self, values: Any) -> None:
        """Add rows (N, ...)."""
        array = np.ascontiguousarray(values, self._dtype)
        rows = array.reshape(-1, *self._shape)
        self._length += len(rows)
        self._file.write(rows.tobytes())

    @cached_property
    def values(self) -> NDArray[Any]:
        """All rows as one array, which may be written to; the column takes no more then."""
        data = self._disk.map(self._file)
        array = np.frombuffer(data, self._dtype)
        return array.reshape(-1, *self._shape)


class Texts:
    """A column of texts."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._ends = disk.column(np.int64)
        self._utf8 = disk.column(np.uint8)
        self._ends.append(0)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, texts: Sequence[str]) -> None:
        """Add texts."""
        joined = "".join(texts)
        utf8 = joined.encode()
        # In ASCII, as most texts are, a letter is a byte.
        counted = texts if joined.isascii() else [text.encode() for text in texts]
        num_bytes = np.fromiter(map(len, counted), np.int64, len(texts))
        ends = np.cumsum(num_bytes) + len(self._utf8)
        self._ends.append(ends)
        self._utf8.append(np.frombuffer(utf8, np.uint8))

    def __getitem__(self, row: int) -> str:
        first, end = self._ends.values[row : row + 2].tolist()
        utf8 = self._utf8.values.data
        return str(utf8[first:end], "utf-8")

    def num_bytes(self, rows: I64) -> I64:
        """Return the bytes that the texts of some rows have."""
        ends: I64 = self._ends.values
        return np.asarray(ends[rows + 1] - ends[rows])

    def take(self, rows: I64) -> list[str]:
        """Return the texts of some rows, in that order."""
        bounds = self._ends.values
        utf8 = self._utf8.values.data
        starts = bounds[rows].tolist()
        ends = bounds[rows + 1].tolist()
        spans = zip(starts, ends, strict=True)
        return [str(utf8[start:end], "utf-8") for start, end in spans]

    def parts(self, num_rows: int = ROWS_AT_ONCE) -> Iterator[pa.LargeStringArray]:
        """Yield the rows as Arrow arrays, not copied, ``num_rows`` at a time."""
        buffers = [
            None,
            pa.py_buffer(self._ends.values),
            pa.py_buffer(self._utf8.values),
        ]
        texts = pa.Array.from_buffers(pa.large_string(), len(self), buffers)
        for first in range(0, len(self), num_rows):
            yield texts.slice(first, num_rows)
            self.disk.used(num_rows)
