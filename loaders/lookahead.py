"""Samples asked for ahead of their turn: as far as a number of bytes goes, and no farther."""

from __future__ import annotations

import collections
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


class Due(NamedTuple):
    """One sample in the order of loading: its place in the batches, its position in the epoch, its row in the index.

    ``flags`` are the whole batch's (`fuelrail.loaders.assemble.BatchSlot`), the same for all of its samples.
    """

    epoch: int
    step: int
    at: int
    position: int
    row: int
    valid: bool
    flags: Mapping[str, NDArray[Any]] = NO_FLAGS


class Ahead(NamedTuple):
    """A sample that was asked for; ``take`` waits for its bytes. ``entry`` is None where the index could not tell."""

    due: Due
    entry: IndexRow | None
    take: PendingSpan


def look_ahead(coming: Iterator[Due], index: SampleIndex, session: Session, max_bytes: int) -> Iterator[Ahead]:
    """Pass the coming samples on, each asked for when less than ``max_bytes`` of samples before it are outstanding.

    So ``max_bytes`` and one sample are outstanding at most. Requests go out in bundles of a quarter of that, so that
    neighbours among them can be fetched as one range. Closing this iterator gives up what is outstanding.
    """
    window: collections.deque[tuple[Ahead, int]] = collections.deque()
    waiting = 0
    more, filled = True, False
    try:
        while more or window:
            if more and waiting <= max_bytes * 3 // 4 and len(window) <= MAX_SAMPLES * 3 // 4:
                bundle: list[tuple[Due, IndexRow]] = []
                broken: tuple[Due, FuelrailError] | None = None
                size = MAX_SAMPLES if filled else EARLY_BUNDLE if window else FIRST_BUNDLE
                while waiting < max_bytes and len(window) + len(bundle) < MAX_SAMPLES and len(bundle) < size:
                    due = next(coming, None)
                    if due is None:
                        more = False
                        break
                    try:
                        entry = index.row(due.row)
                    except FuelrailError as failure:
                        # Told when its turn comes, so that the outcome does not depend on the look-ahead.
                        broken, more = (due, failure), False
                        break
                    bundle.append((due, entry))
                    waiting += entry.length
                takes = session.request([(due.row, entry) for due, entry in bundle])
                for (due, entry), take in zip(bundle, takes, strict=True):
                    window.append((Ahead(due, entry, take), entry.length))
                filled = filled or waiting > max_bytes * 3 // 4 or len(window) > MAX_SAMPLES * 3 // 4
                if broken is not None:
                    due, error = broken
                    window.append((Ahead(due, None, _Raise(error)), 0))
            if not window:
                break
            ahead, length = window.popleft()
            waiting -= length
            yield ahead
            del ahead  # its bytes must not live on in this frame
    finally:
        session.close()


class _Raise:
    """A span that could not be asked for."""

    def __init__(self, error: FuelrailError) -> None:
        self._error = error

    def __call__(self) -> NoReturn:
        raise self._error
