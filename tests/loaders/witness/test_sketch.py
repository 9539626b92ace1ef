"""The table names each row by which two multisets differ; the sample counts rows exactly."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.loaders.witness.judge import expect
from fuelrail.loaders.witness.record import place_of, step_of
from fuelrail.loaders.witness.rows import (
    id_rows,
    integer_rows,
    mix,
    row_names,
    text_rows,
    unmix,
)
from fuelrail.loaders.witness.sketch import (
    ALL,
    LARGE,
    SAMPLE_ROWS,
    SMALL,
    CountedRows,
    Table,
)

INTEGERS = st.integers(-(2**63), 2**63 - 1)


def table_of(ids: list, size: int = LARGE) -> Table:
    rows = id_rows(ids)
    table = Table(size, has_names=rows.kind == "text")
    table.add(rows.hashes[:, 0], rows.names)
    return table


def add_integers(table: Table, ids: np.ndarray) -> None:
    rows = integer_rows(ids)
    table.add(rows.hashes[:, 0], rows.names)


def named(table: Table, kind: str) -> dict[int | str, int]:
    surplus = table.surplus()
    assert surplus.is_whole
    names = row_names(kind, surplus.hashes, surplus.names)
    return dict(zip(names, surplus.times.tolist(), strict=True))


@given(st.lists(INTEGERS, max_size=100))
def test_mixing_can_be_undone(numbers) -> None:
    array = np.array(numbers, np.int64).view(np.uint64)
    assert (unmix(mix(array)) == array).all()
    assert row_names("integer", id_rows(numbers).hashes[:, 0], np.zeros(len(numbers), "S64")) == (
        numbers
    )


@pytest.mark.costly
@settings(max_examples=50)
@given(st.data())
def test_the_difference_of_two_multisets_is_named_exactly(data) -> None:
    """Up to a thousand rows, each up to three times more or fewer, among any rows that both hold."""
    seed = data.draw(st.integers(0, 2**32))
    chance = np.random.default_rng(seed)
    count = data.draw(st.integers(0, 1000))
    is_text = data.draw(st.booleans())
    shared = chance.integers(0, 2**40, data.draw(st.integers(1, 5000)))
    rows = 2**41 + chance.permutation(10**6)[:count]
    times = chance.choice([-3, -2, -1, 1, 2, 3], count)
    more = np.repeat(rows, np.maximum(times, 0))
    fewer = np.repeat(rows, np.maximum(-times, 0))

    def ids(numbers) -> list:
        return [f"clip/{number:x}" if is_text else number for number in numbers.tolist()]

    table = table_of(ids(np.concatenate([shared, more, rows[:1]])))
    table.cells -= table_of(ids(np.concatenate([shared[::-1], fewer, rows[:1]]))).cells
    expected = dict(zip(ids(rows), times.tolist(), strict=True))
    assert named(table, "text" if is_text else "integer") == expected


@pytest.mark.parametrize("count", [6_000, 20_000, 300_000])
@pytest.mark.parametrize("missing", [0.0, 0.5, 1.0], ids=["repeated", "both", "missing"])
def test_more_rows_than_can_be_named_are_counted(count, missing) -> None:
    ids = np.arange(count)
    lost = round(missing * count)
    table = Table(LARGE)
    add_integers(table, ids[lost:])
    other = Table(LARGE)
    add_integers(other, ids[:lost])
    table.cells -= other.cells
    surplus = table.surplus()
    assert not surplus.is_whole
    assert abs(surplus.estimate - count) < 0.15 * count


def test_a_small_table_is_the_fold_of_a_large_one() -> None:
    ids = [f"row {number}" for number in range(60)]
    folded = table_of(ids).fold()
    assert (folded.cells == table_of(ids, SMALL).cells[:, :, :4]).all()
    surplus = folded.surplus()
    assert surplus.is_whole
    assert sorted(surplus.hashes) == sorted(text_rows(ids).hashes[:, 0])


def test_a_table_that_no_rows_made_ends() -> None:
    """A row in one of its three cells is taken from the others, and would come back for ever."""
    table = table_of([7], SMALL)
    table.cells[1:] = 0
    assert not table.surplus().is_whole
    chance = np.random.default_rng(3)
    table.cells = chance.integers(-(2**63), 2**63 - 1, table.cells.shape)
    assert not table.surplus().is_whole


def sample_of(ids) -> CountedRows:
    sample = CountedRows()
    for start in range(0, len(ids), 97):
        rows = integer_rows(np.asarray(ids[start : start + 97]))
        chosen = sample.select(rows.hashes[:, 0])
        sample.add(rows, chosen, np.full(len(chosen), 5, np.uint64))
    return sample


@pytest.mark.costly
@settings(max_examples=50)
@given(st.integers(0, 4000), st.integers(1, 8), st.integers(0, 2**32))
def test_a_sample_counts_exactly_and_merges_as_a_union(count, ranks, seed) -> None:
    ids = np.random.default_rng(seed).integers(0, max(count // 2, 1), count)
    hashes = integer_rows(ids).hashes[:, 0].tolist()
    counts = Counter(hashes)
    smallest = sorted(counts)[:SAMPLE_ROWS]
    whole = sample_of(ids)
    merged = CountedRows()
    for rank in range(ranks):
        merged.merge(sample_of(ids[rank::ranks]))
    for sample in (whole, merged):
        assert sample.rows["hash"].tolist() == smallest[: len(sample.rows)]
        assert (sample.limit == ALL) == (len(counts) <= SAMPLE_ROWS)
        assert sample.rows["count"].tolist() == [counts[digest] for digest in sample.rows["hash"]]
        assert sample.rows["alike"].tolist() == (sample.rows["count"] - 1).tolist()
    assert len(whole.rows) == len(smallest)
    assert (merged.rows == whole.rows[: len(merged.rows)]).all()


def test_places_of_steps_follow_each_other() -> None:
    places = [place_of(step) for step in range(100_000)]
    firsts = [step for step in range(1, 100_000) if places[step] != places[step - 1]]
    assert set(np.diff(places).tolist()) == {0, 1}
    assert [step_of(places[step]) for step in firsts] == firsts
    assert place_of(2**40) < 512


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_faults_in_100_million_rows_are_named() -> None:
    size = 10**8
    reference = expect(size, "integer").record.table
    chance = np.random.default_rng(1)
    lost = chance.choice(size, 500, replace=False)
    again = chance.choice(size, 500, replace=False)
    table = Table(LARGE)
    for start in range(0, size, 2**18):
        ids = np.arange(start, min(start + 2**18, size))
        add_integers(table, ids[~np.isin(ids, lost)])
    add_integers(table, again)
    table.cells -= reference.cells
    expected = Counter(again.tolist())
    expected.subtract(lost.tolist())
    assert named(table, "integer") == {row: times for row, times in expected.items() if times}
