"""Multisets in constant memory: an invertible table, and a sample of rows that is counted exactly."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.loaders.witness.rows import NAME_BYTES, Hashes, Names, Rows, mix

LARGE: Final = 2048
"""Cells of each third of a table that names up to about 4,000 rows."""

SMALL: Final = 64
"""Cells of each third of a table that names up to about 100 rows, and fits into a checkpoint."""

SAMPLE_ROWS: Final = 1024
STATE_ROWS: Final = 64
"""Rows of a sample in a checkpoint."""

ROW: Final = np.dtype(
    [
        ("hash", "<u8"),
        ("count", "<i8"),
        ("digest", "<u8"),
        ("alike", "<i8"),
        ("name", f"S{NAME_BYTES}"),
    ]
)
"""A row of a sample: how many times it came, a digest of its content when it came first (0 where
contents are not compared), and how many of its later contents equal that."""

ALL: Final = 2**64 - 1
_WORD: Final = np.uint64(0xFFFFFFFF)
_CHECK: Final = np.uint64(0xD1B54A32D192ED03)
_FIELDS: Final = 4  # count, two halves of the hash, check
_MANY: Final = 4096


class Surplus(NamedTuple):
    """Rows that one multiset holds more often than another, or less often.

    Attributes:
        hashes: (rows,).
        names: (rows,), empty where the table has none.
        times: (rows,), how many times more; negative: fewer.
        is_whole: whether these are all such rows; else the table held too many to name.
        estimate: number of such rows, counted with their times; exact where `is_whole`.
    """

    hashes: Hashes
    names: Names
    times: NDArray[np.int64]
    is_whole: bool
    estimate: int


class Table:
    """A multiset of rows as sums, from which the rows can be read back if they are few.

    The sums are linear: the table of a union is the sum of tables, and the difference of two
    multisets is that of their tables. So the rows by which two large multisets differ can be
    named, and what they share costs nothing (Goodrich, Mitzenmacher: Invertible Bloom Lookup
    Tables, 2011; Eppstein et al.: What's the Difference?, 2011).

    ``cells``: (3, size, 4 + words), sums over the rows of a cell: how many, halves of their
    hashes, a check of the hash, and their names in words of 32 bits. No sum of less than 2^31 rows
    overflows.
    """

    def __init__(self, size: int, has_names: bool = False) -> None:
        words = NAME_BYTES // 4 if has_names else 0
        self.cells = np.zeros((3, size, _FIELDS + words), np.int64)

    def add(self, rows: Rows) -> None:
        """Add rows."""
        hashes = rows.hashes[:, 0]
        values = self._values(hashes, rows.names)
        for third, cells in zip(self.cells, self._cells(hashes), strict=True):
            if len(hashes) < _MANY:
                np.add.at(third, cells, values)
                continue
            for start in range(0, len(hashes), 2**20):  # sums that a float64 holds exactly
                part = slice(start, start + 2**20)
                for field in range(values.shape[1]):
                    sums = np.bincount(cells[part], values[part, field], len(third))
                    third[:, field] += sums.astype(np.int64)

    def fold(self) -> Table:
        """Return the table of `SMALL` cells that the same rows have, without names."""
        table = Table(SMALL)
        cells = self.cells[:, :, :_FIELDS].reshape(3, -1, SMALL, _FIELDS)
        table.cells = cells.sum(axis=1)
        return table

    def surplus(self) -> Surplus:
        """Return the rows that this table, a difference of two, holds more or fewer times than 0.

        Cells that hold one row alone are read, the row is taken from its other cells, and so on.
        """
        size = self.cells.shape[1]
        work = Table(1)
        work.cells = self.cells.copy()
        rounds = [work._read_single_rows()]
        # A table that no rows made may go on without end.
        while len(rounds[-1][0]) and sum(len(hashes) for hashes, _, _ in rounds) <= 3 * size:
            hashes, names, times = rounds[-1]
            values = work._values(hashes, names) * times[:, None]
            for third, cells in zip(work.cells, work._cells(hashes), strict=True):
                np.subtract.at(third, cells, values)
            rounds.append(work._read_single_rows())
        hashes, names, times = (np.concatenate(parts) for parts in zip(*rounds, strict=True))
        is_whole = not work.cells.any()
        estimate = int(np.abs(times).sum()) if is_whole else self._estimate()
        return Surplus(hashes, names, times, is_whole=is_whole, estimate=estimate)

    def _estimate(self) -> int:
        """Return how many rows the table holds more or fewer times than 0.

        The squares of a third's counts have the expectation F + (N^2 - F) / cells, where F is the
        sum of the rows' squared times and N that of their times. With times of 1 and -1, F is the
        number of rows; the standard error of F is about 2 % for 2,048 cells.
        """
        counts = self.cells[:, :, 0].astype(np.float64)
        size = counts.shape[1]
        net = counts.sum(axis=1).mean()
        squares = (counts**2).sum(axis=1).mean()
        estimate = float((squares - net**2 / size) / (1 - 1 / size))
        return max(round(estimate), abs(round(float(net))))

    def _cells(self, hashes: Hashes) -> list[NDArray[np.int64]]:
        size = np.uint64(self.cells.shape[1])
        return [((hashes >> np.uint64(21 * third)) % size).astype(np.int64) for third in range(3)]

    def _values(self, hashes: Hashes, names: Names) -> NDArray[np.int64]:
        values = np.empty((len(hashes), self.cells.shape[2]), np.int64)
        values[:, 0] = 1
        values[:, 1] = hashes >> np.uint64(32)
        values[:, 2] = hashes & _WORD
        values[:, 3] = mix(hashes ^ _CHECK) >> np.uint64(32)
        if values.shape[1] > _FIELDS:
            values[:, _FIELDS:] = (
                np.ascontiguousarray(names).view(np.uint32).reshape(len(names), -1)
            )
        return values

    def _read_single_rows(self) -> tuple[Hashes, Names, NDArray[np.int64]]:
        """Return hash, name and times of each row that is alone in a cell."""
        size = self.cells.shape[1]
        cells = self.cells.reshape(3 * size, -1)
        places = np.flatnonzero(cells[:, 0])
        times = cells[places, 0]
        with np.errstate(all="ignore"):
            values, rests = np.divmod(cells[places, 1:], times[:, None])
        is_single = ~rests.any(axis=1)
        is_single &= ((values >= 0) & (values <= int(_WORD))).all(axis=1)
        places, times, values = (
            places[is_single],
            times[is_single],
            values[is_single],
        )
        hashes = (values[:, 0].astype(np.uint64) << np.uint64(32)) | values[:, 1].astype(np.uint64)
        shifts = np.uint64(21) * (places // size).astype(np.uint64)
        is_own_cell = (hashes >> shifts) % np.uint64(size) == (places % size).astype(np.uint64)
        checks = (mix(hashes ^ _CHECK) >> np.uint64(32)).astype(np.int64)
        places = np.flatnonzero(is_own_cell & (checks == values[:, 2]))
        places = places[np.unique(hashes[places], return_index=True)[1]]
        names = np.zeros(len(places), f"S{NAME_BYTES}")
        if values.shape[1] > _FIELDS - 1:
            words = np.ascontiguousarray(values[places, _FIELDS - 1 :].astype(np.uint32))
            names = words.view(f"S{NAME_BYTES}").reshape(-1)
        return hashes[places], names, times[places]


class CountedRows:
    """The rows with the smallest hashes, each with how many times it came: exact, and at random.

    A row that is among the smallest at the end was so whenever it came, so its count misses
    nothing.

    Attributes:
        rows: (rows,) of `ROW`, by their hashes.
        limit: rows of larger hashes are not in the sample; `ALL` where all rows are.
    """

    def __init__(self, rows: NDArray[Any] | None = None, limit: int = ALL) -> None:
        self.rows = np.zeros(0, ROW) if rows is None else rows
        self.limit = limit

    def select(self, hashes: Hashes) -> NDArray[np.int64]:
        """Return which rows of a batch belong into the sample."""
        return np.flatnonzero(hashes <= np.uint64(self.limit))

    def add(self, rows: Rows, chosen: NDArray[np.int64], digests: Hashes) -> None:
        """Add the chosen rows of a batch, with digests of their contents."""
        other = CountedRows(np.zeros(len(chosen), ROW))
        other.rows["hash"] = rows.hashes[chosen, 0]
        other.rows["count"] = 1
        other.rows["digest"] = digests
        other.rows["name"] = rows.names[chosen]
        self.merge(other)

    def merge(self, other: CountedRows) -> None:
        """Add what another sample holds; above the smaller limit of both, counts are not exact and
        go.
        """
        rows = np.concatenate([self.rows, other.rows])
        self.limit = min(self.limit, other.limit)
        rows = rows[rows["hash"] <= np.uint64(self.limit)]
        rows = rows[np.argsort(rows["hash"], kind="stable")]
        starts = np.flatnonzero(np.diff(rows["hash"], prepend=~rows["hash"][:1]))
        self.rows = rows[starts]
        if len(starts) < len(rows):
            first = np.repeat(self.rows["digest"], np.diff(starts, append=len(rows)))
            alike = (rows["digest"] == first) & (first != 0)
            later = np.ones(len(rows), np.int64)
            later[starts] = 0
            self.rows["alike"] = np.add.reduceat(alike * (rows["alike"] + later), starts)
            self.rows["count"] = np.add.reduceat(rows["count"], starts)
        self.cut(SAMPLE_ROWS)

    def cut(self, size: int) -> CountedRows:
        """Keep the rows with the ``size`` smallest hashes; return the sample."""
        if len(self.rows) > size:
            self.rows = self.rows[:size].copy()
            self.limit = int(self.rows["hash"][-1])
        return self
