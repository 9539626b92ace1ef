"""Lanes: each row of the global batch follows one clip through time, then the next; for models with
a memory.

The clips (or pieces of them) are assigned to L lanes, L being the global batch, so that all lanes
end about together; position step * L + lane is what a lane sees at a step::

    lane 0 | clip 3 frame 0 | clip 3 frame 1 | ... | clip 8 frame 0 | ...
    lane 1 | clip 5 frame 0 | clip 5 frame 1 | ...
             step 0           step 1

Which lane gets pieces of which lengths is fixed (`groups_of`), so every epoch has the same number
of steps. Each epoch shuffles the places of the pieces of one length, the order of the pieces in a
lane, and the lanes. A lane that ends early repeats its first piece, flagged as not valid: every
lane has a frame at each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.epoch import Entries, Epoch, Occurrences
from fuelrail.pipeline.order.permutation import (
    KeyedPermutation,
    as_positions,
    derive_key,
)
from fuelrail.pipeline.order.regroup import groups_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.dtypes import I64
    from fuelrail.pipeline.format.attributes import ClipTable


class LaneOrder:
    """An order of kind ``lanes``: the pieces of a split's clips, assigned to ``num_lanes`` lanes.

    ``selected`` restricts it to some samples (numbers, each once); a piece ends where a stored
    frame between two selected ones is left out. ``pieces_per_clip`` cuts longer runs into that many
    pieces of about equal length (StreamPETR trains with 2). ``identity`` is what a saved position
    depends on, in plain JSON types. Raises OrderError where there are fewer pieces than lanes.
    """

    def __init__(
        self,
        clips: ClipTable,
        num_lanes: int,
        *,
        seed: int = 0,
        pieces_per_clip: int = 1,
        selected: ArrayLike | None = None,
        identity: dict[str, Any] | None = None,
    ) -> None:
        if num_lanes < 1 or pieces_per_clip < 1:
            raise OrderError(
                f"lanes need a global batch and pieces >= 1, got {num_lanes}, {pieces_per_clip}"
            )
        ranks = np.arange(len(clips))
        if selected is not None:
            ranks = np.sort(clips.ranks[np.asarray(selected)])
        clip = clips.clip_numbers()[ranks]
        is_new = np.ones(len(ranks), dtype=bool)
        is_new[1:] = clip[1:] != clip[:-1]
        is_new[1:] |= ranks[1:] != ranks[:-1] + 1
        starts = np.flatnonzero(is_new)
        run_lengths = np.diff(np.append(starts, len(ranks)))
        # A run of m frames in k pieces: the first m % k of them one frame longer.
        num_pieces = np.minimum(run_lengths, pieces_per_clip)
        run = np.repeat(np.arange(len(run_lengths)), num_pieces)
        firsts = np.cumsum(num_pieces) - num_pieces
        number = np.arange(len(run)) - firsts[run]
        length, num_longer = np.divmod(run_lengths[run], num_pieces[run])
        self._lengths = length + (number < num_longer)
        starts = np.cumsum(self._lengths) - self._lengths
        self._first_ranks = ranks[starts]
        if len(run) < num_lanes:
            raise OrderError(
                f"{len(run)} pieces of clips for {num_lanes} lanes (the global batch): a "
                f"lane needs at least one; use a global batch of at most {len(run)}, or "
                f"more pieces_per_clip than {pieces_per_clip}"
            )
        self.identity: dict[str, Any] = {} if identity is None else identity
        self._clips = clips
        self._ranks = ranks
        self._seed = seed
        self.num_lanes = num_lanes
        self.num_selected = len(ranks)
        slots = np.sort(self._lengths)[::-1]
        max_sizes = [len(slots)] * num_lanes
        self._lane_of_slot = groups_of(slots, max_sizes)
        loads = np.bincount(
            self._lane_of_slot,
            weights=slots,
            minlength=num_lanes,
        )
        self.num_steps = int(loads.max())

    @property
    def epoch_length(self) -> int:
        """Positions in each epoch: steps times lanes."""
        return self.num_steps * self.num_lanes

    def selected(self) -> I64:
        """Return the selected samples, ascending: int64 (num_selected,)."""
        samples = self._clips.samples[self._ranks]
        return np.sort(samples.astype(np.int64))

    def epoch(self, epoch: int, /) -> LaneEpoch:
        """Return the lanes of one epoch, in time linear in the number of pieces; raises
        OrderError if out of range.
        """
        if not 0 <= epoch < 2**63:
            raise OrderError(f"epoch must be in 0 .. 2**63 - 1, got {epoch}")
        seed = self._seed
        num_pieces = len(self._lengths)
        piece_key = derive_key("order lanes pieces", seed, epoch)
        lane_key = derive_key("order lanes", seed, epoch)
        place_key = derive_key("order lanes places", seed, epoch)
        shuffle_pieces = KeyedPermutation(num_pieces, piece_key)
        shuffle_lanes = KeyedPermutation(self.num_lanes, lane_key)
        shuffle_places = KeyedPermutation(num_pieces, place_key)
        numbers = np.arange(num_pieces)
        shuffled = shuffle_pieces(numbers)
        by_length = np.argsort(-self._lengths[shuffled], kind="stable")
        piece_of_slot = shuffled[by_length]  # pieces of equal length stay shuffled
        lane_of_slot = shuffle_lanes(self._lane_of_slot)
        place_of_slot = shuffle_places(numbers)
        slots = np.lexsort((place_of_slot, lane_of_slot))
        pieces = piece_of_slot[slots]
        return LaneEpoch(
            clips=self._clips,
            num_lanes=self.num_lanes,
            lanes=lane_of_slot[slots],
            first_ranks=self._first_ranks[pieces],
            lengths=self._lengths[pieces],
        )


class LaneEpoch(Epoch):
    """One epoch of lanes."""

    __slots__ = (
        "_by_rank",
        "_clips",
        "_first_piece",
        "_first_ranks",
        "_lane_ends",
        "_lengths",
        "_num_steps",
        "_padding",
        "_starts",
        "num_lanes",
    )

    def __init__(
        self,
        clips: ClipTable,
        num_lanes: int,
        lanes: I64,
        first_ranks: NDArray[np.integer],
        lengths: I64,
    ) -> None:
        """Take the pieces in order: lane 0's first to last, then lane 1's (``lanes`` ascends)."""
        self._clips = clips
        self._first_ranks = first_ranks
        self._lengths = lengths
        self.num_lanes = num_lanes
        loads = np.bincount(lanes, lengths, num_lanes)
        num_steps = int(loads.max())
        self._num_steps = num_steps
        self._first_piece = np.searchsorted(lanes, np.arange(num_lanes))
        self._padding = self._first_piece % max(1, len(lanes))
        """What each lane shows when it has ended: its first piece; one without a piece, that of
        another lane.
        """
        ends = np.cumsum(lengths)
        starts = ends - lengths
        total = ends[-1:]
        lane_starts = np.append(starts, total)[self._first_piece]
        # All lanes laid end to end, each given num_steps places: piece i begins at starts[i].
        self._starts = starts - lane_starts[lanes] + lanes * num_steps
        self._lane_ends = np.append(lane_starts[1:], total) - lane_starts
        self._by_rank: tuple[I64, NDArray[np.integer]] | None = None
        """The pieces sorted by their first frames' ranks, and these ranks; from the first
        :meth:`find` on.
        """

    def __len__(self) -> int:
        return self._num_steps * self.num_lanes

    def entries(self, positions: ArrayLike, /) -> Entries:
        """Return entries at ``positions``, with two flags; raises OrderError for positions outside.

        Not valid: the lane has ended, and shows its first piece again. ``lane``: which lane of the
        global batch. ``prev_exists``: the lane showed the frame before this one in its previous
        step; False: reset its memory.
        """
        places = as_positions(positions, len(self))
        step, lane = np.divmod(places, self.num_lanes)
        lane_end = self._lane_ends[lane]
        valid = step < lane_end
        repeated = self._padding[lane]
        repeated_offset = (step - lane_end) % self._lengths[repeated]
        place = lane * self._num_steps + step
        running = np.searchsorted(self._starts, place, side="right") - 1
        piece = np.where(valid, running, repeated)
        offset = np.where(valid, place - self._starts[piece], repeated_offset)
        ranks = self._first_ranks[piece] + offset
        samples = self._clips.samples[ranks].astype(np.int64)
        return Entries(
            parts=np.zeros_like(samples),
            samples=samples,
            valid=valid,
            flags={"lane": lane, "prev_exists": offset > 0},
        )

    def find(self, samples: ArrayLike, _: int = 0, /) -> Occurrences:
        """Return where ``samples`` (n,) are shown, padding included; raises OrderError for numbers
        outside the split.

        The first call of an epoch sorts its pieces.
        """
        numbers = as_positions(samples, len(self._clips), "sample")
        rank = self._clips.ranks[numbers]
        if self._by_rank is None:
            by_rank = np.argsort(self._first_ranks)
            self._by_rank = by_rank, self._first_ranks[by_rank]
        pieces, first_ranks = self._by_rank
        last_not_behind = np.searchsorted(first_ranks, rank, side="right") - 1
        piece = pieces[last_not_behind]
        offset = rank - self._first_ranks[piece]
        is_shown = (offset >= 0) & (offset < self._lengths[piece])
        indices = np.flatnonzero(is_shown)
        piece = piece[indices]
        offset = offset[indices]
        lane = np.searchsorted(self._first_piece, piece, side="right") - 1
        step = self._starts[piece] - lane * self._num_steps + offset
        # A lane that has ended shows its first piece again and again.
        by_piece = np.argsort(self._padding, kind="stable")
        first_ended = np.searchsorted(self._padding, piece, "left", by_piece)
        end_ended = np.searchsorted(self._padding, piece, "right", by_piece)
        showing, ended = _runs(first_ended, end_ended)
        ended = by_piece[ended]
        repeat_start = self._lane_ends[ended] + offset[showing]
        length = self._lengths[piece[showing]]
        turns = np.maximum(-((repeat_start - self._num_steps) // length), 0)
        padding, turn = _runs(np.zeros_like(turns), turns)
        padding_steps = repeat_start[padding] + turn * length[padding]
        steps = np.append(step, padding_steps)
        lanes = np.append(lane, ended[padding])
        padding_indices = indices[showing[padding]]
        return Occurrences.sorted(
            np.append(indices, padding_indices),
            steps * self.num_lanes + lanes,
        )

    def without(self, samples: I64) -> LaneEpoch:
        """Return the epoch without some samples: in each lane the frames behind one follow at
        once, as a new piece.
        """
        hidden = np.sort(self._clips.ranks[samples])
        starts = self._first_ranks
        ends = starts + self._lengths
        first_cut = np.searchsorted(hidden, starts)
        end_cut = np.searchsorted(hidden, ends) + 1
        piece, cut = _runs(first_cut, end_cut)
        bounds = np.append(hidden, ends[-1:])
        is_first = np.diff(piece, prepend=-1) != 0
        is_last = np.diff(piece, append=-1) != 0
        first_ranks = np.where(is_first, starts[piece], bounds[cut - 1] + 1)
        end_ranks = np.where(is_last, ends[piece], bounds[cut])
        lengths = end_ranks - first_ranks
        lanes = np.searchsorted(self._first_piece, piece, side="right") - 1
        mask = lengths > 0
        return LaneEpoch(
            clips=self._clips,
            num_lanes=self.num_lanes,
            lanes=lanes[mask],
            first_ranks=first_ranks[mask],
            lengths=lengths[mask],
        )


def _runs(first: I64, end: I64) -> tuple[I64, I64]:
    """Return the integers of ranges [first, end) (n,), one after the other: which range, and the
    integer.
    """
    lengths = end - first
    range_numbers = np.repeat(np.arange(len(lengths)), lengths)
    shifts = first - np.cumsum(lengths) + lengths
    integers = np.arange(len(range_numbers)) + shifts[range_numbers]
    return range_numbers, integers
