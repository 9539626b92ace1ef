"""How random orders are: against small cases by hand, plain counting, simulated true shuffles and webdataset's own."""

from __future__ import annotations

import math
from itertools import combinations, permutations

import msgspec
import numpy as np
import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.studies.order.describe import webdataset_order
from fuelrail.bench.studies.order.quality import (
    MAX_POSITIONS,
    describe,
    measure,
    ranks,
    same_pairs,
)
from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.permutation import KeyedPermutation, derive_key

Z_FIGURES = ("rank_correlation_z", "serial_correlation_z")


def test_the_stored_order_and_its_reverse_are_not_shuffled():
    stored = measure(np.arange(10_000))
    reverse = measure(np.arange(10_000)[::-1])
    assert (stored.rank_correlation, reverse.rank_correlation) == pytest.approx((1, -1))
    assert stored.serial_correlation > 0.99
    assert min(stored.rank_correlation_z, stored.serial_correlation_z) > 90
    assert reverse.worst[1] < -90
    assert stored.worst[1] == max(getattr(stored, name) for name in Z_FIGURES)


def test_true_shuffles_have_the_stated_means_and_spreads():
    rng = np.random.default_rng(1)
    figures = [measure(rng.permutation(400)) for _ in range(600)]
    for name in Z_FIGURES:
        values = np.array([getattr(figure, name) for figure in figures])
        assert abs(values.mean()) < 4 / math.sqrt(600), name
        assert 0.85 < values.std() < 1.15, name


@pytest.mark.parametrize("n", [34_149, 1_000_000])
def test_the_keyed_permutation_is_as_good_as_a_true_shuffle(n):
    quality = measure(KeyedPermutation(n, derive_key("quality", n))(np.arange(n)))
    assert abs(quality.worst[1]) < 4, quality


@pytest.mark.costly
def test_its_figures_scatter_over_keys_as_those_of_true_shuffles_do():
    # the shortest length that is not a table
    n = 1025
    count = 600
    rng = np.random.default_rng(2)
    ours = [
        measure(KeyedPermutation(n, derive_key("quality", key))(np.arange(n)))
        for key in range(count)
    ]
    true = [measure(rng.permutation(n)) for _ in range(count)]
    for name in Z_FIGURES:
        a, b = (np.array([getattr(figure, name) for figure in figures]) for figures in (ours, true))
        assert abs(a.mean() - b.mean()) < 4 * b.std() * math.sqrt(2 / count), name
        assert 0.85 < a.std() / b.std() < 1.18, name


def test_a_small_buffer_shuffle_is_distinguished_from_a_true_one():
    rng = np.random.default_rng(1)
    buffer = []
    order = []
    for sample in range(20_000):
        buffer.append(sample)
        if len(buffer) == 1000:
            order.append(buffer.pop(rng.integers(1000)))
    quality = measure(np.array(order + buffer))
    assert quality.rank_correlation > 0.9
    assert quality.serial_correlation_z > 50


def test_closed_forms_over_all_permutations():
    every = [measure(np.array(order)) for order in permutations(range(5))]
    assert np.mean([quality.rank_correlation for quality in every]) == pytest.approx(0)
    assert np.var([quality.rank_correlation for quality in every]) == pytest.approx(1 / 4)
    assert np.mean([quality.serial_correlation for quality in every]) == pytest.approx(-1 / 4)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=60), st.integers(2, 9))
def test_batch_figures_are_those_of_plain_counting(groups, batch):
    batches = [groups[i : i + batch] for i in range(0, len(groups) - batch + 1, batch)]
    pairs = [a == b for members in batches for a, b in combinations(members, 2)]
    values = np.array(groups)
    if not batches:
        assert np.isnan(same_pairs(values, batch))
        return
    assert same_pairs(values, batch) == pytest.approx(np.mean(pairs))


def test_a_batch_of_one_has_no_pairs():
    assert np.isnan(same_pairs(np.zeros(5, dtype=int), 1))


@given(st.lists(st.integers(0, 20), max_size=50))
def test_ranks_keep_order_and_break_ties(numbers):
    order_ranks = ranks(np.array(numbers, dtype=np.int64))
    assert sorted(order_ranks.tolist()) == list(range(len(numbers)))
    assert [numbers[i] for i in np.argsort(order_ranks)] == sorted(numbers)


def test_webdatasets_order_is_what_its_pipeline_hands_out():
    lengths = [7, 3, 12, 5, 9]
    starts = np.cumsum([0, *lengths])

    def read(shards):
        for shard in shards:
            yield from range(starts[int(shard["url"])], starts[int(shard["url"]) + 1])

    urls = [str(shard) for shard in range(len(lengths))]
    theirs = list(
        wds.DataPipeline(
            wds.SimpleShardList(urls),
            wds.detshuffle(100, seed=3),
            read,
            wds.detshuffle(6, seed=3),
        )
    )
    ours = webdataset_order(lengths, np.arange(sum(lengths)), seed=3, sample_buffer=6)
    assert ours.tolist() == theirs


def test_selected_samples_come_once_in_webdatasets_order():
    selected = np.array([1, 4, 5, 6, 11, 20, 21, 30])
    assert (
        sorted(webdataset_order([10, 10, 15], selected, seed=0, sample_buffer=3).tolist())
        == selected.tolist()
    )


def test_a_true_shuffle_is_described_as_one():
    n = 20_000
    figures = describe("true", np.random.default_rng(0).permutation(n), np.arange(n) // 40, 64)
    assert figures.same_clip_pairs == pytest.approx(39 / (n - 1), rel=0.1)
    assert abs(figures.quality.worst[1]) < 4
    assert msgspec.to_builtins(figures)["quality"].keys() >= set(Z_FIGURES)


def test_copies_are_samples_of_their_own():
    samples = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 3))
    figures = describe("thrice", samples, np.arange(100), 10)
    assert abs(figures.quality.worst[1]) < 4


@pytest.mark.parametrize(("count", "count_text"), [(MAX_POSITIONS + 1, "10,000,001"), (7, "7")])
def test_epochs_too_long_or_too_short_are_refused(count, count_text):
    samples = np.broadcast_to(np.int64(0), count)
    with pytest.raises(
        OrderError,
        match=f"an epoch of {count_text} positions cannot be measured: 8 to 10,000,000",
    ):
        describe("no", samples, np.zeros(1, dtype=int), 64)
