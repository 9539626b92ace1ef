"""Measure packs and balance: how full packs are, what the dearest rank costs, and how much
randomness packing takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.order.balance import (
    BalancedOrder,
    order_batching,
    rank_positions,
)
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.bucket import BucketedOrder
from fuelrail.pipeline.order.pack import PackedOrder
from fuelrail.pipeline.order.regroup import costs_of
from fuelrail.pipeline.order.without import ThinnedOrder

if TYPE_CHECKING:
    from fuelrail.pipeline.order.epoch import EndlessOrder, Entries, Epoch

_MAX_STEPS: Final = 256


class CostFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What an epoch of an order in packs or buckets, or of a balanced one, costs.

    ``fill`` is the share of the packs' budgets that is used, ``waste`` the rest. ``padding`` is the
    share of padding where each sample is padded to the dearest of its global batch,
    ``padding_before`` the same without buckets; the samples that fill up a bucket's last batch are
    padding. ``dearest_rank`` is the cost of a step's dearest rank over the mean of its ranks,
    averaged over the first 256 steps; 1 is perfect. ``randomness_lost`` is the intraclass
    correlation of the costs of samples within packs, or within the global batches of buckets: 0 in
    a full shuffle, where the samples of a group are as unlike as any; 1 where all samples of a
    group cost the same; below 0 where groups are more alike than by chance. None: of an order
    without packs, or without buckets; padding also of buckets without bounds.
    """

    fill: float | None
    waste: float | None
    samples_per_pack: float
    num_buckets: int | None
    padding_before: float | None
    padding: float | None
    ranks: int
    dearest_rank: float | None
    randomness_lost: float | None


def intraclass_correlation(values: NDArray[np.integer], groups: NDArray[np.int64]) -> float:
    """Return the intraclass correlation of ``values`` (n,) within ``groups`` (n,), by the analysis
    of variance.

    It is (B - W) / (B + (k - 1) W) of the mean squares between and within groups, and k their mean
    size (Fisher, "Statistical Methods for Research Workers", 1925, chapter 7). 0 where it is not
    defined.
    """
    sizes = np.bincount(groups)
    sizes = sizes[sizes > 0]
    n = len(values)
    num_groups = len(sizes)
    if num_groups < 2 or n == num_groups or values.min() == values.max():
        return 0.0
    _, group_index = np.unique(groups, return_inverse=True)
    means = np.bincount(group_index, weights=values) / sizes
    squares_between = sizes * (means - values.mean()) ** 2
    squares_within = (values - means[group_index]) ** 2
    between = float(squares_between.sum()) / (num_groups - 1)
    within = float(squares_within.sum()) / (n - num_groups)
    mean_size = (n - float((sizes**2).sum()) / n) / (num_groups - 1)
    return (between - within) / (between + (mean_size - 1) * within)


def padding_of(costs: NDArray[np.int64], valid: NDArray[np.bool_], size: int) -> float:
    """Return the share of padding where samples of ``costs`` (n,) are padded to the dearest of each
    ``size`` in a row.

    Those that are not ``valid`` are padding; an incomplete batch at the end counts as it is.
    """
    starts = np.arange(0, len(costs), size)
    dearest = np.maximum.reduceat(costs, starts)
    num_samples = np.diff(np.append(starts, len(costs)))
    padded = int((dearest * num_samples).sum())
    real = float(costs[valid].sum())
    return 1 - real / max(1, padded)


def measure_costs(
    order: EndlessOrder,
    epoch: int,
    in_order: Epoch,
    entries: Entries,
    global_batch: int,
    ranks: int,
) -> CostFigures:
    """Return the figures of one epoch, whose ``entries`` are those at all positions.

    Raises WorldError where the ranks cannot share the global batch.
    """
    base = order.base if isinstance(order, BalancedOrder) else order
    while isinstance(base, ThinnedOrder):
        base = base.base
    bucketed = base if isinstance(base, BucketedOrder) else None
    costs = None
    if isinstance(base, PackedOrder | BucketedOrder):
        costs = costs_of(base.costs, entries)
    loads = costs
    if isinstance(order, BalancedOrder):
        loads = costs_of(order.costs, entries)
    assert loads is not None  # the order has packs, buckets or balance
    num_positions = len(in_order)
    positions = entries.flags.get("pack", np.arange(len(loads)))
    loads_by_position = np.bincount(positions, weights=loads, minlength=num_positions)
    batchings = []
    for rank in range(ranks):
        batching = order_batching(order, global_batch, World(rank, ranks), drop_last=False)
        batchings.append(batching)
    shares = []
    for step in range(min(_MAX_STEPS, num_positions // global_batch)):
        rank_loads = []
        for batching in batchings:
            step_positions, _ = rank_positions(order, in_order, batching, step)
            rank_loads.append(loads_by_position[step_positions].sum())
        mean = max(np.mean(rank_loads), 1e-9)
        shares.append(max(rank_loads) / mean)
    fill = None
    padding_before = None
    padding = None
    randomness_lost = None
    if costs is not None:
        groups = positions if bucketed is None else positions // global_batch
        randomness_lost = intraclass_correlation(costs, groups)
        if isinstance(base, PackedOrder):
            fill = float(costs.sum()) / base.pack.budget / num_positions
        if bucketed is not None and bucketed.bucket.bounds:
            plain = bucketed.base.epoch(epoch)
            plain_entries = plain.entries(np.arange(len(plain)))
            plain_costs = costs_of(bucketed.costs, plain_entries)
            is_valid = np.ones(len(plain), bool)
            padding_before = padding_of(plain_costs, is_valid, global_batch)
            padding = padding_of(costs, entries.valid, global_batch)
    return CostFigures(
        fill=fill,
        waste=None if fill is None else 1 - fill,
        samples_per_pack=len(loads) / num_positions,
        num_buckets=None if bucketed is None else bucketed.num_buckets,
        padding_before=padding_before,
        padding=padding,
        ranks=ranks,
        dearest_rank=float(np.mean(shares)) if shares else None,
        randomness_lost=randomness_lost,
    )
