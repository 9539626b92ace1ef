"""Columns on disk read as what was put into them, and leave no files behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.storage import spill as module
from fuelrail.pipeline.storage.spill import Spill


@pytest.fixture(params=[1 << 16, 16], ids=["memory", "disk"])
def limit(request, monkeypatch):
    monkeypatch.setattr(module, "_IN_MEMORY_BYTES", request.param)


@pytest.mark.usefixtures("limit")
def test_columns_of_numbers(tmp_path):
    spill = Spill(tmp_path)
    column = spill.column(np.int32, (2,))
    assert len(column) == 0
    column.append([])
    column.append([(1, 2), (3, 4)])
    column.append(np.arange(20).reshape(-1, 2))
    assert len(column) == 12
    assert column.values[:3].tolist() == [[1, 2], [3, 4], [0, 1]]
    column.values[1] = 9
    spill.release()
    assert column.values[1].tolist() == [9, 9]
    assert [part.tolist() for part in column.parts()] == [column.values.tolist()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("limit")
def test_a_filled_column(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    values = Spill(tmp_path).filled(-1, 7, np.int64, (2,))
    assert values.shape == (7, 2)
    assert (values == -1).all()
    values[6, 1] = 5
    assert values.sum() == -8


@settings(max_examples=50)
@given(parts=st.lists(st.lists(st.text(max_size=20), max_size=6), max_size=6), in_memory=st.sampled_from([1 << 16, 8]))
def test_columns_of_texts(tmp_path_factory, parts, in_memory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_IN_MEMORY_BYTES", in_memory)
        spill = Spill(tmp_path_factory.mktemp("spill"))
        column = spill.texts()
        for part in parts:
            column.append([text.encode() for text in part])
        texts = [text for part in parts for text in part]
        assert len(column) == len(texts)
        assert [column[row] for row in range(len(texts))] == texts
        assert column.array().to_pylist() == texts
        assert column.take(np.arange(len(texts))[::-1]) == texts[::-1]


def test_pages_are_given_back(tmp_path):
    """What stays in this process's memory of a column does not grow with it."""

    def resident():
        blocks = Path("/proc/self/smaps").read_text().split(str(tmp_path))[1:]
        return sum(int(block.split("\nRss:")[1].split()[0]) for block in blocks)

    spill = Spill(tmp_path)
    column = spill.column(np.int64)
    for first in range(0, 1 << 21, 1 << 16):
        column.append(np.arange(first, first + (1 << 16)))
    assert int(column.values.sum()) == (1 << 20) * ((1 << 21) - 1)
    full = resident()
    spill.used(1 << 20)
    assert full > 12_000  # of 16 MiB
    assert resident() < 1000
    assert int(column.values[-1]) == (1 << 21) - 1
