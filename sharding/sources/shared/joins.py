"""Tokens of a source's tables and the links between tables by them, joined by DuckDB.

The tokens are columns on disk (:mod:`fuelrail.pipeline.storage.columns`), and DuckDB writes to disk what outgrows its
share of memory: so a join takes no memory for its rows. Tables of few rows are looked up without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError, needs
from fuelrail.pipeline.storage.columns import ROWS_AT_ONCE, Disk, Texts
from fuelrail.sharding.sources.shared.scan_report import Findings

_MEMORY: Final = "128MB"
_ROWS_OF_PART: Final = 1 << 18
"""Links to a table of more rows are joined in parts by the hash of the token, so that joins take the same memory."""
_HASHES: Final = 1 << 23
_FEW_ROWS: Final = 1 << 13
"""Joins of at most this number of rows are looked up in memory: to load DuckDB takes 0.1 s and 40 MB."""

R = TypeVar("R")


class Database(Disk):
    """Columns on disk, with joins of them."""

    @cached_property
    def _connection(self) -> Any:
        with needs(f"a join of tables of more than {_FEW_ROWS:,} rows", "fuelrail[tables]"):
            import duckdb

        scratch = str(Path(self.folder) / "joins")
        return duckdb.connect(
            config={"memory_limit": _MEMORY, "threads": 1, "temp_directory": scratch}
        )

    def close(self) -> None:
        """Free what joins took of memory and disk; columns stay good."""
        if "_connection" in self.__dict__:
            self._connection.close()
            del self._connection

    def pairs(
        self, own: Texts, links: Sequence[Texts]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield rows of ``own`` and of ``links`` that have the same text, in any order, some at a time.

        Rows of ``links`` are counted over all of these columns.
        """
        num_parts = -(-len(own) // _ROWS_OF_PART) if any(map(len, links)) else 0
        for part in range(num_parts):
            for name, columns in (("own", [own]), ("links", links)):
                self._connection.register(name, _reader(columns))
            mine = (
                f"(SELECT * FROM {{}} WHERE hash(token) % {num_parts} = {part})"
                if num_parts > 1
                else "{}"
            )
            # The hash table is made of the right side.
            found = self._connection.sql(
                f"SELECT own.row, links.row AS link FROM {mine.format('links')} links JOIN {mine.format('own')} own "
                "USING (token)"
            )
            for batch in found.to_arrow_reader(ROWS_AT_ONCE):
                yield batch["row"].to_numpy(), batch["link"].to_numpy()
        if num_parts > 1:
            self.close()  # DuckDB keeps the memory of its largest join; to connect again takes 10 ms


def _reader(columns: Sequence[Texts]) -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        first = 0
        for column in columns:
            for part in column.parts():
                rows = pa.array(np.arange(first, first + len(part)))
                yield pa.RecordBatch.from_arrays([part, rows], ["token", "row"])
                first += len(part)

    schema = pa.schema([("token", pa.large_string()), ("row", pa.int64())])
    return pa.RecordBatchReader.from_batches(schema, batches())


class Tokens(Texts):
    """The tokens that name a table's rows; resolves links to row numbers once all of them are added."""

    def __init__(self, table: str, database: Database) -> None:
        super().__init__(database)
        self.table, self._database = table, database

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
        return np.fromiter(
            map(self._row_of.get, tokens, itertools.repeat(-1)), np.int64, len(tokens)
        )

    def rows_of(self, *links: Texts) -> list[NDArray[np.int64]]:
        """Return for each column each token's row number, -1 where there is none.

        Raises SourceError where two rows have one of these tokens.
        """
        ends = np.cumsum([len(column) for column in links])
        if len(self) + ends[-1] <= _FEW_ROWS and len(self._row_of) == len(self):
            return [self.find(column.take(np.arange(len(column)))) for column in links]
        found = self._database.filled(-1, int(ends[-1]), np.int64)
        for row, link in self._database.pairs(self, links):
            is_again = found[link] >= 0
            found[link] = row
            is_again |= found[link] != row
            if is_again.any():
                raise SourceError(
                    f"table '{self.table}' has the token '{self[int(row[is_again.argmax()])]}' twice"
                )
            self._database.used(len(row))
        return np.split(found, ends[:-1])

    def check(
        self,
        rows: NDArray[np.int64],
        links: Sequence[str] | Texts,
        *,
        table: str,
        column: str,
        owners: Sequence[str] | Texts,
        may_be_empty: bool,
        cut: Cut | None = None,
    ) -> None:
        """Raise SourceError for links without a row, with ``may_be_empty`` but for empty ones.

        ``rows`` were found for ``links``, which are of this table and column; ``owners`` are the tokens of its rows.
        With ``cut``, links that dangle are counted instead.
        """
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
                    findings.add(
                        table, f"table '{table}': row '{owners[at]}' has an empty {column}"
                    )
        findings.check()


class Wanted:
    """Texts to look for, as bits of their hashes: memory does not grow, but a few others are taken for one of them."""

    @cached_property
    def _is_wanted(self) -> NDArray[np.bool_]:
        return np.zeros(_HASHES, np.bool_)

    def add(self, texts: Sequence[str]) -> None:
        """Look for these too."""
        self._is_wanted[_hashes(texts)] = True

    def kept(self, records: list[R], texts: Sequence[str]) -> list[R]:
        """Return the records whose text is looked for, and a few others."""
        return list(itertools.compress(records, self._is_wanted[_hashes(texts)].tolist()))


def _hashes(texts: Sequence[str]) -> NDArray[np.int64]:
    return np.fromiter(map(hash, texts), np.int64, len(texts)) & (_HASHES - 1)


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
