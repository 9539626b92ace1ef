"""Samples asked for ahead of their turn: as far as a number of bytes goes, and no farther."""

from __future__ import annotations

import collections
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from fuelrail.loaders.storage.protocol import PendingSpan, Session
    from fuelrail.pipeline.index import IndexRow, SampleIndex

MAX_SAMPLES: Final = 512
"""Small samples are not asked for farther ahead than this."""

FIRST_BUNDLE: Final = 16
EARLY_BUNDLE: Final = 4
"""Samples in the first bundle, and in those that follow until the window is nearly full for once: the first batch
waits for neither the whole window nor, with a large index, for the look-ups that it takes."""

NO_FLAGS: Final[Mapping[str, NDArray[Any]]] = MappingProxyType({})
"""Of batches whose order has nothing to say of its samples."""

_NUMBERS_KEPT: Final = 1 << 16


class Due(NamedTuple):
    """One sample in the order of loading: its place in the batches, its position in the epoch, its frames' rows.

    ``part`` says which dataset these are rows of, ``present`` which are the frames asked for (None: all).
    ``flags`` are the whole batch's (`fuelrail.loaders.assemble.BatchSlot`), the same for all of its samples.
    """

    epoch: int
    step: int
    at: int
    position: int
    rows: Sequence[int]
    valid: bool
    part: int = 0
    present: Sequence[bool] | None = None
    flags: Mapping[str, NDArray[Any]] = NO_FLAGS


class Ahead(NamedTuple):
    """A sample that was asked for; ``takes`` wait for its frames' bytes. No ``entries``: the index could not tell."""

    due: Due
    entries: tuple[IndexRow, ...]
    takes: tuple[PendingSpan, ...]


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
