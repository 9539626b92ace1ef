"""Links between tables, by tokens that lie on disk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.storage.spill import Spill
from fuelrail.sharding.sources.columns import tokens as module
from fuelrail.sharding.sources.columns.tokens import Sieve, TokenColumn, Tokens


def test_links(tmp_path):
    tokens = Tokens("log", Spill(tmp_path), ["a", "b", "c"])
    link = {"table": "scene", "column": "log_token", "owners": ["x", "y", "z"]}
    assert tokens.find(["c", "q", ""]).tolist() == [2, -1, -1]
    assert tokens.resolve(["c", "", "a"], **link).tolist() == [2, -1, 0]
    assert tokens.need(["b", "b"], **link).tolist() == [1, 1]
    with pytest.raises(SourceError, match="table 'scene': row 'y' has log_token 'q', not found in table 'log'"):
        tokens.resolve(["a", "q"], **link)
    with pytest.raises(SourceError, match="row 'z' has an empty log_token"):
        tokens.need(["a", "b", ""], **link)
    with pytest.raises(SourceError, match="table 'log' has the token 'a' twice"):
        Tokens("log", Spill(tmp_path), ["a", "b", "a"])


def test_links_of_a_whole_column(tmp_path):
    spill = Spill(tmp_path)
    tokens = Tokens("log", spill, ["a", "b", "c"])

    def column(*links):
        made = TokenColumn(spill)
        made.extend(links)
        return made

    link = {"table": "scene", "column": "log_token", "owners": ["x", "y", "z"]}
    assert tokens.resolve_all(column("c", "", "a"), **link).tolist() == [2, -1, 0]
    with pytest.raises(SourceError, match="table 'scene': row 'y' has log_token 'q', not found in table 'log'"):
        tokens.resolve_all(column("a", "q"), **link)
    with pytest.raises(SourceError, match="row 'y' has an empty log_token"):
        tokens.resolve_all(column("a", ""), **link, may_be_empty=False)


def test_an_empty_table_has_no_token(tmp_path):
    tokens = Tokens("log", Spill(tmp_path), [])
    assert tokens.find(["a", ""]).tolist() == [-1, -1]
    assert tokens.find([]).tolist() == []


TEXTS = st.text(max_size=4)


@settings(max_examples=100)
@given(table=st.lists(TEXTS, max_size=60), wanted=st.lists(TEXTS, max_size=60), weak=st.booleans())
def test_a_token_is_found_where_it_stands_first(tmp_path_factory, table, wanted, weak):
    """Also where all digests begin alike, so that the sorted words alone tell nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if weak:
            patch.setattr(module, "_digests", lambda texts: strong(texts) & np.array([3 << 62, -1 % 2**64], "u8"))
        tokens = Tokens("log", Spill(tmp_path_factory.mktemp("spill")))
        tokens.extend(table)
        assert tokens.find(wanted).tolist() == [table.index(text) if text in table else -1 for text in wanted]
        if len(set(table)) < len(table):
            with pytest.raises(SourceError, match="twice"):
                tokens.check_unique()
        else:
            tokens.check_unique()
        assert [tokens[row] for row in range(len(table))] == table


strong = module._digests


def test_a_sieve_lets_all_tokens_of_its_column_through(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    column = TokenColumn(Spill(tmp_path))
    column.extend([f"here{number}" for number in range(100)])
    tokens = [f"{where}{number}" for number in range(100) for where in ("here", "elsewhere")]
    likely = Sieve(column).likely(tokens).tolist()
    assert set(range(0, 200, 2)) <= set(likely)
    assert len(likely) < 110
    assert Sieve(TokenColumn(Spill(tmp_path))).likely(tokens).tolist() == []
