"""Tables of rows that are grouped by clip: Parquet, JSON lines or CSV, read clip by clip.

A table is copied once, a batch of rows at a time, into a compressed Arrow file in a temporary
folder. From there the rows of any clip are read alone, so memory does not grow with the table.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, json, parquet

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.index.attributes_file import MAX_TEXT_BYTES
from fuelrail.pipeline.text import shortened
from fuelrail.sharding.sources.shared.arrow import BoundedParquet
from fuelrail.sharding.sources.shared.files import (
    LFS_MAGIC,
    check_most,
    check_no_pointer,
)
from fuelrail.sharding.sources.shared.foreign import (
    NAN_AS_NULL,
    parsing,
    without_nan,
)
from fuelrail.sharding.sources.tables.values import Rows

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.files import SourceFiles

    TypeOf = Callable[[str], pa.DataType | None]
    """The type of a column that is known by name, None for others."""

EXTENSIONS: Final = ("parquet", "jsonl", "csv")
CLIP: Final = "clip_id"
_ROWS: Final = 1024
_ROWS_AT_ONCE: Final = 256
"""Rows of Parquet in memory: a dictionary has a value of a megabyte once, and the rows of a
batch have it each.
"""
_MOST_ROW: Final = 64 << 20
_MOST_CLIP: Final = 512 << 20
"""Bytes of the rows of a clip, which are in memory at once, some of them as Python's texts."""
_MOST_AT_URL: Final = 4 << 30
_BLOCK_BYTES: Final = 4 << 20
_KEPT_BATCHES: Final = 4
_PYTHON: Final = {
    pa.int64(): int,
    pa.float64(): float,
    pa.string(): str,
    pa.bool_(): bool,
}


def find_table(files: SourceFiles, stem: str) -> str | None:
    """Return the name of the table ``stem`` in the root; raises SourceError where there are
    several.
    """
    listed = set(files.listed())
    names = [name for name in (f"{stem}.{extension}" for extension in EXTENSIONS) if name in listed]
    if len(names) > 1:
        raise SourceError(f"'{files.shown}' has {' and '.join(names)}: leave one of them")
    return names[0] if names else None


def table_schema(files: SourceFiles, name: str, type_of: TypeOf) -> pa.Schema:
    """Return names and types of the columns, from the first rows."""
    with (
        parsing(f"table '{files.shown}/{name}'"),
        _open_table(files, name) as file,
    ):
        if name.endswith(".parquet"):
            return _simplify_schema(parquet.read_schema(file))
        return next(_iter_batches(file, f"{files.shown}/{name}", type_of, Counter())).schema


def has_text(
    files: SourceFiles,
    name: str,
    text: str,
    is_searched: Callable[[str], bool],
) -> bool:
    """Return whether a text occurs in a table: in these columns of Parquet, anywhere in the
    other forms.
    """
    with (
        parsing(f"table '{files.shown}/{name}'"),
        _open_table(files, name) as file,
    ):
        if name.endswith(".parquet"):
            opened = _open_parquet(file, name)
            columns = [column for column in opened.schema_arrow.names if is_searched(column)]
            batches: Iterable[pa.RecordBatch] = ()
            if columns:
                batches = opened.iter_batches(
                    batch_size=_ROWS_AT_ONCE,
                    columns=columns,
                    use_threads=False,
                )
            for batch in batches:
                for column in batch.columns:
                    is_text = pa.types.is_dictionary(column.type) or column.type in (
                        pa.string(),
                        pa.large_string(),
                    )
                    if (
                        is_text
                        and pc.any(pc.match_substring(column.cast(pa.string()), text)).as_py()
                    ):
                        return True
            return False
        needle = text.encode()
        rest = b""
        while block := file.read(_BLOCK_BYTES):
            if needle in rest + block:
                return True
            if b"\0" in block:
                # It is no text, and perhaps without end: the reader of the rows reports it.
                return False
            rest = block[-len(needle) :]
    return False


class Table:
    """A table that was copied into ``folder``; rows are counted from 0."""

    def __init__(
        self,
        name: str,
        batches: Iterable[pa.RecordBatch],
        folder: Path,
        *,
        has_clips: bool = True,
    ) -> None:
        """Copy the table from its batches (:func:`read_batches`); raises SourceError where clips
        are not together.

        Without ``has_clips`` a column of clips may be absent: the rows are then for all clips,
        under the name "".
        """
        self.name = name
        self._path = folder / f"{name.rpartition('/')[2]}.arrow"
        self.clips: dict[str, tuple[int, int]] = {}
        """Name of each clip to its first row and its number of rows, in order."""
        self._num_rows = 0
        self._clip_bytes = 0
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        writer = None
        try:
            for batch in batches:
                if writer is None:
                    self.schema = batch.schema
                    path = str(self._path)
                    writer = pa.ipc.new_file(path, self.schema, options=options)
                self._note_clips(batch, has_clips=has_clips)
                writer.write_batch(batch)
        finally:
            if writer is not None:
                writer.close()
        reader = pa.ipc.open_file(pa.OSFile(str(self._path)))
        self._batch = lru_cache(maxsize=_KEPT_BATCHES)(reader.get_batch)

    def _note_clips(self, batch: pa.RecordBatch, *, has_clips: bool) -> None:
        first = self._num_rows
        self._num_rows += len(batch)
        if CLIP not in self.schema.names:
            if has_clips:
                raise SourceError(
                    f"table '{self.name}' has no column {CLIP}; it has "
                    f"{', '.join(self.schema.names)}"
                )
            self.clips[""] = (0, self._num_rows)
            return
        last = next(reversed(self.clips), None)
        row_bytes = batch.nbytes // len(batch)
        rows = Rows(self.name, first, batch)
        for row, clip in enumerate(rows.texts(CLIP), first):
            if not clip:
                raise SourceError(f"table '{self.name}', row {row}: {CLIP} is empty")
            if clip == last:
                start, count = self.clips[clip]
                self.clips[clip] = (start, count + 1)
                self._clip_bytes += row_bytes
                if self._clip_bytes > _MOST_CLIP:
                    raise SourceError(
                        f"table '{self.name}', row {row}: the rows of clip '{clip}' take "
                        f"over {_MOST_CLIP} bytes, which are in memory at once; divide the "
                        "clip, or shorten its values"
                    )
            elif clip in self.clips:
                raise SourceError(
                    f"table '{self.name}', row {row}: clip '{clip}' comes again after "
                    f"others, its rows began at {self.clips[clip][0]}; sort the table by {CLIP}"
                )
            elif len(clip.encode()) > MAX_TEXT_BYTES:
                raise SourceError(
                    f"table '{self.name}', row {row}: {CLIP} '{shortened(clip)}' has "
                    f"{len(clip.encode())} bytes, allowed are {MAX_TEXT_BYTES}; shorten it"
                )
            else:
                self.clips[clip] = (row, 1)
                self._clip_bytes = row_bytes
                last = clip

    def rows(self, clip: str) -> Rows | None:
        """Return the rows of a clip; None where it has none."""
        first, count = self.clips.get(clip, (0, 0))
        if not count:
            return None
        end = first + count
        first_of_batch = first // _ROWS * _ROWS
        starts = [max(first, start) for start in range(first_of_batch, end, _ROWS)]
        batches = [
            self._batch(position // _ROWS).slice(position % _ROWS, end - position)
            for position in starts
        ]
        joined = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        return Rows(self.name, first, joined)

    def parts(self) -> Iterator[Rows]:
        """Yield all rows, a batch at a time."""
        for first in range(0, self._num_rows, _ROWS):
            yield Rows(self.name, first, self._batch(first // _ROWS))


def _open_table(files: SourceFiles, name: str) -> pa.NativeFile:
    """Open the table's file; read one at a URL whole."""
    path = files.path(name)
    file = (
        pa.BufferReader(files.read(name, limit=_MOST_AT_URL)) if path is None else pa.OSFile(path)
    )
    head = file.read(len(LFS_MAGIC))
    # Arrow passes over the mark in CSV only.
    has_mark = head.startswith(codecs.BOM_UTF8) and name.endswith(".jsonl")
    file.seek(len(codecs.BOM_UTF8) if has_mark else 0)
    check_no_pointer(head, f"table '{files.shown}/{name}'")
    if not head:
        raise SourceError(f"table '{files.shown}/{name}' is empty")
    return file


def read_batches(
    files: SourceFiles,
    name: str,
    type_of: TypeOf,
    noted: Counter[str],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file as :func:`regrouped` does; raise SourceError for one that is
    damaged.

    ``noted`` counts values of JSON that are read as null.
    """
    with (
        parsing(f"table '{files.shown}/{name}'"),
        _open_table(files, name) as file,
    ):
        yield from _iter_batches(file, f"{files.shown}/{name}", type_of, noted)


def _iter_batches(
    file: pa.NativeFile,
    name: str,
    type_of: TypeOf,
    noted: Counter[str],
) -> Iterator[pa.RecordBatch]:
    if name.endswith(".parquet"):
        opened = _open_parquet(file, name)
        schema = _simplify_schema(opened.schema_arrow)
        tables: Iterator[pa.Table] = (
            pa.Table.from_batches([batch]).cast(schema)
            for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE, use_threads=False)
        )
    elif name.endswith(".jsonl"):
        tables = _read_json_tables(file, name, type_of, noted)
    else:
        tables = _read_csv_tables(file, name, type_of)
    return regrouped(tables, name)


def regrouped(tables: Iterable[pa.Table], name: str) -> Iterator[pa.RecordBatch]:
    """Yield batches of 1024 rows, the last one shorter; raise SourceError, naming the table,
    where there is no row.
    """
    pending = None
    is_empty = True
    for table in tables:
        pending = (
            table if pending is None or not len(pending) else pa.concat_tables([pending, table])
        )
        is_empty = is_empty and not len(table)
        num_rows = len(pending) // _ROWS * _ROWS
        if num_rows:
            rows = pending.slice(0, num_rows).combine_chunks()
            yield from rows.to_batches(max_chunksize=_ROWS)
            pending = pending.slice(num_rows)
    if pending is None or is_empty:
        raise SourceError(f"table '{name}' has no rows")
    if len(pending):
        yield pending.combine_chunks().to_batches()[0]


def _open_parquet(file: pa.NativeFile, name: str) -> BoundedParquet:
    return BoundedParquet(file, f"table '{name}'", buffer_size=1 << 16, pre_buffer=False)


def _simplify_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema without dictionaries and without metadata."""
    return pa.schema(
        [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
            for field in schema
        ]
    )


def _read_csv_tables(
    file: pa.NativeFile,
    name: str,
    type_of: TypeOf,
) -> Iterator[pa.Table]:
    read_options = csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES)
    header = csv.open_csv(file, read_options).schema.names
    file.seek(0)
    if len(header) == 1:
        for separator in ";\t|":
            if separator in header[0]:
                raise SourceError(
                    f"table '{name}' has the separator {separator!r}; write it with commas "
                    "between columns and points in numbers"
                )
    types = {column: kind for column in header if (kind := type_of(column)) is not None}
    lists = [column for column, kind in types.items() if pa.types.is_nested(kind)]
    if lists:
        raise SourceError(
            f"table '{name}': CSV has no lists, and {lists[0]} is one; give numbers in "
            "columns of their own, such as fx, fy, cx, cy and tx, ty, tz, qw, qx, qy, qz, "
            "or write Parquet"
        )
    texts = dict.fromkeys(header, pa.string())
    options = csv.ConvertOptions(
        column_types=texts | types,
        null_values=[""],
        strings_can_be_null=True,
    )
    reader = csv.open_csv(file, read_options, convert_options=options)
    kinds: dict[str, pa.DataType] | None = None
    row = 0
    for batch in reader:
        table = pa.Table.from_batches([batch])
        if kinds is None:
            # Of numbers or truth where no text changes by it.
            kinds = {}
            for column in header:
                texts_of_column = table.column(column)
                if column in types or texts_of_column.null_count == len(texts_of_column):
                    continue
                for kind in (pa.int64(), pa.float64(), pa.bool_()):
                    if _cast_exactly(texts_of_column, kind) is not None:
                        kinds[column] = kind
                        break
        for column, kind in kinds.items():
            values = _cast_exactly(table.column(column), kind)
            if values is None:
                raise SourceError(
                    f"table '{name}', one of the rows from {row} on: column {column} is "
                    f"{kind} in the first rows, and has a text here that is none; write "
                    "Parquet, or JSON lines"
                )
            table = table.set_column(header.index(column), column, values)
        row += len(table)
        yield table


def _cast_exactly(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    """Return texts as values of a type; None where one is none, or means more than it: 007,
    12345678901234567890.
    """
    try:
        values = column.cast(kind)
    except pa.ArrowInvalid:
        return None
    if kind == pa.int64():
        if values.cast(pa.string()).equals(column):
            return values
        return None
    if kind == pa.float64():
        is_code = pc.match_substring_regex(column, r"^[+-]?0[0-9]|^[+-]?[0-9]{16,}$")
        if pc.any(is_code).as_py():
            return None
        return values
    return values


def _read_json_tables(
    file: pa.NativeFile,
    name: str,
    type_of: TypeOf,
    noted: Counter[str],
) -> Iterator[pa.Table]:
    """Yield tables of whole lines; the first one settles names and types of all columns.

    NaN and infinities are read as null, and counted.
    """
    schema: pa.Schema | None = None
    row = 0
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        block, newline, rest_ = (rest + block).rpartition(b"\n")
        rest = rest_
        check_most(len(rest), f"table '{name}': a row after row {row}", _MOST_ROW)
        block, count = without_nan(block)
        if count:
            noted[NAN_AS_NULL] += count
        if newline:
            table = _read_json_table(
                block + newline,
                name=name,
                row=row,
                schema=schema,
                type_of=type_of,
            )
            schema = table.schema
            row = row + len(table)
            yield table
    rest, count = without_nan(rest)
    if count:
        noted[NAN_AS_NULL] += count
    if rest.strip():
        yield _read_json_table(
            rest,
            name=name,
            row=row,
            schema=schema,
            type_of=type_of,
        )


def _read_json_table(
    block: bytes,
    name: str,
    row: int,
    schema: pa.Schema | None,
    type_of: TypeOf,
) -> pa.Table:
    try:
        str(block, "utf-8")  # Arrow takes any bytes, and fails where they become texts
    except UnicodeDecodeError as error:
        lines_before = block[: error.start].split(b"\n")[:-1]
        row_number = row + sum(1 for line in lines_before if line.strip())
        raise SourceError(
            f"table '{name}', row {row_number}: {error}; write the file as UTF-8"
        ) from error
    explicit = schema
    if schema is None:
        names = dict.fromkeys(key for _, line in _iter_lines(block, name, row) for key in line)
        scalars = {
            key: kind
            for key in names
            if (kind := type_of(key)) is not None and not pa.types.is_nested(kind)
        }
        explicit = pa.schema(scalars.items())
    unexpected = "infer" if schema is None else "error"
    options = json.ParseOptions(explicit_schema=explicit, unexpected_field_behavior=unexpected)
    try:
        table = json.read_json(
            pa.BufferReader(block),
            json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            options,
        )
        table.validate()
    except pa.ArrowInvalid as error:
        for row_number, line in _iter_lines(block, name, row):
            _check_types(line, explicit, f"table '{name}', row {row_number}")
            for column, value in line.items():
                if b"[null" in bytes(value).replace(b" ", b""):
                    # Arrow makes no list of it in the first rows.
                    raise SourceError(
                        f"table '{name}', row {row_number}, column {column}: "
                        f"{bytes(value).decode()} has null for a number; give all of them, "
                        "or null for the whole"
                    ) from error
        raise SourceError(
            f"table '{name}', one of the rows from {row} on: {error}; each row has the "
            "columns and types of the first ones, null where there is nothing"
        ) from error
    if schema is None:
        dates = [
            field.name
            for field in table.schema
            if pa.types.is_temporal(field.type) and type_of(field.name) is None
        ]
        if dates:  # Arrow takes texts such as 2020-01-31 for times
            texts = [pa.field(date, pa.string()) for date in dates]
            assert explicit is not None, "of the known columns"
            fixed = pa.schema([*explicit, *texts])
            table = json.read_json(
                pa.BufferReader(block),
                json.ReadOptions(use_threads=False, block_size=len(block) + 1),
                json.ParseOptions(explicit_schema=fixed, unexpected_field_behavior="infer"),
            ).select(table.column_names)
        table = table.cast(
            pa.schema(
                [
                    field.with_type(_settle_type(field.name, field.type, type_of))
                    for field in table.schema
                ]
            )
        )
    return table


def _iter_lines(
    block: bytes,
    name: str,
    row: int,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows with their numbers; raise SourceError for one that is not a JSON object."""
    decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
    lines = (line for line in block.split(b"\n") if line.strip())
    for number, line in enumerate(lines, row):
        with parsing(f"table '{name}', row {number}:", "not a JSON object"):
            decoded = decode(line)
        yield number, decoded


def _check_types(line: dict[str, Any], schema: pa.Schema, where: str) -> None:
    """Raise SourceError for a value that has not the type of its column."""
    for field in schema:
        kind = _PYTHON.get(field.type)
        if kind is not None and field.name in line:
            try:
                msgspec.json.decode(line[field.name], type=kind | None)
            except msgspec.ValidationError as error:
                value = bytes(line[field.name]).decode("utf-8", "replace")
                raise SourceError(
                    f"{where}, column {field.name}: {value} is not {field.type}"
                ) from error


def _settle_type(name: str, kind: pa.DataType, type_of: TypeOf) -> pa.DataType:
    """Return type for all rows of a column from that of its first rows: numbers in lists are
    float64, nulls texts.
    """
    if pa.types.is_list(kind):
        return pa.list_(_settle_type("", kind.value_type, type_of))
    if pa.types.is_struct(kind):
        return pa.struct(
            [
                field.with_type(_settle_type(field.name, field.type, type_of))
                for field in map(kind.field, range(kind.num_fields))
            ]
        )
    if pa.types.is_integer(kind) and not name:
        return pa.float64()
    if pa.types.is_null(kind):
        return type_of(name) or pa.string()
    return kind


def distinct(parts: Iterator[Rows], column: str) -> list[str]:
    """Return the distinct texts of a column in the order of their first rows."""
    texts: dict[str, None] = {}
    for rows in parts:
        unique = rows.texts(column, pc.unique(rows.column(column)))
        texts.update((text, None) for text in unique if text)
    return list(texts)
