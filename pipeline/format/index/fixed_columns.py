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

    def __init__(
        self,
        file: BlockFile,
        schema: pa.Schema,
        dtypes: Mapping[str, np.dtype],
    ) -> None:
        """Open it; raises IndexFileError where the file is not of that schema."""
        self._file = file
        reader = file.open_arrow()
        has_columns = reader.schema.equals(schema, check_metadata=True)
        if not has_columns or reader.num_record_batches != 1:
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
        file_address = int(np.frombuffer(file.map, np.uint8).ctypes.data)
        self._columns: dict[str, tuple[NDArray[np.generic], int]] = {}
        for column, (name, dtype) in zip(batch.columns, dtypes.items(), strict=True):
            *null_buffers, data = column.buffers()
            if any(buffer is not None and buffer.size for buffer in null_buffers):
                raise IndexFileError(f"'{file.path}': column {name} has nulls")
            num_bytes = self.num_rows * dtype.itemsize
            if data is None or data.size < num_bytes or column.offset:
                raise IndexFileError(
                    f"'{file.path}': column {name} is shorter than its {self.num_rows} rows"
                )
            values = np.frombuffer(data, dtype, self.num_rows)
            place = data.address - file_address
            self._columns[name] = (values, place)

    def read(self, name: str, first: int, end: int) -> NDArray[np.generic]:
        """Return rows ``first`` to ``end - 1`` of a column, not copied; raise what
        :meth:`BlockFile.need` does.
        """
        values, place = self._columns[name]
        itemsize = values.dtype.itemsize
        start_byte = place + first * itemsize
        end_byte = place + end * itemsize
        self._file.need(start_byte, end_byte)
        return values[first:end]
