"""The figures of an order over a dataset: batches against plain counting, webdataset's order against its own."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.order_quality import (
    MAX_POSITIONS,
    Placed,
    describe,
    distinct_per_batch,
    ranks,
    same_pairs,
    true_shuffle,
    webdataset_order,
)
from fuelrail.pipeline.errors import OrderError


@given(st.lists(st.integers(0, 5), min_size=2, max_size=60), st.integers(2, 9))
def test_batch_figures_are_those_of_plain_counting(groups, batch):
    batches = [groups[i : i + batch] for i in range(0, len(groups) - batch + 1, batch)]
    pairs = [a == b for each in batches for a, b in combinations(each, 2)]
    values = np.array(groups)
    if not batches:
        assert np.isnan(same_pairs(values, batch))
        assert np.isnan(distinct_per_batch(values, batch))
        return
    assert same_pairs(values, batch) == pytest.approx(np.mean(pairs))
    assert distinct_per_batch(values, batch) == pytest.approx(np.mean([len(set(each)) for each in batches]))


def test_a_batch_of_one_has_no_pairs():
    assert np.isnan(same_pairs(np.zeros(5, dtype=int), 1))


@given(st.lists(st.integers(0, 20), max_size=50))
def test_ranks_keep_order_and_break_ties(numbers):
    found = ranks(np.array(numbers, dtype=np.int64))
    assert sorted(found.tolist()) == list(range(len(numbers)))
    assert [numbers[i] for i in np.argsort(found)] == sorted(numbers)


def test_webdatasets_order_is_what_its_pipeline_hands_out():
    lengths = [7, 3, 12, 5, 9]
    starts = np.cumsum([0, *lengths])

    def read(shards):
        for shard in shards:
            yield from range(starts[int(shard["url"])], starts[int(shard["url"]) + 1])

    urls = [str(shard) for shard in range(len(lengths))]
    theirs = list(
        wds.DataPipeline(wds.SimpleShardList(urls), wds.detshuffle(100, seed=3), read, wds.detshuffle(6, seed=3))
    )
    ours = webdataset_order(lengths, np.arange(sum(lengths)), seed=3, sample_buffer=6)
    assert ours.tolist() == theirs


def test_selected_samples_come_once_from_every_order():
    selected = np.array([1, 4, 5, 6, 11, 20, 21, 30])
    theirs = webdataset_order([10, 10, 15], selected, seed=0, sample_buffer=3)
    assert sorted(theirs.tolist()) == sorted(true_shuffle(selected, seed=1).tolist()) == selected.tolist()


def test_a_true_shuffle_is_described_as_one():
    n = 20_000
    clips, shards = np.arange(n) // 40, np.arange(n) // 250
    figures = describe(Placed(name="true", samples=true_shuffle(np.arange(n), seed=0)), clips, shards, 64)
    assert figures.same_clip_pairs == pytest.approx(39 / (n - 1), rel=0.1)
    assert figures.shards_per_batch == pytest.approx(80 * (1 - (79 / 80) ** 64), rel=0.02)
    assert abs(figures.quality.rank_correlation_z) < 4


def test_copies_are_samples_of_their_own():
    samples = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 3))
    figures = describe(Placed(name="thrice", samples=samples), np.arange(100), np.zeros(100, dtype=int), 10)
    assert figures.quality.num_samples == 300
    assert abs(figures.quality.rank_correlation_z) < 4
    assert figures.shards_per_batch == 1


def test_epochs_too_long_to_hold_are_refused():
    samples = np.broadcast_to(np.int64(0), MAX_POSITIONS + 1)
    with pytest.raises(OrderError, match="10,000,001 positions is too long"):
        describe(Placed(name="long", samples=samples), np.zeros(1, dtype=int), np.zeros(1, dtype=int), 64)
