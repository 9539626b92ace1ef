"""Tokens of a source's tables and the links between tables by them, joined by DuckDB.

The tokens are columns on disk (:mod:`fuelrail.pipeline.storage.columns`), and DuckDB writes to disk what outgrows its
share of memory: so a join takes no memory for its rows. Tables of few rows are looked up without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError, needs
from fuelrail.pipeline.storage.columns import ROWS_AT_ONCE, Disk, Texts
from fuelrail.sharding.sources.shared.scan_report import Findings

_MEMORY: Final = "128MB"
_ROWS_OF_PART: Final = 1 << 18
"""A join of more rows is made in parts by the hash of the token, so that all joins take the same memory."""
_MOST_PARTS: Final = 32
_FEW_ROWS: Final = 1 << 13
"""Joins of at most this number of rows are looked up in memory: to load DuckDB takes 0.1 s and 40 MB."""

R = TypeVar("R")


class Owners(Protocol):
    """The tokens of rows that link to another table."""

    def __getitem__(self, row: int, /) -> str: ...


class Database(Disk):
    """Columns on disk, with joins of them."""

    @cached_property
    def _connection(self) -> Any:  # noqa: ANN401 - as slow to import as to connect
        with needs(f"a join of tables of more than {_FEW_ROWS:,} rows", "fuelrail[tables]"):
            import duckdb

        scratch = str(Path(self.folder) / "joins")
        return duckdb.connect(config={"memory_limit": _MEMORY, "threads": 1, "temp_directory": scratch})

    def close(self) -> None:
        """Free what joins took of memory and disk; columns stay good."""
        if "_connection" in self.__dict__:
            self._connection.close()
            del self._connection

    def pairs(self, own: Texts, links: Texts) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield rows of ``own`` and of ``links`` that have the same text, in any order, some at a time."""
        num_parts = min(_MOST_PARTS, -(-(len(own) + len(links)) // _ROWS_OF_PART))
        for part in range(num_parts):
            for name, column in (("own", own), ("links", links)):
                self._connection.register(name, _reader(column))
            mine = f"(SELECT * FROM {{}} WHERE hash(token) % {num_parts} = {part})"
            found = self._connection.sql(
                f"SELECT own.row, links.row AS link FROM {mine.format('own')} own JOIN {mine.format('links')} links "
                "USING (token)"
            )
            for batch in found.to_arrow_reader(ROWS_AT_ONCE):
                yield batch["row"].to_numpy(), batch["link"].to_numpy()
        if num_parts > 1:
            self.close()  # DuckDB keeps the memory of its largest join; to connect again takes 10 ms


def _reader(column: Texts) -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        first = 0
        for part in column.parts():
            rows = pa.array(np.arange(first, first + len(part)))
            yield pa.RecordBatch.from_arrays([part, rows], ["token", "row"])
            first += len(part)

    schema = pa.schema([("token", pa.large_string()), ("row", pa.int64())])
    return pa.RecordBatchReader.from_batches(schema, batches())


class Tokens(Texts):
    """The tokens that name a table's rows; resolves links to row numbers once all of them are added."""

    def __init__(self, table: str, database: Database, tokens: Sequence[str] = ()) -> None:
        """Take all ``tokens``, where they are known; raise SourceError for a duplicate then."""
        super().__init__(database)
        self.table, self._database = table, database
        if tokens:
            self.append(tokens)
            self.check_unique()

    def check_unique(self) -> None:
        """Raise SourceError for a duplicate token."""
        self.rows_of(self)

    @cached_property
    def _row_of(self) -> dict[str, int]:
        """The rows in memory: for tables of few rows, and for sources that are cut out, which are small."""
        tokens = itertools.chain.from_iterable(part.to_pylist() for part in self.parts())
        return {token: row for row, token in enumerate(tokens)}

    def find(self, tokens: Sequence[str]) -> NDArray[np.int64]:
        """Return the row number of each token; -1 where there is none. For a table of few rows."""
        return np.fromiter(map(self._row_of.get, tokens, itertools.repeat(-1)), np.int64, len(tokens))

    def resolve(self, tokens: Sequence[str], *, may_be_empty: bool = True, **where: Any) -> NDArray[np.int64]:
        """Do :meth:`resolve_all` for a few tokens at hand, for a table of few rows."""
        rows = self.find(tokens)
        self._check(rows, tokens, may_be_empty=may_be_empty, **where)
        return rows

    def resolve_all(self, links: Texts, *, may_be_empty: bool = True, **where: Any) -> NDArray[np.int64]:
        """Return the row number of each token; -1 for an empty one.

        ``where``: ``table`` and ``column`` of the links, and ``owners``, the tokens of the rows that have them; ``cut``
        may make dangling ones -1. Raises SourceError for a token that is not in this table, and for an empty one unless
        ``may_be_empty``.
        """
        rows = self.rows_of(links)
        self._check(rows, links, may_be_empty=may_be_empty, **where)
        return rows

    def rows_of(self, links: Texts) -> NDArray[np.int64]:
        """Return each token's row number, -1 where there is none; raise SourceError where two rows have one."""
        if len(self) + len(links) <= _FEW_ROWS and len(self._row_of) == len(self):
            return self.find(links.take(np.arange(len(links))))
        found = self._database.filled(-1, len(links), np.int64)
        for row, link in self._database.pairs(self, links):
            is_again = found[link] >= 0
            found[link] = row
            is_again |= found[link] != row
            if is_again.any():
                raise SourceError(f"table '{self.table}' has the token '{self[int(row[is_again.argmax()])]}' twice")
            self._database.used(len(row))
        return found

    def _check(
        self, rows: NDArray[np.int64], links: Sequence[str] | Texts, *,
        table: str, column: str, owners: Owners, may_be_empty: bool, cut: Cut | None = None,
    ) -> None:  # fmt: skip
        findings = Findings()
        for first in range(0, len(rows), ROWS_AT_ONCE):
            lacking = first + np.flatnonzero(rows[first : first + ROWS_AT_ONCE] < 0)
            if may_be_empty and isinstance(links, Texts):
                lacking = lacking[links.num_bytes(lacking) > 0]
            for at in lacking.tolist():
                token = links[at]
                if token and cut is not None and cut.is_on:
                    cut.count(table, column)
                elif token:
                    what = f"has {column} '{token}', not found in table '{self.table}'"
                    findings.add(table, f"table '{table}': row '{owners[at]}' {what}")
                elif not may_be_empty:
                    findings.add(table, f"table '{table}': row '{owners[at]}' has an empty {column}")
        findings.check()


class Cut:
    """What is done about links to rows that a cut-out source does not have: an error, or with ``is_on`` they are cut.

    ``counts``: table and column to number of links that were cut.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on, self.counts = is_on, dict[str, int]()

    def count(self, table: str, column: str, number: int = 1) -> None:
        """Count links that were cut."""
        if number:
            name = f"{table}.{column}"
            self.counts[name] = self.counts.get(name, 0) + number

    def kept(self, records: list[R], table: str, **links: Tokens) -> list[R]:
        """Return the records all of whose ``links``, by column, are there; without ``is_on`` all of them."""
        for column, tokens in links.items() if self.is_on else ():
            rows = tokens.find([getattr(record, column) for record in records]).tolist()
            self.count(table, column, sum(row < 0 for row in rows))
            records = [record for record, row in zip(records, rows, strict=True) if row >= 0]
        return records
