"""Where a run becomes steady, and how far repeats of a measurement can be trusted. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A median over repeats, and an interval that holds the true median with probability ``confidence``."""

    median: float
    low: float
    high: float
    confidence: float
    num_repeats: int


def warm_up_length(values: Sequence[float]) -> int:
    """How many of the first values belong to the warm-up: the marginal standard error rule (MSER).

    The cut d, up to half of the values, that makes the standard error of the mean of the rest smallest:
    ``sum((x[d:] - mean(x[d:]))^2) / (n - d)^2`` (K. P. White, Simulation 69(6), 1997). It needs no threshold and adapts
    to the noise; without a transient it cuts off little.
    """
    series = np.asarray(values, dtype=np.float64)
    count = len(series)
    if count < 2:
        return 0
    # Sums over the tails that begin at each cut.
    sums = np.cumsum(series[::-1])[::-1]
    squares = np.cumsum(series[::-1] ** 2)[::-1]
    lengths = np.arange(count, 0, -1)
    errors = (squares - sums**2 / lengths) / lengths.astype(np.float64) ** 2
    return int(np.argmin(np.maximum(errors[: count // 2 + 1], 0.0)))


def interval_of(values: Sequence[float]) -> Interval:
    """Median of at least one repeat, between the lowest and the highest.

    Whatever the distribution, n independent repeats all fall on one side of the true median with probability
    ``2^(1-n)``: so lowest to highest is a confidence interval of ``1 - 2^(1-n)``, 94 % for five.
    """
    assert values, "no repeats"
    return Interval(
        median=float(np.median(values)),
        low=min(values),
        high=max(values),
        confidence=1.0 - 2.0 ** (1 - len(values)),
        num_repeats=len(values),
    )
