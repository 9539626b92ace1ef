"""``keys.arrow``: row and place of a key, by a table sorted by the hashes of the keys.

FORMAT.md has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from fuelrail.pipeline.errors import IndexFileError
from fuelrail.pipeline.format.index.fixed_columns import (
    HEAD_BYTES,
    FixedColumns,
)
from fuelrail.pipeline.storage.columns import Disk
from fuelrail.pipeline.text import shortened

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.blocks import BlockFile
    from fuelrail.pipeline.format.index.samples import SampleIndex

KEYS_FILE: Final = "keys.arrow"

ENTRY: Final = np.dtype(
    [
        ("xxh3", "<u8"),
        ("row", "<u8"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("shard", "<u4"),
    ]
)
"""An entry: XXH3-64 of the key in UTF-8, the key's row in the index, and the place of its span."""
_SCHEMA: Final = pa.schema(
    [pa.field("entry", pa.binary(ENTRY.itemsize), nullable=False)],
    metadata={"fuelrail.keys.version": "1"},
)
_ROWS_AT_ONCE: Final = 1 << 16
_BUCKET_ROWS: Final = 1 << 20
_BACKGROUND_BYTES: Final = 512 << 20
"""A table at a URL of up to this size (16 million samples) comes as a whole in the background of
the first look-up.
"""


class KeyEntry(NamedTuple):
    """What the table has of a key: its row in the index, and where the index has its span."""

    row: int
    offset: int
    length: int
    shard: int


def key_hash(key: str) -> int:
    """Return XXH3-64 of a key in UTF-8; text that is not UTF-8 is not a key and is never found."""
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogatepass"))


def sorted_entries(index: SampleIndex, folder: Path) -> NDArray[np.void]:
    """Return table of an index: its entries in ascending order.

    Entries that exceed memory are kept in ``folder``.
    """
    disk = Disk(folder)
    column = disk.column(ENTRY)
    for first in range(0, len(index), _ROWS_AT_ONCE):
        keys = index.strings("key", first, min(first + _ROWS_AT_ONCE, len(index)))
        part = np.empty(len(keys), ENTRY)
        part["xxh3"] = [key_hash(key) for key in keys]
        part["row"] = np.arange(first, first + len(keys))
        for name in KeyEntry._fields[1:]:
            part[name] = index.column(name, first, first + len(keys))
        column.append(part)
        index.release()
    entries: NDArray[np.void] = column.values
    bits = max(len(entries) // _BUCKET_ROWS, 1).bit_length() - 1
    if not bits:
        return _sorted(entries)
    # Sort by the upper bits of the hash, then each bucket: the hashes are spread evenly, so each
    # bucket fits in memory.
    num_buckets = 1 << bits
    shift = np.uint64(64 - bits)

    def parts() -> Iterator[NDArray[np.void]]:
        for first in range(0, len(entries), _ROWS_AT_ONCE):
            yield entries[first : first + _ROWS_AT_ONCE]
            disk.used(_ROWS_AT_ONCE)

    counts = np.zeros(num_buckets, np.int64)
    for part in parts():
        bucket = (part["xxh3"] >> shift).astype(np.int64)
        counts += np.bincount(bucket, minlength=num_buckets)
    ends = np.cumsum(counts)
    starts = ends - counts
    places = starts.copy()
    num_bytes = len(entries) * ENTRY.itemsize
    out: NDArray[np.void] = disk.filled(0, num_bytes, np.uint8).view(ENTRY)
    for part in parts():
        bucket = (part["xxh3"] >> shift).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        sizes = np.bincount(bucket, minlength=num_buckets)
        firsts = np.cumsum(sizes) - sizes
        within = np.arange(len(part)) - np.repeat(firsts, sizes)
        out[places[bucket[order]] + within] = part[order]
        places += sizes
    for start, end in zip(starts, ends, strict=True):
        out[start:end] = _sorted(out[start:end])
        disk.used(int(end - start))
    return out


def _sorted(entries: NDArray[np.void]) -> NDArray[np.void]:
    """Sort entries that are in the order of their rows by their hashes."""
    return entries[np.argsort(entries["xxh3"], kind="stable")]


def write_keys(path: Path, index: SampleIndex) -> None:
    """Write the table of an index."""
    write_entries(path, sorted_entries(index, path.parent))


def write_entries(path: Path, entries: NDArray[np.void]) -> None:
    """Write a table of sorted entries."""
    data = (
        pa.py_buffer(np.ascontiguousarray(entries).view(np.uint8))
        if len(entries)
        else pa.py_buffer(b"")
    )
    array = pa.FixedSizeBinaryArray.from_buffers(_SCHEMA.field(0).type, len(entries), [None, data])
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, _SCHEMA) as writer,
    ):
        writer.write_batch(pa.RecordBatch.from_arrays([array], schema=_SCHEMA))


class KeyTable:
    """The table of an open dataset."""

    def __init__(
        self,
        opened: Callable[[], BlockFile],
        num_samples: int,
        checked: Callable[[], BlockFile] | None = None,
    ) -> None:
        """Take functions that open the file: ``opened`` at the first look-up, ``checked`` with
        digests at a miss.

        Without ``checked`` what ``opened`` opens is checked, or was when it was fetched.
        """
        # Not as cached properties: Python 3.11 lets one thread at a time into those of all objects,
        # for as long as it waits for a server, and a fork inherits that lock.
        self._opened = cache(opened)
        self._num_samples = num_samples
        self._checked = None if checked is None else cache(checked)
        self._columns_read: FixedColumns | None = None

    @property
    def _file(self) -> BlockFile:
        return self._opened()

    @property
    def _columns(self) -> FixedColumns:
        if self._columns_read is None:
            columns = FixedColumns(self._file, _SCHEMA, {"entry": ENTRY})
            if columns.num_rows != self._num_samples:
                raise IndexFileError(
                    f"'{self._file.path}' has {columns.num_rows} keys, the index "
                    f"{self._num_samples} samples"
                )
            self._columns_read = columns
        return self._columns_read

    def entries(self) -> NDArray[Any]:
        """Return all entries, sorted by hash; raise IndexFileError where the table is damaged."""
        return self._columns.read("entry", 0, self._num_samples)

    def check(self, index: SampleIndex, folder: Path) -> None:
        """Check the whole table against the index, with work files in ``folder``; raises
        IndexFileError.
        """
        expected = sorted_entries(index, folder)
        for first in range(0, self._num_samples, _ROWS_AT_ONCE):
            end = min(first + _ROWS_AT_ONCE, self._num_samples)
            if not np.array_equal(self._columns.read("entry", first, end), expected[first:end]):
                raise IndexFileError(
                    f"the rows from {first} on are not those of the keys of the index"
                )

    def find(self, key: str) -> list[KeyEntry]:
        """Return the entries whose key has the hash of this one: rarely more than one, often none.

        The hashes are spread evenly, so the place of one among n is known to within a few times the
        square root of n: one range of the table is read. Raises IndexFileError for a table that is
        damaged.
        """
        digest = key_hash(key)
        total = self._num_samples
        guess, width = self._near(digest)
        end = len(self._file.map)
        # The file's beginning and end too, which say where the entries are.
        if self._columns_read is None:
            self._file.need_parts((0, 1), self._bytes_of(guess, width), (end - 1, end))
            if end <= _BACKGROUND_BYTES:  # so that the look-ups that follow find their part here
                self._file.fetch_in_background()
        while True:
            low = max(guess - width, 0)
            high = min(guess + width, total)
            part: Any = self._columns.read("entry", low, high)
            hashes = part["xxh3"]
            first = int(np.searchsorted(hashes, np.uint64(digest), "left"))
            end = int(np.searchsorted(hashes, np.uint64(digest), "right"))
            if (first > 0 or low == 0) and (end < high - low or high == total):
                break
            width *= 16
        entries = [KeyEntry(*entry) for entry in part[list(KeyEntry._fields)][first:end].tolist()]
        for entry in entries:
            if entry.row >= total:
                raise IndexFileError(
                    f"keys.arrow puts key '{key}' at row {entry.row}, the index has {total}"
                )
        return entries

    def row(self, key: str, key_of: Callable[[int], str]) -> int | None:
        """Return the row whose key, by the index's ``key_of``, is this one; None where there is
        none.

        Raises what :meth:`find` does, and IndexFileError where the part of the table that would
        have it is damaged, or the index has a key of another hash in that row.
        """
        entries = self.find(key)
        for entry in entries:
            if key_of(entry.row) == key:
                return entry.row
        if self._checked is not None:
            self._checked().need(*self._bytes_of(*self._near(key_hash(key))))
        for entry in entries:
            if key_hash(stored_key := key_of(entry.row)) != key_hash(key):
                raise IndexFileError(
                    f"index.arrow is damaged: its row {entry.row} has the key "
                    f"{shortened(stored_key)!r}, keys.arrow has the row for "
                    f"{shortened(key)!r}; `fuelrail verify` checks the whole dataset"
                )
        return None

    def _near(self, digest: int) -> tuple[int, int]:
        """Return the expected number of a hash's entry, and how far from it the entry rarely is."""
        return (digest * self._num_samples) >> 64, 2 * math.isqrt(self._num_samples) + 64

    def _bytes_of(self, guess: int, width: int) -> tuple[int, int]:
        """Return the bytes of the entries that are no farther than ``width`` from ``guess``."""
        end = len(self._file.map)
        low, high = (
            min(max(guess + side, 0) * ENTRY.itemsize, end - 1) for side in (-width, width)
        )
        return low, min(high + HEAD_BYTES, end)
