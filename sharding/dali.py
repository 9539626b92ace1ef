"""A shard's index as ``fn.readers.webdataset`` of NVIDIA DALI reads it (format v1.2, what its ``wds2idx`` writes).

First line ``v1.2 N`` with the number of samples, then a line for each sample: for each member its extension, the
offset of its data in the tar, its size and its name, all separated by single spaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.pipeline.shardfile import StoredMember


class IndexText:
    """Collects the lines of one shard."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, key: str, span_offset: int, members: Sequence[StoredMember], offsets: Sequence[int]) -> None:
        """Add the next sample, whose span begins at ``span_offset``; ``offsets`` are those of the data in the span."""
        self._lines.append(
            " ".join(
                f"{field} {span_offset + offset} {memoryview(data).nbytes} {key}.{field}"
                for (field, data), offset in zip(members, offsets, strict=True)
            )
        )

    def encode(self) -> bytes:
        """The whole file."""
        return "\n".join([f"v1.2 {len(self._lines)}", *self._lines, ""]).encode("ascii", "replace")
