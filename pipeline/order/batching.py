"""Assign positions to ranks, steps and epochs, by arithmetic on a few integers.

An epoch is cut into global batches of G consecutive positions; each of the R ranks takes G / R
consecutive ones, of any R up to G: rank r has the rows r G // R to (r + 1) G // R - 1::

    step 0                     step 1                     step 2
    | rank 0 | .. | rank R-1 | rank 0 | .. | rank R-1 | ...
    start                      start + G                  start + 2 G

``start`` is the number of samples consumed before: 0 at the epoch's beginning. A global batch
depends on (start, G) alone, so another number of ranks continues with the same batches. With
another G the rest of the epoch is cut again, and each of the samples left comes once. Ranks agree
without communication.

`Batching` is one epoch or its rest, `Cursor` the position of a run, `WorkerShard` the steps of one
of several processes that take turns, `Walk` all of them together: the steps of a run through the
ends of epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import WorldError

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I64, Mask

MAX_EMPTY_EPOCHS: Final = 100
"""Epochs in a row that may have no step, before a run counts as one that never goes on."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's data-parallel rank and the number of data-parallel ranks; one process alone by
    default.

    Ranks of one tensor-, pipeline- or context-parallel group share a data-parallel rank. Raises
    WorldError unless 0 <= rank < size.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        _integers(self, "rank", "size")
        if self.size < 1:
            raise WorldError(f"world size must be at least 1, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise WorldError(
                f"rank {self.rank} is outside 0 .. {self.size - 1} of a world of {self.size}"
            )


@dataclass(frozen=True, slots=True)
class Batching:
    """The global batches of one epoch, or of its rest, and one rank's part in each.

    ``epoch_length``: positions in the epoch, at least 1. ``global_batch``: samples a step over all
    ranks, ``world.size`` or more. ``start``: samples of this epoch consumed already; step 0 begins
    there. The samples after the last full batch are left out (``drop_last``), or make one more
    batch, filled up with positions from the epoch's beginning that are flagged as not valid. Every
    rank has the same number of steps, and in each step the same rows of the global batch
    (:attr:`rows`): equally many where the number of ranks divides it, else some ranks have one
    more.

    ``lengths`` knows the positions of each epoch, where these differ: an order in packs. `of_epoch`
    asks it. Such an epoch may be too short for a step; `next_epoch` finds the one that a run
    continues with. ``unit`` is what a position shows, for messages.

    Raises WorldError where there are more ranks than rows, where ``drop_last`` would leave every
    epoch empty, and for numbers out of range.
    """

    epoch_length: int
    global_batch: int
    world: World
    drop_last: bool = True
    start: int = 0
    lengths: Callable[[int], int] | None = None
    unit: Literal["samples", "packs"] = "samples"

    def __post_init__(self) -> None:
        _integers(self, "epoch_length", "global_batch", "start")
        shortest = 1 if self.lengths is None else 0
        if not shortest <= self.epoch_length <= 2**62:
            raise WorldError(
                f"an epoch must have {shortest} .. 2**62 positions, got {self.epoch_length}"
            )
        if not 1 <= self.global_batch <= 2**31:
            raise WorldError(
                f"a global batch must have 1 .. 2**31 {self.unit}, got {self.global_batch}"
            )
        if self.global_batch < self.world.size:
            raise WorldError(
                f"a global batch of {self.global_batch} has no row for some of {self.world.size} "
                f"ranks: use at most {self.global_batch} ranks, or a global batch of "
                f"{self.world.size} or more"
            )
        if not 0 <= self.start <= self.epoch_length:
            raise WorldError(
                f"{self.start} {self.unit} consumed in an epoch that has {self.epoch_length}"
            )
        if self.lengths is None and self.drop_last and self.global_batch > self.epoch_length:
            raise WorldError(
                f"an epoch of {self.epoch_length} samples has no full global batch of "
                f"{self.global_batch}, so with drop_last every epoch is empty; use a global "
                f"batch of at most {self.epoch_length}, or drop_last=False"
            )

    @property
    def rows(self) -> range:
        """The rows of each global batch that this rank has."""
        return self.rows_of(range(self.world.rank, self.world.rank + 1))

    def rows_of(self, ranks: range) -> range:
        """Return the rows of each global batch that some ranks in a row have together."""
        first = ranks.start * self.global_batch // self.world.size
        end = ranks.stop * self.global_batch // self.world.size
        return range(first, end)

    @property
    def rank_batch(self) -> int:
        """Samples a step on this rank."""
        return len(self.rows)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many rows."""
        return self.global_batch % self.world.size == 0

    @property
    def rank_weight(self) -> float:
        """What this rank's mean loss is multiplied with: its rows times R / G.

        The mean over the ranks of the gradients is then that of the global batch's mean loss.
        """
        return self.rank_batch * self.world.size / self.global_batch

    @property
    def num_steps(self) -> int:
        """Steps from ``start`` to the epoch's end, the same on every rank."""
        remaining = self.epoch_length - self.start
        if self.drop_last:
            return remaining // self.global_batch
        return -(-remaining // self.global_batch)

    def of_epoch(self, epoch: int) -> Batching:
        """Return the batches of one epoch."""
        if self.lengths is None:
            return self
        return replace(self, epoch_length=self.lengths(epoch))

    def next_epoch(self, epoch: int) -> int:
        """Return the first epoch from this one on that has a step; those without any are passed
        over.

        Raises WorldError where none of `MAX_EMPTY_EPOCHS` epochs has one.
        """
        min_length = self.global_batch if self.drop_last else 1
        last = epoch + MAX_EMPTY_EPOCHS - 1
        for candidate in range(epoch, last + 1):
            batches = self.of_epoch(candidate)
            if batches.epoch_length >= min_length:
                return candidate
        remedy = "use a smaller one, or drop_last=False" if self.drop_last else "leave out fewer"
        raise WorldError(
            f"none of the epochs {epoch} .. {last} has a full global batch of "
            f"{self.global_batch} {self.unit}, the last one has {batches.epoch_length}; {remedy}"
        )

    def positions(self, step: int) -> I64:
        """Return this rank's positions in one step: int64 (rank_batch,), each in [0, epoch_length).

        Beyond the epoch's end, in the last step only, they start again at position 0. Raises
        WorldError for a step outside 0 .. num_steps - 1.
        """
        return self._running(step) % self.epoch_length

    def valid(self, step: int) -> Mask:
        """Return which of ``positions(step)`` are samples of the epoch, not padding: bool
        (rank_batch,).
        """
        return self._running(step) < self.epoch_length

    def running(self, step: int) -> I64:
        """Return the positions of a step over all ranks, continued beyond the epoch's end: int64
        (global_batch,).

        Raises WorldError for a step outside 0 .. num_steps - 1.
        """
        return self._range(step, 0, self.global_batch)

    def _running(self, step: int) -> I64:
        """Return this rank's positions in one step, continued beyond the epoch's end."""
        return self._range(step, self.rows.start, self.rank_batch)

    def _range(self, step: int, first: int, size: int) -> I64:
        if not 0 <= step < self.num_steps:
            raise WorldError(f"step {step} is outside the {self.num_steps} steps left in the epoch")
        start = self.start + step * self.global_batch + first
        return np.arange(start, start + size, dtype=np.int64)

    def consumed(self, num_steps: int) -> int:
        """Return how many samples of the epoch all ranks have consumed after ``num_steps`` steps.

        Padding is not counted. This is what `Cursor.samples_consumed` and ``start`` hold. Raises
        WorldError for more steps than there are.
        """
        if not 0 <= num_steps <= self.num_steps:
            raise WorldError(f"{num_steps} steps done of the {self.num_steps} left in the epoch")
        end = self.start + num_steps * self.global_batch
        return min(end, self.epoch_length)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a run: the epoch, and the number of its samples that all ranks together have
    consumed.

    Of an order in packs it is the number of packs. Padding is not counted. With the order and the
    dataset, this is all that a checkpoint needs. Raises WorldError for negative numbers.
    """

    epoch: int = 0
    samples_consumed: int = 0

    def __post_init__(self) -> None:
        _integers(self, "epoch", "samples_consumed")
        if self.epoch < 0 or self.samples_consumed < 0:
            raise WorldError(
                f"a cursor cannot be negative, got epoch {self.epoch}, samples "
                f"{self.samples_consumed}"
            )

    def rest(self, batching: Batching) -> Batching:
        """Return the remaining batches of this cursor's epoch, of the size of ``batching``'s.

        The first begins after the last consumed sample, at any batch size. Without a step the
        epoch is over (:meth:`rolled`). Raises WorldError where more samples were consumed than the
        epoch has.
        """
        epoch_batches = batching.of_epoch(self.epoch)
        return replace(epoch_batches, start=self.samples_consumed)

    def rolled(self, batching: Batching) -> Cursor:
        """Return itself, or the beginning of the next epoch with a step where its own has none
        left.

        Raises WorldError where no epoch with a step follows soon (`Batching.next_epoch`).
        """
        if self.rest(batching).num_steps:
            return self
        return Cursor(batching.next_epoch(self.epoch + 1))


class WorkerShard(NamedTuple):
    """The steps that a process makes of its rank's: every ``stride``-th one of an epoch, from
    ``first`` on.
    """

    first: int = 0
    stride: int = 1

    def steps(self, batching: Batching) -> range:
        """Return the steps of these batches that are its own."""
        return range(self.first, batching.num_steps, self.stride)


EVERY_STEP: Final = WorkerShard()


@dataclass(frozen=True, slots=True)
class Walk:
    """The steps of a run from ``start`` on: the rest of that epoch, then whole epochs without end.

    ``batching`` cuts a whole epoch, ``share`` selects the steps that are made here: k counts those.
    A step of an epoch is numbered within :meth:`batches` of that epoch. Raises WorldError where
    ``start`` has consumed more samples than an epoch has.
    """

    start: Cursor
    batching: Batching
    share: WorkerShard = EVERY_STEP
    rest: Batching = field(init=False)
    """The batches of the first epoch that are still to come."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rest", self.start.rest(self.batching))

    @property
    def num_steps(self) -> int:
        """Steps made here in the first epoch."""
        return len(self.share.steps(self.rest))

    @property
    def following(self) -> Cursor:
        """The beginning of the second epoch; `Cursor.rolled` passes over one without a step."""
        return Cursor(self.start.epoch + 1)

    def batches(self, epoch: int) -> Batching:
        """Return the batches of one epoch of the walk."""
        if epoch == self.start.epoch:
            return self.rest
        return self.batching.of_epoch(epoch)

    def place(self, k: int) -> tuple[int, int]:
        """Return epoch and step of the k-th step of this walk: in constant time where all epochs
        are equally long.

        Raises WorldError where the share has no such step.
        """
        if self.batching.lengths is not None:
            for epoch, steps in self._epochs():
                if k < len(steps):
                    return epoch, steps[k]
                k -= len(steps)
            raise self._make_no_step_error(epoch)
        first_steps = self.share.steps(self.rest)
        if k < len(first_steps):
            return self.start.epoch, first_steps[k]
        second_epoch = self.start.epoch + 1
        epoch_steps = self.share.steps(self.batching)
        if not epoch_steps:
            raise self._make_no_step_error(second_epoch)
        num_epochs, number = divmod(k - len(first_steps), len(epoch_steps))
        return second_epoch + num_epochs, epoch_steps[number]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the place of each step made here; endless, or empty where the share has no step."""
        if self.batching.lengths is None and not self.share.steps(self.batching):
            return
        for epoch, steps in self._epochs():
            for step in steps:
                yield epoch, step

    def _epochs(self) -> Iterator[tuple[int, range]]:
        """Yield the epochs that have steps, and those of them that are made here; end after
        `MAX_EMPTY_EPOCHS` in a row without one.
        """
        epoch = self.start.epoch
        num_empty = 0
        while num_empty <= MAX_EMPTY_EPOCHS:
            steps = self.share.steps(self.batches(epoch))
            yield epoch, steps
            num_empty = 0 if steps else num_empty + 1
            epoch = self.batching.next_epoch(epoch + 1)

    def _make_no_step_error(self, epoch: int) -> WorldError:
        num_steps = self.batches(epoch).num_steps
        return WorldError(
            f"worker {self.share.first} of {self.share.stride} has no step of its own: epoch "
            f"{epoch} has {num_steps}; use at most {max(num_steps, 1)} workers"
        )

    def number(self, k: int) -> int:
        """Return the number of the k-th step made here among the steps of all shares."""
        epoch, step = self.place(k)
        if epoch == self.start.epoch:
            return step
        return self.steps_before(epoch) + step

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps of all shares from the start to the beginning of an epoch,
        0 for the first.
        """
        first = self.start.epoch
        if self.batching.lengths is not None:
            return sum(self.batches(earlier).num_steps for earlier in range(first, epoch))
        if epoch <= first:
            return 0
        num_whole_epochs = epoch - first - 1
        return self.rest.num_steps + num_whole_epochs * self.batching.num_steps

    def cursor(self, k: int) -> Cursor:
        """Return the position before the k-th step of this walk."""
        epoch, step = self.place(k)
        batches = self.batches(epoch)
        return Cursor(epoch, batches.consumed(step))

    def after(self, num_steps: int) -> Cursor:
        """Return the cursor after this number of steps made here and by each other share, in the
        first epoch.
        """
        num_all = min(num_steps * self.share.stride, self.rest.num_steps)
        return Cursor(self.start.epoch, self.rest.consumed(num_all))

    def positions(
        self,
        first: int,
        num_steps: int,
        ranks: range,
    ) -> Iterator[tuple[int, I64]]:
        """Yield, epoch by epoch, the positions of ``ranks`` in the steps made here from the
        ``first`` on.

        Step by step, and rank by rank in each: int64 (steps * their rows,). Padding included.
        """
        rows = np.array(self.batching.rows_of(ranks))
        stride = self.share.stride
        while num_steps > 0:
            epoch, step = self.place(first)
            batches = self.batches(epoch)
            end = min(step + num_steps * stride, batches.num_steps)
            steps = np.arange(step, end, stride, dtype=np.int64)
            starts = batches.start + steps * batches.global_batch
            running = starts[:, None] + rows
            yield epoch, running.reshape(-1) % batches.epoch_length
            first += len(steps)
            num_steps -= len(steps)


def _integers(record: object, *names: str) -> None:
    """Convert integer-like fields (numpy scalars too) to int; raise WorldError for anything
    else.
    """
    for name in names:
        value = getattr(record, name)
        try:
            object.__setattr__(record, name, index(value))
        except TypeError as error:
            raise WorldError(
                f"{type(record).__name__}: {name}={value!r} must be an integer"
            ) from error
