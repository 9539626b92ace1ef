"""Columns on disk read as what was put into them, and leave no files behind."""

from __future__ import annotations

import resource

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.storage import columns as module
from fuelrail.pipeline.storage.columns import Disk


def test_columns_of_numbers(tmp_path):
    disk = Disk(tmp_path)
    column = disk.column(np.int32, (2,))
    assert len(column) == 0
    column.append([])
    column.append([(1, 2), (3, 4)])
    column.append(np.arange(20).reshape(-1, 2))
    assert len(column) == 12
    assert column.values[:3].tolist() == [[1, 2], [3, 4], [0, 1]]
    column.values[1] = 9
    disk.release()
    assert column.values[1].tolist() == [9, 9]
    assert disk.column(np.float64, (3, 3)).values.shape == (0, 3, 3)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        Disk(tmp_path / "gone").column(np.int32)


def test_a_filled_column(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    values = Disk(tmp_path).filled(-1, 7, np.int64, (2,))
    assert values.shape == (7, 2)
    assert (values == -1).all()
    values[6, 1] = 5
    assert values.sum() == -8


@settings(max_examples=50)
@given(parts=st.lists(st.lists(st.text(max_size=20), max_size=6), max_size=6))
def test_columns_of_texts(tmp_path_factory, parts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROWS_AT_ONCE", 4)
        column = Disk(tmp_path_factory.mktemp("columns")).texts()
        for part in parts:
            column.append(part)
        texts = [text for part in parts for text in part]
        assert len(column) == len(texts)
        assert [column[row] for row in range(len(texts))] == texts
        assert column.take(np.arange(len(texts))[::-1]) == texts[::-1]
        assert [text for part in column.parts() for text in part.to_pylist()] == texts


def test_rows_of_a_table(tmp_path):
    disk = Disk(tmp_path)
    in_memory = pa.table(
        {
            "n": pa.array([0, None, 2, 3, 4], pa.int16()),
            "text": ["a", "b", None, "", "e"],
        }
    )
    table = disk.table(in_memory.slice(first, 2) for first in (0, 2, 4))
    for rows in ([], [3], [0, 1, 2, 3, 4], [4, 0, 1, 1, 3, 4]):
        columns = disk.take(table, np.array(rows, np.int64))
        disk.release()
        assert columns.equals(in_memory.take(pa.array(rows, pa.int64())).combine_chunks())
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_read_leaves_no_file_either(tmp_path):
    disk = Disk(tmp_path)
    column = disk.column(np.int64)
    column.append(np.arange(100_000))
    del column
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_read_and_has_no_place_is_dropped_without_a_word(tmp_path):
    column = Disk(tmp_path).column(np.int64)
    column.append([1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        del column  # pytest reports an exception that `__del__` leaves behind
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
