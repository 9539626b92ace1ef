"""Samples asked for ahead of their turn: as far as a number of bytes goes, and no farther."""

from __future__ import annotations

import collections
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from fuelrail.loaders.records import Ahead
from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fuelrail.loaders.records import Due
    from fuelrail.loaders.storage.protocol import PendingSpan, Session
    from fuelrail.pipeline.format.index import SampleIndex
    from fuelrail.pipeline.format.index_row import IndexRow

MAX_SAMPLES: Final = 512
"""Small samples are not asked for farther ahead than this."""

FIRST_BUNDLE: Final = 16


EARLY_BUNDLE: Final = 4
"""Samples in the first bundle, and in those that follow until the window is nearly full for once: the first batch
waits for neither the whole window nor, with a large index, for the look-ups that it takes."""

_NUMBERS_KEPT: Final = 1 << 16


class RequestNumbers:
    """Which of all requests a dataset's k-th one is, where several datasets are mixed; see `foresight.foresee`.

    Asked about k, it forgets those before: they are taken in order.
    """

    def __init__(self) -> None:
        self._first = 0
        self._numbers: collections.deque[int] = collections.deque()

    def note(self, number: int) -> None:
        """The next request of this dataset is this one of all."""
        self._numbers.append(number)
        if len(self._numbers) > _NUMBERS_KEPT:  # nobody asks: all are found in the cache
            self._numbers.popleft()
            self._first += 1

    def __call__(self, k: int) -> int:
        """The number of the k-th request."""
        while self._first < k and len(self._numbers) > 1:
            self._numbers.popleft()
            self._first += 1
        return self._numbers[0]


class Shelf(NamedTuple):
    """Where one dataset's samples are looked up and asked for."""

    rows: SampleIndex
    session: Session
    numbers: RequestNumbers | None = None


def look_ahead(coming: Iterator[Due], shelves: Sequence[Shelf], max_bytes: int) -> Iterator[Ahead]:
    """Pass the coming samples on, each asked for when less than ``max_bytes`` of samples before it are outstanding.

    So ``max_bytes`` and one sample are outstanding at most. Requests go out in bundles of a quarter of that, so that
    neighbours among them can be fetched as one range. Closing this iterator gives up what is outstanding.
    """
    window: collections.deque[tuple[Ahead, int]] = collections.deque()
    waiting = num_asked = 0
    more, filled = True, False
    try:
        while more or window:
            if more and waiting <= max_bytes * 3 // 4 and len(window) <= MAX_SAMPLES * 3 // 4:
                bundle: list[tuple[Due, tuple[IndexRow, ...]]] = []
                broken: tuple[Due, FuelrailError] | None = None
                size = MAX_SAMPLES if filled else EARLY_BUNDLE if window else FIRST_BUNDLE
                while waiting < max_bytes and len(window) + len(bundle) < MAX_SAMPLES and len(bundle) < size:
                    due = next(coming, None)
                    if due is None:
                        more = False
                        break
                    try:
                        index = shelves[due.part].rows
                        entries = tuple([index.row(row) for row in due.rows])
                    except FuelrailError as failure:
                        # Told when its turn comes, so that the outcome does not depend on the look-ahead.
                        broken, more = (due, failure), False
                        break
                    bundle.append((due, entries))
                    waiting += _length(entries)
                for (due, entries), takes in zip(bundle, _ask(bundle, shelves, num_asked), strict=True):
                    window.append((Ahead(due, entries, takes), _length(entries)))
                    num_asked += len(entries)
                filled = filled or waiting > max_bytes * 3 // 4 or len(window) > MAX_SAMPLES * 3 // 4
                if broken is not None:
                    due, error = broken
                    window.append((Ahead(due, (), (_Raise(error),)), 0))
            if not window:
                break
            ahead, length = window.popleft()
            waiting -= length
            yield ahead
            del ahead  # its bytes must not live on in this frame
    finally:
        for shelf in shelves:
            shelf.session.close()


def _length(entries: tuple[IndexRow, ...]) -> int:
    return sum([entry.length for entry in entries])


def _ask(
    bundle: list[tuple[Due, tuple[IndexRow, ...]]], shelves: Sequence[Shelf], num_asked: int
) -> list[tuple[PendingSpan, ...]]:
    """Ask each dataset for its samples among these, in their order."""
    takes: list[tuple[PendingSpan, ...]] = [()] * len(bundle)
    for part, (_, session, numbers) in enumerate(shelves):
        wanted: list[tuple[int, IndexRow]] = []
        number = num_asked
        for due, entries in bundle:
            if due.part == part:
                wanted += zip(due.rows, entries, strict=True)
                if numbers is not None:
                    for at in range(len(entries)):
                        numbers.note(number + at)
            number += len(entries)
        pending = iter(session.request(wanted))
        for at, (due, entries) in enumerate(bundle):
            if due.part == part:
                takes[at] = tuple(islice(pending, len(entries)))
    return takes


class _Raise:
    """A span that could not be asked for."""

    def __init__(self, error: FuelrailError) -> None:
        self._error = error

    def __call__(self) -> NoReturn:
        raise self._error
