"""Multisets in constant memory: an invertible table, and a sample of rows that is counted exactly."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.loaders.witness.rows import NAME_BYTES, Hashes, Names, Rows, mix

LARGE: Final = 2048
"""Cells of each third of a table that names up to about 4,000 rows."""

SMALL: Final = 40
"""Cells of each third of a table that names up to about 60 rows, and fits into a checkpoint."""

SAMPLE_ROWS: Final = 1024

_WORD: Final = np.uint64(0xFFFFFFFF)
_CHECK: Final = np.uint64(0xD1B54A32D192ED03)
_FIELDS: Final = 4  # count, two halves of the hash, check


class Surplus(NamedTuple):
    """Rows that one multiset holds more often than another, or less often.

    Attributes:
        hashes: (rows,).
        names: (rows, NAME_BYTES or 0).
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

    def add(self, rows: Rows, times: int = 1) -> None:
        """Add rows, each so many times."""
        values = self._values(rows.hashes[:, 0], rows.names) * times
        for third, cells in zip(self.cells, self._cells(rows.hashes[:, 0]), strict=True):
            np.add.at(third, cells, values)

    def surplus(self) -> Surplus:
        """Return the rows that this table, a difference of two, holds more or fewer times than 0.

        Cells that hold one row alone are read, the row is taken from its other cells, and so on.
        """
        work = Table(1)
        work.cells = self.cells.copy()
        size = self.cells.shape[1]
        found_hashes: list[Hashes] = []
        found_words: list[NDArray[np.int64]] = []
        found_times: list[NDArray[np.int64]] = []
        while True:
            flat = work.cells.reshape(3 * size, -1)
            hashes, words, times = _read_single_rows(flat, size)
            if not len(hashes):
                break
            found_hashes.append(hashes)
            found_words.append(words)
            found_times.append(times)
            values = work._values(hashes, words.astype(np.uint32).view(np.uint8))
            values *= times[:, None]
            for third, cells in zip(work.cells, work._cells(hashes), strict=True):
                np.subtract.at(third, cells, values)
        hashes = np.concatenate([np.empty(0, np.uint64), *found_hashes])
        times = np.concatenate([np.empty(0, np.int64), *found_times])
        words = np.concatenate(
            [np.empty((0, self.cells.shape[2] - _FIELDS), np.int64), *found_words]
        )
        is_whole = not work.cells.any()
        return Surplus(
            hashes=hashes,
            names=words.astype(np.uint32).view(np.uint8).reshape(len(hashes), 4 * words.shape[1]),
            times=times,
            is_whole=is_whole,
            estimate=int(np.abs(times).sum()) if is_whole else self._estimate(),
        )

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

    def _values(self, hashes: Hashes, names: NDArray[np.uint8]) -> NDArray[np.int64]:
        words = self.cells.shape[2] - _FIELDS
        values = np.empty((len(hashes), _FIELDS + words), np.int64)
        values[:, 0] = 1
        values[:, 1] = hashes >> np.uint64(32)
        values[:, 2] = hashes & _WORD
        values[:, 3] = _check(hashes)
        if words:
            values[:, _FIELDS:] = np.ascontiguousarray(names).view(np.uint32)
        return values


def _check(hashes: Hashes) -> NDArray[np.int64]:
    return (mix(hashes ^ _CHECK) >> np.uint64(32)).astype(np.int64)


def _read_single_rows(
    cells: NDArray[np.int64], size: int
) -> tuple[Hashes, NDArray[np.int64], NDArray[np.int64]]:
    """Return hash, words of the name, and times of each row that is alone in a cell."""
    places = np.flatnonzero(cells[:, 0])
    times = cells[places, 0]
    values, rests = np.divmod(cells[places, 1:], times[:, None])
    is_single = ~rests.any(axis=1)
    is_single &= ((values >= 0) & (values <= int(_WORD))).all(axis=1)
    places, times, values = places[is_single], times[is_single], values[is_single]
    hashes = (values[:, 0].astype(np.uint64) << np.uint64(32)) | values[:, 1].astype(np.uint64)
    shifts = np.uint64(21) * (places // size).astype(np.uint64)
    is_own_cell = (hashes >> shifts) % np.uint64(size) == (places % size).astype(np.uint64)
    is_row = is_own_cell & (_check(hashes) == values[:, 2])
    _, first = np.unique(hashes[is_row], return_index=True)
    chosen = np.flatnonzero(is_row)[first]
    return hashes[chosen], values[chosen, 3:], times[chosen]


class Sample:
    """The rows with the smallest hashes, each with how many times it came: exact, and at random.

    A row that is among the smallest at the end was so whenever it came, so its count misses
    nothing. The sample is as large as the multiset where that has at most `SAMPLE_ROWS` rows.

    Attributes:
        hashes: (rows,), ascending.
        names: (rows, NAME_BYTES or 0).
        counts: (rows,).
        digests: (rows,), of a row's content when it came first; 0 where contents are not compared.
        alike: (rows,), how many of its later contents equal that.
    """

    COLUMNS: Final = ("hashes", "names", "counts", "digests", "alike")

    def __init__(self) -> None:
        self.hashes: Hashes = np.empty(0, np.uint64)
        self.names: Names = np.empty((0, 0), np.uint8)
        self.counts: NDArray[np.int64] = np.empty(0, np.int64)
        self.digests: Hashes = np.empty(0, np.uint64)
        self.alike: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def limit(self) -> int:
        """Rows of larger hashes are not in the sample."""
        return int(self.hashes[-1]) if len(self.hashes) >= SAMPLE_ROWS else 2**64 - 1

    def select(self, hashes: Hashes) -> NDArray[np.int64]:
        """Return which rows of a batch belong into the sample."""
        return np.flatnonzero(hashes <= np.uint64(self.limit))

    def add(self, rows: Rows, chosen: NDArray[np.int64], digests: Hashes) -> None:
        """Add the chosen rows of a batch, with digests of their contents."""
        other = Sample()
        other.hashes = rows.hashes[chosen, 0]
        other.names = rows.names[chosen]
        other.counts = np.ones(len(chosen), np.int64)
        other.digests = digests
        other.alike = np.zeros(len(chosen), np.int64)
        self.merge(other)

    def merge(self, other: Sample) -> None:
        """Add what another sample holds; above the smaller limit of both, counts are not exact and
        go.
        """
        if not len(other.hashes):
            return
        limit = min(self.limit, other.limit)
        if not len(self.hashes):
            self.names = np.empty((0, other.names.shape[1]), np.uint8)
        both: dict[str, NDArray[Any]] = {
            name: np.concatenate([getattr(self, name), getattr(other, name)])
            for name in self.COLUMNS
        }
        order = np.argsort(both["hashes"], kind="stable")
        hashes = both["hashes"][order]
        starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        group = np.cumsum(np.concatenate([[True], hashes[1:] != hashes[:-1]])) - 1
        digests = both["digests"][order]
        is_alike = (digests == digests[starts][group]) & (digests != 0)
        is_alike[starts] = False
        alike = both["alike"][order] * (digests == digests[starts][group])
        is_kept = hashes[starts] <= np.uint64(limit)
        self.hashes = hashes[starts][is_kept][:SAMPLE_ROWS]
        self.names = both["names"][order][starts][is_kept][:SAMPLE_ROWS]
        self.counts = np.add.reduceat(both["counts"][order], starts)[is_kept][:SAMPLE_ROWS]
        self.digests = digests[starts][is_kept][:SAMPLE_ROWS]
        self.alike = np.add.reduceat(alike + is_alike, starts)[is_kept][:SAMPLE_ROWS]
