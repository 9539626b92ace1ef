"""Columns larger than memory: written to unnamed temporary files, read back through the page cache.

What is collected row by row and looked up all over (the joined tables of a source, the columns of an index) would take
memory for every row. Here it takes disk: a column is a file without a name in a folder of the caller's, gone with the
process however that ends, mapped into memory when it is read. :meth:`Spill.used` gives pages back to the page cache, so
that the memory of this process stays the same however long the columns are.

Columns of up to 64 KiB never see a disk. For one thread.
"""

from __future__ import annotations

import mmap
import tempfile
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

_IN_MEMORY_BYTES: Final = 1 << 16
_ROWS_BETWEEN: Final = 1 << 15
ROWS_AT_ONCE: Final = 1 << 16
"""What loops over a long column take at once."""


def numpy_dtype(kind: pa.DataType) -> np.dtype[Any]:
    """Return the numpy type of an Arrow type; its own ``to_pandas_dtype`` needs pandas in pyarrow 23 and older."""
    dtype: np.dtype[Any] = pa.array([], kind).to_numpy(zero_copy_only=False).dtype
    return dtype


class Spill:
    """Columns with their files in ``folder``, which must be there and may be on any disk."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder
        self._maps: list[mmap.mmap] = []
        self._num_used = 0

    def column(self, dtype: DTypeLike, shape: tuple[int, ...] = ()) -> SpilledColumn:
        """Return a column of rows of that type and shape, empty."""
        return SpilledColumn(self, np.dtype(dtype), shape)

    def filled(self, value: float, num_rows: int, dtype: DTypeLike, shape: tuple[int, ...] = ()) -> NDArray[Any]:
        """Return a column of ``num_rows`` rows of ``value`` as an array, to be written to in place."""
        column = self.column(dtype, shape)
        for first in range(0, num_rows, ROWS_AT_ONCE):
            column.append(np.full((min(ROWS_AT_ONCE, num_rows - first), *shape), value, dtype))
        return column.values

    def texts(self) -> SpilledTexts:
        """Return a column of texts, empty."""
        return SpilledTexts(self)

    def used(self, num_rows: int) -> None:
        """So many rows were looked at; every now and then their pages are given back (to the page cache)."""
        self._num_used += num_rows
        if self._num_used >= _ROWS_BETWEEN:
            self.release()

    def release(self) -> None:
        """Give the pages of all columns back. What was written to them is not lost, and arrays stay good.

        Arrow's pool gives back too what it keeps of arrays that are no more: tens of megabytes otherwise.
        """
        self._num_used = 0
        pa.default_memory_pool().release_unused()
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def new_file(self) -> IO[bytes]:
        """Return a temporary file without a name."""
        return tempfile.TemporaryFile(dir=self._folder)

    def map(self, file: IO[bytes]) -> mmap.mmap:
        """Map a file's bytes, and close it."""
        with file:
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0)
        self._maps.append(mapped)
        return mapped


class _Bytes:
    """Bytes that grow, in memory at first and then in a file."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._pending = bytearray()
        self._file: IO[bytes] | None = None
        self._whole: mmap.mmap | bytearray | None = None

    def __del__(self) -> None:
        if self._file is not None:  # of a column that was not read
            self._file.close()

    def append(self, data: bytes | memoryview) -> None:
        assert self._whole is None, "a column is read when it is whole"
        self._pending += data
        if len(self._pending) > _IN_MEMORY_BYTES:
            if self._file is None:
                self._file = self._spill.new_file()
            self._file.write(self._pending)
            self._pending = bytearray()

    @property
    def whole(self) -> mmap.mmap | bytearray:
        if self._whole is None:
            if self._file is None:
                self._whole = self._pending
            else:
                self._file.write(self._pending)
                self._whole, self._pending = self._spill.map(self._file), bytearray()
        return self._whole


class SpilledColumn:
    """A column of numbers, all rows of one shape."""

    def __init__(self, spill: Spill, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape
        self._bytes = _Bytes(spill)
        self._values: NDArray[Any] | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, values: Any) -> None:  # noqa: ANN401 - what numpy takes
        """Add rows (N, ...)."""
        rows = np.ascontiguousarray(values, self._dtype).reshape(-1, *self._shape)
        self._length += len(rows)
        self._bytes.append(rows.data.cast("B") if rows.size else b"")

    @property
    def values(self) -> NDArray[Any]:
        """All rows as one array, which may be written to; the column takes no more then."""
        if self._values is None:
            self._values = np.frombuffer(self._bytes.whole, self._dtype).reshape(-1, *self._shape)
        return self._values

    def parts(self) -> Iterator[NDArray[Any]]:
        """Yield the rows, in order, ``ROWS_AT_ONCE`` at a time."""
        for first in range(0, self._length, ROWS_AT_ONCE):
            yield self.values[first : first + ROWS_AT_ONCE]


class SpilledTexts:
    """A column of texts."""

    def __init__(self, spill: Spill) -> None:
        self._ends = spill.column(np.int64)
        self._ends.append(0)
        self._num_bytes = 0
        self._utf8 = _Bytes(spill)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, texts: Sequence[bytes]) -> None:
        """Add texts, in UTF-8."""
        self.append_utf8(b"".join(texts), np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts))))

    def append_utf8(self, utf8: bytes | memoryview, ends: NDArray[np.int64]) -> None:
        """Add texts that stand one after the other, and where in ``utf8`` each of them ends."""
        self._ends.append(ends + self._num_bytes)
        self._num_bytes += len(utf8)
        self._utf8.append(utf8)

    def __getitem__(self, row: int) -> str:
        first, end = self._ends.values[row : row + 2].tolist()
        return str(self._utf8.whole[first:end], "utf-8")

    def take(self, rows: NDArray[np.int64]) -> list[str]:
        """Return the texts of some rows, in that order."""
        ends, utf8 = self._ends.values, self._utf8.whole
        bounds = zip(ends[rows].tolist(), ends[rows + 1].tolist(), strict=True)
        return [str(utf8[first:end], "utf-8") for first, end in bounds]

    def array(self) -> pa.LargeStringArray:
        """Return all rows as an Arrow array, not copied."""
        buffers = (pa.py_buffer(self._ends.values), pa.py_buffer(self._utf8.whole))
        return pa.LargeStringArray.from_buffers(len(self), *buffers)
