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
        end = min(first + _ROWS_AT_ONCE, len(index))
        keys = index.strings("key", first, end)
        part = np.empty(end - first, ENTRY)
        part["xxh3"] = [key_hash(key) for key in keys]
        part["row"] = np.arange(first, end)
        for name in ("offset", "length", "shard"):
            part[name] = index.column(name, first, end)
        column.append(part)
        index.release()
    entries: NDArray[np.void] = column.values
    num_full_buckets = len(entries) // _BUCKET_ROWS
    bits = max(num_full_buckets, 1).bit_length() - 1
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
        out_places = places[bucket[order]] + within
        out[out_places] = part[order]
        places += sizes
    for start, end in zip(starts, ends, strict=True):
        out[start:end] = _sorted(out[start:end])
        disk.used(int(end - start))
    return out


def _sorted(entries: NDArray[np.void]) -> NDArray[np.void]:
    """Sort entries that are in the order of their rows by their hashes."""
    by_hash = np.argsort(entries["xxh3"], kind="stable")
    return entries[by_hash]


def write_keys(path: Path, index: SampleIndex) -> None:
    """Write the table of an index."""
    entries = sorted_entries(index, path.parent)
    write_entries(path, entries)


def write_entries(path: Path, entries: NDArray[np.void]) -> None:
    """Write a table of sorted entries."""
    data = pa.py_buffer(b"")
    if len(entries):
        entry_bytes = np.ascontiguousarray(entries).view(np.uint8)
        data = pa.py_buffer(entry_bytes)
    array = pa.FixedSizeBinaryArray.from_buffers(
        _SCHEMA.field("entry").type,
        len(entries),
        [None, data],
    )
    batch = pa.RecordBatch.from_arrays([array], schema=_SCHEMA)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, _SCHEMA) as writer,
    ):
        writer.write_batch(batch)


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
            entries = self._columns.read("entry", first, end)
            if not np.array_equal(entries, expected[first:end]):
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
        # The file's beginning and end too, which say where the entries are.
        if self._columns_read is None:
            num_bytes = len(self._file.map)
            self._file.need_parts(
                (0, 1),
                self._bytes_of(guess, width),
                (num_bytes - 1, num_bytes),
            )
            if num_bytes <= _BACKGROUND_BYTES:  # so that later look-ups find their part here
                self._file.fetch_in_background()
        needle = np.uint64(digest)
        while True:
            low = max(guess - width, 0)
            high = min(guess + width, total)
            part: Any = self._columns.read("entry", low, high)
            hashes = part["xxh3"]
            first = int(np.searchsorted(hashes, needle, "left"))
            end = int(np.searchsorted(hashes, needle, "right"))
            has_first = first > 0 or low == 0
            has_last = end < high - low or high == total
            if has_first and has_last:
                break
            width *= 16
        matches = part[list(KeyEntry._fields)][first:end]
        entries = [KeyEntry(*entry) for entry in matches.tolist()]
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
        digest = key_hash(key)
        if self._checked is not None:
            guess, width = self._near(digest)
            start, end = self._bytes_of(guess, width)
            self._checked().need(start, end)
        for entry in entries:
            stored_key = key_of(entry.row)
            if key_hash(stored_key) != digest:
                raise IndexFileError(
                    f"index.arrow is damaged: its row {entry.row} has the key "
                    f"{shortened(stored_key)!r}, keys.arrow has the row for "
                    f"{shortened(key)!r}; `fuelrail verify` checks the whole dataset"
                )
        return None

    def _near(self, digest: int) -> tuple[int, int]:
        """Return the expected number of a hash's entry, and how far from it the entry rarely is."""
        guess = (digest * self._num_samples) >> 64
        width = 2 * math.isqrt(self._num_samples) + 64
        return guess, width

    def _bytes_of(self, guess: int, width: int) -> tuple[int, int]:
        """Return the bytes of the entries that are no farther than ``width`` from ``guess``."""
        num_bytes = len(self._file.map)
        low = max(guess - width, 0) * ENTRY.itemsize
        high = max(guess + width, 0) * ENTRY.itemsize
        start = min(low, num_bytes - 1)
        end = min(high, num_bytes - 1)
        return start, min(end + HEAD_BYTES, num_bytes)
