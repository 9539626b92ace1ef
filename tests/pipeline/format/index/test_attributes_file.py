"""``attributes.parquet`` of an unknown writer: what few bytes of it decode to."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuelrail.pipeline.errors import IndexFileError
from fuelrail.pipeline.format.index import attributes_file
from fuelrail.pipeline.format.index.attributes_file import (
    MAX_TEXT_BYTES,
    AttributesFile,
)


def write(path, text, num_columns, num_rows):
    column = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array([text]))
    table = pa.table({f"text_{number}": column for number in range(num_columns)})
    pq.write_table(table, path, compression="zstd", store_schema=False)
    return AttributesFile(path)


def test_dictionaries_of_many_columns_are_expanded_in_parts(tmp_path, monkeypatch) -> None:
    """Of 800 MB, some 4 MB at a time."""
    text = "x" * MAX_TEXT_BYTES
    file = write(tmp_path / "a.parquet", text, num_columns=40, num_rows=5000)
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    monkeypatch.setattr(attributes_file, "_EXPANDED_BYTES", 4 << 20)
    num_rows = 0
    for batch in file.batches(file.schema().names, range(10, 1000)):
        assert batch.nbytes < 2 * (4 << 20)
        assert set(batch.column(7).to_pylist()) == {text}
        num_rows += len(batch)
    assert num_rows == 990


def test_a_text_over_the_limit_is_refused_before_it_is_expanded(
    tmp_path,
) -> None:
    file = write(tmp_path / "a.parquet", "x" * 300_000, num_columns=1, num_rows=100_000)
    with pytest.raises(IndexFileError, match="a text of 300000 bytes, over the limit of 4096"):
        list(file.batches(["text_0"]))
