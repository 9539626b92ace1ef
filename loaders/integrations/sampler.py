"""The order of Fuelrail over any map-style dataset: samplers for torch's DataLoader, and batches by number for others.

::

    sampler = fr.order.BatchSampler(len(dataset), fr.OrderSpec(seed=7), global_batch=64)
    loader = sampler.count(torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=4))
    for batch in loader:                         # one epoch, or its rest
        train(batch)
        state = loader.state_dict()              # what was received up to this batch, not what workers have fetched

A DataLoader draws batches from its sampler long before the trainer receives them, so a sampler alone cannot know the
position of the training. :meth:`BatchSampler.count` wraps a loader and counts what it hands out. Without it
`state_dict` raises an error as soon as a batch was drawn.

Importing this module imports numpy and msgspec only. pyarrow is imported where columns are read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fuelrail.loaders.schedule.state import STATE_VERSION, Identity, LoaderState, decode_state, encode_state
from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.balance import order_batching
from fuelrail.pipeline.order.batching import Cursor, Walk, World
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.order.table import OrderedRows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.pipeline.order.mix import MixStage
    from fuelrail.pipeline.order.table import Data
    from fuelrail.pipeline.order.windows import FrameWindow

_ROWS_AT_A_TIME: Final = 16384  # a permutation's own chunk
_PART: Final = "a part of an epoch"
_WHOLE: Final = "a whole epoch"
_HOW: Final = (
    "count what the trainer receives: loader = sampler.count(loader), iterate that loader, and save and load its state"
)


class BatchSampler:
    """This rank's batches of row numbers in the order of a spec, for ``DataLoader(batch_sampler=...)``.

    ``data`` is the number of rows, or columns by name with a value a row (numpy arrays, lists, Arrow). Filters, weights
    and mixes of parts name columns. Four names have a meaning: ``key`` for lists of keys, ``clip_id`` and ``frame`` for
    lanes and windows (without ``frame`` the rows of a clip count in stored order).

    Args:
        data: as above; with ``mix`` a mapping of dataset names to such data. Rows are then those of a
            ``ConcatDataset`` of the datasets in this order.
        spec: the order; None: ``OrderSpec()``, shuffled with seed 0.
        global_batch: rows of a batch over all ranks, a multiple of their number.
        world: rank and number of ranks, or a device mesh; None: as torch.distributed, Megatron or the launcher has it.
        drop_last: leave out the rows at an epoch's end that do not fill a batch; else they are filled up with the
            epoch's first rows, as DistributedSampler does.
        blocks: rows of a block, for kind ``windowed``, whose window counts blocks; or the length of each block.
        mix: rows of each dataset in a block of the mix (`fuelrail.pipeline.order.mix`), or stages of a run with such.
        window: the frames of a sample. ``pad="drop"`` leaves out rows without all of them, others need ``entries``.
        entries: yield an `Entry` in place of each row number.

    With ``OrderSpec(pack=...)`` a batch holds ``global_batch`` packs over all ranks, each of several rows: the rows
    come pack by pack, and `Entry.pack` says where one begins. Epochs then differ in length.

    Iterating yields the rest of the epoch, then each time the following one. ``sampler[k]`` is batch k of a run from
    its beginning, through all epochs, for loops that count their steps. Raises OrderError for data and a spec that do
    not fit, WorldError for ranks that cannot share the batch.
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
    ) -> None:
        spec = OrderSpec() if spec is None else spec
        if window is not None and window.pad != "drop" and not entries:
            raise OrderError(f"window with pad={window.pad!r} needs entries=True: row numbers alone have no frames")
        self._rows = OrderedRows(data, spec, blocks, mix, window, global_batch, entries=entries)
        self._batching = order_batching(self._rows.order, global_batch, _find_world(world), drop_last=drop_last)
        # Through JSON and back, so that a state that was saved as JSON has the same types.
        plain: Any = None if window is None else msgspec.json.decode(msgspec.json.encode(window))
        self._identity = Identity(
            dataset=self._rows.described,
            split="rows",
            order=self._rows.order.identity,
            drop_last=drop_last,
            frames=plain,
        )
        self._position = Cursor()
        self._pass: CountedLoader | None = None
        """The iteration of a counted loader that is under way."""
        self._expects_pass = False
        """A counted loader has announced that it will draw an epoch."""
        self._uncounted = ""
        """How far others have drawn: "" (nothing), "a part of an epoch", "a whole epoch"."""

    @property
    def world(self) -> World:
        """Rank and number of ranks."""
        return self._batching.world

    @property
    def rank_batch(self) -> int:
        """Rows of a batch on this rank."""
        return self._batching.rank_batch

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch, the same on every rank; in packs, of the epoch of the position."""
        return self._batching.of_epoch(self._position.epoch).num_steps

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __getitem__(self, step: int) -> list[Any]:
        """Return batch ``step`` of a run, counted from 0 through all epochs; leaves the position as it is."""
        if step < 0:
            raise IndexError(f"batches are counted from 0, got {step}")
        epoch, at = Walk(Cursor(), self._batching).place(step)
        return self._rows.batches(epoch, self._batching.of_epoch(epoch), range(at, at + 1))[0]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, then over the next one.

        Raises OrderError where an earlier iteration was left before its end and nobody counted what was received.
        """
        # A generator: torch's loaders make two iterators, and draw from one. The first draw decides which pass it is.
        counted, self._expects_pass = self._expects_pass, False
        if not counted:
            self._refuse_partial()
            self._uncounted, self._pass = _PART, None
        walk = self._walk()
        at_a_time = max(1, _ROWS_AT_A_TIME // self.rank_batch)
        for first in range(0, walk.num_steps, at_a_time):
            steps = range(first, min(first + at_a_time, walk.num_steps))
            yield from self._rows.batches(walk.start.epoch, walk.rest, steps)
        if not counted:
            self._position, self._uncounted = walk.following, _WHOLE

    def _refuse_partial(self) -> None:
        if self._uncounted == _PART:
            raise OrderError(f"the last iteration of this sampler drew {_PART}, and was not counted; {_HOW}")

    def _walk(self) -> Walk:
        return Walk(self._position.rolled(self._batching), self._batching)

    def count(self, loader: Iterable[Any] | None = None) -> CountedLoader:
        """Return ``loader``, which draws its batches from this sampler, with a state; None: the batches themselves.

        Raises OrderError for a torch DataLoader that has another sampler, such as one that a trainer has put around
        this one, or other batches.
        """
        self._check(loader)
        return CountedLoader(self, self if loader is None else loader)

    def _check(self, loader: Iterable[Any] | None) -> None:
        actual = getattr(loader, "batch_sampler", self)
        if actual is not self:
            raise OrderError(
                f"the loader's batch_sampler is a {type(actual).__name__}, not this sampler; give it batch_sampler="
                "sampler, and do not let a trainer wrap it: every rank has its own batches already"
            )

    def begin(self, counting: CountedLoader) -> Walk:
        """Announce that a counted loader draws the next pass; return its steps."""
        self._refuse_partial()
        self._pass, self._expects_pass, self._uncounted = counting, True, ""
        return self._walk()

    def receive(self, counting: CountedLoader, walk: Walk, num_steps: int) -> None:
        """Note that the trainer has received ``num_steps`` batches of a pass; raise OrderError for an older pass."""
        if self._pass is not counting or self._expects_pass:
            what = "draws no batch from this sampler" if self._expects_pass else "is not the newest of its sampler"
            raise OrderError(f"a counted iteration {what}; make a sampler and a loader for each iteration")
        self._position = walk.after(num_steps).rolled(self._batching)

    def end(self, counting: CountedLoader) -> None:
        """Note that a pass is over, also one that drew nothing because of an error."""
        if self._pass is counting:
            self._pass, self._expects_pass = None, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as plain JSON types: equal on every rank, valid on any number of them.

        Raises OrderError where batches were drawn and not counted (:meth:`count`).
        """
        if self._uncounted:
            raise OrderError(
                f"the position is not known: a loader drew {self._uncounted} from this sampler, which may be ahead of "
                f"what the trainer received; {_HOW}"
            )
        return encode_state(
            LoaderState(
                version=STATE_VERSION, identity=self._identity, epoch=self._position.epoch,
                samples_consumed=self._position.samples_consumed, global_batch_size=self._batching.global_batch,
            )
        )  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; an iteration under way ends with an error.

        Raises StateMismatchError for a state of other data, another order or drop_last, showing both sides, and
        WorldError for more samples than an epoch has.
        """
        decoded = decode_state(state, self._identity)
        restored = Cursor(decoded.epoch, decoded.samples_consumed)
        Walk(restored, self._batching)  # refuses more samples than an epoch has
        self._position, self._uncounted, self._pass, self._expects_pass = restored, "", None, False


class Sampler(BatchSampler):
    """The rows of `BatchSampler` one by one, for ``DataLoader(batch_size=sampler.rank_batch, sampler=...)``.

    Raises OrderError for an order in packs, whose batches differ in their number of rows.
    """

    def __init__(self, data: Data, spec: OrderSpec | None = None, **options: Any) -> None:  # those of BatchSampler
        if spec is not None and spec.pack is not None:
            raise OrderError("batches of packs differ in their number of rows: use BatchSampler")
        super().__init__(data, spec, **options)

    def __len__(self) -> int:
        return self.steps_per_epoch * self.rank_batch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, row by row; see `BatchSampler`."""
        for batch in super().__iter__():
            yield from batch

    def _check(self, loader: Iterable[Any] | None) -> None:
        actual, size = getattr(loader, "sampler", None), getattr(loader, "batch_size", None)
        if actual is not self or size != self.rank_batch:
            raise OrderError(
                f"a loader with sampler=sampler and batch_size={self.rank_batch} (sampler.rank_batch) is needed, got "
                f"{type(loader).__name__} with {type(actual).__name__} and batch_size={size}"
            )


class CountedLoader:
    """A loader that counts the batches it hands out, so that its sampler knows the position of the training.

    Each iteration is the rest of the sampler's epoch; ``len`` is the number of batches in a whole one.
    """

    def __init__(self, sampler: BatchSampler, loader: Iterable[Any]) -> None:
        self.sampler, self.loader = sampler, loader

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch.

        Raises OrderError where another iteration has started since, and at the end where the loader has not handed out
        each batch of the sampler as one.
        """
        counting = CountedLoader(self.sampler, self.loader)  # this pass, apart from others of this loader
        walk, number = self.sampler.begin(counting), 0
        try:
            for number, batch in enumerate(self.loader, 1):
                self.sampler.receive(counting, walk, number)
                yield batch
        finally:
            self.sampler.end(counting)
        if number != walk.num_steps:
            raise OrderError(
                f"the loader handed out {number} batches, and the sampler has {walk.num_steps} here: it joins, splits "
                "or leaves out batches, so the position is not known; do that outside of sampler.count(loader)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch handed out last; see `BatchSampler.state_dict`."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `BatchSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)


def _find_world(given: World | DeviceMesh | None) -> World:
    if isinstance(given, World):
        return given
    if given is None and "torch" not in sys.modules and "RANK" not in os.environ:
        return World()
    from fuelrail.loaders.distributed import resolve_world

    return resolve_world(given)
