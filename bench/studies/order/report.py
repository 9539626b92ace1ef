"""Figures on how random an order is, compared with webdataset's buffer shuffle and a true shuffle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.studies.order.shuffle_quality import ChiSquare, ShuffleQuality, measure
from fuelrail.pipeline.errors import OrderError

MAX_POSITIONS: Final = 10_000_000
"""Longest epoch that is measured whole: every figure needs all of it in memory."""

WEBDATASET_SHARD_BUFFER: Final = 100  # what WebDataset(..., shardshuffle=True) means
WEBDATASET_SAMPLE_BUFFER: Final = 1000  # the default size of its .shuffle()


class OrderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one epoch: those of `ShuffleQuality`, and how its global batches mix clips and shards."""

    name: str
    quality: ShuffleQuality
    same_clip_pairs: float
    """Share of the pairs of samples of a global batch that are of one clip."""
    shards_per_batch: float
    """Different shards that a global batch reads from, on average."""
    equal_chance_z: float
    """Over many epochs: has every part of the data its chance at the first, middle and last position?"""


class Placed(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An epoch of some order: the samples of the split in the order of the positions, by name.

    ``over_epochs``: the samples at some fixed positions in many epochs, int64 (num_epochs, num_positions); ``chances``:
    how often each sample is expected in an epoch, float64 (num_samples of the split,).
    """

    name: str
    samples: NDArray[np.int64]
    over_epochs: NDArray[np.int64]
    chances: NDArray[np.float64]


def webdataset_order(
    shard_lengths: Sequence[int], selected: NDArray[np.int64], *, seed: int, sample_buffer: int
) -> NDArray[np.int64]:
    """Return the order of webdataset's own shuffles for ``selected`` samples (ascending): shards, then samples.

    One reader, seeded, with both through a buffer; several workers and ranks read their parts of the shards alike.
    """
    from webdataset.filters import detshuffle

    starts = np.searchsorted(selected, np.cumsum([0, *shard_lengths])).tolist()
    shards: Iterator[int] = detshuffle(bufsize=WEBDATASET_SHARD_BUFFER, seed=seed).run(iter(range(len(shard_lengths))))
    stored = (sample for shard in shards for sample in selected[starts[shard] : starts[shard + 1]].tolist())
    return np.fromiter(detshuffle(bufsize=sample_buffer, seed=seed).run(stored), dtype=np.int64, count=len(selected))


def true_shuffle(selected: NDArray[np.int64], *, seed: int | tuple[int, ...]) -> NDArray[np.int64]:
    """Return a uniformly random permutation of some samples, by numpy."""
    return np.random.default_rng(seed).permutation(selected)


def describe(
    placed: Placed, clips: NDArray[np.integer], shards: NDArray[np.integer], global_batch: int
) -> OrderFigures:
    """Return the figures of an epoch of a split whose sample i is of clip ``clips[i]`` and in shard ``shards[i]``.

    Samples may occur any number of times: each copy counts as a sample. Raises OrderError for
    epochs too short or too long to be measured.
    """
    n = len(placed.samples)
    if n > MAX_POSITIONS:
        raise OrderError(f"an epoch of {n:,} positions is too long to be measured; at most {MAX_POSITIONS:,}")
    return OrderFigures(
        name=placed.name,
        quality=measure(ranks(placed.samples)),
        same_clip_pairs=same_pairs(clips[placed.samples], global_batch),
        shards_per_batch=distinct_per_batch(shards[placed.samples], global_batch),
        equal_chance_z=equal_chance_z(placed.over_epochs, placed.chances),
    )


def equal_chance_z(over_epochs: NDArray[np.int64], chances: NDArray[np.float64]) -> float:
    """Chi-square, as a z, of the samples at some positions (num_epochs, num_positions) against the samples' chances.

    Samples are put in at most 16 buckets of about equal chance, with 8 expected in each. Positions are
    taken to be independent of one another, which they nearly are in long epochs. NaN for fewer than 16 epochs.
    """
    num_epochs, num_positions = over_epochs.shape
    num_buckets = min(16, num_epochs // 8)
    if num_buckets < 2:
        return float("nan")
    ends = np.cumsum(chances) / chances.sum()
    bucket = np.minimum((ends * num_buckets * (1 - 1e-12)).astype(np.int64), num_buckets - 1)
    shares = np.bincount(bucket, weights=chances, minlength=num_buckets) / chances.sum()
    possible = shares > 0  # a few samples of large weight may leave buckets empty
    statistic = 0.0
    for column in over_epochs.T:
        counts = np.bincount(bucket[column], minlength=num_buckets)[possible]
        expected = num_epochs * shares[possible]
        statistic += float((np.square(counts - expected) / expected).sum())
    degrees = num_positions * (int(possible.sum()) - 1)
    return ChiSquare(statistic, degrees).z if degrees else float("nan")


def ranks(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ranks of some numbers, 0 .. n - 1, equal ones in random order (seeded): int64 (n,)."""
    ties = np.random.default_rng(0).random(len(samples))
    found = np.empty(len(samples), dtype=np.int64)
    found[np.lexsort((ties, samples))] = np.arange(len(samples))
    return found


def same_pairs(groups: NDArray[np.integer], batch: int) -> float:
    """Share of the pairs within full batches whose two members are of one group; NaN without a pair."""
    batches = np.sort(groups[: len(groups) // batch * batch].reshape(-1, batch), axis=1)
    if batch < 2 or not len(batches):
        return float("nan")
    # In a sorted batch a run of length m has m (m - 1) / 2 pairs: the sum over members of those before them in the run.
    place = np.arange(batch)
    begins = np.maximum.accumulate(np.where(_is_new(batches), place, 0), axis=1)
    return float((place - begins).sum(axis=1).mean() / (batch * (batch - 1) / 2))


def distinct_per_batch(groups: NDArray[np.integer], batch: int) -> float:
    """Different groups in a full batch, on average; NaN without a full batch."""
    batches = np.sort(groups[: len(groups) // batch * batch].reshape(-1, batch), axis=1)
    return float(_is_new(batches).sum(axis=1).mean()) if len(batches) else float("nan")


def _is_new(batches: NDArray[np.integer]) -> NDArray[np.bool_]:
    new = np.ones(batches.shape, dtype=bool)
    new[:, 1:] = batches[:, 1:] != batches[:, :-1]
    return new
