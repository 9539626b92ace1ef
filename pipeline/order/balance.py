"""Balance: the samples or packs of each global batch are dealt to the ranks so that all of them cost about the same.

Which samples are in a global batch stays as it is, so a position of a run is valid with any number of ranks; which rank
takes which of them depends on that number. Every rank computes the same deal from the costs of the whole batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import OrderError, WorldError
from fuelrail.pipeline.order.batching import Batching
from fuelrail.pipeline.order.cost import Cost, CostTable, sample_costs
from fuelrail.pipeline.order.epoch import digest
from fuelrail.pipeline.order.mix import MixedOrder
from fuelrail.pipeline.order.pack import Pack, PackedOrder, costs_of, fit
from fuelrail.pipeline.order.without import ThinnedOrder
from fuelrail.pipeline.settings import Settings, check_types

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.pipeline.order.batching import World
    from fuelrail.pipeline.order.epoch import EndlessOrder, Epoch


class Balance(Settings, frozen=True):
    """Deal the rows of each global batch to ranks, and to their micro-batches, by cost. All have equally many rows."""

    cost: str | Cost
    """An attribute with whole numbers, or a model of several (`Cost`); a pack costs what its samples do in sum."""
    micro_batches: int = 1
    """Parts of a rank's batch that are dealt too, each a run of its rows, such as micro-batches of accumulation."""

    def __post_init__(self) -> None:
        check_types(self, OrderError)
        if self.micro_batches < 1:
            raise OrderError(f"micro_batches must be 1 or more, got {self.micro_batches}")


def deal(costs: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    """Return the rows of a batch (n,) group by group, n / num_groups in each, of about equal costs: int64 (n,).

    The dearest row is first, those of equal cost come in their order. Each goes to the group with the least cost so far
    that is not full, the one with the lowest number among equals. The rows of a group keep their order. The method is
    Graham's (1969), longest processing time first, with groups of one size.
    """
    size = len(costs) // num_groups
    by_cost = np.argsort(-costs, kind="stable")
    groups = [(0, group) for group in range(num_groups)]
    held = [0] * num_groups
    group_of = np.empty(len(costs), np.int64)
    chosen = []
    for cost in costs[by_cost].tolist():
        load, group = groups[0]
        held[group] += 1
        chosen.append(group)
        if held[group] < size:
            heapq.heapreplace(groups, (load + cost, group))
        else:
            heapq.heappop(groups)
    group_of[by_cost] = chosen
    return np.argsort(group_of, kind="stable")


class BalancedOrder:
    """An order whose global batches are dealt by ``costs`` of each sample, which are those of each dataset of a mix."""

    def __init__(self, base: EndlessOrder, balance: Balance, costs: Sequence[NDArray[np.integer]]) -> None:
        self.base, self.balance, self.costs = base, balance, tuple(costs)
        self.identity: dict[str, Any] = {**base.identity, "dealt": True}

    @property
    def epoch_length(self) -> int:
        """Positions in each epoch, those of ``base``."""
        return self.base.epoch_length

    @property
    def num_selected(self) -> int:
        """Number of selected samples."""
        return self.base.num_selected

    def selected(self) -> NDArray[np.int64]:
        """Return the selected samples, ascending: int64 (num_selected,)."""
        return self.base.selected()

    def expected_counts(self) -> NDArray[np.float64]:
        """Return how often each selected sample occurs in an epoch, averaged over epochs: float64 (num_selected,)."""
        return self.base.expected_counts()

    def epoch(self, epoch: int, /) -> Epoch:
        """Return one epoch of ``base``; raise OrderError for an epoch out of range."""
        return self.base.epoch(epoch)

    def position_costs(self, in_order: Epoch, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cost of each position (n,) of an epoch: int64 (n,)."""
        entries = in_order.entries(positions)
        costs = costs_of(self.costs, entries)
        if "pack" not in entries.flags:
            return costs
        sums = np.zeros(len(positions), np.int64)
        np.add.at(sums, entries.flags["pack"], costs)
        return sums


class OrderCosts(NamedTuple):
    """What the samples of an order cost, for packs and for balance: an array for each dataset of a mix."""

    pack: tuple[NDArray[np.integer], ...] = ()
    balance: tuple[NDArray[np.integer], ...] = ()

    @classmethod
    def read(
        cls,
        for_packs: Pack | None,
        for_balance: Balance | None,
        attributes: CostTable,
        rows: NDArray[np.int64] | None,
        num_samples: int,
    ) -> OrderCosts:
        """Return the costs of the samples of one split, of which ``rows`` are selected (None: all).

        Raises OrderError for columns that are no costs, and for a sample that fits no pack.
        """
        pack: tuple[NDArray[np.integer], ...] = ()
        balance: tuple[NDArray[np.integer], ...] = ()
        if for_packs is not None:
            pack = (sample_costs(for_packs.cost, attributes, rows, num_samples),)
            fit(pack[0], for_packs, attributes, rows)
        if for_balance is not None:
            balance = (sample_costs(for_balance.cost, attributes, rows, num_samples),)
        return cls(pack, balance)

    def identity(self) -> dict[str, str]:
        """Return digests of the costs, by what they are for."""
        return {f"{name}_costs": digest(each[0]) for name, each in self._asdict().items() if each}

    def apply(
        self,
        order: EndlessOrder,
        pack: Pack | None,
        balance: Balance | None,
        seed: int,
        hidden: Iterable[Sequence[NDArray[np.int64]]],
    ) -> EndlessOrder:
        """Return an order of samples in packs, shuffled by ``seed``, and dealt, where these are asked for.

        ``hidden`` are the samples of each part that are left out in their place, in any number of rounds.
        """
        if pack is not None:
            if isinstance(order, MixedOrder) and order.schedule is not None:
                raise OrderError("stages of a mix count positions of samples, and those in packs are packs: no stages")
            order = PackedOrder(order, pack, self.pack, seed)
        for of_parts in hidden:
            order = ThinnedOrder(order, of_parts)
        return order if balance is None else BalancedOrder(order, balance, self.balance)

    @classmethod
    def split(
        cls, orders: Sequence[EndlessOrder]
    ) -> tuple[list[EndlessOrder], OrderCosts, list[tuple[NDArray[np.int64], ...]]]:
        """Return the orders of samples under orders of several parts; all their costs; and what `apply` is to hide."""
        bases = list(orders)
        hidden: list[list[NDArray[np.int64]]] = [[] for _ in orders]
        pack: list[NDArray[np.integer]] = []
        balance: list[NDArray[np.integer]] = []
        for at, base in enumerate(bases):
            if isinstance(base, BalancedOrder):
                balance += base.costs
                bases[at] = base.base
            while isinstance(thinned := bases[at], ThinnedOrder):
                hidden[at].insert(0, thinned.hidden[0])
                bases[at] = thinned.base
            if isinstance(inner := bases[at], PackedOrder):
                pack += inner.costs
                bases[at] = inner.base
        return bases, cls(tuple(pack), tuple(balance)), list(zip(*hidden, strict=True))


def order_batching(order: EndlessOrder, global_batch: int, world: World, *, drop_last: bool) -> Batching:
    """Return the batches of epoch 0 of an order; of others see `Batching.of_epoch`.

    Raises WorldError where the ranks cannot share the batch, and where a rank's cannot be cut into its micro-batches.
    """
    base = order.base if isinstance(order, BalancedOrder) else order
    lengths = base.length if isinstance(base, PackedOrder | ThinnedOrder) else None
    batching = Batching(order.epoch_length, global_batch, world, drop_last, lengths=lengths)
    if isinstance(order, BalancedOrder) and batching.rank_batch % order.balance.micro_batches:
        raise WorldError(
            f"a rank's batch of {batching.rank_batch} cannot be cut into {order.balance.micro_batches} micro-batches; "
            "take a batch size that is a multiple of them"
        )
    return batching


def rank_positions(
    order: EndlessOrder, in_order: Epoch, batching: Batching, step: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return this rank's positions in a step, dealt where the order balances, and which are no padding: (rank_batch,).

    ``in_order`` and ``batching`` are of the epoch. Raises WorldError for a step outside of it.
    """
    if not isinstance(order, BalancedOrder):
        return batching.positions(step), batching.valid(step)
    running = batching.running(step)
    positions = running % batching.epoch_length
    rows = deal(order.position_costs(in_order, positions), batching.world.size * order.balance.micro_batches)
    first = batching.world.rank * batching.rank_batch
    own = rows[first : first + batching.rank_batch]
    return positions[own], running[own] < batching.epoch_length
