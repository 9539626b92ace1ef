"""Map positions of an order to rows of datasets, through lanes, windows, mixes and packs.

Loading, the cache's future uses and the replacement of bad samples all use this map, so they agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fuelrail.loaders.records import Scheduled
from fuelrail.pipeline.order.balance import rank_positions
from fuelrail.pipeline.order.without import check_unseen, windows_without

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I64, Mask
    from fuelrail.pipeline.order.batching import Cursor, Walk
    from fuelrail.pipeline.order.epoch import EndlessOrder
    from fuelrail.pipeline.order.windows import WindowLookup

    Rows: TypeAlias = NDArray[np.int64]

_EPOCHS_KEPT: Final = 4


class Part(NamedTuple):
    """One dataset's part of the sequence: where its split begins in its index, and its windows.

    ``base`` rows belong to the datasets before it: ``base + row`` numbers rows over all datasets.
    """

    first_row: int
    base: int
    window: WindowLookup | None


class Places(NamedTuple):
    """The samples at B positions, of T frames each (T is 1 without windows).

    In packs B counts their samples.

    With channels at times of their own the samples that these need are among the T, behind the
    frames.
    """

    parts: Rows
    """(B,): which dataset."""
    rows: Rows
    """(B, T): rows of its index, the sample's own among them."""
    present: Mask
    """(B, T): False: the clip has no such frame, the row is that of its stand-in."""
    valid: Mask
    """(B,): False: padding of a lane that has ended."""
    flags: Mapping[str, NDArray[Any]]
    """(B,) each: what the order knows of these samples, under their names in a batch."""


class PositionIndex:
    """Maps the positions of any epoch to their places.

    Pure; safe to call from any number of threads.
    """

    def __init__(self, order: EndlessOrder, parts: Sequence[Part]) -> None:
        """Take one part, or the ``parts`` that the order mixes."""
        self.epoch_length = order.epoch_length
        self.order = order
        self._windows = [part.window for part in parts]
        pairs = zip(parts, windows_without(self._windows, order), strict=True)
        self._parts = tuple(part._replace(window=lookup) for part, lookup in pairs)
        window = self._parts[0].window
        self.frames = 1 if window is None else window.num_rows
        # Epochs cost time to set up, and callers use one or two neighbouring ones.
        self._epoch = lru_cache(maxsize=_EPOCHS_KEPT)(order.epoch)

    def places(self, epoch: int, positions: I64) -> Places:
        """Return the places at ``positions`` (B,) of an epoch, in packs of all their samples: the
        flag ``pack``.

        Raises OrderError for positions outside.
        """
        parts, samples, valid, flags = self._epoch(epoch).entries(positions)
        rows = np.empty((len(samples), self.frames), dtype=np.int64)
        present = np.ones(rows.shape, dtype=bool)
        for number, part in enumerate(self._parts):
            mask = slice(None) if len(self._parts) == 1 else parts == number
            if part.window is None:
                rows[mask] = samples[mask][:, None] + part.first_row
            else:
                window_samples = part.window(samples[mask])
                rows[mask] = window_samples.samples + part.first_row
                present[mask] = window_samples.present
        return Places(
            parts=parts,
            rows=rows,
            present=present,
            valid=valid,
            flags=flags,
        )

    def find(
        self,
        epoch: int,
        part: int,
        samples: Rows,
    ) -> tuple[Rows, Rows, Mask]:
        """Return where ``samples`` (n,) of a part's split are shown in an epoch, as frames of
        windows too.

        That is, by sample and position: which of ``samples``, the position, and whether it is the
        position's own sample; each (k,).
        """
        lookup = self._parts[part].window
        if lookup is None:
            indices = np.arange(len(samples))
            centres = samples
        else:
            indices, centres = lookup.find(samples)
        matches, positions = self._epoch(epoch).find(centres, part)
        indices = indices[matches]
        is_own = centres[matches] == samples[indices]
        by_sample = np.lexsort((positions, indices))
        return indices[by_sample], positions[by_sample], is_own[by_sample]

    def check_unseen(
        self,
        identity: dict[str, Any],
        place: Cursor,
        full_batch: int,
    ) -> None:
        """Raise StateMismatchError where a run of this order's identity has shown what this one
        leaves out.
        """
        check_unseen(
            self.order,
            state=identity,
            place=place,
            full_batch=full_batch,
            windows=self._windows,
        )

    def scheduled(self, walk: Walk) -> Iterator[Scheduled]:
        """Yield the samples of this rank and share in order, each with its place in a batch.

        The sequence is endless: it starts at the run's position and crosses the ends of epochs.
        """
        for epoch, step in walk:
            batches = walk.batches(epoch)
            positions, is_first = rank_positions(self.order, self._epoch(epoch), batches, step)
            parts, rows, present, valid, flags = self.places(epoch, positions)
            if "pack" in flags:
                pack = flags["pack"]
                positions = positions[pack]
                is_first = is_first[pack]
            valid &= is_first
            step += batches.start // batches.global_batch
            columns = (positions, rows, valid, parts, present)
            entries = zip(*[column.tolist() for column in columns], strict=True)
            for batch_row, (position, row, is_valid, part, exists) in enumerate(entries):
                yield Scheduled(
                    epoch=epoch,
                    step=step,
                    batch_row=batch_row,
                    position=position,
                    rows=row,
                    valid=is_valid,
                    part=part,
                    present=exists,
                    flags=flags,
                )

    def numbers(self, epoch: int, positions: I64) -> Rows:
        """Return the rows to read for ``positions`` (B,), in order: ``base + row`` of each
        frame, (B * T,).
        """
        places = self.places(epoch, positions)
        bases = np.array([part.base for part in self._parts])
        bases_of_samples = bases[places.parts]
        numbers: Rows = places.rows + bases_of_samples[:, None]
        return numbers.reshape(-1)

    def next_position(self, epoch: int, position: int) -> int:
        """Return the position whose sample replaces a bad one: the next one, in lanes the lane's
        next frame.
        """
        # Another lane's would be of another clip.
        in_order = self._epoch(epoch)
        return (position + in_order.num_lanes) % len(in_order)
