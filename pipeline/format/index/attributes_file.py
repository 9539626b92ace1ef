"""``attributes.parquet``: the file, read with care. FORMAT.md has the rules, section 8."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet as pq

from fuelrail.pipeline.errors import FuelrailError, IndexFileError
from fuelrail.pipeline.limits import ATTRIBUTES
from fuelrail.pipeline.storage.files import open_file
from fuelrail.pipeline.storage.named_tables import expanded_bytes
from fuelrail.pipeline.text import shortened

if TYPE_CHECKING:
    from io import BufferedReader, RawIOBase

    from fuelrail.pipeline.format.index.blocks import BlockFile

ATTRIBUTES_FILE: Final = "attributes.parquet"
_TYPES: Final = (pa.bool_(), pa.int64(), pa.float64(), pa.string())
"""The types of columns; `frame` is int32."""
MAX_TEXT_BYTES: Final = 4 << 10
"""Cap on one text in it."""
MAX_COLUMNS: Final = 4096
"""Cap on its columns."""
NUM_OF_SAMPLES: Final = 5
"""Its columns that are no attributes: key, clip_id, split, frame and timestamp_ns."""

_MAX_FILE_BYTES: Final = 16 << 30
_ROWS_AT_ONCE: Final = 1 << 12
_EXPANDED_BYTES: Final = 64 << 20
"""About what the texts of a batch take that is handed out."""


class AttributesFile:
    """The file itself, from an unknown writer: its sizes are checked before memory is allocated
    for them.
    """

    def __init__(
        self,
        path: Path,
        blocks: BlockFile | None = None,
        *,
        exists: bool = True,
    ) -> None:
        """Take the file at ``path``, or ``blocks`` of it where parts may have to be fetched.

        ``exists``: whether the manifest names it; a dataset needs none.
        """
        self._path = path
        self._blocks = blocks
        self.exists = exists

    def schema(self, num_rows: int | None = None) -> pa.Schema:
        """Return the file's columns, from the footer alone.

        Raises IndexFileError for a file that is damaged or over the limits, or has other than
        ``num_rows`` rows.
        """
        with self._opened() as (file, schema):
            if num_rows not in (None, file.metadata.num_rows):
                raise IndexFileError(
                    f"'{self._path}' has {file.metadata.num_rows} rows for {num_rows} "
                    "samples of the index"
                )
            return schema.remove_metadata()

    def batches(self, names: Sequence[str], rows: range | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the columns ``names``, about a thousand rows at a time; read nothing else of the
        file.

        ``rows`` are the rows wanted, None: all. Raises IndexFileError as :meth:`schema` does.
        """
        with self._opened() as (file, schema):
            for name in names:
                if name not in schema.names:
                    raise IndexFileError(f"'{self._path}' has no column '{shortened(name)}'")
            groups = [
                file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)
            ]
            ends = list(itertools.accumulate((group.num_rows for group in groups), initial=0))
            interval = range(ends[-1]) if rows is None else rows
            numbers = [
                n
                for n in range(len(groups))
                if ends[n] < interval.stop and ends[n + 1] > interval.start
            ]
            if self._blocks is not None:
                chunks = []
                for number in numbers:
                    for column in map(groups[number].column, range(groups[number].num_columns)):
                        if column.path_in_schema in names:
                            first = column.dictionary_page_offset or column.data_page_offset
                            chunks.append((first, first + column.total_compressed_size))
                self._blocks.need_parts(*chunks)
            first_row = ends[numbers[0]] if numbers else 0
            for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=numbers, columns=list(names)):
                low, high = (
                    min(max(side - first_row, 0), len(batch))
                    for side in (interval.start, interval.stop)
                )
                first_row += len(batch)
                if low < high:
                    yield from self._expanded(batch.slice(low, high - low).select(list(names)))

    def _expanded(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield a batch with its texts expanded, in parts where that takes much memory.

        It is known before that no text is too long: few bytes of dictionary may expand to many.
        """
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            texts = array.dictionary if pa.types.is_dictionary(array.type) else array
            if pa.types.is_string(texts.type):
                longest = pc.max(pc.binary_length(texts)).as_py() or 0
                if longest > MAX_TEXT_BYTES:
                    raise IndexFileError(
                        f"'{self._path}': column '{shortened(name)}' has a text of "
                        f"{longest} bytes, over the limit of {MAX_TEXT_BYTES}"
                    )
        num_bytes = sum(map(expanded_bytes, batch.columns))
        num_parts = -(-num_bytes // _EXPANDED_BYTES)
        num_rows = -(-len(batch) // max(num_parts, 1))
        for first in range(0, len(batch), num_rows):
            part = batch.slice(first, num_rows)
            arrays = [
                array.cast(pa.string()) if pa.types.is_dictionary(array.type) else array
                for array in part.columns
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[pq.ParquetFile, pa.Schema]]:
        try:
            if self._blocks is None:
                opened: BufferedReader | RawIOBase = open_file(self._path, _MAX_FILE_BYTES)
            elif len(self._blocks.map) <= _MAX_FILE_BYTES:
                opened = self._blocks.stream()
            else:
                raise IndexFileError(
                    f"'{self._path}' has over {_MAX_FILE_BYTES} bytes, which is all that is read "
                    "of it"
                )
            with opened as stream:
                schema = pq.read_schema(stream)
                texts = [field.name for field in schema if pa.types.is_string(field.type)]
                with pq.ParquetFile(stream, read_dictionary=texts) as file:
                    if file.metadata.num_columns > MAX_COLUMNS:
                        raise IndexFileError(
                            f"'{self._path}' has {file.metadata.num_columns} columns, at most "
                            f"{MAX_COLUMNS} are read"
                        )
                    for name, count in Counter(schema.names).items():
                        if count > 1:
                            raise IndexFileError(
                                f"'{self._path}' has the column '{shortened(name)}' {count} times"
                            )
                    for field in schema:
                        if field.type not in _TYPES and (field.name, field.type) != (
                            "frame",
                            pa.int32(),
                        ):
                            listed = ", ".join(map(str, _TYPES))
                            raise IndexFileError(
                                f"'{self._path}': column '{shortened(field.name)}' has the type "
                                f"{shortened(field.type)}, expected one of {listed}"
                            )
                    for number in range(file.metadata.num_row_groups):
                        group = file.metadata.row_group(number)
                        columns = [group.column(column) for column in range(group.num_columns)]
                        num_bytes = max(
                            group.total_byte_size,
                            sum(column.total_uncompressed_size for column in columns),
                        )
                        text = ATTRIBUTES.broken(num_bytes)
                        if text is not None:
                            raise IndexFileError(f"'{self._path}': row group {number} {text}")
                    yield file, schema
        except OSError as error:
            raise IndexFileError(
                f"'{self._path}' cannot be read: {error.strerror or error}"
            ) from error
        except (pa.ArrowException, ValueError, MemoryError) as error:
            if isinstance(error, FuelrailError):
                raise
            raise IndexFileError(f"'{self._path}' is damaged: {error}") from error
