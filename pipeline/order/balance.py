"""Balance: the samples or packs of each global batch are dealt to the ranks so that all of them
cost about the same.

Which samples are in a global batch stays as it is, so a position of a run is valid with any number
of ranks; which rank takes which of them depends on that number. Every rank computes the same deal
from the costs of the whole batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fuelrail.pipeline.errors import OrderError, WorldError
from fuelrail.pipeline.order.batching import Batching
from fuelrail.pipeline.order.bucket import BucketedOrder
from fuelrail.pipeline.order.cost import Cost
from fuelrail.pipeline.order.regroup import (
    RegroupedOrder,
    WindowedOrder,
    costs_of,
    groups_of,
)
from fuelrail.pipeline.order.without import ThinnedOrder
from fuelrail.pipeline.settings import Positive, Settings, check_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.dtypes import I64, Mask
    from fuelrail.pipeline.order.batching import World
    from fuelrail.pipeline.order.epoch import EndlessOrder, Epoch


class Balance(Settings, frozen=True):
    """Deal the rows of each global batch to ranks, and to their micro-batches, by cost.

    How many rows each rank has stays as it is without; its micro-batches have equally many.
    """

    cost: str | Cost
    """An attribute with whole numbers, or a model of several (`Cost`); a pack costs what its
    samples do in sum.
    """
    micro_batches: Positive = 1
    """Parts of a rank's batch that are dealt too, each a run of its rows, such as micro-batches
    of accumulation.
    """

    def __post_init__(self) -> None:
        check_types(self, OrderError)


def deal(costs: I64, num_groups: int) -> I64:
    """Return the rows of a batch (n,) group by group, of about equal costs: int64 (n,).

    Group g has as many as g n // num_groups to (g + 1) n // num_groups. The rows of a group keep
    their order; see `groups_of`.
    """
    bounds = np.arange(num_groups + 1) * len(costs) // num_groups
    sizes = np.diff(bounds).tolist()
    groups = groups_of(costs, sizes)
    return np.argsort(groups, kind="stable")


class BalancedOrder(RegroupedOrder):
    """An order whose global batches are dealt by the costs of their samples."""

    use = "balance"

    def __init__(
        self,
        base: EndlessOrder,
        balance: Balance,
        costs: Sequence[NDArray[np.integer]],
    ) -> None:
        super().__init__(base, costs)
        self.balance = balance

    @property
    def epoch_length(self) -> int:
        """Positions in each epoch, those of ``base``."""
        return self.base.epoch_length

    def epoch(self, epoch: int, /) -> Epoch:
        """Return one epoch of ``base``; raise OrderError for an epoch out of range."""
        return self.base.epoch(epoch)

    def position_costs(self, in_order: Epoch, positions: I64) -> I64:
        """Return the cost of each position (n,) of an epoch: int64 (n,)."""
        entries = in_order.entries(positions)
        costs = costs_of(self.costs, entries)
        if "pack" not in entries.flags:
            return costs
        sums = np.zeros(len(positions), np.int64)
        np.add.at(sums, entries.flags["pack"], costs)
        return sums


def order_batching(
    order: EndlessOrder,
    global_batch: int,
    world: World,
    *,
    drop_last: bool,
) -> Batching:
    """Return the batches of epoch 0 of an order; of others see `Batching.of_epoch`.

    Raises WorldError where the ranks cannot share the batch, where a rank's cannot be cut into its
    micro-batches, and where epoch 0 has no step. A later epoch without a step is passed over
    (`Batching.next_epoch`).
    """
    base = order.base if isinstance(order, BalancedOrder) else order
    lengths = base.length if isinstance(base, WindowedOrder | ThinnedOrder) else None
    # It was compiled for it.
    assert not isinstance(base, BucketedOrder) or base.global_batch == global_batch
    batching = Batching(
        order.epoch_length,
        global_batch,
        world,
        drop_last,
        lengths=lengths,
        unit="packs" if "has_pack" in order.identity else "samples",
    )
    if not batching.num_steps:
        raise WorldError(
            f"the first epoch has {batching.epoch_length} {batching.unit}, with drop_last "
            f"no full global batch of {global_batch}: use a global batch of at most "
            f"{batching.epoch_length}, or drop_last=False"
        )
    check_micro_batches(order, batching)
    return batching


def check_micro_batches(order: EndlessOrder, batching: Batching) -> None:
    """Raise WorldError where not every rank's batch can be cut into equal micro-batches, by which
    the order balances.
    """
    if not isinstance(order, BalancedOrder) or order.balance.micro_batches == 1:
        return
    parts = order.balance.micro_batches
    if batching.global_batch % (batching.world.size * parts):
        batch = f"a rank's batch of {batching.rank_batch}"
        if not batching.is_even:
            batch = f"a global batch of {batching.global_batch} on {batching.world.size} ranks"
        raise WorldError(
            f"{batch} cannot be cut into {parts} micro-batches; take a batch size that is a "
            "multiple of them"
        )


def rank_positions(
    order: EndlessOrder,
    in_order: Epoch,
    batching: Batching,
    step: int,
) -> tuple[I64, Mask]:
    """Return this rank's positions in a step, dealt where the order balances, and which are no
    padding: (rank_batch,).

    ``in_order`` and ``batching`` are of the epoch. Raises WorldError for a step outside of it.
    """
    if not isinstance(order, BalancedOrder):
        return batching.positions(step), batching.valid(step)
    running = batching.running(step)
    positions = running % batching.epoch_length
    costs = order.position_costs(in_order, positions)
    num_groups = batching.world.size * order.balance.micro_batches
    rows = deal(costs, num_groups)
    rank_rows = rows[batching.rows.start : batching.rows.stop]
    valid = running[rank_rows] < batching.epoch_length
    return positions[rank_rows], valid
