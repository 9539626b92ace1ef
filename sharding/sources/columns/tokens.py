"""Tokens of a source's tables and the links between tables by them; names of the files of a listing likewise.

A token is looked up by its 128-bit xxh3 digest: a table's digests lie in a file, and a sorted column of as many 64-bit
words, each the upper part of a digest and the row's number, leads to them. So a join takes no memory for its rows
(:mod:`fuelrail.pipeline.storage.spill`); only the texts of the rows at hand are Python objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import numpy as np
import xxhash

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.storage.spill import ROWS_AT_ONCE
from fuelrail.sharding.sources.scan_report import MOST_FINDINGS, Findings, source_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.storage.spill import Spill


class Owners(Protocol):
    """The tokens of rows that link to another table."""

    def __getitem__(self, row: int, /) -> str: ...


R = TypeVar("R")


class TokenColumn:
    """A column of tokens, in row order."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._texts = spill.texts()
        self._digests = spill.column(np.uint64, (2,))

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, row: int) -> str:
        return self._texts[row]

    def take(self, rows: NDArray[np.int64]) -> list[str]:
        """The tokens of some rows, in that order."""
        return self._texts.take(rows)

    def extend(self, tokens: Sequence[str]) -> None:
        """Add rows."""
        encoded = [token.encode() for token in tokens]
        self._texts.append(encoded)
        self._digests.append(_digests(encoded))

    def digests(self) -> Iterator[NDArray[np.uint64]]:
        """Digests (N, 2) of the rows, part by part."""
        return self._digests.parts()


class Tokens(TokenColumn):
    """The tokens that name a table's rows; resolves links to row numbers, from when it is whole."""

    def __init__(self, table: str, spill: Spill, tokens: Sequence[str] | None = None) -> None:
        """``tokens``: all of them, where they are at hand; raises SourceError for a duplicate then."""
        super().__init__(spill)
        self.table = table
        self._sorted: NDArray[np.uint64] | None = None
        self._at_hand: dict[str, int] = {}
        if tokens is not None:
            self.extend(tokens)
            self.check_unique()
            self._at_hand = {token: row for row, token in enumerate(tokens)}

    def check_unique(self) -> None:
        """Raise SourceError for a duplicate token."""
        words = self._words
        for first in range(0, len(words), ROWS_AT_ONCE):
            part = words[first : first + ROWS_AT_ONCE + 1]
            for at in np.flatnonzero(part[:-1] & self._high == part[1:] & self._high).tolist():
                row = int(part[at + 1] & ~self._high)
                if self._find(self._digests.values[row][None])[0] != row:
                    raise SourceError(f"table '{self.table}' has the token '{self[row]}' twice")
        self._spill.release()

    def find(self, tokens: Sequence[str]) -> NDArray[np.int64]:
        """Row number of each token, the first one that has it; -1 where there is none."""
        if self._at_hand:
            return np.array([self._at_hand.get(token, -1) for token in tokens], np.int64)
        return self._find(_digests([token.encode() for token in tokens]))

    def resolve(self, tokens: Sequence[str], *, table: str, column: str, owners: Owners) -> NDArray[np.int64]:
        """Row number of each token; -1 for an empty one. ``owners`` are the tokens of the rows that link here.

        Raises SourceError for a token that is not in this table.
        """
        rows = self.find(tokens)
        dangling = [at for at in np.flatnonzero(rows < 0).tolist() if tokens[at]]
        if dangling:
            shown = dangling[:MOST_FINDINGS]
            raise source_error([self._dangling(table, column, owners[at], tokens[at]) for at in shown], len(dangling))
        return rows

    def need(self, tokens: Sequence[str], *, table: str, column: str, owners: Owners) -> NDArray[np.int64]:
        """As :meth:`resolve`, and an empty token is a SourceError too."""
        rows = self.resolve(tokens, table=table, column=column, owners=owners)
        empty = np.flatnonzero(rows < 0).tolist()
        if empty:
            texts = [f"table '{table}': row '{owners[at]}' has an empty {column}" for at in empty[:MOST_FINDINGS]]
            raise source_error(texts, len(empty))
        return rows

    def resolve_all(
        self,
        links: TokenColumn,
        *,
        table: str,
        column: str,
        owners: Owners,
        may_be_empty: bool = True,
        cut: Cut | None = None,
    ) -> NDArray[np.int64]:
        """:meth:`resolve` (or :meth:`need`) of a whole column, to a spilled one; ``cut`` may make dangling ones -1."""
        resolved = self._spill.column(np.int64)
        findings = Findings()
        for part in links.digests():
            rows, first = self._find(part), len(resolved)
            for at in np.flatnonzero(rows < 0).tolist():
                token = links[first + at]
                if token and cut is not None and cut.is_on:
                    cut.count(table, column)
                elif token:
                    findings.add(table, self._dangling(table, column, owners[first + at], token))
                elif not may_be_empty:
                    findings.add(table, f"table '{table}': row '{owners[first + at]}' has an empty {column}")
            resolved.append(rows)
        findings.check()
        return resolved.values

    def _dangling(self, table: str, column: str, owner: str, token: str) -> str:
        return f"table '{table}': row '{owner}' has {column} '{token}', not found in table '{self.table}'"

    @property
    def _row_bits(self) -> int:
        return len(self).bit_length()

    @property
    def _high(self) -> np.uint64:
        """The bits of a word that are of the digest."""
        return np.uint64(((1 << 64) - 1) >> self._row_bits << self._row_bits)

    @property
    def _words(self) -> NDArray[np.uint64]:
        """For each row, sorted: the upper bits of the digest's first half, and the row's number."""
        if self._sorted is None:
            words = self._spill.column(np.uint64)
            for part in self.digests():
                words.append((part[:, 0] & self._high) | np.arange(len(words), len(words) + len(part), dtype=np.uint64))
            self._sorted = words.values
            self._sorted.sort()
        return self._sorted

    def _find(self, digests: NDArray[np.uint64]) -> NDArray[np.int64]:
        words, own = self._words, self._digests.values
        wanted: NDArray[Any] = digests[:, 0] & self._high
        at = np.searchsorted(words, wanted)
        found = np.full(len(digests), -1, np.int64)
        looking = np.flatnonzero(at < len(words))
        while looking.size:  # more than once where upper bits are alike
            word = words[at[looking]]
            alike = word & self._high == wanted[looking]
            looking, row = looking[alike], (word[alike] & ~self._high).astype(np.int64)
            same = (own[row] == digests[looking]).all(axis=1)
            found[looking[same]] = row[same]
            looking = looking[~same]
            at[looking] += 1
            looking = looking[at[looking] < len(words)]
        self._spill.used(len(digests))
        return found


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


class Sieve:
    """A quick test that finds most tokens absent from a column, at a fifth of the cost of looking them up."""

    _NUM_SLOTS: Final = 1 << 21

    def __init__(self, column: TokenColumn) -> None:
        self._has = np.zeros(self._NUM_SLOTS, np.bool_)
        for first in range(0, len(column), ROWS_AT_ONCE):
            rows = np.arange(first, min(first + ROWS_AT_ONCE, len(column)))
            self._has[self._slots(column.take(rows))] = True

    def likely(self, tokens: Sequence[str]) -> NDArray[np.int64]:
        """Positions of the tokens that the column may have; those that it has are among them."""
        return np.flatnonzero(self._has[self._slots(tokens)])

    def _slots(self, tokens: Sequence[str]) -> NDArray[np.int64]:
        return np.fromiter(map(hash, tokens), np.int64, len(tokens)) & (self._NUM_SLOTS - 1)


def _digests(encoded: Sequence[bytes]) -> NDArray[np.uint64]:
    """(N, 2)."""
    return np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, encoded)), np.uint64).reshape(-1, 2)
