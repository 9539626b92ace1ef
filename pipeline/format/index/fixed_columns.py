"""Tables of one record batch whose columns all have a fixed width, such as ``shards.arrow`` and
``keys.arrow``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fuelrail.pipeline.errors import IndexFileError
from fuelrail.pipeline.format.index.checks import batch_range, check_plain

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.blocks import BlockFile

HEAD_BYTES: Final = 4 << 10
"""More than what precedes the columns in a table of one record batch: schema and message take
about 100 bytes each.
"""


class FixedColumns:
    """The columns of an Arrow file of one record batch, all of fixed width and without nulls;
    read range by range.
    """

    def __init__(self, file: BlockFile, schema: pa.Schema, dtypes: Mapping[str, np.dtype]) -> None:
        """Open it; raises IndexFileError where the file is not of that schema."""
        self._file = file
        reader = file.open_arrow()
        if not reader.schema.equals(schema, check_metadata=True) or reader.num_record_batches != 1:
            raise IndexFileError(
                f"'{file.path}' does not have the columns and the one record batch of this version"
            )
        try:
            first, end = batch_range(memoryview(file.map), 0)
            file.need(first, min(end, first + HEAD_BYTES))
            check_plain(memoryview(file.map), 0)
            batch = reader.get_batch(0)
            batch.validate()
        except (OSError, pa.ArrowException, IndexFileError) as error:
            raise IndexFileError(f"'{file.path}' is damaged: {error}") from error
        self.num_rows = batch.num_rows
        base = int(np.frombuffer(file.map, np.uint8).ctypes.data)
        self._columns: dict[str, tuple[NDArray[np.generic], int]] = {}
        for number, (name, dtype) in enumerate(dtypes.items()):
            buffers = batch.column(number).buffers()
            if any(buffer is not None and buffer.size for buffer in buffers[:-1]):
                raise IndexFileError(f"'{file.path}': column {name} has nulls")
            data = buffers[-1]
            if (
                data is None
                or data.size < self.num_rows * dtype.itemsize
                or batch.column(number).offset
            ):
                raise IndexFileError(
                    f"'{file.path}': column {name} is shorter than its {self.num_rows} rows"
                )
            self._columns[name] = (
                np.frombuffer(data, dtype, self.num_rows),
                data.address - base,
            )

    def read(self, name: str, first: int, end: int) -> NDArray[np.generic]:
        """Return rows ``first`` to ``end - 1`` of a column, not copied; raise what
        :meth:`BlockFile.need` does.
        """
        values, place = self._columns[name]
        size = values.dtype.itemsize
        self._file.need(place + first * size, place + end * size)
        return values[first:end]
