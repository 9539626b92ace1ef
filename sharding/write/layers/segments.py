"""Segments: rows of a layer that a writer has finished, in files that many processes write and one
reads.

A segment holds up to `ROWS_PER_SEGMENT` rows. It gets its name, which is a digest of its content,
when it is whole: a writer that is killed leaves no part of one, and rows that are written again
with the same bytes change nothing. What the segments of a layer hold does not depend on who wrote
them, and neither does what is made of them.

A file is: number of rows (int64), their positions in the base (int64 each, ascending), the end of
each row's blob from the end of this head (int64 each), the blobs (msgpack of `SegmentRow`).
Little-endian.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from fuelrail.pipeline.errors import DatasetError
from fuelrail.pipeline.format.index.row import IndexRow
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from fuelrail.pipeline.storage.files import open_file, published

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.schema import I64, Mask
    from fuelrail.sharding.output.folder import Output

SEGMENTS: Final = f"{WORK_FOLDER}/segments"
ROWS_PER_SEGMENT: Final = 1024
BYTES_PER_SEGMENT: Final = 64 << 20
"""A writer that holds more publishes a shorter segment."""

_SUFFIX: Final = ".rows"
_WORD: Final = np.dtype("<i8")
_HEAD_BYTES: Final = (1 + ROWS_PER_SEGMENT) * _WORD.itemsize
"""What holds a segment's number of rows and their positions."""
_FILES_OPEN: Final = 256


class SegmentRow(msgspec.Struct, frozen=True, array_like=True):
    """One row: its place in the index (shard and offset are not known yet), its attributes, its
    span of a shard.
    """

    row: IndexRow
    attributes: tuple[bool | int | float | None, ...]
    span: bytes


class Blob(NamedTuple):
    """An encoded row and its position in the base."""

    position: int
    data: bytes


def publish_segment(out: Output, blobs: Sequence[Blob]) -> None:
    """Write rows of different positions as one segment."""
    ordered = sorted(blobs)
    count = len(ordered)
    head = np.empty(1 + 2 * count, _WORD)
    head[0] = count
    head[1 : 1 + count] = [blob.position for blob in ordered]
    head[1 + count :] = np.cumsum([len(blob.data) for blob in ordered])
    values = [blob.data for blob in ordered]
    content = b"".join([head.tobytes(), *values])
    name = f"{ordered[0].position:012d}-{xxhash.xxh3_128_hexdigest(content)}{_SUFFIX}"
    with out.publish(f"{SEGMENTS}/{name}") as file:
        file.write(content)


class Segments:
    """All segments that are published at this moment; ``update`` looks for more.

    Raises DatasetError for one that is damaged: by its head when it is found, by its digest when
    its rows are read.
    """

    def __init__(self, out: Output, num_samples: int) -> None:
        """Take the number of the base's positions (``num_samples``)."""
        self._out = out
        self._num_samples = num_samples
        self._names: list[str] = []
        self._whole: set[int] = set()
        self._known: set[str] = set()
        self._positions: list[I64] = []
        self._opened = functools.lru_cache(maxsize=_FILES_OPEN)(self._map_segment)
        self.update()

    def are_there(self) -> Mask:
        """Return which positions have a row: bool (num_samples,)."""
        mask = np.zeros(self._num_samples, bool)
        for positions in self._positions:
            mask[positions] = True
        return mask

    def update(self) -> None:
        """Look for segments that were published since."""
        for name in self._out.names(SEGMENTS):
            if not name.endswith(_SUFFIX) or name in self._known:
                continue
            head = self._out.read(f"{SEGMENTS}/{name}", _HEAD_BYTES)
            if head is None:  # another process has finished the layer meanwhile
                continue
            num_bytes = len(head) // _WORD.itemsize * _WORD.itemsize
            words = np.frombuffer(head[:num_bytes], _WORD)
            count = int(words[0]) if len(words) else 0
            positions = words[1 : 1 + count].astype(np.int64)
            is_sound = (
                0 < count == len(positions)
                and positions[0] >= 0
                and positions[-1] < self._num_samples
            )
            if not (is_sound and (positions[1:] > positions[:-1]).all()):
                raise self._make_damage_error(name)
            self._positions.append(positions)
            self._names.append(name)
            self._known.add(name)

    def rows(self) -> Iterator[tuple[int, SegmentRow]]:
        """Yield all rows with their positions, which ascend.

        Raises DatasetError where a sample was written twice with different values.
        """
        counts = [len(positions) for positions in self._positions]
        positions = np.concatenate([np.empty(0, np.int64), *self._positions])
        owner = np.repeat(np.arange(len(counts)), counts)
        rows_by_segment = [np.arange(count) for count in counts]
        segment_index = np.concatenate([np.empty(0, np.int64), *rows_by_segment])
        last: tuple[int, SegmentRow, int] | None = None
        for number in np.argsort(positions, kind="stable").tolist():
            position = int(positions[number])
            segment = int(owner[number])
            number = int(segment_index[number])
            count = len(self._positions[segment])
            mapped = self._opened(segment)
            head = 8 * (1 + 2 * count)
            if len(mapped) < head:
                raise self._make_damage_error(self._names[segment])
            ends = mapped[8 * (1 + count) : head].view(_WORD)
            start = int(ends[number - 1]) if number else 0
            end = int(ends[number])
            if not 0 <= start <= end <= len(mapped) - head:
                raise self._make_damage_error(self._names[segment])
            try:
                row = msgspec.msgpack.decode(
                    mapped[head + start : head + end].data, type=SegmentRow
                )
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._make_damage_error(self._names[segment]) from error
            is_whole = row.row.length == len(row.span)
            if not is_whole or xxhash.xxh3_64_intdigest(row.span) != row.row.xxh3:
                raise self._make_damage_error(self._names[segment])
            if last is not None and last[0] == position:
                if last[1].span != row.span:
                    raise DatasetError(
                        f"sample '{row.row.key}' (position {position}) was written twice, "
                        f"with different values, in '{self._out.shown}/{SEGMENTS}': "
                        f"segments {self._names[last[2]]} and {self._names[segment]}; a "
                        "model must give the same values each time, and each sample one "
                        "writer; remove one of the two files"
                    )
                continue
            last = position, row, segment
            yield position, row

    def _map_segment(self, segment: int) -> U8:
        name = self._names[segment]
        path = self._out.work / "segments" / name
        if not path.exists():  # at a URL
            path.parent.mkdir(parents=True, exist_ok=True)
            with published(path, sync=False) as file:
                self._out.fetch(f"{SEGMENTS}/{name}", Path(file.name))
        with open_file(path) as file:
            mapped = np.memmap(file, np.uint8, mode="r")
        if segment not in self._whole:
            if (
                xxhash.xxh3_128_hexdigest(mapped.data)
                != name.removesuffix(_SUFFIX).rpartition("-")[2]
            ):
                raise self._make_damage_error(name)
            self._whole.add(segment)
        return mapped

    def _make_damage_error(self, name: str) -> DatasetError:
        return DatasetError(
            f"'{self._out.shown}/{SEGMENTS}/{name}' is damaged: remove it, and write its rows again"
        )
