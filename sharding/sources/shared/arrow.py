"""Tables of research datasets: Arrow columns by name and type, and the checks on files and rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import feather

from fuelrail.pipeline.errors import IndexFileError, SourceError
from fuelrail.pipeline.format.index.checks import (
    ARROW_MAGIC,
    buffer_bytes_of_message,
    decoded_bytes,
    list_buffer_bytes,
)
from fuelrail.pipeline.limits import TABLE, TABLE_OF_LOG
from fuelrail.sharding.sources.shared.files import check_most, check_no_pointer
from fuelrail.sharding.sources.shared.foreign import parsing
from fuelrail.sharding.sources.shared.windows import open_file

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64
    from fuelrail.sharding.sources.shared.files import SourceFiles

QUATERNION: Final = ("qw", "qx", "qy", "qz")
TRANSLATION: Final = ("tx_m", "ty_m", "tz_m")
_MOST_COLUMN: Final = TABLE.maximum
"""Bytes of one column in one row group of Parquet, before compression and when it is decoded."""
_MOST_ROWS: Final = 65_536
"""Rows of a batch where nothing else bounds them."""
_WIDTHS: Final = {
    "BOOLEAN": 1,
    "INT32": 4,
    "INT64": 8,
    "INT96": 12,
    "FLOAT": 4,
    "DOUBLE": 8,
}
_OFFSET_BYTES: Final = 4
_WIDEST: Final = 8
"""Bytes of the widest number."""


def read_file(files: SourceFiles, name: str) -> bytes:
    """Read all of a file; raise SourceError where it is empty, or a Git LFS pointer."""
    data = files.read(name)
    if not data:
        raise SourceError(f"file '{files.shown}/{name}' is empty")
    check_no_pointer(data, f"file '{files.shown}/{name}'")
    return data


def names_in(files: SourceFiles, folder: str, *parts: str) -> list[str]:
    """Return the names in the folder ``folder/parts[0]/...``, sorted; none where it, or one
    above it, is missing.
    """
    for part in parts:
        if part not in files.listed(folder):
            return []
        folder = f"{folder}/{part}" if folder else part
    return files.listed(folder)


def read_feather(
    files: SourceFiles,
    name: str,
    types: Mapping[str, pa.DataType],
) -> dict[str, NDArray[Any]]:
    """Read these columns of a feather file, in these types (:func:`columns`)."""
    data = read_file(files, name)
    where = f"table '{files.shown}/{name}'"
    problem = "cannot be read as feather"
    if data.startswith(ARROW_MAGIC):  # the older form, which has no compression, begins otherwise
        try:
            num_bytes = decoded_bytes(memoryview(data))
        except IndexFileError as error:
            raise SourceError(f"{where} {problem}: {error}") from error
        check_most(num_bytes, f"{where}, decoded,", _MOST_COLUMN)
    with parsing(where, problem):
        table = feather.read_table(pa.BufferReader(data))
        table.validate()
    # Of encodings by which a few bytes are many rows, and of texts that many rows share.
    num_bytes = len(table) * _WIDEST * len(types)
    for name in set(types).intersection(table.column_names):
        num_bytes += sum(map(_count_decoded_bytes, table.column(name).chunks))
    check_most(num_bytes, f"{where}: the rows, decoded,", _MOST_COLUMN)
    return columns(table, where, types)


def open_mapped(mapped: pa.Buffer, where: str, *, read_whole: bool = False) -> Any:
    """Return pyarrow's reader of a mapped Arrow file or stream.

    Raises SourceError, naming ``where``, for a record batch, or with ``read_whole`` for a table,
    that takes more than its limit when it is decompressed. What is not compressed stays in the
    file.
    """
    with parsing(where):
        is_file = mapped[: len(ARROW_MAGIC)].to_pybytes() == ARROW_MAGIC
        if is_file:
            try:
                sizes = list_buffer_bytes(memoryview(mapped))
            except IndexFileError as error:
                raise SourceError(f"{where} cannot be read: {error}") from error
        else:
            sizes = [
                buffer_bytes_of_message(memoryview(message.metadata), memoryview(message.body))
                for message in pa.ipc.MessageReader.open_stream(mapped)
                if message.type in ("dictionary", "record batch")
            ]
    num_bytes_held = 0
    for size in sizes:
        num_bytes = size.decoded if size.decoded > size.stored else 0
        check_most(num_bytes, f"{where}: a record batch, decoded,", TABLE.maximum)
        num_bytes_held += num_bytes if read_whole or size.is_dictionary else 0
    limit = TABLE_OF_LOG if read_whole else TABLE
    check_most(num_bytes_held, f"{where}, decoded,", limit.maximum)
    with parsing(where):
        if is_file:
            return pa.ipc.open_file(mapped)
        return pa.ipc.open_stream(mapped)


def check_expanded(rows: pa.RecordBatch | pa.Table, where: str) -> None:
    """Raise SourceError, naming ``where``, for rows of Arrow that take more than the limit as
    plain values: few bytes may be many rows, and many rows may share a text.
    """
    num_bytes = 0
    with parsing(where):
        for column in rows.columns:
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            num_bytes += sum(map(_count_expanded_bytes, chunks))
    check_most(num_bytes, f"{where}: {len(rows)} rows, decoded,", TABLE.maximum)


def is_plain(kind: pa.DataType) -> bool:
    """Return whether each value of this type is stored for itself: no runs, and no views, of
    which many may show the same.
    """
    if pa.types.is_dictionary(kind):
        return is_plain(kind.value_type)
    text = str(kind).partition("<")[0]
    if text.endswith(("_view", "union", "run_end_encoded")):
        return False
    return all(is_plain(kind.field(number).type) for number in range(kind.num_fields))


def byte_ranges(
    data: pa.Array,
    mapped: pa.Buffer,
    advice: str,
) -> list[tuple[int, int]]:
    """Return offset and length in a mapped Arrow file of each value of a column of bytes; the
    length of null is 0.

    Raises ValueError, with ``advice``, for a file whose record batches are compressed.
    """
    _, offsets, content = data.buffers()
    dtype = np.int64 if pa.types.is_large_binary(data.type) else np.int32
    end = data.offset + len(data) + 1
    ends = np.frombuffer(offsets, dtype)[data.offset : end]
    ends = ends.astype(np.int64)
    begin = content.address - mapped.address if content is not None else 0
    first = begin + ends[0]
    last = begin + ends[-1]
    if first < last and not 0 <= first <= last <= mapped.size:
        raise ValueError(f"its record batches are compressed: {advice}")
    is_valid = data.is_valid().to_numpy(zero_copy_only=False)
    sizes = np.where(is_valid, np.diff(ends), 0)
    starts = begin + ends[:-1]
    return list(zip(starts.tolist(), sizes.tolist(), strict=True))


def columns(
    table: pa.Table,
    where: str,
    types: Mapping[str, pa.DataType],
) -> dict[str, NDArray[Any]]:
    """Return columns of a table by name, cast where no value changes; texts are arrays of objects,
    lists are rows.

    Raises SourceError, naming ``where``, for a column that is missing, has nulls, or is of a type
    that does not go: floating-point numbers are never taken for integers, because times in
    nanoseconds do not fit into them.
    """
    missing = [name for name in types if name not in table.column_names]
    if missing:
        raise SourceError(
            f"{where} has no column '{missing[0]}'; it has {', '.join(table.column_names)}"
        )
    arrays: dict[str, NDArray[Any]] = {}
    for name, kind in types.items():
        column = table.column(name)
        if column.null_count:
            raise SourceError(f"{where}: column '{name}' has {column.null_count} nulls")
        try:
            if pa.types.is_integer(kind) and pa.types.is_floating(column.type):
                raise pa.ArrowInvalid("integers are needed")
            values = column.cast(kind)
        except pa.ArrowException as error:
            text = " ".join(str(error).split())
            raise SourceError(
                f"{where}: column '{name}' is {column.type}, expected {kind}: {text}"
            ) from error
        if pa.types.is_fixed_size_list(kind):
            parts = [chunk.flatten().to_numpy() for chunk in values.chunks]
            flat = np.concatenate([np.empty(0), *parts])
            arrays[name] = flat.reshape(-1, kind.list_size)
        else:
            arrays[name] = (
                values.to_numpy() if values.num_chunks else np.empty(0, kind.to_pandas_dtype())
            )
    return arrays


def stacked(table: Mapping[str, NDArray[Any]], names: Sequence[str]) -> F64:
    """Return columns of numbers as one array (rows, columns)."""
    columns = np.stack([table[name] for name in names], 1)
    return columns.astype(np.float64)


def check_unique(names: Sequence[Any], where: str, noun: str) -> None:
    """Raise SourceError, naming ``where``, for a value that is there twice."""
    if len(set(names)) != len(names):
        twice = next(name for position, name in enumerate(names) if name in names[:position])
        raise SourceError(f"{where} has two rows for {noun} {twice}")


def unique_pairs(
    table: Mapping[str, NDArray[Any]],
    names: tuple[str, str],
    where: str,
    noun: str,
) -> list[tuple[Any, Any]]:
    """Return the pairs of values of two columns; raise SourceError, naming ``where``, for one that
    is there twice.
    """
    first, second = (table[name].tolist() for name in names)
    pairs = list(zip(first, second, strict=True))
    check_unique(pairs, where, noun)
    return pairs


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column of this type has lists."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def read_parquet(
    files: SourceFiles,
    name: str,
    types: Mapping[str, pa.DataType],
    *,
    read_whole: bool = False,
) -> dict[str, NDArray[Any]]:
    """Read these columns of a Parquet file, in these types (:func:`columns`); ``read_whole`` as
    in :func:`open_parquet`.
    """
    where = f"table '{files.shown}/{name}'"
    with open_parquet(files, name, read_whole=read_whole) as file:
        with parsing(where):
            names_known = [column for column in types if column in file.schema_arrow.names]
            table = file.read(names_known, use_threads=False)
        names = file.schema_arrow.names
    missing = [column for column in types if column not in names]
    if missing:
        raise SourceError(f"{where} has no column '{missing[0]}'; it has {', '.join(names)}")
    return columns(table, where, types)


def open_parquet(
    files: SourceFiles,
    name: str,
    *,
    read_whole: bool = False,
) -> BoundedParquet:
    """Open a file; at a URL by ranges, or with ``read_whole`` at once, which no scan needs.

    Raise SourceError for other files.
    """
    where = f"table '{files.shown}/{name}'"
    path = files.path(name)
    if path is not None and files.facts(name) is None:
        raise SourceError(f"{where} is not there")
    with parsing(where, "cannot be read as Parquet"):
        if path is None and read_whole:
            return BoundedParquet(pa.BufferReader(files.read(name)), where)
        return BoundedParquet(path or pa.PythonFile(open_file(files, name), "r"), where)


class BoundedParquet(pq.ParquetFile):  # type: ignore[misc] # pyarrow has no types
    """A Parquet file whose values take no more memory than a limit, however well they are encoded.

    A text that a dictionary has once, or that shares its beginning with the one before, is as long
    in every row that has it, and a number takes its bytes: the size that the file states says
    nothing of that. Columns whose rows may take more than the limit are read as dictionaries, and
    are decoded when it is known how long they are.
    """

    def __init__(self, source: Any, where: str, **options: Any) -> None:
        """Raise SourceError, naming ``where``, for a column that is too large in one row group."""
        super().__init__(source, **options)
        self._where = where
        self._source = source
        self._bytes_columns: list[str] = []
        self._rows_at_once = _MOST_ROWS
        for group in range(self.metadata.num_row_groups):
            row_group = self.metadata.row_group(group)
            num_bytes_of_group = 0
            for number in range(self.metadata.num_columns):
                chunk = row_group.column(number)
                column = chunk.path_in_schema
                label = f"{self._where}: column '{column}'"
                num_bytes = chunk.total_uncompressed_size
                check_most(num_bytes, label, _MOST_COLUMN)
                if chunk.physical_type != "BYTE_ARRAY":
                    num_bytes = self._count_bytes(group, number)
                    check_most(num_bytes, f"{label}, decoded,", _MOST_COLUMN)
                    num_bytes_of_group += num_bytes
                    continue
                check_most(
                    chunk.num_values * _OFFSET_BYTES,
                    f"{label}, decoded,",
                    _MOST_COLUMN,
                )
                if chunk.num_values * num_bytes <= _MOST_COLUMN or column in self._bytes_columns:
                    continue
                if self.schema.column(number).max_repetition_level or (
                    "DELTA_BYTE_ARRAY" in chunk.encodings
                ):
                    self._rows_at_once = max(min(self._rows_at_once, _MOST_COLUMN // num_bytes), 1)
                else:
                    self._bytes_columns.append(column)
            if num_bytes_of_group > _MOST_COLUMN:
                rows = _MOST_COLUMN * row_group.num_rows // num_bytes_of_group
                self._rows_at_once = max(min(self._rows_at_once, rows), 1)
        if self._bytes_columns:
            self._packed = pq.ParquetFile(
                source,
                metadata=self.metadata,
                read_dictionary=self._bytes_columns,
                **options,
            )
        else:
            self._packed = None

    def _count_bytes(self, group: int, number: int) -> int:
        """Return the bytes that a column of a row group takes at most when it is decoded."""
        chunk = self.metadata.row_group(group).column(number)
        if chunk.physical_type == "BYTE_ARRAY":
            return int(chunk.num_values * (chunk.total_uncompressed_size + _OFFSET_BYTES))
        width = _WIDTHS.get(chunk.physical_type)
        if not width:
            width = self.schema.column(number).length
        return int(chunk.num_values * width)

    def iter_batches(
        self,
        batch_size: int = _MOST_ROWS,
        row_groups: Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
        **options: Any,
    ) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most these rows; raise SourceError for one that takes more than
        the limit.
        """
        size = min(batch_size, self._rows_at_once)
        groups = range(self.metadata.num_row_groups) if row_groups is None else row_groups
        options |= {"row_groups": groups, "columns": columns}
        if self._packed is None:
            yield from super().iter_batches(size, **options)
            return
        kinds = self.schema_arrow
        for batch in self._packed.iter_batches(size, **options):
            num_bytes = sum(map(_count_decoded_bytes, batch.columns))
            check_most(
                num_bytes,
                f"{self._where}: {len(batch)} rows, decoded,",
                _MOST_COLUMN,
            )
            arrays = []
            for name, array in zip(batch.schema.names, batch.columns, strict=True):
                if array.type == kinds.field(name).type:
                    arrays.append(array)
                else:
                    arrays.append(_decode_dictionaries(array))
            yield pa.RecordBatch.from_arrays(
                arrays, names=batch.schema.names
            ).replace_schema_metadata(kinds.metadata)

    def read(self, columns: Sequence[str] | None = None, **options: Any) -> pa.Table:
        """Read these columns, all of them where none is named."""
        return self.read_row_groups(range(self.metadata.num_row_groups), columns, **options)

    def read_row_group(
        self, i: int, columns: Sequence[str] | None = None, **options: Any
    ) -> pa.Table:
        """Read a row group."""
        return self.read_row_groups([i], columns, **options)

    def read_row_groups(
        self,
        row_groups: Sequence[int],
        columns: Sequence[str] | None = None,
        **options: Any,
    ) -> pa.Table:
        """Read row groups; raise SourceError where they take more than the limit."""
        if self._packed is None:
            # Read at once what is surely within the limit together.
            selected = None if columns is None else set(columns)
            most_bytes = 0
            for number in range(self.metadata.num_columns):
                path = self.schema.column(number).path
                column = path.partition(".")[0]
                if selected is None or path in selected or column in selected:
                    most_bytes += sum(self._count_bytes(group, number) for group in row_groups)
            if most_bytes <= _MOST_COLUMN:
                return super().read_row_groups(list(row_groups), columns, **options)
        batches = []
        num_bytes = 0
        size = self._rows_at_once
        for batch in self.iter_batches(size, list(row_groups), columns, **options):
            num_bytes += batch.nbytes
            check_most(num_bytes, f"{self._where}: the rows, decoded,", _MOST_COLUMN)
            batches.append(batch)
        if not batches:
            return super().read_row_groups(list(row_groups), columns, **options)
        return pa.Table.from_batches(batches)


def _count_decoded_bytes(array: pa.Array) -> int:
    """Return the bytes of an array whose dictionaries, also those in structs, are decoded."""
    if pa.types.is_dictionary(array.type):
        if array.type.value_type not in (
            pa.string(),
            pa.binary(),
            pa.large_string(),
            pa.large_binary(),
        ):
            return int(array.nbytes)
        lengths = pc.binary_length(array.dictionary)
        lengths_of_rows = lengths.take(array.indices).cast(pa.int64())
        return int(pc.sum(lengths_of_rows).as_py() or 0)
    if pa.types.is_struct(array.type):
        return sum(
            _count_decoded_bytes(array.field(number)) for number in range(array.type.num_fields)
        )
    return int(array.nbytes)


def _count_expanded_bytes(array: pa.Array) -> int:
    """Return the bytes of an array as plain values, without those of texts that it has itself."""
    kind = array.type
    num_bytes = len(array) * _WIDEST
    if isinstance(array, pa.ExtensionArray):
        return _count_expanded_bytes(array.storage)
    if pa.types.is_dictionary(kind):
        if pa.types.is_nested(kind.value_type):
            raise ValueError(f"a dictionary of {kind.value_type} is not read: write plain values")
        return num_bytes + _count_decoded_bytes(array)
    if pa.types.is_struct(kind):
        parts = [array.field(number) for number in range(kind.num_fields)]
    elif pa.types.is_map(kind):
        parts = [array.keys, array.items]
    elif is_list(kind):
        parts = [array.values]
    else:
        parts = []
    return num_bytes + sum(map(_count_expanded_bytes, parts))


def _decode_dictionaries(array: pa.Array) -> pa.Array:
    """Return an array whose dictionaries, also those in structs, are decoded."""
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if pa.types.is_struct(array.type):
        parts = [
            _decode_dictionaries(array.field(number)) for number in range(array.type.num_fields)
        ]
        pairs = zip(array.type, parts, strict=True)
        fields = [field.with_type(part.type) for field, part in pairs]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null())
    return array
