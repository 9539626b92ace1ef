"""Where a span's bytes come from: memory-mapped local shards."""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING

from fuelrail.pipeline.errors import ShardError, TruncatedShardError

if TYPE_CHECKING:
    from pathlib import Path

    from fuelrail.pipeline.dataset import Dataset
    from fuelrail.pipeline.index import IndexRow


class MappedShards:
    """Local shards, each mapped on first use; spans are views of the maps, nothing is copied. Thread-safe.

    A map takes address space, not memory: the page cache holds the bytes and drops them under pressure.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._maps: list[memoryview | None] = [None] * len(dataset.manifest.shards)
        self._lock = threading.Lock()

    def span(self, row: IndexRow) -> memoryview:
        """A read-only view of a sample's bytes.

        Raises TruncatedShardError where the shard is shorter than the index says, ShardError where it cannot be opened
        or is not the file that the manifest describes.
        """
        path = self._dataset.shard_path(row)
        data = self._maps[row.shard] or self._map(row.shard, path)
        end = row.offset + row.length
        if not 0 <= row.offset <= end <= len(data):
            raise TruncatedShardError(
                f"sample needs bytes up to {end}, the shard has {len(data)}",
                shard=path.name, offset=row.offset, key=row.key,
            )  # fmt: skip
        return data[row.offset : end]

    def _map(self, number: int, path: Path) -> memoryview:
        with self._lock:
            mapped = self._maps[number]
            if mapped is None:
                mapped = self._maps[number] = _map_file(path, self._dataset.manifest.shards[number].bytes)
            return mapped


def _map_file(path: Path, expected_bytes: int) -> memoryview:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ShardError(f"cannot be opened: {error}", shard=path.name) from error
    if len(data) != expected_bytes:
        # A shard that shrinks under a map kills the process with SIGBUS, so its size is settled here.
        kind = TruncatedShardError if len(data) < expected_bytes else ShardError
        raise kind(f"has {len(data)} bytes, the manifest says {expected_bytes}", shard=path.name)
    # Samples are read in a seeded random order: reading ahead of each fault would fetch what is not wanted.
    data.madvise(mmap.MADV_RANDOM)
    return memoryview(data)
