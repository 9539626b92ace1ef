"""Request samples before their turn, up to a number of bytes."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from fuelrail.loaders.records import Requested, Scheduled
from fuelrail.loaders.storage.protocol import raise_at_its_turn
from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from fuelrail.loaders.storage.cache.future_uses import RequestNumbers
    from fuelrail.loaders.storage.layers import LayeredSession
    from fuelrail.loaders.storage.protocol import PendingSample
    from fuelrail.loaders.storage.reader import SampleReader
    from fuelrail.pipeline.format.index.row import IndexRow

MAX_SAMPLES: Final = 512
"""Number of samples that are outstanding at most, however small they are."""

FIRST_BUNDLE: Final = 16

EARLY_BUNDLE: Final = 4
"""Samples in the first bundle, and in those that follow until the window is nearly full for once:
the first batch waits for neither the whole window nor, with a large index, for the look-ups that it
reads.
"""


class RequestStream(NamedTuple):
    """One dataset's reader, which has its rows, and storage session, which its samples are
    requested from.
    """

    rows: SampleReader
    session: LayeredSession
    numbers: RequestNumbers | None = None


def prefetch(
    coming: Iterator[Scheduled],
    streams: Sequence[RequestStream],
    max_bytes: int,
) -> Iterator[Requested]:
    """Yield the coming samples, each requested when less than ``max_bytes`` of samples before it
    are outstanding.

    So ``max_bytes`` and one sample are outstanding at most. Requests are sent in bundles of a
    quarter of that, so that neighbours among them can be fetched as one range. Closing this
    iterator cancels what is outstanding.
    """
    window: collections.deque[tuple[Requested, int]] = collections.deque()
    waiting = num_requested = 0
    more = True
    filled = False
    try:
        while more or window:
            if more and waiting <= max_bytes * 3 // 4 and len(window) <= MAX_SAMPLES * 3 // 4:
                bundle: list[tuple[Scheduled, tuple[IndexRow, ...]]] = []
                lengths: list[int] = []
                broken: tuple[Scheduled, FuelrailError] | None = None
                if filled:
                    size = MAX_SAMPLES
                elif window:
                    size = EARLY_BUNDLE
                else:
                    size = FIRST_BUNDLE
                while (
                    waiting < max_bytes
                    and len(window) + len(bundle) < MAX_SAMPLES
                    and len(bundle) < size
                ):
                    scheduled = next(coming, None)
                    if scheduled is None:
                        more = False
                        break
                    try:
                        reader, session, _ = streams[scheduled.part]
                        entries = reader.rows(scheduled.rows)
                        by_row = dict(zip(scheduled.rows, entries, strict=True))
                        length = sum(
                            [
                                entry.length + session.look_up(row, entry)
                                for row, entry in by_row.items()
                            ]
                        )
                    except FuelrailError as failure:
                        # Raised when its turn comes, so that the outcome does not depend on the
                        # look-ahead.
                        broken = (scheduled, failure)
                        more = False
                        break
                    bundle.append((scheduled, entries))
                    lengths.append(length)
                    waiting += length
                requests = _request_bundle(bundle, streams, num_requested)
                for (scheduled, entries), length, reads in zip(
                    bundle,
                    lengths,
                    requests,
                    strict=True,
                ):
                    window.append((Requested(scheduled, entries, reads), length))
                    num_requested += len(entries)
                filled = (
                    filled or waiting > max_bytes * 3 // 4 or len(window) > MAX_SAMPLES * 3 // 4
                )
                if broken is not None:
                    scheduled, error = broken
                    window.append(
                        (
                            Requested(
                                scheduled,
                                (),
                                (partial(raise_at_its_turn, error),),
                            ),
                            0,
                        )
                    )
            if not window:
                break
            requested, length = window.popleft()
            waiting -= length
            yield requested
            del requested  # its bytes must not live on in this frame
    finally:
        for stream in streams:
            stream.session.close()


def _request_bundle(
    bundle: list[tuple[Scheduled, tuple[IndexRow, ...]]],
    streams: Sequence[RequestStream],
    num_requested: int,
) -> list[tuple[PendingSample, ...]]:
    """Request these samples from their datasets, in their order.

    Where requests have numbers, a row that a sample shows more than once is requested once.
    """
    reads: list[tuple[PendingSample, ...]] = [()] * len(bundle)
    for part, (_, session, numbers) in enumerate(streams):
        pairs: list[tuple[int, IndexRow]] = []
        number = num_requested
        for scheduled, entries in bundle:
            if scheduled.part == part:
                rows_seen: set[int] = set()
                for place, pair in enumerate(zip(scheduled.rows, entries, strict=True)):
                    if numbers is None or pair[0] not in rows_seen:
                        pairs.append(pair)
                        rows_seen.add(pair[0])
                        if numbers is not None:
                            numbers.note(number + place)
            number += len(entries)
        pending = iter(session.request(pairs))
        for place, (scheduled, _) in enumerate(bundle):
            if scheduled.part == part and numbers is None:
                reads[place] = tuple(islice(pending, len(scheduled.rows)))
            elif scheduled.part == part:
                by_row = {row: next(pending) for row in dict.fromkeys(scheduled.rows)}
                reads[place] = tuple([by_row[row] for row in scheduled.rows])
    return reads
