"""Measure how random an order is, and how its batches mix clips.

A z is in standard deviations from the mean over uniformly random permutations: within about 4 is as
good as random.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import OrderError

MAX_POSITIONS: Final = 10_000_000
"""Longest epoch that is measured: every figure needs all of it in memory."""
_MIN_POSITIONS: Final = 8


class ShuffleQuality(msgspec.Struct, frozen=True, kw_only=True):
    """How random an order is. Correlations are -1 .. 1, and near 0 in a true shuffle.

    ``rank_correlation`` is Spearman's rho between position and sample, ``serial_correlation`` that
    of each sample with the next one in the order.
    """

    rank_correlation: float
    rank_correlation_z: float
    serial_correlation: float
    serial_correlation_z: float

    @property
    def worst(self) -> tuple[str, float]:
        """The figure that is farthest from a true shuffle's, and its z."""
        figures = (
            ("rank correlation", self.rank_correlation_z),
            ("neighbours' correlation", self.serial_correlation_z),
        )
        return max(figures, key=lambda entry: abs(entry[1]))


class OrderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one epoch.

    ``same_clip_pairs``: share of the pairs of samples of a global batch that are of one clip; NaN
    without a full batch.
    """

    name: str
    quality: ShuffleQuality
    same_clip_pairs: float


def describe(
    name: str,
    samples: NDArray[np.int64],
    clips: NDArray[np.integer],
    global_batch: int,
) -> OrderFigures:
    """Return the figures of an epoch of a split whose sample i is of clip ``clips[i]``.

    ``samples`` (n,) may hold a sample several times: each copy counts as a sample. Raises
    OrderError for epochs that are too short or too long to be measured.
    """
    if not _MIN_POSITIONS <= len(samples) <= MAX_POSITIONS:
        raise OrderError(
            f"an epoch of {len(samples):,} positions cannot be measured: {_MIN_POSITIONS} "
            f"to {MAX_POSITIONS:,} are possible; select other samples"
        )
    return OrderFigures(
        name=name,
        quality=measure(ranks(samples)),
        same_clip_pairs=same_pairs(clips[samples], global_batch),
    )


def ranks(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ranks of some numbers, from 0 to n - 1, equal ones in random order (seeded): int64
    (n,).
    """
    n = len(samples)
    rng = np.random.default_rng(0)
    ties = rng.random(n)
    in_order = np.lexsort((ties, samples))
    numbers = np.empty(n, dtype=np.int64)
    numbers[in_order] = np.arange(n)
    return numbers


def measure(order: NDArray[np.int64]) -> ShuffleQuality:
    """Return the quality of an order (n,) that holds each of 0 .. n - 1 once.

    Rho has standard deviation 1 / sqrt(n - 1) over random permutations (Kendall and Gibbons, "Rank
    Correlation Methods", chapter 4). The circular lag-1 correlation has mean -1 / (n - 1) and
    standard deviation about 1 / sqrt(n) (Wald and Wolfowitz, 1943).
    """
    n = len(order)
    positions = np.arange(n)
    following = np.roll(order, -1)
    rho = float(np.corrcoef(positions, order)[0, 1])
    serial = float(np.corrcoef(order, following)[0, 1])
    return ShuffleQuality(
        rank_correlation=rho,
        rank_correlation_z=rho * math.sqrt(n - 1),
        serial_correlation=serial,
        serial_correlation_z=(serial + 1 / n) * math.sqrt(n),
    )


def same_pairs(groups: NDArray[np.integer], batch: int) -> float:
    """Share of the pairs within full batches whose two members are of one group; NaN without a
    pair.
    """
    num_full = len(groups) // batch * batch
    batches = np.sort(groups[:num_full].reshape(-1, batch), axis=1)
    if batch < 2 or not len(batches):
        return float("nan")
    # In a sorted batch a run of length m has m (m - 1) / 2 pairs: the sum over members of those
    # before them in the run.
    place = np.arange(batch)
    is_new = np.ones(batches.shape, dtype=bool)
    is_new[:, 1:] = batches[:, 1:] != batches[:, :-1]
    begins = np.maximum.accumulate(np.where(is_new, place, 0), axis=1)
    pairs_of_groups = (place - begins).sum(axis=1)
    num_pairs = batch * (batch - 1) / 2
    return float(pairs_of_groups.mean() / num_pairs)
