"""Leave samples out of an order that is under way: what is left keeps its order, and batches stay
full.

::

    order          a b C d e C f g       C is to be left out
    without C      a b d e f g           positions 0 .. 5 of a shorter epoch

A filter would make another order, for it permutes fewer samples. Here position p of the epoch is
the p-th position of the whole order that shows none of the samples left out: all positions before
the first one that does are as they were. So a run that continues from a state before it equals,
from its first step to its last, a run that began without them. The positions to leave out come from
the inverse of the order, once an epoch; then a position takes one bisection.

Lanes close up one by one, as if the frames were not stored. A pack stays as it is, less the
samples; packs that are empty then are left out. A window shows what it shows where its clip lacks a
frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.pipeline.errors import OrderError, StateMismatchError
from fuelrail.pipeline.order.epoch import Entries, Epoch, Occurrences, digest
from fuelrail.pipeline.order.lanes import LaneEpoch
from fuelrail.pipeline.order.permutation import as_positions

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.dtypes import I64
    from fuelrail.pipeline.order.batching import Cursor
    from fuelrail.pipeline.order.epoch import EndlessOrder
    from fuelrail.pipeline.order.windows import WindowLookup

    Rows = NDArray[np.int64]

_EPOCHS_KEPT: Final = 8


class ThinnedOrder:
    """The epochs of ``base`` without some samples; they may differ in length.

    ``hidden`` are these samples of each dataset of a mix, or of the one dataset, ascending. Raises
    OrderError where nothing is left.
    """

    def __init__(self, base: EndlessOrder, hidden: Sequence[Rows]) -> None:
        self.base = base
        self.hidden = tuple(hidden)
        num_samples = sum(map(len, hidden))
        numbers: list[ArrayLike] = []
        for rows in hidden:
            numbers += [[len(rows)], rows]
        summary = f"{num_samples} samples {digest(*numbers)}"
        summaries = base.identity.get("without", ())
        self.identity: dict[str, Any] = {
            **base.identity,
            "without": [*summaries, summary],
        }
        self._epoch = lru_cache(maxsize=_EPOCHS_KEPT)(self._thinned)
        if not self.epoch_length:
            raise OrderError("`without` names all samples that the order shows: nothing is left")

    def __reduce__(self) -> tuple[Any, ...]:
        return ThinnedOrder, (self.base, self.hidden)

    @property
    def epoch_length(self) -> int:
        """Positions in epoch 0; :meth:`length` knows the others."""
        return self.length(0)

    @property
    def num_selected(self) -> int:
        """Number of selected samples that are left, of one dataset."""
        return len(self.selected())

    def length(self, epoch: int) -> int:
        """Return the number of positions in an epoch."""
        return len(self.epoch(epoch))

    def selected(self) -> I64:
        """Return the selected samples that are left, ascending: int64 (num_selected,)."""
        samples = self.base.selected()
        return np.setdiff1d(samples, self.hidden[0], assume_unique=True)

    def epoch(self, epoch: int, /) -> Epoch:
        """Return one epoch; raise OrderError for an epoch out of range."""
        return self._epoch(epoch)

    def _thinned(self, epoch: int) -> Epoch:
        base = self.base.epoch(epoch)
        if isinstance(base, LaneEpoch):
            return base.without(self.hidden[0])
        return ThinnedEpoch(base, self.hidden, in_packs="has_pack" in self.identity)


class ThinnedEpoch(Epoch):
    """One epoch of an order without some samples."""

    __slots__ = ("_base", "_gone", "_hidden", "_in_packs", "_shifts")

    def __init__(self, base: Epoch, hidden: Sequence[Rows], *, in_packs: bool) -> None:
        self._base = base
        self._hidden = hidden
        self._in_packs = in_packs
        positions = [base.find(rows, part).positions for part, rows in enumerate(hidden)]
        gone, num_hidden = np.unique(np.concatenate(positions), return_counts=True)
        if in_packs:
            packs = base.entries(gone).flags["pack"]
            pack_sizes = np.bincount(packs, minlength=len(gone))
            gone = gone[num_hidden == pack_sizes]
        self._gone = gone
        self._shifts = gone - np.arange(len(gone))
        """How many positions are left before each of those that are gone."""

    def __len__(self) -> int:
        return len(self._base) - len(self._gone)

    def __call__(self, positions: ArrayLike, /) -> I64:
        """Return samples alone (int64, same shape; in packs as many as these hold) at
        ``positions``.
        """
        if self._in_packs:
            return super().__call__(positions)
        return self._base(self._below(positions))

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return entries at ``positions``; raises OrderError for positions outside."""
        entries = self._base.entries(self._below(positions))
        if not self._in_packs:
            return entries
        is_hidden = np.zeros(entries.samples.shape, bool)
        for part, rows in enumerate(self._hidden):
            is_hidden |= (entries.parts == part) & np.isin(entries.samples, rows)
        mask = ~is_hidden
        return Entries(
            parts=entries.parts[mask],
            samples=entries.samples[mask],
            valid=entries.valid[mask],
            flags={name: flag[mask] for name, flag in entries.flags.items()},
        )

    def find(self, samples: ArrayLike, part: int = 0, /) -> Occurrences:
        """Return where ``samples`` (n,) of a part are shown; those that are left out, nowhere."""
        numbers = np.asarray(samples, dtype=np.int64)
        indices, positions = self._base.find(numbers, part)
        is_hidden = np.isin(numbers[indices], self._hidden[part])
        indices = indices[~is_hidden]
        positions = positions[~is_hidden]
        num_gone_before = np.searchsorted(self._gone, positions)
        return Occurrences(indices, positions - num_gone_before)

    def _below(self, positions: ArrayLike) -> I64:
        """Return the positions in the whole order."""
        places = as_positions(positions, len(self))
        num_gone_before = np.searchsorted(self._shifts, places, side="right")
        return places + num_gone_before


def hidden_samples(order: EndlessOrder, part: int = 0) -> Rows:
    """Return the samples of a part that an order leaves out, ascending."""
    rows: Rows = np.zeros(0, np.int64)
    below: Any = order
    while below is not None:
        if isinstance(below, ThinnedOrder):
            rows = np.union1d(rows, below.hidden[part])
        below = getattr(below, "base", None)
    return rows


def windows_without(
    windows: Sequence[WindowLookup | None],
    order: EndlessOrder,
) -> tuple[WindowLookup | None, ...]:
    """Return the windows of each part, where clips lack the samples that the order leaves out."""
    lookups = []
    for part, lookup in enumerate(windows):
        if lookup is not None:
            lookup = lookup.without(hidden_samples(order, part))
        lookups.append(lookup)
    return tuple(lookups)


def check_unseen(
    order: EndlessOrder,
    state: dict[str, Any],
    place: Cursor,
    full_batch: int,
    windows: Sequence[WindowLookup | None],
) -> None:
    """Raise StateMismatchError where a run has shown samples before ``place`` that ``order`` leaves
    out.

    ``state`` is the identity of the order that the run had, which left out none of them, or the
    first ones only; ``full_batch`` is its global batch where it dropped the rest of each epoch,
    else 1. ``windows`` are those of each part of the whole order.
    """
    before: Any = order
    num_applied = len(state.get("without", ()))
    while len(before.identity.get("without", ())) > num_applied:
        before = before.base
    if before is order:
        return
    rows_of_parts = []
    for part, lookup in enumerate(windows_without(windows, before)):
        hidden = hidden_samples(order, part)
        rows = np.setdiff1d(hidden, hidden_samples(before, part))
        # Else they have the samples whose windows show them.
        if lookup is not None and lookup.window.pad != "drop":
            rows = lookup.find(rows).positions
        rows_of_parts.append(rows)
    for epoch in range(place.epoch + 1):
        in_order = before.epoch(epoch)
        end = place.samples_consumed
        if epoch < place.epoch:
            end = len(in_order) // full_batch * full_batch
        for part, rows in enumerate(rows_of_parts):
            positions = in_order.find(rows, part).positions
            if (positions < end).any():
                raise StateMismatchError(
                    f"the state is of epoch {place.epoch}, sample {place.samples_consumed}, "
                    f"and the run showed what `without` names at position {positions.min()} "
                    f"of epoch {epoch}: load a state from before it; `fuelrail runs seen "
                    "LEDGER KEY...` names the newest one"
                )
