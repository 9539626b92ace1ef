"""``attributes.parquet``: attributes of each sample from the source, one row a sample in the
order of the index.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import ConfigError, IndexFileError, OrderError
from fuelrail.pipeline.format.fetch import comes_whole
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.index.samples import INDEX_FILE

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I32, I64
    from fuelrail.pipeline.format.dataset import Dataset

_DTYPES: Final = {
    pa.bool_(): "bool",
    pa.int64(): "int64",
    pa.float64(): "float64",
}
TEXTS: Final = ("key", "clip_id")
"""Columns of texts that the index has too."""

_INDEX_NUMBERS: Final = ("frame", "timestamp_ns")

_FRAME_BITS: Final = 32

FRAME_LIMIT: Final = 2**31
"""Frame numbers lie in [0, FRAME_LIMIT), so that half of a key's frame bits keep clips apart."""


class Attributes:
    """The attributes of one split's samples; the index's key, clip_id, frame and timestamp_ns are
    among them.

    Raises ConfigError for an unknown split.
    """

    def __init__(self, dataset: Dataset, split: str) -> None:
        entry = dataset.split(split)
        self._dataset = dataset
        self._first = entry.first_sample
        self._end = self._first + entry.num_samples
        self._file = dataset.attributes_file()

    def __len__(self) -> int:
        return self._end - self._first

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All attributes there are, from the file's footer alone.

        Raises IndexFileError for a file that is damaged or has another number of rows than the
        index.
        """
        indexed = (*TEXTS, *_INDEX_NUMBERS)
        if not self._file.exists:
            return indexed
        schema = self._file.schema(len(self._dataset.index))
        names = dict.fromkeys((*indexed, *schema.names))
        return tuple(names)

    def read(self, names: Sequence[str]) -> pa.Table:
        """Return columns ``names`` of the split's samples, in the index's order; raise
        OrderError for unknown names.
        """
        for name in names:
            if name not in self.names:
                raise OrderError(no_attribute(name, self.names))
        index = self._dataset.index
        first = self._first
        end = self._end
        indexed = (*TEXTS, *_INDEX_NUMBERS)
        from_file = [name for name in names if name not in indexed]
        columns = {}
        if from_file:
            schema = self._file.schema(len(index))
            table = pa.Table.from_batches(
                self._file.batches(from_file, range(first, end)),
                pa.schema([schema.field(name) for name in from_file]),
            )
            if len(table) != len(self):
                raise IndexFileError(
                    f"attributes.parquet has {len(table)} of the split's {len(self)} rows"
                )
            columns = {name: table[name] for name in from_file}
        for name in names:
            if name in TEXTS:
                columns[name] = index.texts(name, first, end)
            elif name in _INDEX_NUMBERS:
                numbers = index.column(name, first, end)
                columns[name] = pa.chunked_array([numbers])
        return pa.table({name: columns[name] for name in names})


def has_whole_index(dataset: Dataset) -> bool:
    """Return whether no part of a dataset's index has to be fetched when it is looked at."""
    entry = dataset.manifest.file(INDEX_FILE)
    return dataset.url is None or entry is None or comes_whole(entry)


def clip_numbers(dataset: Dataset) -> I32:
    """Return the clips of all samples as numbers, equal where the ids are; where parts of the index
    would have to be fetched, by the column of attributes, which is a copy of its clip ids.

    Raises ConfigError where there is no such column, IndexFileError for damaged files.
    """
    index = dataset.index
    if has_whole_index(dataset):
        return index.clip_numbers()
    file = dataset.attributes_file()
    if not file.exists:
        raise ConfigError(
            f"dataset '{dataset.location}' has no {ATTRIBUTES_FILE}, and the clips of its index "
            "cannot be told apart before all of it is fetched: copy the dataset to a folder"
        )
    file.schema(len(index))  # has as many rows as the index
    table = pa.Table.from_batches(file.batches(["clip_id"]))
    clip_ids = pc.fill_null(table["clip_id"], "")
    encoded = clip_ids.dictionary_encode().combine_chunks()
    numbers: I32 = encoded.indices.to_numpy()
    return numbers


class AttributeColumns(NamedTuple):
    """Attributes of the samples from ``first_row`` on, in memory, and channels by which a batch
    collates them.
    """

    channels: tuple[Channel, ...] = ()
    columns: tuple[pa.Array, ...] = ()
    first_row: int = 0

    @classmethod
    def of_table(cls, table: pa.Table, first_row: int) -> Self:
        """Make the columns of a table; texts, which repeat, are kept as numbers of different
        ones.
        """
        channels = []
        columns = []
        for name, column in zip(table.column_names, table.columns, strict=True):
            dtype = _DTYPES.get(column.type, "")
            channel = Channel(
                name=name,
                kind="array" if dtype else "text",
                field=f"{name}.npy" if dtype else f"{name}.txt",
                dtype=dtype,
                law=Law("fixed"),
            )
            channels.append(channel)
            if not dtype:
                column = column.dictionary_encode().unify_dictionaries()
            columns.append(pa.concat_arrays(column.chunks))
        return cls(tuple(channels), tuple(columns), first_row)

    def values(self, row: int) -> dict[str, Any]:
        """Return the values of a row of the dataset as its channels decode them, None for one
        that is not known.
        """
        place = row - self.first_row
        values = {}
        for channel, column in zip(self.channels, self.columns, strict=True):
            value = column[place].as_py()
            if value is not None and channel.dtype:
                value = np.array(value, channel.dtype)
            values[channel.name] = value
        return values


def no_attribute(name: str, names: Collection[str]) -> str:
    """Return a message about an unknown attribute: the nearest names, or all of them."""
    matches = difflib.get_close_matches(name, names, n=3)
    if matches:
        return f"no attribute {name!r}; did you mean {' or '.join(matches)}?"
    return f"no attribute {name!r}; there are: {', '.join(sorted(names))}"


@dataclass(frozen=True, slots=True)
class ClipTable:
    """The n samples of a split sorted by clip, then by frame; a sample's place in that sorting is
    its *rank*.

    Clips come in the order of their first stored sample.
    """

    keys: I64
    """(n,), ascending: clip number * 2**32 + frame, by rank."""
    samples: NDArray[np.integer]
    """(n,): sample number (0 is the split's first) by rank."""
    ranks: NDArray[np.integer]
    """(n,): rank by sample number."""
    times_ns: I64 | None = None
    """(n,): the samples' times [ns] by rank; read where windows in seconds need them."""

    @classmethod
    def build(cls, clips: ArrayLike, frames: ArrayLike) -> Self:
        """Sort samples by their clip's number and their frame's (both (n,), 0 or more).

        Raises IndexFileError for a frame number out of range, or that occurs twice in its clip.
        """
        frame = np.asarray(frames, dtype=np.int64)
        if len(frame):
            low = frame.min()
            high = frame.max()
            if low < 0 or high >= FRAME_LIMIT:
                raise IndexFileError(
                    f"frame numbers must be in 0 .. 2**31 - 1, got {low} .. {high}"
                )
        clip = np.asarray(clips, dtype=np.int64)
        keys = (clip << _FRAME_BITS) + frame
        dtype = np.int32 if len(keys) <= np.iinfo(np.int32).max else np.int64
        numbers: NDArray[np.integer] = np.arange(len(keys)).astype(dtype)
        if (keys[1:] > keys[:-1]).all():
            return cls(keys, samples=numbers, ranks=numbers)
        samples: NDArray[np.integer] = np.argsort(keys, kind="stable").astype(dtype)
        ranks = np.empty_like(numbers)
        ranks[samples] = numbers
        keys = keys[samples]
        repeats = np.flatnonzero(keys[1:] == keys[:-1])
        if repeats.size:
            rank = repeats[0]
            first, second = samples[rank : rank + 2]
            raise IndexFileError(
                f"samples {first} and {second} of the split are the same frame of the same clip"
            )
        return cls(keys, samples, ranks)

    @classmethod
    def of_split(cls, dataset: Dataset, split: str, *, times: bool = False) -> Self:
        """Make the table of a split of a dataset; raise ConfigError for an unknown split,
        IndexFileError as `build`.
        """
        index = dataset.index
        entry = dataset.split(split)
        first = entry.first_sample
        end = first + entry.num_samples
        table = cls.build(
            clips=index.clip_numbers(first, end),
            frames=index.column("frame", first, end),
        )
        if times:
            return table.at_times(index.column("timestamp_ns", first, end))
        return table

    def at_times(self, times_ns: ArrayLike) -> Self:
        """Return the table with the samples' times [ns], given by sample number: (n,)."""
        times_by_sample = np.asarray(times_ns, dtype=np.int64)
        return replace(self, times_ns=times_by_sample[self.samples])

    def __len__(self) -> int:
        return len(self.keys)

    def without(self, samples: I64) -> Self:
        """Return the table of the other samples, which keep their numbers; the rank of these is
        -1.
        """
        mask = np.ones(len(self), dtype=bool)
        mask[self.ranks[samples]] = False
        ranks = np.full_like(self.ranks, -1)
        ranks[self.samples[mask]] = np.arange(mask.sum())
        times_ns = None if self.times_ns is None else self.times_ns[mask]
        return replace(
            self,
            keys=self.keys[mask],
            samples=self.samples[mask],
            ranks=ranks,
            times_ns=times_ns,
        )

    def clip_numbers(self) -> I64:
        """Return the number of each position's clip: int64 (n,), ascending."""
        return self.keys >> _FRAME_BITS

    def bounds(self, ranks: I64) -> tuple[I64, I64]:
        """Return the first rank of the clip of each of ``ranks``, and the one behind its last."""
        clip = self.keys[ranks] >> _FRAME_BITS
        clip_key = clip << _FRAME_BITS
        next_clip_key = (clip + 1) << _FRAME_BITS
        first = np.searchsorted(self.keys, clip_key)
        end = np.searchsorted(self.keys, next_clip_key)
        return first, end
