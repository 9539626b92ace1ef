"""Compute what the samples of an order cost, for packs, for buckets and for balance, and apply
these to the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.balance import BalancedOrder
from fuelrail.pipeline.order.bucket import BucketedOrder
from fuelrail.pipeline.order.cost import refuse, sample_costs
from fuelrail.pipeline.order.epoch import digest
from fuelrail.pipeline.order.mix import MixedOrder
from fuelrail.pipeline.order.pack import PackedOrder, fit
from fuelrail.pipeline.order.regroup import RegroupedOrder
from fuelrail.pipeline.order.without import ThinnedOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from fuelrail.pipeline.order.epoch import EndlessOrder
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
        table: pa.Table | None,
        rows: NDArray[np.int64] | None,
        num_samples: int,
        *,
        name_sample: Callable[[int], str],
    ) -> OrderCosts:
        """Return the costs of the samples of one split, of which ``rows`` are selected (None: all).

        ``table`` has the columns of all costs, a row a sample; without costs it is None. Raises
        OrderError for columns that are no costs, and for a sample that fits no pack and no bucket.
        """
        costs_of = {}
        if spec.pack is not None:
            costs = sample_costs(spec.pack.cost, table, rows, num_samples)
            fit(costs, spec.pack, rows, name_sample)
            costs_of["pack"] = (costs,)
        if spec.bucket is not None:
            bounds = spec.bucket.bounds
            costs = sample_costs(spec.bucket.by, table, rows, num_samples, texts=not bounds)
            if bounds:
                reason = f"above the last bound of {bounds[-1]}"
                refuse(
                    costs > bounds[-1],
                    costs=costs,
                    rows=rows,
                    name_sample=name_sample,
                    reason=reason,
                    fix="another bound",
                )
            costs_of["bucket"] = (costs,)
        if spec.balance is not None:
            costs_of["balance"] = (sample_costs(spec.balance.cost, table, rows, num_samples),)
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
