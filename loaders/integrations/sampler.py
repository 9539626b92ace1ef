"""The order of Fuelrail over any map-style dataset: samplers for torch's DataLoader, and batches by
number for others.

::

    sampler = fr.order.BatchSampler(len(dataset), fr.OrderSpec(seed=7), global_batch=64)
    loader = sampler.count(torch.utils.data.DataLoader(dataset, batch_sampler=sampler,
    num_workers=4))
    for batch in loader:                         # one epoch, or its rest
        train(batch)
        state = loader.state_dict()  # of this batch, not of those that workers have fetched

A DataLoader draws batches from its sampler long before the trainer receives them, so a sampler
alone cannot know the position of the training. :meth:`BatchSampler.count` wraps a loader and counts
what it hands out. Without it `state_dict` raises an error as soon as a batch was drawn.

Importing this module imports numpy and msgspec only. pyarrow is imported where columns are read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fuelrail.loaders.schedule.ledger import (
    LedgerOptions,
    RunLedger,
    ledger_options,
)
from fuelrail.loaders.schedule.state import Identity, decode_state, state_at
from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.balance import check_micro_batches, order_batching
from fuelrail.pipeline.order.batching import Cursor, Walk, World
from fuelrail.pipeline.order.compile import plain
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.order.table import OrderedRows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.pipeline.order.mix import MixStage
    from fuelrail.pipeline.order.table import Data
    from fuelrail.pipeline.order.windows import FrameWindow

_PART: Final = "a part of an epoch"
_ENTIRE: Final = "a whole epoch"
_HOW: Final = (
    "count what the trainer receives: loader = sampler.count(loader), iterate that loader, "
    "and save and load its state; or make a fr.order.StatefulSampler for torchdata's "
    "StatefulDataLoader"
)


_FIXED: Final = (
    "{} cannot be used with torchdata's StatefulDataLoader, which alone knows what the trainer "
    "received: load its state into a new one with world=, or count a DataLoader "
    "(BatchSampler.count)"
)


class BatchSampler:
    """This rank's batches of row numbers in the order of a spec, for
    ``DataLoader(batch_sampler=...)``.

    ``data`` is the number of rows, or columns by name with a value a row (numpy arrays, lists,
    Arrow). Filters, weights and mixes of parts name columns. Four names have a meaning: ``key`` for
    lists of keys, ``clip_id`` and ``frame`` for lanes and windows (without ``frame`` the rows of a
    clip count in stored order).

    Args:
        data: as above; with ``mix`` a mapping of dataset names to such data. Rows are then those of
            a ``ConcatDataset`` of the datasets in this order.
        spec: the order; None: ``OrderSpec()``. Without a kind it is shuffled.
        global_batch: rows of a batch over all ranks, at least one for each: rank r of R has the
            rows r G // R to (r + 1) G // R - 1. Where R does not divide G, multiply a rank's mean
            loss with :attr:`rank_weight`.
        world: rank and number of ranks, or a device mesh; None: as torch.distributed, Megatron or
            the launcher has it.
        drop_last: leave out the rows at an epoch's end that do not fill a batch; else they are
            filled up with the epoch's first rows, as DistributedSampler does.
        blocks: rows of a block, for kind ``windowed``, whose window counts blocks; or the length of
            each block.
        mix: rows of each dataset in a block of the mix (`fuelrail.pipeline.order.mix`), or stages
            of a run with such.
        window: the frames of a sample. ``pad="drop"`` leaves out rows without all of them, others
            need ``entries``.
        entries: yield an `Entry` in place of each row number.
        ledger: file in which the run is recorded, or a `LedgerOptions`; the batches must be counted
            (:meth:`count`).

    With ``OrderSpec(pack=...)`` a batch holds ``global_batch`` packs over all ranks, each of
    several rows: the rows come pack by pack, and `Entry.pack` says where one begins. Epochs then
    differ in length. With ``OrderSpec(bucket=...)`` `Entry.bucket` says which bucket the batch is
    of.

    Iterating yields the rest of the epoch, then each time the following one. ``sampler[k]`` is
    batch k of a run from its beginning, through all epochs, for loops that count their steps.
    Raises OrderError for data and a spec that do not fit, WorldError for ranks that cannot share
    the batch.
    """

    def __init__(
        self,
        data: Data,
        spec: OrderSpec | None = None,
        *,
        global_batch: int,
        world: World | DeviceMesh | None = None,
        drop_last: bool = True,
        blocks: int | Sequence[int] | None = None,
        mix: Mapping[str, int] | Sequence[MixStage] | None = None,
        window: FrameWindow | None = None,
        entries: bool = False,
        ledger: LedgerOptions | str | os.PathLike[str] | None = None,
    ) -> None:
        spec = OrderSpec() if spec is None else spec
        if window is not None and window.pad != "drop" and not entries:
            raise OrderError(
                f"window with pad={window.pad!r} needs entries=True: row numbers alone have "
                "no frames"
            )
        self._rows = OrderedRows(
            data=data,
            spec=spec,
            blocks=blocks,
            mix=mix,
            window=window,
            global_batch=global_batch,
            entries=entries,
        )
        resolved = World()
        if isinstance(world, World):
            resolved = world
        elif world is not None or "torch" in sys.modules or "RANK" in os.environ:
            from fuelrail.loaders.distributed import resolve_world

            resolved = resolve_world(world)
        self._batching = order_batching(
            self._rows.order,
            global_batch,
            resolved,
            drop_last=drop_last,
        )
        self._identity = Identity(
            dataset=self._rows.described,
            split="rows",
            order=self._rows.order.identity,
            drop_last=drop_last,
            frames=plain(window),
        )
        self._ledger = RunLedger(ledger_options(ledger), self._identity, self._batching)
        self._origin = Cursor()
        self._num_received = 0
        """Where the newest pass began, and the steps that the trainer has received of it:
        counted, not computed.
        """
        self._pass: CountedLoader | None = None
        """The iteration of a counted loader that is under way."""
        self._committed: Cursor | None = None
        """The place after the last committed batch; None: batches are final when received."""
        self._expects_pass = False
        """A counted loader has announced that it will draw an epoch."""
        self._uncounted = ""
        """How far others have drawn: "" (nothing), "a part of an epoch", "a whole epoch"."""
        self._is_counted = False
        """Whether there is a counted loader."""

    @property
    def world(self) -> World:
        """Rank and number of ranks."""
        return self._batching.world

    @property
    def global_batch(self) -> int:
        """Rows of a batch over all ranks; in packs, packs."""
        return self._batching.global_batch

    @property
    def rank_batch(self) -> int:
        """Rows of a batch on this rank."""
        return self._batching.rank_batch

    @property
    def rank_weight(self) -> float:
        """What this rank's mean loss is multiplied with: its rows times R / G, of R ranks.

        The mean of the gradients over the ranks is then that of the global batch. It is 1 where R
        divides G.
        """
        return self._batching.rank_weight

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch, the same on every rank; in packs, of the epoch of the
        position.
        """
        return self._batching.of_epoch(self._walk().start.epoch).num_steps

    @property
    def steps_left(self) -> int:
        """Batches of the epoch after those that the trainer has received; 0 at its end."""
        return Walk(self._position(), self._batching).num_steps

    @property
    def drop_last(self) -> bool:
        """Whether rows at an epoch's end that do not fill a batch are left out.

        Raises OrderError for a trainer that deals out this rank's batches to all ranks: that is who
        asks, of a sampler that nobody counts.
        """
        self._refuse_to_be_dealt_out()
        return self._identity.drop_last

    def set_epoch(self, epoch: int) -> None:  # noqa: ARG002 - the position has it
        """Do nothing, for each iteration is the next epoch by itself; trainers call this.

        Raises OrderError for a trainer that deals out this rank's batches to all ranks.
        """
        self._refuse_to_be_dealt_out()

    def _refuse_to_be_dealt_out(self) -> None:
        if self.world.size > 1 and not self._is_counted:
            raise OrderError(
                f"this sampler has the batches of rank {self.world.rank} of {self.world.size}, and "
                "a trainer is about to deal them out to all ranks once more, which loses rows; "
                "give the trainer sampler.count(loader), which it leaves as it is"
            )

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __getitem__(self, step: int) -> list[Any]:
        """Return batch ``step`` of a run, counted from 0 through all epochs; leaves the position
        as it is.
        """
        if step < 0:
            raise IndexError(f"batches are counted from 0, got {step}")
        epoch, step_of_epoch = Walk(Cursor(), self._batching).place(step)
        return self._rows.batches(
            epoch,
            self._batching.of_epoch(epoch),
            range(step_of_epoch, step_of_epoch + 1),
        )[0]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, then over the next one.

        Raises OrderError where an earlier iteration was left before its end and nobody counted what
        was received.
        """
        # A generator: torch's loaders make two iterators, and draw from one. The first draw decides
        # which pass it is.
        counted = self._expects_pass
        self._expects_pass = False
        if not counted:
            self._refuse_partial()
            self._ledger.refuse_uncounted(_HOW)
            self._uncounted = _PART
            self._pass = None
        walk = self._walk()
        yield from self._rows.rest(walk)
        if not counted:
            self._origin = walk.following
            self._num_received = 0
            self._uncounted = _ENTIRE

    def _refuse_partial(self) -> None:
        if self._uncounted == _PART:
            raise OrderError(
                f"the last iteration of this sampler drew {_PART}, and was not counted; {_HOW}"
            )

    def commit(self) -> None:
        """Make the batches received so far final: all ranks have taken these steps.

        From the first call on, `state_dict`, :meth:`reshape`, :meth:`rollback` and the ledger know
        committed steps only. Of a sampler that was never told, every batch received is final.
        """
        self._refuse_uncounted()
        self._committed = self._position()
        self._ledger.commit()

    def rollback(self) -> None:
        """Give the batches after the last :meth:`commit` again, in this iteration or the next one.

        Without any commit so far these are all batches of the iteration.
        """
        self._refuse_uncounted()
        self._continue_at(self._origin if self._committed is None else self._committed)

    def reshape(self, world: World | DeviceMesh) -> None:
        """Continue as another rank, or with another number of ranks, from 1 to the global batch.

        Call it between two steps, on every rank that stays. A counted iteration under way continues
        after the last batch that was committed (:meth:`commit`): it draws the rest of its order
        from ``iter(loader)`` again, whose ``persistent_workers`` stay. Raises WorldError for more
        ranks than rows, OrderError where batches were drawn and not counted.
        """
        self._refuse_uncounted()
        if not isinstance(world, World):
            from fuelrail.loaders.distributed import resolve_world

            world = resolve_world(world)
        batching = replace(self._batching, world=world)
        check_micro_batches(self._rows.order, batching)
        place = self._position() if self._committed is None else self._committed
        self._ledger.reshape(batching)
        self._batching = batching
        self._continue_at(place)

    def _continue_at(self, place: Cursor) -> None:
        self._origin = place
        self._num_received = 0
        self._ledger.restore(place)
        if self._pass is not None:
            self._pass.is_moved = True

    def _position(self) -> Cursor:
        """Return the place after the batches that the trainer has received."""
        return Walk(self._origin, self._batching).after(self._num_received)

    def _walk(self) -> Walk:
        """Return the steps from the position on."""
        return Walk(self._position().rolled(self._batching), self._batching)

    def count(self, loader: Iterable[Any] | None = None) -> CountedLoader:
        """Return ``loader``, which draws its batches from this sampler, with a state; None: the
        batches themselves.

        Raises OrderError for a torch DataLoader that has another sampler, such as one that a
        trainer has put around this one, or other batches.
        """
        is_counted = isinstance(loader, CountedLoader)
        actual = self if is_counted else getattr(loader, "batch_sampler", self)
        if actual is not self:
            raise OrderError(
                f"the loader's batch_sampler is a {type(actual).__name__}, not this "
                "sampler; give it batch_sampler=sampler, and do not let a trainer wrap it: "
                "every rank has its own batches already"
            )
        self._is_counted = True
        return CountedLoader(self, self if loader is None else loader)

    def begin(self, counting: CountedLoader) -> Walk:
        """Announce that a counted loader draws the next pass; return its steps."""
        self._refuse_partial()
        self._pass = counting
        self._expects_pass = True
        self._uncounted = ""
        walk = self._walk()
        if self._committed == self._position():
            self._committed = walk.start  # else batches before it are still to be committed
        self._ledger.enter(walk.start)
        return walk

    def is_over(self, walk: Walk) -> bool:
        """Return whether no step is left of the epoch of a pass."""
        return self._walk().start.epoch > walk.start.epoch

    def receive(
        self,
        counting: CountedLoader,
        walk: Walk,
        num_steps: int,
    ) -> None:
        """Note that the trainer has received ``num_steps`` batches of a pass; raise OrderError
        for an older pass.
        """
        if self._pass is not counting or self._expects_pass:
            reason = (
                "draws no batch from this sampler"
                if self._expects_pass
                else "is not the newest of its sampler"
            )
            raise OrderError(
                f"a counted iteration {reason}; make a sampler and a loader for each iteration"
            )
        if self._ledger.is_kept:
            self._ledger.hand_out(
                walk.after(num_steps - 1),
                following=walk.after(num_steps).rolled(self._batching),
            )
        self._origin = walk.start
        self._num_received = num_steps

    def end(self, counting: CountedLoader) -> None:
        """Note that a pass is over, also one that drew nothing because of an error."""
        if self._pass is counting:
            self._pass = None
            self._expects_pass = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as plain JSON types: equal on every rank, valid on any number of
        them.

        Raises OrderError where batches were drawn and not counted (:meth:`count`).
        """
        self._refuse_uncounted()
        self._ledger.reached("state")
        place = self._position() if self._committed is None else self._committed
        return state_at(self._identity, place.rolled(self._batching), self._batching.global_batch)

    def _refuse_uncounted(self) -> None:
        if self._uncounted:
            raise OrderError(
                f"the position is not known: a loader drew {self._uncounted} from this "
                f"sampler, which may be ahead of what the trainer received; {_HOW}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; an iteration under way ends with an error.

        Raises StateMismatchError for a state of other data, another order or drop_last, showing
        both sides, and WorldError for more samples than an epoch has.
        """
        decoded = decode_state(state, self._identity)
        restored = Cursor(decoded.epoch, decoded.samples_consumed)
        self._rows.check_unseen(decoded.identity.order, restored, decoded.full_batch)
        Walk(restored, self._batching)  # refuses more samples than an epoch has
        self._origin = restored
        self._num_received = 0
        if self._committed is not None:  # where the trainer commits at all
            self._committed = restored
        self._uncounted = ""
        self._pass = None
        self._expects_pass = False
        self._ledger.restore(restored)


class StatefulSampler(BatchSampler):
    """The batches of `BatchSampler` for torchdata's StatefulDataLoader, which saves a state with
    each batch.

    `state_dict` is the position after the batch drawn last; the loader returns the one of the batch
    that the trainer received last. An iteration that is left before its end is repeated by the next
    one, unless a state is loaded.
    """

    _drawn: Cursor | None = None

    def reshape(self, world: World | DeviceMesh) -> None:  # noqa: ARG002 - of any world
        """Raise OrderError: the loader knows the position."""
        raise OrderError(_FIXED.format("reshape"))

    def commit(self) -> None:
        """Raise OrderError: the loader knows the position."""
        raise OrderError(_FIXED.format("commit"))

    def rollback(self) -> None:
        """Raise OrderError: the loader knows the position."""
        raise OrderError(_FIXED.format("rollback"))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, then over the next one."""
        self._ledger.refuse_uncounted(_HOW)
        walk = self._walk()
        self._drawn = walk.start  # at once, for the loader asks for the state before it draws

        def batches() -> Iterator[Any]:
            for number, batch in enumerate(self._rows.rest(walk), 1):
                self._drawn = walk.after(number).rolled(self._batching)
                yield batch
            self._origin = walk.following

        return batches()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch that was drawn last; see
        `BatchSampler.state_dict`.
        """
        return state_at(
            self._identity,
            self._drawn or self._origin,
            self._batching.global_batch,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `BatchSampler.load_state_dict`."""
        super().load_state_dict(state)
        self._drawn = self._origin


class Sampler(BatchSampler):
    """The rows of `BatchSampler` one by one, for ``DataLoader(batch_size=sampler.rank_batch,
    sampler=...)``.

    Raises OrderError for an order in packs, whose batches differ in their number of rows.
    """

    def __init__(
        self, data: Data, spec: OrderSpec | None = None, **options: Any
    ) -> None:  # those of BatchSampler
        if spec is not None and spec.pack is not None:
            raise OrderError("batches of packs differ in their number of rows: use BatchSampler")
        super().__init__(data, spec, **options)

    def reshape(self, world: World | DeviceMesh) -> None:  # noqa: ARG002 - of any world
        """Raise OrderError: torch's DataLoader keeps its batch size."""
        raise OrderError(
            "reshape may change the rows of a rank, and torch's DataLoader(batch_size=...) keeps "
            "their number: use BatchSampler"
        )

    def __len__(self) -> int:
        return self.steps_per_epoch * self.rank_batch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, row by row; see `BatchSampler`."""
        for batch in super().__iter__():
            yield from batch

    def count(self, loader: Iterable[Any] | None = None) -> CountedLoader:
        """Return ``loader``, which draws its rows from this sampler, with a state; see
        `BatchSampler.count`.
        """
        actual = getattr(loader, "sampler", None)
        size = getattr(loader, "batch_size", None)
        if loader is None or actual is not self or size != self.rank_batch:
            raise OrderError(
                f"a loader with sampler=sampler and batch_size={self.rank_batch} "
                f"(sampler.rank_batch) is needed, got {type(loader).__name__} with "
                f"{type(actual).__name__} and batch_size={size}"
            )
        self._is_counted = True
        return CountedLoader(self, loader)


class CountedLoader:
    """A loader that counts the batches it hands out, so that its sampler knows the position of the
    training; after a `BatchSampler.reshape` or `BatchSampler.rollback` the iteration under way
    continues there.

    Each iteration is the rest of the sampler's epoch; ``len`` is the number of batches in a whole
    one.
    """

    batch_sampler = None
    """What Lightning asks of a loader of validation that has a sampler."""

    def __init__(self, sampler: BatchSampler, loader: Iterable[Any]) -> None:
        self.sampler = sampler
        self.loader = loader
        self.is_moved = False
        """The sampler has gone to another place, from where this pass is drawn again."""

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch.

        Raises OrderError where another iteration has started since, and at the end where the loader
        has not handed out each batch of the sampler as one.
        """
        # This pass, apart from others of this loader.
        counting = CountedLoader(self.sampler, self.loader)
        walk = self.sampler.begin(counting)
        number = 0
        try:
            while True:
                for number, batch in enumerate(self.loader, 1):
                    self.sampler.receive(counting, walk, number)
                    yield batch
                    if counting.is_moved:
                        break
                if not counting.is_moved:
                    break
                counting.is_moved = False
                number = 0
                if self.sampler.is_over(walk):
                    return
                walk = self.sampler.begin(counting)
        finally:
            self.sampler.end(counting)
        if number != walk.num_steps:
            raise OrderError(
                f"the loader handed out {number} batches, and the sampler has "
                f"{walk.num_steps} here: it joins, splits or leaves out batches, so the "
                "position is not known; do that outside of sampler.count(loader)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch handed out last; see `BatchSampler.state_dict`."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `BatchSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)
