"""Compute what the samples of an order cost, for packs, for buckets and for balance, and apply
these to the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.balance import BalancedOrder
from fuelrail.pipeline.order.bucket import BucketedOrder
from fuelrail.pipeline.order.cost import (
    MAX_COST,
    Cost,
    compute_costs,
    cost_columns,
)
from fuelrail.pipeline.order.epoch import digest
from fuelrail.pipeline.order.mix import MixedOrder
from fuelrail.pipeline.order.pack import PackedOrder
from fuelrail.pipeline.order.regroup import RegroupedOrder
from fuelrail.pipeline.order.without import ThinnedOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.order.epoch import EndlessOrder
    from fuelrail.pipeline.order.inputs import OrderInputs
    from fuelrail.pipeline.order.spec import OrderSpec


class OrderCosts(NamedTuple):
    """What the samples of an order cost, by what it is for: an array for each dataset of a mix."""

    pack: tuple[NDArray[np.integer], ...] = ()
    bucket: tuple[NDArray[np.integer], ...] = ()
    balance: tuple[NDArray[np.integer], ...] = ()

    @classmethod
    def compute(
        cls,
        spec: OrderSpec,
        inputs: OrderInputs,
        rows: NDArray[np.int64] | None,
    ) -> OrderCosts:
        """Return the costs of the samples of one split, of which ``rows`` are selected (None: all).

        Raises OrderError for columns that are no costs, and for a sample that fits no pack and no
        bucket.
        """
        costs_of = {}
        if (pack := spec.pack) is not None:
            costs = _sample_costs(pack.cost, inputs, rows)
            _refuse(
                costs > (MAX_COST if pack.truncate else pack.budget),
                costs=costs,
                rows=rows,
                inputs=inputs,
                reason=f"above the budget of {pack.budget}",
                fix="truncate=True, a larger budget",
            )
            _refuse(
                costs < 1,
                costs=costs,
                rows=rows,
                inputs=inputs,
                reason="and a pack could hold any number of those",
                fix="a Cost with a constant of 1 or more",
            )
            np.minimum(costs, min(pack.budget, np.iinfo(costs.dtype).max), out=costs)
            costs_of["pack"] = (costs,)
        if (bucket := spec.bucket) is not None:
            costs = _sample_costs(bucket.by, inputs, rows, texts=not bucket.bounds)
            if bucket.bounds:
                _refuse(
                    costs > bucket.bounds[-1],
                    costs=costs,
                    rows=rows,
                    inputs=inputs,
                    reason=f"above the last bound of {bucket.bounds[-1]}",
                    fix="another bound",
                )
            costs_of["bucket"] = (costs,)
        if spec.balance is not None:
            costs_of["balance"] = (_sample_costs(spec.balance.cost, inputs, rows),)
        return cls(**costs_of)

    def identity(self) -> dict[str, str]:
        """Return digests of the costs, by what they are for."""
        return {
            f"{name}_costs": digest(arrays[0]) for name, arrays in self._asdict().items() if arrays
        }

    def apply(
        self,
        order: EndlessOrder,
        spec: OrderSpec,
        global_batch: int | None,
        hidden: Sequence[Sequence[NDArray[np.int64]]],
    ) -> EndlessOrder:
        """Return an order of samples in packs or buckets, and dealt, where ``spec`` asks for these.

        ``hidden`` are the samples of each part that are left out in their place, in any number of
        rounds. Raises OrderError for stages of a mix, and for buckets without a global batch or
        with samples left out.
        """
        if (
            (spec.pack or spec.bucket)
            and isinstance(order, MixedOrder)
            and order.schedule is not None
        ):
            raise OrderError(
                "stages of a mix count positions of samples: no packs and no buckets, which "
                "have others"
            )
        if spec.pack is not None:
            order = PackedOrder(order, spec.pack, self.pack, spec.seed)
        if spec.bucket is not None:
            if hidden:
                raise OrderError(
                    "`without` shifts positions, and the global batches of buckets keep "
                    "theirs: no buckets"
                )
            order = BucketedOrder(
                base=order,
                bucket=spec.bucket,
                costs=self.bucket,
                seed=spec.seed,
                global_batch=global_batch,
            )
        for of_parts in hidden:
            order = ThinnedOrder(order, of_parts)
        return order if spec.balance is None else BalancedOrder(order, spec.balance, self.balance)

    @classmethod
    def split(
        cls, orders: Sequence[EndlessOrder]
    ) -> tuple[list[EndlessOrder], OrderCosts, list[tuple[NDArray[np.int64], ...]]]:
        """Return the orders of samples under regrouped ones; all their costs; and what
        :meth:`apply` is to hide.
        """
        bases: list[EndlessOrder] = []
        costs: dict[str, tuple[NDArray[np.integer], ...]] = {}
        hidden: list[list[NDArray[np.int64]]] = []
        for order in orders:
            hidden.append([])
            below: Any = order
            while isinstance(below, RegroupedOrder | ThinnedOrder):
                if isinstance(below, ThinnedOrder):
                    hidden[-1].insert(0, below.hidden[0])
                else:
                    costs[below.use] = (*costs.get(below.use, ()), *below.costs)
                below = below.base
            bases.append(below)
        return bases, cls(**costs), list(zip(*hidden, strict=True))


def _sample_costs(
    cost: str | Cost,
    inputs: OrderInputs,
    rows: NDArray[np.int64] | None,
    *,
    texts: bool = False,
) -> NDArray[np.integer]:
    """Return the cost of each sample of a split, -1 of those that are not among ``rows`` (None:
    all are).
    """
    table = inputs.attributes(cost_columns(cost), rows)
    costs: NDArray[np.integer] = compute_costs(cost, table, texts=texts)
    if rows is not None:
        selected = costs
        costs = np.full(inputs.num_samples, -1)
        costs[rows] = selected
    return costs if costs.max(initial=0) > np.iinfo(np.int32).max else costs.astype(np.int32)


def _refuse(
    wrong: NDArray[np.bool_],
    costs: NDArray[np.integer],
    rows: NDArray[np.int64] | None,
    inputs: OrderInputs,
    reason: str,
    fix: str,
) -> None:
    """Raise OrderError where a sample of ``rows`` (None: all) is ``wrong``, naming the first."""
    selected = np.arange(len(costs)) if rows is None else rows
    refused = selected[wrong[selected]]
    if not len(refused):
        return
    first = int(refused[0])
    raise OrderError(
        f"{inputs.name_sample(first)} costs {costs[first]}, {reason}; so do {len(refused) - 1} "
        f"others of {len(selected)}: take {fix}, or leave them out by a filter"
    )
