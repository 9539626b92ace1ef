"""The figures of an order over a dataset: batches against plain counting, webdataset's order against its own."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.studies.order.report import (
    MAX_POSITIONS,
    Placed,
    describe,
    distinct_per_batch,
    equal_chance_z,
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
    over_epochs = np.random.default_rng(0).integers(0, n, (500, 3))
    samples = true_shuffle(np.arange(n), seed=0)
    figures = describe(
        Placed(name="true", samples=samples, over_epochs=over_epochs, chances=np.ones(n)), clips, shards, 64
    )
    assert abs(figures.equal_chance_z) < 4
    assert figures.same_clip_pairs == pytest.approx(39 / (n - 1), rel=0.1)
    assert figures.shards_per_batch == pytest.approx(80 * (1 - (79 / 80) ** 64), rel=0.02)
    assert abs(figures.quality.rank_correlation_z) < 4


def test_copies_are_samples_of_their_own():
    samples = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 3))
    placed = Placed(name="thrice", samples=samples, over_epochs=np.empty((0, 3), int), chances=np.full(100, 3.0))
    figures = describe(placed, np.arange(100), np.zeros(100, dtype=int), 10)
    assert np.isnan(figures.equal_chance_z)
    assert figures.quality.num_samples == 300
    assert abs(figures.quality.rank_correlation_z) < 4
    assert figures.shards_per_batch == 1


def test_epochs_too_long_to_hold_are_refused():
    samples = np.broadcast_to(np.int64(0), MAX_POSITIONS + 1)
    with pytest.raises(OrderError, match="10,000,001 positions is too long"):
        describe(
            Placed(name="long", samples=samples, over_epochs=np.empty((0, 3), int), chances=np.ones(1)),
            np.zeros(1, dtype=int), np.zeros(1, dtype=int), 64,
        )  # fmt: skip


def test_chances_are_checked_against_the_expected_ones():
    rng = np.random.default_rng(0)
    chances = rng.random(300) * (rng.random(300) < 0.5)
    drawn = rng.choice(300, (2000, 3), p=chances / chances.sum())
    assert abs(equal_chance_z(drawn, chances)) < 4
    assert equal_chance_z(drawn, np.ones(300)) > 10
    scores = [equal_chance_z(rng.integers(0, 100, (160, 3)), np.ones(100)) for _ in range(400)]
    assert abs(np.mean(scores)) < 0.2
    assert 0.85 < np.std(scores) < 1.15


def test_one_sample_has_every_chance():
    assert np.isnan(equal_chance_z(np.zeros((100, 3), int), np.ones(1)))
