"""Parquet and feather that are small in their files and large in memory."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared import arrow
from fuelrail.sharding.sources.shared.arrow import (
    open_parquet,
    read_feather,
    read_parquet,
)
from fuelrail.sharding.sources.shared.files import source_files

LIMIT = 1 << 20
ROWS = 3000


def repeated(text, kind=None):
    return pa.array([text] * ROWS, kind)


TABLES = {
    "texts": pa.table({"a": repeated("x" * 1000)}),
    "bytes": pa.table({"a": repeated(b"x" * 1000)}),
    "dictionary": pa.table({"a": repeated("x" * 1000).dictionary_encode()}),
    "structs": pa.table(
        {"a": pa.StructArray.from_arrays([repeated(b"x" * 1000), repeated("y")], ["bytes", "path"])}
    ),
    "lists": pa.table({"a": pa.array([["x" * 1000, None]] * ROWS)}),
    "numbers": pa.table({"a": pa.array(np.zeros(100 * ROWS))}),
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    def write(table, **options):
        parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", **options)
        assert (tmp_path / "a.parquet").stat().st_size < LIMIT / 10
        monkeypatch.setattr(arrow, "_MOST_COLUMN", LIMIT)
        return source_files(str(tmp_path))

    return write


@pytest.mark.parametrize("options", [{}, {"store_schema": False}], ids=["", "no schema"])
@pytest.mark.parametrize("name", TABLES)
def test_what_is_larger_in_memory_than_in_the_file_is_refused(write, name, options):
    files = write(TABLES[name], **options)
    with (
        pytest.raises(
            SourceError,
            match=rf"a.parquet'.*, decoded, has \d+ bytes.* {LIMIT} are read",
        ),
        open_parquet(files, "a.parquet") as file,
    ):
        file.read()


def test_texts_that_share_their_beginning_are_refused(write):
    table = pa.table({"a": pa.array([f"{'x' * 1000}{row}" for row in range(ROWS)])})
    files = write(table, use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"})
    with pytest.raises(SourceError, match="decoded, has"):
        read_parquet(files, "a.parquet", {"a": pa.string()})


@pytest.mark.parametrize("name", ["texts", "bytes", "dictionary", "structs", "lists"])
def test_what_fits_by_batches_is_read_as_it_is(write, name):
    """Nulls and parts of a column too."""
    table = pa.concat_tables([TABLES[name], pa.table({"a": pa.nulls(50, TABLES[name]["a"].type)})])
    table = table.append_column("b", pa.array(np.arange(len(table))))
    with open_parquet(write(table), "a.parquet") as file:
        batches = list(file.iter_batches(100))
        assert max(map(len, batches)) <= 100
        assert pa.Table.from_batches(batches).to_pydict() == table.to_pydict()
        assert batches[0].schema.equals(table.schema)
        part = list(file.iter_batches(100, row_groups=[0], columns=["b"]))
        assert pa.Table.from_batches(part).equals(table.select(["b"]))
        assert file.read(["b"]).equals(table.select(["b"]))


def test_a_long_dictionary_of_short_texts_is_read(write):
    """Most files are such: its size times the rows is far above the limit, and what they hold is not."""
    table = pa.table({"a": pa.array([f"{row % 500:03d}" for row in range(ROWS)])})
    with open_parquet(write(table), "a.parquet") as file:
        assert file.read().equals(table)
        assert file.read_row_group(0, ["a"]).equals(table)


def numbers(count, num_columns=1):
    return pa.table({f"c{column}": np.zeros(count) for column in range(num_columns)})


def test_row_groups_and_columns_are_limited_together(write):
    """Each of them is below the limit."""
    groups = write(numbers(10 * LIMIT // 16), row_group_size=LIMIT // 16)
    with pytest.raises(SourceError, match=r"the rows, decoded, has \d+ bytes"):
        read_parquet(groups, "a.parquet", {"c0": pa.float64()})
    columns = write(numbers(LIMIT // 16, 10))
    with open_parquet(columns, "a.parquet") as file:
        assert file.read(["c3"]).num_columns == 1
        with pytest.raises(SourceError, match=r"the rows, decoded, has \d+ bytes"):
            file.read()
        batches = list(file.iter_batches(LIMIT))
    assert max(batch.nbytes for batch in batches) < 1.1 * LIMIT
    assert sum(map(len, batches)) == LIMIT // 16


FEATHERS = {
    "numbers": numbers(LIMIT, 2),
    "texts": pa.table({"c0": repeated("x" * 1000)}),
    "dictionary": pa.table({"c0": repeated("x" * 1000).dictionary_encode()}),
    "dictionary of few rows": pa.table(
        {
            "c0": pa.array(["y"]).dictionary_encode(),
            "c1": pa.array(["x" * LIMIT * 2]),
        }
    ),
    "runs": pa.table({"c0": pa.RunEndEncodedArray.from_arrays([LIMIT], [0.0])}),
}


@pytest.mark.parametrize("name", FEATHERS)
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_feather_that_is_larger_in_memory_is_refused(tmp_path, monkeypatch, name, compression):
    table = FEATHERS[name]
    feather.write_feather(table, tmp_path / "a.feather", compression=compression)
    assert (tmp_path / "a.feather").stat().st_size < LIMIT / 10
    files = source_files(str(tmp_path))
    kinds = {"numbers": pa.float64(), "runs": pa.float64()}
    types = {"c0": kinds.get(name, pa.string())}
    expected = read_feather(files, "a.feather", types) if name != "runs" else None
    assert expected is None or len(expected["c0"]) == len(table)
    monkeypatch.setattr(arrow, "_MOST_COLUMN", LIMIT)
    with pytest.raises(SourceError, match=rf"decoded, has \d+ bytes.* {LIMIT} are read"):
        read_feather(files, "a.feather", types)


@pytest.mark.parametrize("compression", ["zstd", "lz4", "uncompressed"])
def test_feather_that_fits_is_read(tmp_path, monkeypatch, compression):
    values = np.random.default_rng(0).random(ROWS)
    table = pa.table(
        {
            "c0": values,
            "c1": pa.array(["a", "b", "c"] * 1000).dictionary_encode(),
        }
    )
    feather.write_feather(table, tmp_path / "a.feather", compression=compression, chunksize=700)
    monkeypatch.setattr(arrow, "_MOST_COLUMN", LIMIT)
    types = {"c0": pa.float64(), "c1": pa.string()}
    found = read_feather(source_files(str(tmp_path)), "a.feather", types)
    assert (found["c0"] == values).all()
    assert found["c1"].tolist() == table["c1"].to_pylist()
