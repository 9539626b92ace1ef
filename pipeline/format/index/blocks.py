"""Files in blocks of 1 MiB, each with a digest: what is read of a table is checked, or fetched,
block by block.

``blocks.sha256`` holds the digests of all blocks of ``shards.arrow``, ``index.arrow``,
``keys.arrow`` and ``attributes.parquet``. FORMAT.md has the rules.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from fuelrail.pipeline.errors import DatasetError, FuelrailError, IndexFileError
from fuelrail.pipeline.format.index.checks import (
    ARROW_MAGIC,
    batch_range,
    footer_range,
)
from fuelrail.pipeline.storage.files import open_file
from fuelrail.pipeline.storage.private import open_file as open_private
from fuelrail.pipeline.storage.retry import RetryPolicy, read_checked

if TYPE_CHECKING:
    Read = Callable[[int, int], bytes]

BLOCKS_FILE: Final = "blocks.sha256"
BLOCK_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 32
TABLE_FILES: Final = (
    "shards.arrow",
    "index.arrow",
    "keys.arrow",
    "attributes.parquet",
)
"""The files that have block digests, in the order in which ``blocks.sha256`` holds these; not
all have the last one.
"""
_MAX_RUN: Final = 16
"""Blocks of one range request at most."""
_MAX_REQUESTS: Final = 8
"""Range requests at once at most."""
_BACKGROUND_REQUESTS: Final = 4
"""The number of requests in the background."""


def num_blocks(num_bytes: int) -> int:
    """Return the number of blocks of a file of that size; the last block may be shorter."""
    return -(-num_bytes // BLOCK_BYTES)


def block_digests(path: Path) -> bytes:
    """Return the SHA-256 of each block of a file of a dataset, one after the other; raise
    OSError.
    """
    digests = []
    with open_file(path) as file:
        while block := file.read(BLOCK_BYTES):
            digests.append(hashlib.sha256(block).digest())
    return b"".join(digests)


def split_digests(data: bytes, sizes: Iterable[tuple[str, int]]) -> dict[str, bytes]:
    """Cut the content of ``blocks.sha256`` into those of its files, given their names and sizes
    [bytes] in its order.

    Raises IndexFileError where it has another length than these sizes make.
    """
    digests = {}
    first = 0
    for name, num_bytes in sizes:
        end = first + DIGEST_BYTES * num_blocks(num_bytes)
        digests[name] = data[first:end]
        first = end
    if first != len(data):
        raise IndexFileError(
            f"{BLOCKS_FILE} has {len(data)} bytes; the tables of the dataset make {first}"
        )
    return digests


class BlockFile:
    """A mapped file of a dataset. With ``digests`` each block is checked when it is first needed.

    With ``read``, a range request (first byte, end), the file is a sparse one in the cache: a block
    whose bytes are not those of its digest is fetched and stored there, for all processes of the
    host. Safe to use from many threads.
    """

    def __init__(
        self,
        path: Path,
        digests: bytes | None = None,
        read: Read | None = None,
    ) -> None:
        """Map the file; raises IndexFileError where it cannot be opened or has another size than
        its digests.
        """
        self.path = path
        self._digests = digests
        self._read = read
        try:
            with open_file(path) as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._descriptor = None if digests is None else os.dup(file.fileno())
        except (OSError, ValueError) as error:  # ValueError: an empty file
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise IndexFileError(f"'{path}' cannot be opened: {reason}") from error
        if self._descriptor is not None:
            weakref.finalize(self, os.close, self._descriptor)
        self._view = memoryview(self.map)
        num_file_blocks = num_blocks(len(self._view))
        if digests is not None and len(digests) != DIGEST_BYTES * num_file_blocks:
            raise IndexFileError(
                f"'{path}' has {len(self._view)} bytes, but {BLOCKS_FILE} has "
                f"{len(digests) // DIGEST_BYTES} digests of it, one for each {BLOCK_BYTES} bytes"
            )
        self._good = bytearray(num_file_blocks)
        self._claim = threading.Lock()
        self._in_background = list[threading.Thread]()

    def need(self, first: int, end: int) -> memoryview:
        """Return bytes ``first`` to ``end - 1``, checked where the file has digests, fetched where
        they are missing.

        Raises IndexFileError for bytes outside the file or at odds with their digest, DatasetError
        where a block cannot be fetched or stored.
        """
        if not 0 <= first <= end <= len(self._view):
            raise IndexFileError(
                f"'{self.path}': bytes {first} to {end} lie outside its {len(self._view)}"
            )
        if self._digests is not None:
            low = first // BLOCK_BYTES
            high = num_blocks(end)
            if 0 in self._good[low:high]:
                self._check(range(low, high))
        return self._view[first:end]

    def need_parts(self, *parts: tuple[int, int]) -> None:
        """Have those bytes of parts (first byte, end) here that are in the file, if any can be
        missing: all at once.
        """
        if self._read is None:
            return
        blocks = set[int]()
        for first, end in parts:
            first_block = max(first, 0) // BLOCK_BYTES
            end_block = num_blocks(min(end, len(self._view)))
            blocks.update(range(first_block, end_block))
        self._check(sorted(blocks))

    def _missing(self, blocks: Sequence[int]) -> list[int]:
        """Return the blocks whose bytes do not match their digests."""
        assert self._descriptor is not None, "there are digests"
        for block in blocks:
            if not self._good[block]:
                # Not through the map: in a tmpfs each hole that is looked at takes memory, and
                # SIGBUS comes where it is full.
                data = os.pread(self._descriptor, BLOCK_BYTES, block * BLOCK_BYTES)
                self._good[block] = self._matches(block, data)
        return [block for block in blocks if not self._good[block]]

    def _check(self, blocks: Sequence[int]) -> None:
        missing = self._missing(blocks)
        if not missing:
            return
        if self._read is None:
            start = missing[0] * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, len(self._view))
            raise IndexFileError(
                f"'{self.path}' is damaged: bytes {start} to {end} do not match their "
                f"SHA-256 in {BLOCKS_FILE}; `fuelrail verify` checks the whole dataset"
            )
        runs = _runs(missing)
        if len(runs) == 1:
            self._fetch(self._read, runs[0])
            return
        num_requests = min(len(runs), _MAX_REQUESTS)
        with ThreadPoolExecutor(num_requests) as pool:
            list(pool.map(partial(self._fetch, self._read), runs))

    def fetch_in_background(self) -> None:
        """Start to fetch what is not here, once.

        Where that fails, :meth:`need` tries again and raises the error.
        """
        read = self._read
        if read is None or not self._claim.acquire(blocking=False):
            return
        num_file_blocks = len(self._good)
        starts = list(range(0, num_file_blocks, _MAX_RUN))
        random.Random().shuffle(starts)  # processes that share the cache fetch different parts
        remaining_starts = iter(starts)

        def work() -> None:
            with contextlib.suppress(FuelrailError):
                for start in remaining_starts:
                    end = min(start + _MAX_RUN, num_file_blocks)
                    # One after the other: the interpreter would wait for the threads of a pool when
                    # it ends, but not for daemons. What is stored by then stays in the cache.
                    for run in _runs(self._missing(range(start, end))):
                        self._fetch(read, run)

        self._in_background = []
        for _ in range(_BACKGROUND_REQUESTS):
            thread = threading.Thread(
                target=work,
                name=f"fetch {self.path.name}",
                daemon=True,
            )
            self._in_background.append(thread)
        for thread in self._in_background:
            thread.start()

    def _matches(self, block: int, data: memoryview | bytes) -> bool:
        assert self._digests is not None
        start = DIGEST_BYTES * block
        expected = self._digests[start : start + DIGEST_BYTES]
        return hashlib.sha256(data).digest() == expected

    def _fetch(self, read: Read, run: range) -> None:
        first = run.start * BLOCK_BYTES
        end = min(run.stop * BLOCK_BYTES, len(self._view))

        def check(data: bytes) -> memoryview:
            view = memoryview(data)
            is_sound = len(data) == end - first
            for number, block in enumerate(run):
                start = number * BLOCK_BYTES
                is_sound = is_sound and self._matches(block, view[start : start + BLOCK_BYTES])
            if not is_sound:
                raise IndexFileError(
                    f"bytes {first} to {end} of '{self.path.name}' at the dataset's URL are "
                    f"not those that {BLOCKS_FILE} describes (SHA-256 differs): was the "
                    "dataset replaced in part?"
                )
            return view

        data = read_checked(lambda: read(first, end), check, RetryPolicy())
        try:
            descriptor = open_private(self.path, os.O_WRONLY)
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], first + done)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DatasetError(
                f"a block of the index cannot be stored in '{self.path}': {error}; choose "
                "another folder with cache_dir"
            ) from error
        for block in run:
            self._good[block] = 1

    def stream(self) -> RawIOBase:
        """Return the file as a stream that reads no more than asked; its errors are those of
        :meth:`need`.
        """
        return _Stream(self)

    def open_arrow(self) -> pa.ipc.RecordBatchFileReader:
        """Return the file as an Arrow file; raise IndexFileError where it is none."""
        try:
            first, end = footer_range(self._view, self.need)
            self.need(first, end)
            # Arrow does not look at it. At a URL the first block is fetched with the first rows.
            if self._read is None and self.map[: len(ARROW_MAGIC)] != ARROW_MAGIC:
                raise IndexFileError("it does not begin as an Arrow file does")
            buffer = pa.py_buffer(self.map)
            return pa.ipc.open_file(pa.BufferReader(buffer))
        except (OSError, ValueError, pa.ArrowException, IndexFileError) as error:
            raise IndexFileError(f"index '{self.path}' cannot be opened: {error}") from error

    def has_batch(self, number: int) -> bool:
        """Return whether the whole of a record batch is here, so that :meth:`need_batch` fetches
        nothing.
        """
        if self._read is None:
            return True
        first, end = batch_range(self._view, number)
        return not self._missing(range(first // BLOCK_BYTES, num_blocks(end)))

    def need_batch(self, number: int) -> None:
        """Have the whole of a record batch here, if blocks of it can be missing."""
        if self._read is not None:
            self.need(*batch_range(self._view, number))

    def release(self) -> None:
        """Give the pages that were looked at back to the page cache; what was handed out stays
        good.
        """
        self.map.madvise(mmap.MADV_DONTNEED)


def _runs(blocks: Iterable[int]) -> list[range]:
    """Merge ascending numbers of blocks into ranges, each of which one request fetches."""
    runs: list[range] = []
    for block in blocks:
        end = block + 1
        if runs:
            run = runs[-1]
            if run.stop == block and len(run) < _MAX_RUN:
                runs[-1] = range(run.start, end)
                continue
        runs.append(range(block, end))
    return runs


class _Stream(RawIOBase):
    """A file whose bytes are checked, or fetched, when they are read."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._position,
            os.SEEK_END: len(self._file.map),
        }
        self._position = origins[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        start = self._position
        end = min(start + len(buffer), len(self._file.map))
        data = self._file.need(start, max(start, end))
        num_bytes = len(data)
        buffer[:num_bytes] = data
        self._position += num_bytes
        return num_bytes


def open_sparse(
    path: Path,
    num_bytes: int,
    digests: bytes,
    read: Callable[[int, int], bytes],
) -> BlockFile:
    """Open a table at a URL, fetched by blocks: ``read`` gets a range, which a sparse file in the
    cache takes.

    Raises IndexFileError, and DatasetError where the sparse file cannot be made.
    """
    try:
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_size != num_bytes:
                os.ftruncate(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    except (OSError, OverflowError) as error:
        raise DatasetError(
            f"'{path}' cannot take the {num_bytes} bytes of the index: {error}"
        ) from error
    return BlockFile(path, digests, read)
