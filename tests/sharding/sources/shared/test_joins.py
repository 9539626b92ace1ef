"""Links between tables, by tokens on disk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.storage.columns import Disk
from fuelrail.sharding.sources.shared import joins as module
from fuelrail.sharding.sources.shared.joins import TextFilter, Tokens

LINK = {"table": "scene", "column": "log_token", "owners": ["x", "y", "z"]}


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joins")
    yield Disk(folder)
    assert list(folder.iterdir()) == []


def column(disk, texts):
    links = disk.texts()
    links.append(texts)
    return links


def tokens_of(disk, texts):
    tokens = Tokens("log", disk)
    tokens.append(texts)
    tokens.check_unique()
    return tokens


@pytest.mark.parametrize("is_column", [False, True], ids=["at hand", "column"])
def test_links(disk, is_column):
    tokens = tokens_of(disk, ["a", "b", "c"])

    def resolve(texts, may_be_empty=True):
        links = column(disk, texts) if is_column else texts
        rows = tokens.rows_of(links)[0] if is_column else tokens.find(links)
        tokens.check(rows, links, may_be_empty=may_be_empty, **LINK)
        return rows.tolist()

    assert resolve(["c", "", "a"]) == [2, -1, 0]
    assert resolve(["b", "b"], may_be_empty=False) == [1, 1]
    with pytest.raises(
        SourceError,
        match="table 'scene': row 'y' has log_token 'q', not found in table 'log'",
    ):
        resolve(["a", "q"])
    with pytest.raises(SourceError, match="row 'z' has an empty log_token"):
        resolve(["a", "b", ""], may_be_empty=False)


def test_several_columns_are_joined_at_once(disk):
    tokens = tokens_of(disk, ["a", "b", "c"])
    rows_by_column = tokens.rows_of(
        column(disk, ["c", "q"]), column(disk, []), column(disk, ["a", "", "c"])
    )
    assert [rows.tolist() for rows in rows_by_column] == [
        [2, -1],
        [],
        [0, -1, 2],
    ]


@given(tokens=st.lists(st.text(max_size=4)), texts=st.lists(st.text(max_size=4)))
@settings(max_examples=30, deadline=None)
def test_no_text_that_is_looked_for_is_lost(tokens, texts):
    looked_for = TextFilter()
    looked_for.add(tokens)
    positions = looked_for.select(list(range(len(texts))), texts)
    assert {position for position, text in enumerate(texts) if text in tokens} <= set(positions)
    assert positions == sorted(positions)


def test_what_is_not_looked_for_is_mostly_left_out():
    looked_for = TextFilter()
    looked_for.add(["a", "b"])
    assert len(looked_for.select(list(range(1000)), list(map(str, range(1000))))) < 10


def test_an_empty_table_has_no_token(disk):
    tokens = tokens_of(disk, [])
    tokens.check_unique()
    assert tokens.find(["a", ""]).tolist() == [-1, -1]
    assert tokens.rows_of(column(disk, ["a", ""]))[0].tolist() == [-1, -1]
    assert tokens.rows_of(column(disk, []))[0].tolist() == []


def test_rows_are_numbered_over_all_parts_of_a_column(disk, monkeypatch):
    monkeypatch.setattr(module, "_ROWS_OF_PART", 2)
    monkeypatch.setattr(module, "_LINKS_AT_ONCE", 2)
    tokens = tokens_of(disk, list("abcde"))
    (rows,) = tokens.rows_of(column(disk, ["e", "a", "c"]))
    assert tokens.find(["e", "a", "c"]).tolist() == rows.tolist() == [4, 0, 2]


@pytest.mark.parametrize(
    ("rows_of_part", "links_at_once"),
    [(7, 3), (7, 1 << 19), (1 << 18, 1 << 19)],
)
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    table=st.lists(st.text(max_size=4), max_size=60),
    links=st.lists(st.text(max_size=4), max_size=60),
)
def test_both_ways_find_the_same_rows(disk, monkeypatch, rows_of_part, links_at_once, table, links):
    monkeypatch.setattr(module, "_ROWS_OF_PART", rows_of_part)
    monkeypatch.setattr(module, "_LINKS_AT_ONCE", links_at_once)
    tokens = Tokens("log", disk)
    tokens.append(table)
    if len(set(table)) < len(table):
        with pytest.raises(SourceError, match="twice"):
            tokens.check_unique()
    else:
        tokens.check_unique()
        expected = [table.index(text) if text in table else -1 for text in links]
        (rows,) = tokens.rows_of(column(disk, links))
        assert tokens.find(links).tolist() == rows.tolist() == expected


@pytest.mark.parametrize("rows_of_part", [2, 1 << 18], ids=["in two parts", "in one part"])
def test_a_token_that_is_there_twice_is_an_error_where_a_link_names_it(
    disk, monkeypatch, rows_of_part
):
    """Of the ego poses most are named by nothing."""
    monkeypatch.setattr(module, "_ROWS_OF_PART", rows_of_part)
    tokens = Tokens("ego_pose", disk)
    tokens.append(["a", "b", "c", "a"])
    assert tokens.rows_of(column(disk, ["c", "b"]))[0].tolist() == [2, 1]
    with pytest.raises(SourceError, match="table 'ego_pose' has the token 'a' twice"):
        tokens.rows_of(column(disk, ["c"]), column(disk, ["b", "a"]))


@pytest.mark.slow
def test_more_tokens_than_a_part(tmp_path):
    disk = Disk(tmp_path)
    tokens = Tokens("log", disk)
    for first in range(0, 400_000, 50_000):
        tokens.append([f"{number:064x}" for number in range(first, first + 50_000)])
    tokens.check_unique()
    links = column(disk, [f"{number:064x}" for number in (399_999, 0, 400_000)])
    assert tokens.rows_of(links)[0].tolist() == [399_999, 0, -1]
    assert np.array_equal(tokens.rows_of(tokens)[0], np.arange(400_000))
    assert list(tmp_path.iterdir()) == []
