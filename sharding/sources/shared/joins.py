"""Tokens of a source's tables and the links between tables by them, looked up by Arrow.

The tokens are columns on disk (:mod:`fuelrail.pipeline.storage.columns`). A part of a table's
tokens at a time is made a hash table, and all links are looked up in it: so a join takes the memory
of a part, however many rows there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import pyarrow.compute as pc

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.storage.columns import ROWS_AT_ONCE, Texts
from fuelrail.sharding.sources.shared.scan_report import Findings

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import I64, Mask
    from fuelrail.pipeline.storage.columns import Disk

_ROWS_OF_PART: Final = 1 << 18
"""Tokens that are a hash table at once; of nuScenes' length they take 25 MB."""
_LINKS_AT_ONCE: Final = 1 << 19
"""Links that are looked up by one call, which makes the hash table again."""
_HASHES: Final = 1 << 23

R = TypeVar("R")


class Tokens(Texts):
    """The tokens that name a table's rows; resolves links to row numbers once all of them are
    added.
    """

    def __init__(self, table: str, disk: Disk) -> None:
        super().__init__(disk)
        self.table = table

    def check_unique(self) -> None:
        """Raise SourceError for a duplicate token."""
        self.rows_of(self)

    @cached_property
    def _row_of(self) -> dict[str, int]:
        """The rows in memory: for tables of few rows, and for sources that are cut out, which
        are small.
        """
        tokens = itertools.chain.from_iterable(part.to_pylist() for part in self.parts())
        return {token: row for row, token in enumerate(tokens)}

    def find(self, tokens: Sequence[str]) -> I64:
        """Return the row number of each token; -1 where there is none. For a table of few rows."""
        return np.fromiter(
            map(self._row_of.get, tokens, itertools.repeat(-1)),
            np.int64,
            len(tokens),
        )

    def rows_of(self, *links: Texts) -> list[I64]:
        """Return for each column each token's row number, -1 where there is none.

        Raises SourceError where two rows have one of these tokens.
        """
        ends = np.cumsum([len(column) for column in links])
        num_links = int(ends[-1])
        rows = self.disk.filled(-1, num_links, np.int64)
        if not len(rows):
            return np.split(rows, ends[:-1])
        first_row = 0
        for tokens in self.parts(_ROWS_OF_PART):
            places = pc.index_in(tokens, tokens).to_numpy()
            is_twice = np.zeros(len(tokens), np.bool_)
            is_twice[places[places != np.arange(len(tokens))]] = True
            first_link = 0
            for texts in itertools.chain.from_iterable(
                column.parts(_LINKS_AT_ONCE) for column in links
            ):
                matches = pc.index_in(texts, tokens)
                linked = first_link + np.flatnonzero(matches.is_valid().to_numpy(False))
                place = matches.drop_null().to_numpy()
                wrong = place[is_twice[place] | (rows[linked] >= 0)]
                if len(wrong):
                    token = tokens[int(wrong[0])].as_py()
                    raise SourceError(f"table '{self.table}' has the token '{token}' twice")
                rows[linked] = first_row + place
                first_link += len(texts)
            first_row += len(tokens)
        return np.split(rows, ends[:-1])

    def check(
        self,
        rows: I64,
        links: Sequence[str] | Texts,
        *,
        table: str,
        column: str,
        owners: Sequence[str] | Texts,
        may_be_empty: bool,
        cut: Cut | None = None,
        remedy: str = "",
    ) -> None:
        """Raise SourceError for links without a row, with ``may_be_empty`` but for empty ones.

        ``rows`` were found for ``links``, which are of this table and column; ``owners`` are the
        tokens of its rows. With ``cut``, links that dangle are counted instead. ``remedy`` ends the
        error for a link that dangles.
        """
        findings = Findings()
        for first in range(0, len(rows), ROWS_AT_ONCE):
            lacking = first + np.flatnonzero(rows[first : first + ROWS_AT_ONCE] < 0)
            if may_be_empty and isinstance(links, Texts):
                lacking = lacking[links.num_bytes(lacking) > 0]
            for row in lacking.tolist():
                token = links[row]
                if token and cut is not None and cut.is_on:
                    cut.count(table, column)
                elif token:
                    problem = f"has {column} '{token}', not found in table '{self.table}'"
                    findings.add(
                        table,
                        f"table '{table}': row '{owners[row]}' {problem}{remedy}",
                    )
                elif not may_be_empty:
                    findings.add(
                        table,
                        f"table '{table}': row '{owners[row]}' has an empty {column}",
                    )
        findings.check()


class TextFilter:
    """Texts to look for, as bits of their hashes: memory does not grow, but a few others are
    taken for one of them.
    """

    @cached_property
    def _is_wanted(self) -> Mask:
        return np.zeros(_HASHES, np.bool_)

    def add(self, texts: Sequence[str]) -> None:
        """Look for these too."""
        self._is_wanted[_hash_texts(texts)] = True

    def select(self, records: list[R], texts: Sequence[str]) -> list[R]:
        """Return the records whose text is looked for, and a few others."""
        is_wanted = self._is_wanted[_hash_texts(texts)].tolist()
        return list(itertools.compress(records, is_wanted))


def _hash_texts(texts: Sequence[str]) -> I64:
    hashes = np.fromiter(map(hash, texts), np.int64, len(texts))
    return hashes & (_HASHES - 1)


class Cut:
    """What is done about links to rows that a cut-out source does not have: an error, or with
    ``is_on`` they are cut.

    ``counts``: table and column to number of links that were cut. ``remedy`` says which option of
    the source turns it on; empty: none.
    """

    def __init__(self, *, is_on: bool, remedy: str = "") -> None:
        self.is_on = is_on
        self.remedy = remedy
        self.counts = dict[str, int]()

    def count(self, table: str, column: str, number: int = 1) -> None:
        """Count links that were cut."""
        if number:
            name = f"{table}.{column}"
            self.counts[name] = self.counts.get(name, 0) + number

    def select(self, records: list[R], table: str, **links: Tokens) -> list[R]:
        """Return the records all of whose ``links``, by column, are there; without ``is_on`` all
        of them.
        """
        if self.is_on:
            for column, tokens in links.items():
                texts = [getattr(record, column) for record in records]
                is_found = [row >= 0 for row in tokens.find(texts).tolist()]
                self.count(table, column, len(records) - sum(is_found))
                records = list(itertools.compress(records, is_found))
        return records
