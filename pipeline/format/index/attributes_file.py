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

    def batches(
        self,
        names: Sequence[str],
        rows: range | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the columns ``names``, about a thousand rows at a time; read nothing else of the
        file.

        ``rows`` are the rows wanted, None: all. Raises IndexFileError as :meth:`schema` does.
        """
        with self._opened() as (file, schema):
            for name in names:
                if name not in schema.names:
                    raise IndexFileError(f"'{self._path}' has no column '{shortened(name)}'")
            num_groups = file.metadata.num_row_groups
            groups = [file.metadata.row_group(number) for number in range(num_groups)]
            lengths = [group.num_rows for group in groups]
            bounds = list(itertools.accumulate(lengths, initial=0))
            if rows is None:
                rows = range(bounds[-1])
            numbers = []
            for number, (start, end) in enumerate(itertools.pairwise(bounds)):
                if start < rows.stop and end > rows.start:
                    numbers.append(number)
            if self._blocks is not None:
                parts = []
                for number in numbers:
                    group = groups[number]
                    for column_number in range(group.num_columns):
                        chunk = group.column(column_number)
                        if chunk.path_in_schema in names:
                            first = chunk.dictionary_page_offset or chunk.data_page_offset
                            parts.append((first, first + chunk.total_compressed_size))
                self._blocks.need_parts(*parts)
            first_row = bounds[numbers[0]] if numbers else 0
            batches = file.iter_batches(
                _ROWS_AT_ONCE,
                row_groups=numbers,
                columns=list(names),
            )
            for batch in batches:
                low = max(rows.start - first_row, 0)
                high = min(rows.stop - first_row, len(batch))
                first_row += len(batch)
                if low < high:
                    part = batch.slice(low, high - low)
                    yield from self._expanded(part.select(list(names)))

    def _expanded(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield a batch with its texts expanded, in parts where that takes much memory.

        It is known before that no text is too long: few bytes of dictionary may expand to many.
        """
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            texts = array.dictionary if pa.types.is_dictionary(array.type) else array
            if pa.types.is_string(texts.type):
                lengths = pc.binary_length(texts)
                longest = pc.max(lengths).as_py() or 0
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
            arrays = []
            for array in part.columns:
                if pa.types.is_dictionary(array.type):
                    array = array.cast(pa.string())
                arrays.append(array)
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
                        is_frame = field.name == "frame" and field.type == pa.int32()
                        if field.type not in _TYPES and not is_frame:
                            types = ", ".join(map(str, _TYPES))
                            raise IndexFileError(
                                f"'{self._path}': column '{shortened(field.name)}' has the type "
                                f"{shortened(field.type)}, expected one of {types}"
                            )
                    for number in range(file.metadata.num_row_groups):
                        group = file.metadata.row_group(number)
                        column_bytes = 0
                        for column_number in range(group.num_columns):
                            chunk = group.column(column_number)
                            column_bytes += chunk.total_uncompressed_size
                        num_bytes = max(group.total_byte_size, column_bytes)
                        reason = ATTRIBUTES.broken(num_bytes)
                        if reason is not None:
                            raise IndexFileError(f"'{self._path}': row group {number} {reason}")
                    yield file, schema
        except OSError as error:
            raise IndexFileError(
                f"'{self._path}' cannot be read: {error.strerror or error}"
            ) from error
        except (pa.ArrowException, ValueError, MemoryError) as error:
            if isinstance(error, FuelrailError):
                raise
            raise IndexFileError(f"'{self._path}' is damaged: {error}") from error
