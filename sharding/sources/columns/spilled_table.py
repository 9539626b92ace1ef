"""A table that is filled part by part and then read in any order, its columns on disk (:mod:`pipeline.spill`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuelrail.pipeline.storage.spill import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.format.index.attributes_file import AttributesFile
    from fuelrail.pipeline.storage.spill import Spill, SpilledTexts


class SpilledTable:
    """Columns of ``schema``: bool, integers, floats and strings, any of them with nulls."""

    def __init__(self, spill: Spill, schema: pa.Schema) -> None:
        self._spill, self._schema = spill, schema
        self._columns: dict[str, Any] = {}
        for field in schema:
            is_text = pa.types.is_string(field.type)
            self._columns[field.name] = spill.texts() if is_text else spill.column(numpy_dtype(field.type))
        self._is_valid = {field.name: spill.column(np.bool_) for field in schema}

    @staticmethod
    def of_file(spill: Spill, file: AttributesFile, names: Sequence[str]) -> SpilledTable:
        """Columns of a Parquet file."""
        schema = file.schema()
        table = SpilledTable(spill, pa.schema([schema.field(name) for name in names]))
        for part in file.batches(names):
            table.append(pa.Table.from_batches([part]))
        return table

    def append(self, part: pa.Table) -> None:
        """Add rows; ``part`` may have other columns too."""
        for field in self._schema:
            values = part[field.name].combine_chunks()
            self._is_valid[field.name].append(values.is_valid().to_numpy(zero_copy_only=False))
            column = self._columns[field.name]
            if pa.types.is_string(field.type):
                _append_texts(column, pc.fill_null(values, ""))
            else:
                column.append(pc.fill_null(values, pa.scalar(0).cast(field.type)).to_numpy(zero_copy_only=False))
        self._spill.used(len(part) * len(self._schema))

    def take(self, rows: NDArray[np.int64]) -> pa.Table:
        """Some rows, in that order."""
        found = []
        for field in self._schema:
            is_null = ~self._is_valid[field.name].values[rows]
            column = self._columns[field.name]
            if pa.types.is_string(field.type):
                texts = column.array().take(pa.array(rows)).cast(field.type)
                found.append(pc.if_else(pa.array(is_null), pa.scalar(None, field.type), texts))
            else:
                found.append(pa.array(column.values[rows], field.type, mask=is_null))
        self._spill.used(len(rows) * len(self._schema))
        return pa.Table.from_arrays(found, schema=self._schema)


def _append_texts(column: SpilledTexts, texts: pa.StringArray) -> None:
    _, ends, utf8 = texts.cast(pa.large_string()).buffers()
    starts = np.frombuffer(ends, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    if len(texts):
        column.append_utf8(memoryview(utf8 or b"")[starts[0] : starts[-1]], starts[1:] - starts[0])
