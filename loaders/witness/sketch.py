"""Multisets in constant memory: an invertible table, and a sample of rows, counted exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.loaders.witness.rows import NAME_BYTES, Hashes, Names, Rows, mix

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I64


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
_HALF: Final = np.uint64(32)
_WORD: Final = np.uint64(0xFFFFFFFF)
_CHECK: Final = np.uint64(0xD1B54A32D192ED03)
_SHIFTS: Final = np.array([[0], [21], [42]], np.uint64)
_FIELDS: Final = 4  # count, two halves of the hash, check


class _SingleRows(NamedTuple):
    """Rows that are alone in a cell of a table."""

    hashes: Hashes
    names: Names
    times: I64


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
    times: I64
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

    def add(
        self,
        hashes: Hashes,
        names: Names,
        times: I64 | None = None,
    ) -> None:
        """Add rows by the first column of their hashes, each a number of times; None: once."""
        width = self.cells.shape[2]
        values = np.empty((len(hashes), width), np.int64)
        values[:, 0] = 1
        values[:, 1] = hashes >> _HALF
        values[:, 2] = hashes & _WORD
        values[:, 3] = _check(hashes)
        if width > _FIELDS:
            words = np.ascontiguousarray(names).view(np.uint32)
            values[:, _FIELDS:] = words.reshape(len(names), -1)
        if times is not None:
            values *= times[:, None]
        # One index for each number: numpy adds along one axis several times as fast.
        firsts = self._cells(hashes) * width
        places = firsts[:, :, None] + np.arange(width)
        addends = np.broadcast_to(values, places.shape)
        numbers = self.cells.reshape(-1)
        np.add.at(numbers, places.reshape(-1), addends.reshape(-1))

    def _cells(self, hashes: Hashes) -> I64:
        """Return the cells of each row, (3, rows): one of each third, counted over all thirds."""
        size = self.cells.shape[1]
        remainders = (hashes >> _SHIFTS) % np.uint64(size)
        first_cells = np.array([[0], [size], [2 * size]])
        cells: I64 = first_cells + remainders.astype(np.int64)
        return cells

    def fold(self) -> Table:
        """Return the table of `SMALL` cells that the same rows have, without names."""
        table = Table(SMALL)
        fields = self.cells[:, :, :_FIELDS]
        folds = fields.reshape(3, -1, SMALL, _FIELDS)
        table.cells = folds.sum(axis=1)
        return table

    def surplus(self) -> Surplus:
        """Return the rows that this table, a difference of two, holds more or fewer times than 0.

        Cells that hold one row alone are read, the row is taken from its other cells, and so on.
        """
        counts = self.cells[:, :, 0]
        rest = Table(1)
        rest.cells = self.cells.copy()
        rounds: list[_SingleRows] = []
        num_rows = 0
        # A table that no rows made may go on without end.
        while num_rows <= counts.size:
            single = rest._read_single_rows()
            rounds.append(single)
            if not len(single.hashes):
                break
            num_rows += len(single.hashes)
            rest.add(single.hashes, single.names, -single.times)
        times = np.concatenate([single.times for single in rounds])
        is_whole = not rest.cells.any()
        estimate = int(np.abs(times).sum())
        if not is_whole:
            # The squares of a third's counts have the expectation F + (N^2 - F) / cells, where F is
            # the sum of the rows' squared times and N that of their times. With times of 1 and -1,
            # F is the number of rows; the standard error of F is about 2 % for 2,048 cells.
            counts_of_thirds = counts.astype(np.float64)
            size = counts_of_thirds.shape[1]
            net = counts_of_thirds.sum(axis=1).mean()
            squares = (counts_of_thirds**2).sum(axis=1).mean()
            num_differing = (squares - net**2 / size) / (1 - 1 / size)
            estimate = max(round(float(num_differing)), abs(round(float(net))))
        return Surplus(
            hashes=np.concatenate([single.hashes for single in rounds]),
            names=np.concatenate([single.names for single in rounds]),
            times=times,
            is_whole=is_whole,
            estimate=estimate,
        )

    def _read_single_rows(self) -> _SingleRows:
        """Return the rows that are alone in a cell, each once."""
        cells = self.cells.reshape(-1, self.cells.shape[2])
        places = np.flatnonzero(cells[:, 0])
        times = cells[places, 0]
        sums = cells[places, 1:]
        with np.errstate(all="ignore"):
            values, rests = np.divmod(sums, times[:, None])
        high = values[:, 0].astype(np.uint64)
        low = values[:, 1].astype(np.uint64)
        check = values[:, 2].astype(np.uint64)
        hashes = (high << _HALF) | low
        is_word = (values >= 0) & (values <= int(_WORD))
        is_in_cell = self._cells(hashes) == places
        is_single = is_word.all(axis=1)
        is_single &= ~rests.any(axis=1)
        is_single &= is_in_cell.any(axis=0)
        is_single &= _check(hashes) == check
        singles = np.flatnonzero(is_single)
        _, firsts = np.unique(hashes[singles], return_index=True)
        singles = singles[firsts]
        words = values[singles, _FIELDS - 1 :]
        if words.shape[1]:
            names = words.astype(np.uint32).view(f"S{NAME_BYTES}").reshape(-1)
        else:
            names = np.zeros(len(singles), f"S{NAME_BYTES}")
        return _SingleRows(
            hashes=hashes[singles],
            names=names,
            times=times[singles],
        )


def _check(hashes: Hashes) -> Hashes:
    """Return 32 bits for each hash, by which it is known again."""
    return mix(hashes ^ _CHECK) >> _HALF


class CountedRows:
    """The rows with the smallest hashes, each with how many times it came: exact, and at random.

    A row that is among the smallest at the end was so whenever it came, so its count misses
    nothing.

    Attributes:
        rows: (rows,) of `ROW`, by their hashes.
        limit: rows of larger hashes are not in the sample; `ALL` where all rows are.
    """

    def __init__(
        self,
        rows: NDArray[Any] | None = None,
        limit: int = ALL,
    ) -> None:
        self.rows = np.zeros(0, ROW) if rows is None else rows
        self.limit = limit

    def select(self, hashes: Hashes) -> I64:
        """Return which rows of a batch belong into the sample."""
        return np.flatnonzero(hashes <= np.uint64(self.limit))

    def add(self, rows: Rows, chosen: I64, digests: Hashes) -> None:
        """Add the chosen rows of a batch, with digests of their contents."""
        counted = np.zeros(len(chosen), ROW)
        counted["hash"] = rows.hashes[chosen, 0]
        counted["count"] = 1
        counted["digest"] = digests
        counted["name"] = rows.names[chosen]
        self.merge(CountedRows(counted))

    def merge(self, other: CountedRows) -> None:
        """Add what another sample holds.

        Above the smaller limit of both, counts are not exact and go.
        """
        self.limit = min(self.limit, other.limit)
        rows = np.concatenate([self.rows, other.rows])
        rows = rows[rows["hash"] <= np.uint64(self.limit)]
        by_hash = np.argsort(rows["hash"], kind="stable")
        rows = rows[by_hash]
        hashes = rows["hash"]
        steps = np.diff(hashes, prepend=~hashes[:1])
        starts = np.flatnonzero(steps)
        self.rows = rows[starts]
        if len(starts) < len(rows):
            repeats = np.diff(starts, append=len(rows))
            digests = np.repeat(self.rows["digest"], repeats)
            is_alike = rows["digest"] == digests
            is_alike &= digests != 0
            counts = rows["alike"] + 1
            counts[starts] -= 1  # the first time is like itself
            self.rows["alike"] = np.add.reduceat(is_alike * counts, starts)
            self.rows["count"] = np.add.reduceat(rows["count"], starts)
        self.cut(SAMPLE_ROWS)

    def cut(self, size: int) -> CountedRows:
        """Keep the rows with the ``size`` smallest hashes; return the sample."""
        if len(self.rows) > size:
            self.rows = self.rows[:size].copy()
            self.limit = int(self.rows["hash"][-1])
        return self
