"""Links between tables, by tokens on disk."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.storage import columns
from fuelrail.sharding.sources.shared import joins as module
from fuelrail.sharding.sources.shared.joins import Database, Tokens, Wanted

LINK = {"table": "scene", "column": "log_token", "owners": ["x", "y", "z"]}


@pytest.fixture(autouse=True)
def _by_duckdb(monkeypatch):
    monkeypatch.setattr(module, "_FEW_ROWS", -1)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joins")
    database = Database(folder)
    yield database
    database.close()
    assert list(folder.iterdir()) == []


def column(database, texts):
    made = database.texts()
    made.append(texts)
    return made


def tokens_of(database, texts):
    tokens = Tokens("log", database)
    tokens.append(texts)
    tokens.check_unique()
    return tokens


@pytest.mark.parametrize("whole", [False, True], ids=["at hand", "column"])
def test_links(database, whole):
    tokens = tokens_of(database, ["a", "b", "c"])

    def resolve(texts, may_be_empty=True):
        links = column(database, texts) if whole else texts
        rows = tokens.rows_of(links)[0] if whole else tokens.find(links)
        tokens.check(rows, links, may_be_empty=may_be_empty, **LINK)
        return rows.tolist()

    assert resolve(["c", "", "a"]) == [2, -1, 0]
    assert resolve(["b", "b"], may_be_empty=False) == [1, 1]
    with pytest.raises(
        SourceError, match="table 'scene': row 'y' has log_token 'q', not found in table 'log'"
    ):
        resolve(["a", "q"])
    with pytest.raises(SourceError, match="row 'z' has an empty log_token"):
        resolve(["a", "b", ""], may_be_empty=False)


def test_several_columns_are_joined_at_once(database):
    tokens = tokens_of(database, ["a", "b", "c"])
    found = tokens.rows_of(
        column(database, ["c", "q"]), column(database, []), column(database, ["a", "", "c"])
    )
    assert [rows.tolist() for rows in found] == [[2, -1], [], [0, -1, 2]]


@given(wanted=st.lists(st.text(max_size=4)), texts=st.lists(st.text(max_size=4)))
@settings(max_examples=30, deadline=None)
def test_no_text_that_is_looked_for_is_lost(wanted, texts):
    looked_for = Wanted()
    looked_for.add(wanted)
    kept = looked_for.kept(list(range(len(texts))), texts)
    assert {at for at, text in enumerate(texts) if text in wanted} <= set(kept)
    assert kept == sorted(kept)


def test_what_is_not_looked_for_is_mostly_left_out():
    looked_for = Wanted()
    looked_for.add(["a", "b"])
    assert len(looked_for.kept(list(range(1000)), list(map(str, range(1000))))) < 10


def test_an_empty_table_has_no_token(database):
    tokens = tokens_of(database, [])
    tokens.check_unique()
    assert tokens.find(["a", ""]).tolist() == [-1, -1]
    assert tokens.rows_of(column(database, ["a", ""]))[0].tolist() == [-1, -1]
    assert tokens.rows_of(column(database, []))[0].tolist() == []


def test_rows_are_numbered_over_all_parts_of_a_column(database, monkeypatch):
    monkeypatch.setattr(columns, "ROWS_AT_ONCE", 2)
    tokens = tokens_of(database, list("abcde"))
    (rows,) = tokens.rows_of(column(database, ["e", "a", "c"]))
    assert tokens.find(["e", "a", "c"]).tolist() == rows.tolist() == [4, 0, 2]


@pytest.mark.parametrize(
    ("few_rows", "rows_of_part"),
    [(-1, 7), (-1, 1 << 18), (1 << 12, 7)],
    ids=["in parts", "at once", "in memory"],
)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    table=st.lists(st.text(max_size=4), max_size=60),
    wanted=st.lists(st.text(max_size=4), max_size=60),
)
def test_both_ways_find_the_same_rows(database, monkeypatch, few_rows, rows_of_part, table, wanted):
    monkeypatch.setattr(module, "_FEW_ROWS", few_rows)
    monkeypatch.setattr(module, "_ROWS_OF_PART", rows_of_part)
    tokens = Tokens("log", database)
    tokens.append(table)
    if len(set(table)) < len(table):
        with pytest.raises(SourceError, match="twice"):
            tokens.check_unique()
    else:
        tokens.check_unique()
        expected = [table.index(text) if text in table else -1 for text in wanted]
        (rows,) = tokens.rows_of(column(database, wanted))
        assert tokens.find(wanted).tolist() == rows.tolist() == expected


@pytest.mark.slow
def test_more_tokens_than_a_join_may_keep_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MEMORY", "32MB")
    database = Database(tmp_path)
    tokens = Tokens("log", database)
    for first in range(0, 400_000, 50_000):
        tokens.append([f"{number:064x}" for number in range(first, first + 50_000)])
    tokens.check_unique()
    links = column(database, [f"{number:064x}" for number in (399_999, 0, 400_000)])
    assert tokens.rows_of(links)[0].tolist() == [399_999, 0, -1]
    assert np.array_equal(tokens.rows_of(tokens)[0], np.arange(400_000))
    database.close()
    assert list(tmp_path.iterdir()) == []


def test_without_duckdb_a_large_join_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(
        ConfigError, match=r"needs duckdb, .*: pip install -e '\.\[tables\]' in a checkout"
    ):
        tokens_of(Database(tmp_path), ["a", "b"])
