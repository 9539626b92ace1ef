"""What of a dataset may stay in the page cache.

Where the dataset exceeds the memory there is, each sample's pages are let go once it was read, but for a fixed part of
the samples that fits. An epoch uses each sample once, so that part is found in memory in every epoch, and the kernel
has no reason to push out anything else. Left to itself, a page cache smaller than the dataset keeps what was used last,
which is what will be used latest.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fuelrail.pipeline.dataset import Dataset
    from fuelrail.pipeline.index import IndexRow

_KEEP_OF_MEMORY: Final = 0.6
"""Part of the page cache's room that a dataset larger than it may hold."""


class Residency:
    """Which samples' pages stay: all, or a part by their digests, the same in every process.

    ``memory_bytes`` is what the page cache may take; None: what the machine and the control group have now.
    """

    def __init__(self, dataset: Dataset, memory_bytes: int | None = None) -> None:
        room = page_cache_room_bytes() if memory_bytes is None else memory_bytes
        total = sum(shard.bytes for shard in dataset.manifest.shards)
        self.is_whole = total <= room
        self._digests_below = 1 << 64 if self.is_whole else int(_KEEP_OF_MEMORY * room / total * 2**64)

    def keeps(self, row: IndexRow) -> bool:
        """Whether a sample's pages stay."""
        return row.xxh3 < self._digests_below


def page_cache_room_bytes() -> int:
    """Memory that the page cache may take: what the kernel calls available, or the control group's limit."""
    available = sys.maxsize
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            available = min(available, int(limit))
    except (OSError, ValueError):
        pass  # not Linux, or no control groups of version 2
    return available
