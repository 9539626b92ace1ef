"""``attributes.parquet``: what the source knows of each sample, one row a sample in the order of the index."""

from __future__ import annotations

import difflib
from functools import cached_property
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyarrow import parquet as pq

from fuelrail.pipeline.errors import IndexFileError, OrderError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fuelrail.pipeline.dataset import Dataset

ATTRIBUTES_FILE: Final = "attributes.parquet"

_INDEX_TEXTS: Final = ("key", "clip_id")
_INDEX_NUMBERS: Final = ("frame", "timestamp_ns")


class Attributes:
    """The attributes of one split's samples; the index's key, clip_id, frame and timestamp_ns are among them.

    Raises ConfigError for an unknown split.
    """

    def __init__(self, dataset: Dataset, split: str) -> None:
        self._dataset = dataset
        entry = dataset.split(split)
        self._first, self._end = entry.first_sample, entry.first_sample + entry.num_samples
        self._path = dataset.root / ATTRIBUTES_FILE

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All attributes there are, from the file's footer alone.

        Raises IndexFileError for a file that is damaged or has another number of rows than the index.
        """
        indexed = (*_INDEX_TEXTS, *_INDEX_NUMBERS)
        if not self._path.exists():
            return indexed
        try:
            metadata, stored = pq.read_metadata(self._path), pq.read_schema(self._path).names
        except (OSError, pa.ArrowException) as error:
            raise IndexFileError(f"'{self._path}' cannot be read: {error}") from error
        if metadata.num_rows != len(self._dataset.index):
            raise IndexFileError(
                f"'{self._path}' has {metadata.num_rows} rows for {len(self._dataset.index)} samples of the index"
            )
        return tuple(dict.fromkeys((*indexed, *stored)))

    def read(self, names: Sequence[str]) -> pa.Table:
        """The columns ``names`` of the split's samples, in the order of the index; OrderError for unknown names."""
        for name in names:
            if name not in self.names:
                raise OrderError(no_attribute(name, self.names))
        indexed = (*_INDEX_TEXTS, *_INDEX_NUMBERS)
        from_file = [name for name in names if name not in indexed]
        columns = {}
        if from_file:
            try:
                table = pq.read_table(self._path, columns=from_file)
            except (OSError, pa.ArrowException) as error:
                raise IndexFileError(f"'{self._path}' is damaged: {error}") from error
            columns = {name: table[name].slice(self._first, self._end - self._first) for name in from_file}
        index = self._dataset.index
        for name in names:
            if name in _INDEX_TEXTS:
                columns[name] = index.texts(name, self._first, self._end)
            elif name in _INDEX_NUMBERS:
                columns[name] = pa.chunked_array([index.column(name, self._first, self._end)])
        return pa.table({name: columns[name] for name in names})


def no_attribute(name: str, known: Collection[str]) -> str:
    """What to say of an attribute that isn't there: the nearest names, or all of them."""
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(sorted(known))}"
    return f"no attribute {name!r}; {hint}"
