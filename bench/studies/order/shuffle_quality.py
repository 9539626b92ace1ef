"""Measure the randomness of any order given as an array, compared with a true shuffle.

An order is an integer array of length n that holds each of 0 .. n-1 once: ``order[position] = sample``. Each figure
comes as a z-score (standard deviations from the mean over uniformly random permutations: within about 4 is as good as
random) or as a ratio to a true shuffle's expectation (1 is as good as random, 0 is not shuffled).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fuelrail.pipeline.errors import OrderError


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """The figures of one order of ``num_samples`` samples; a true shuffle has z about 0 and ratios about 1."""

    num_samples: int
    rank_correlation: float
    """Spearman's rho between position and sample, -1 .. 1."""
    rank_correlation_z: float
    serial_correlation: float
    """Correlation of each sample index with the next one in the order, -1 .. 1."""
    serial_correlation_z: float
    bucket_chi_square_z: float
    """Position buckets against sample buckets: is every part of the data spread over the whole epoch?"""
    displacement_ratio: float
    """Mean of abs(sample - position), over the (n^2 - 1) / 3n of a true shuffle."""
    neighbour_distance_ratio: float
    """Mean of abs(sample - next sample), over the (n + 1) / 3 of a true shuffle."""
    separation_ratio: float
    """Mean distance in the order of samples adjacent in the data, over the (n + 1) / 3 of a true shuffle."""


def measure(order: ArrayLike, num_buckets: int | None = None) -> ShuffleQuality:
    """Return all figures of one order; ``num_buckets`` as in :func:`bucket_chi_square`. Raises OrderError."""
    values = as_order(order)
    n = len(values)
    positions = np.empty(n, dtype=np.int64)
    positions[values] = np.arange(n)
    rho, serial = rank_correlation(values), serial_correlation(values)
    displacement = float(np.abs(values - np.arange(n)).mean())
    return ShuffleQuality(
        num_samples=n,
        rank_correlation=rho,
        rank_correlation_z=rho * math.sqrt(n - 1),
        serial_correlation=serial,
        serial_correlation_z=(serial + 1 / n) * math.sqrt(n),
        bucket_chi_square_z=bucket_chi_square(values, num_buckets).z,
        displacement_ratio=displacement / ((n * n - 1) / (3 * n)),
        neighbour_distance_ratio=neighbour_distance(values) / ((n + 1) / 3),
        separation_ratio=neighbour_distance(positions) / ((n + 1) / 3),
    )


def as_order(order: ArrayLike) -> NDArray[np.int64]:
    """``order`` as int64 (n,), n >= 8; raises OrderError unless it is a permutation of 0 .. n-1."""
    array: NDArray[Any] = np.asarray(order)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise OrderError(f"an order must be a 1-D array of integers, got shape {array.shape}, dtype {array.dtype}")
    values = array.astype(np.int64)
    n = len(values)
    if n < 8:
        raise OrderError(f"shuffle quality needs at least 8 samples, got {n}")
    if values.min() < 0 or values.max() >= n or (np.bincount(values, minlength=n) != 1).any():
        raise OrderError(f"an order of length {n} must hold each of 0 .. {n - 1} once")
    return values


def rank_correlation(order: NDArray[np.int64]) -> float:
    """Spearman's rho of position and sample; over random permutations mean 0, standard deviation 1 / sqrt(n - 1).

    Kendall and Gibbons, "Rank Correlation Methods", chapter 4.
    """
    return _correlation(np.arange(len(order), dtype=np.float64), order.astype(np.float64))


def serial_correlation(order: NDArray[np.int64]) -> float:
    """Circular lag-1 correlation of the sample indices; mean -1 / (n - 1), standard deviation about 1 / sqrt(n).

    Wald and Wolfowitz, "An Exact Test for Randomness in the Non-Parametric Case Based on Serial Correlation", 1943.
    """
    values = order.astype(np.float64)
    return _correlation(values, np.roll(values, -1))


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / math.sqrt((x @ x) * (y @ y)))


def neighbour_distance(order: NDArray[np.int64]) -> float:
    """Mean of abs(order[i + 1] - order[i]); (n + 1) / 3 is the mean over random permutations."""
    return float(np.abs(np.diff(order)).mean())


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A chi-square statistic with its degrees of freedom."""

    statistic: float
    degrees: int

    @property
    def z(self) -> float:
        """Standard normal equivalent by Wilson and Hilferty's cube root (1931); good from about 10 degrees on."""
        spread = 2 / (9 * self.degrees)
        return (math.cbrt(self.statistic / self.degrees) - (1 - spread)) / math.sqrt(spread)


def bucket_chi_square(order: NDArray[np.int64], num_buckets: int | None = None) -> ChiSquare:
    """Chi-square of the table (bucket of positions) x (bucket of samples), ``num_buckets`` of each, about equal.

    Without ``num_buckets``: as many as leave 10 expected in each cell, 4 .. 64. Both margins are fixed, as every
    sample comes once; the mean over random permutations is then degrees * n / (n - 1), which is divided out.
    """
    n = len(order)
    k = max(2, min(64, math.isqrt(n // 10))) if num_buckets is None else num_buckets
    if not 2 <= k <= n:
        raise OrderError(f"num_buckets must be in 2 .. {n} for {n} samples, got {k}")
    bucket = np.arange(n) * k // n
    sizes = np.bincount(bucket, minlength=k).astype(np.float64)
    table = np.bincount(bucket * k + bucket[order], minlength=k * k).reshape(k, k)
    expected = np.outer(sizes, sizes) / n
    statistic = float((np.square(table - expected) / expected).sum())
    return ChiSquare(statistic * (n - 1) / n, (k - 1) ** 2)


def equal_chance(orders: ArrayLike) -> ChiSquare:
    """Chi-square of the table position x sample over many orders (m, n), one for each seed.

    Has every sample the same chance of every position? Permutation matrices less their mean span (n - 1)^2
    dimensions and a uniform one has variance 1 / (n - 1) in each, so the plain statistic is n / (n - 1) times a
    chi-square with (n - 1)^2 degrees of freedom; the factor is divided out. Wants m of at least 5 n.
    """
    array = np.asarray(orders, dtype=np.int64)
    if array.ndim != 2 or array.shape[1] < 2:
        raise OrderError(f"equal chance needs orders of shape (num_orders, n >= 2), got {array.shape}")
    m, n = array.shape
    if array.min() < 0 or array.max() >= n:
        raise OrderError(f"orders of length {n} must hold 0 .. {n - 1}, got {array.min()} .. {array.max()}")
    cells = np.zeros(n * n, dtype=np.int64)
    for row in array:  # one order at a time: the flat table of all of them would need m * n more integers
        cells[np.arange(n) * n + row] += 1
    expected = m / n
    statistic = float((np.square(cells - expected) / expected).sum())
    return ChiSquare(statistic * (n - 1) / n, (n - 1) ** 2)
