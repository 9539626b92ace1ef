"""``shards.arrow``: one row for each shard. FORMAT.md has the rules."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

import numpy as np
import pyarrow as pa

from fuelrail.pipeline.errors import IndexFileError, ManifestError
from fuelrail.pipeline.format.index.fixed_columns import FixedColumns
from fuelrail.pipeline.storage.columns import numpy_dtype

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I64
    from fuelrail.pipeline.format.index.blocks import BlockFile
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.format.manifest import Manifest

SHARDS_FILE: Final = "shards.arrow"

_NO_DIGEST: Final = bytes(32)
_PLACES_KEPT: Final = 1 << 14
SHARDS_SCHEMA: Final = pa.schema(
    [
        pa.field("first_sample", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("sha256", pa.binary(32), nullable=False),
        pa.field("framed", pa.uint8(), nullable=False),
        pa.field("idx_bytes", pa.int64(), nullable=False),
        pa.field("idx_sha256", pa.binary(32), nullable=False),
    ],
    metadata={"fuelrail.shards.version": "1"},
)
_DTYPES: Final = {
    field.name: np.dtype("V32") if field.type == pa.binary(32) else numpy_dtype(field.type)
    for field in SHARDS_SCHEMA
}
_ENDINGS: Final = (".tar", ".tar.zst")


class ShardEntry(NamedTuple):
    """One shard: rows ``first_sample`` to ``first_sample + num_samples - 1`` of the index, in this
    order.

    ``idx_bytes`` and ``idx_sha256`` are of its listing for DALI; 0 and empty where it has none.
    """

    name: str
    split: str
    first_sample: int
    num_samples: int
    bytes: int
    sha256: str
    idx_bytes: int = 0
    idx_sha256: str = ""

    @property
    def idx_name(self) -> str:
        """The name of its listing for DALI."""
        return f"{self.name.partition('.')[0]}.idx"


def shard_name(split: str, number: int, *, framed: bool = False) -> str:
    """Return the name of the shard that has this number within its split."""
    return f"{split}-{number:06d}{_ENDINGS[framed]}"


def write_shards(path: Path, shards: Iterable[ShardEntry]) -> None:
    """Write the table; shards must have the names that follow from their numbers."""
    rows: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for shard in shards:
        number = numbers.get(shard.split, 0)
        numbers[shard.split] = number + 1
        framed = shard.name.endswith(_ENDINGS[1])
        name = shard_name(shard.split, number, framed=framed)
        assert shard.name == name, f"'{shard.name}' is not shard {number}"
        idx_sha256 = bytes.fromhex(shard.idx_sha256) if shard.idx_bytes else _NO_DIGEST
        row = {
            "first_sample": shard.first_sample,
            "bytes": shard.bytes,
            "sha256": bytes.fromhex(shard.sha256),
            "framed": int(framed),
            "idx_bytes": shard.idx_bytes,
            "idx_sha256": idx_sha256,
        }
        rows.append(row)
    batch = pa.RecordBatch.from_pylist(rows, schema=SHARDS_SCHEMA)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, SHARDS_SCHEMA) as writer,
    ):
        writer.write_batch(batch)


class ShardTable(Sequence[ShardEntry]):
    """The shards of a dataset in the order of their samples.

    Opening it costs the same for any number of shards.

    Each entry is checked when it is read: ManifestError where it does not continue the one before,
    or belongs to a split that does not have its samples.
    """

    def __init__(self, file: BlockFile, manifest: Manifest) -> None:
        """Check the table's length and the beginnings of the splits; raises ManifestError and
        IndexFileError.
        """
        self._file = file
        self._columns = FixedColumns(file, SHARDS_SCHEMA, _DTYPES)
        self.mapped = file.map
        self._num_samples = manifest.num_samples
        self._places: dict[int, tuple[str, int]] = {}
        splits = []
        for name, entry in manifest.splits.items():
            if entry.num_shards:
                splits.append((entry.first_shard, name))
        splits.sort()
        self._splits = [name for _, name in splits]
        self._first_shards = [first for first, _ in splits]
        self._length = sum(entry.num_shards for entry in manifest.splits.values())
        if self._columns.num_rows != self._length:
            raise ManifestError(
                f"'{file.path}' has {self._columns.num_rows} shards, the splits of the "
                f"manifest {self._length}"
            )
        for name in self._splits:
            entry = manifest.splits[name]
            first_sample = self._count("first_sample", entry.first_shard)
            if first_sample != entry.first_sample:
                raise ManifestError(
                    f"'{file.path}': split '{name}' begins at sample {entry.first_sample}, "
                    f"but its first shard, number {entry.first_shard}, at {first_sample}"
                )

    def __len__(self) -> int:
        return self._length

    def name(self, number: int) -> str:
        """Return the name of a shard by its number in the dataset."""
        split = bisect.bisect_right(self._first_shards, number) - 1
        (framed,) = self._columns.read("framed", number, number + 1)
        return shard_name(
            self._splits[split],
            number - self._first_shards[split],
            framed=bool(framed),
        )

    def size(self, number: int) -> int:
        """Return the size of a shard [bytes]; raise ManifestError for one below 0."""
        return self._count("bytes", number)

    def name_of(self, row: IndexRow) -> str:
        """Return name of the shard that holds a sample; raise IndexFileError where none has the
        bytes of the row.
        """
        if not 0 <= row.shard < self._length:
            raise IndexFileError(
                f"the index of '{self._file.path.parent}' puts sample {row.key} into shard "
                f"number {row.shard}, but the manifest has {self._length}"
            )
        name, num_bytes = self.place(row.shard)
        start = row.offset
        end = start + row.length
        if 0 <= start <= end <= num_bytes:
            return name
        raise IndexFileError(
            f"the index of '{self._file.path.parent}' puts sample {row.key} at bytes {start} "
            f"to {end} of shard {name}, which has {num_bytes}"
        )

    def place(self, number: int) -> tuple[str, int]:
        """Return the name and size [bytes] of a shard, remembered: every sample that is read
        asks for them.
        """
        place = self._places.get(number)
        if place is None:
            if len(self._places) >= _PLACES_KEPT:
                self._places.clear()
            place = (self.name(number), self.size(number))
            self._places[number] = place
        return place

    @property
    def num_bytes(self) -> int:
        """The bytes of all shards."""
        sizes = self._read_numbers("bytes", 0, self._length)
        return int(sizes.sum())

    @property
    def num_framed(self) -> int:
        """The number of shards that are compressed frame by frame."""
        flags = self._columns.read("framed", 0, self._length)
        return int(np.count_nonzero(flags))

    def lengths(self, first: int, end: int) -> I64:
        """Return the number of samples of shards ``first`` to ``end - 1``; raise ManifestError
        for one below 1.
        """
        next_end = min(end + 1, self._length)
        first_samples = self._read_numbers("first_sample", first, next_end)
        if end == self._length:
            first_samples = np.append(first_samples, self._num_samples)
        lengths: I64 = np.diff(first_samples)
        if len(lengths) and lengths.min() < 1:
            number = first + int(lengths.argmin())
            raise ManifestError(
                f"'{self._file.path}': shard {number} holds {lengths.min()} samples; each "
                "holds 1 or more"
            )
        return lengths

    def split_lengths(self, first: int, end: int) -> I64:
        """Return the number of samples of the shards of a split, which are ``first`` to ``end -
        1``.
        """
        return self.lengths(first, end)

    def check(self, num_bytes: int) -> None:
        """Check all rows, and the manifest's number of bytes of all shards; raises
        ManifestError.
        """
        self.lengths(0, self._length)
        for name in ("bytes", "idx_bytes"):
            values = self._read_numbers(name, 0, self._length)
            if len(values):
                self._count(name, int(values.argmin()))
        total = self.num_bytes
        if total != num_bytes:
            raise ManifestError(
                f"'{self._file.path}': the shards have {total} bytes, the manifest states "
                f"{num_bytes}"
            )

    def _read_numbers(self, name: str, first: int, end: int) -> I64:
        return self._columns.read(name, first, end).astype(np.int64)

    def _count(self, name: str, number: int) -> int:
        """Return a shard's number in a column; raise ManifestError for one below 0."""
        (value,) = self._read_numbers(name, number, number + 1).tolist()
        if value < 0:
            raise ManifestError(
                f"'{self._file.path}': {name} of shard {number} is {value}; allowed are 0 or more"
            )
        return int(value)

    @overload
    def __getitem__(self, number: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, number: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        if isinstance(number, slice):
            numbers = range(*number.indices(self._length))
            return tuple(map(self._entry, numbers))
        index = number + self._length if number < 0 else number
        if not 0 <= index < self._length:
            raise IndexError(
                f"shard {number} is not in the dataset: it has shards 0 to {self._length - 1}"
            )
        return self._entry(index)

    def __iter__(self) -> Iterator[ShardEntry]:
        return map(self._entry, range(self._length))

    def _entry(self, number: int) -> ShardEntry:
        split_number = bisect.bisect_right(self._first_shards, number) - 1
        idx_bytes = self._count("idx_bytes", number)
        sha256 = self._columns.read("sha256", number, number + 1)
        idx_sha256 = self._columns.read("idx_sha256", number, number + 1)
        first_sample = self._count("first_sample", number)
        (num_samples,) = self.lengths(number, number + 1).tolist()
        return ShardEntry(
            name=self.name(number),
            split=self._splits[split_number],
            first_sample=first_sample,
            num_samples=num_samples,
            bytes=self.size(number),
            sha256=sha256.tobytes().hex(),
            idx_bytes=idx_bytes,
            idx_sha256=idx_sha256.tobytes().hex() if idx_bytes else "",
        )
