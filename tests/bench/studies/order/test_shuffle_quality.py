"""The figures of shuffle quality, against small cases by hand, closed forms, and simulated true shuffles."""

from __future__ import annotations

import dataclasses
import math
from itertools import permutations

import numpy as np
import pytest

from fuelrail.bench.studies.order.shuffle_quality import (
    ChiSquare,
    as_order,
    bucket_chi_square,
    measure,
    neighbour_distance,
    rank_correlation,
    serial_correlation,
)
from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.permutation import KeyedPermutation, derive_key

Z_FIGURES = ("rank_correlation_z", "serial_correlation_z", "bucket_chi_square_z")
RATIO_FIGURES = ("displacement_ratio", "neighbour_distance_ratio", "separation_ratio")


def test_the_stored_order_and_its_reverse_are_not_shuffled():
    stored, reverse = measure(np.arange(10_000)), measure(np.arange(1000)[::-1])
    assert (stored.rank_correlation, reverse.rank_correlation) == pytest.approx((1, -1))
    assert stored.serial_correlation > 0.99
    assert min(stored.rank_correlation_z, stored.serial_correlation_z, stored.bucket_chi_square_z) > 90
    assert reverse.bucket_chi_square_z > 20
    assert stored.displacement_ratio == 0
    assert stored.neighbour_distance_ratio == stored.separation_ratio == pytest.approx(3 / 10_001)


def test_true_shuffles_have_the_stated_means_and_spreads():
    rng = np.random.default_rng(1)
    figures = [measure(rng.permutation(400)) for _ in range(600)]
    for name in Z_FIGURES:
        values = np.array([getattr(figure, name) for figure in figures])
        assert abs(values.mean()) < 4 / math.sqrt(600), name
        assert 0.85 < values.std() < 1.15, name
    for name in RATIO_FIGURES:
        assert np.mean([getattr(figure, name) for figure in figures]) == pytest.approx(1, abs=0.01), name


@pytest.mark.parametrize("n", [34_149, 1_000_000])
def test_the_keyed_permutation_is_as_good_as_a_true_shuffle(n):
    quality = measure(KeyedPermutation(n, derive_key("quality", n))(np.arange(n)))
    for name in Z_FIGURES:
        assert abs(getattr(quality, name)) < 4, name
    for name in RATIO_FIGURES:
        assert abs(getattr(quality, name) - 1) < 4 * 0.65 / math.sqrt(n), name


def test_its_figures_scatter_over_keys_as_those_of_true_shuffles_do():
    n, count = 1025, 600  # the shortest length that is not a table
    rng = np.random.default_rng(2)
    ours = [measure(KeyedPermutation(n, derive_key("quality", key))(np.arange(n))) for key in range(count)]
    true = [measure(rng.permutation(n)) for _ in range(count)]
    for name in (*Z_FIGURES, *RATIO_FIGURES):
        a, b = (np.array([getattr(figure, name) for figure in figures]) for figures in (ours, true))
        assert abs(a.mean() - b.mean()) < 4 * b.std() * math.sqrt(2 / count), name
        assert 0.85 < a.std() / b.std() < 1.18, name


def test_a_small_buffer_shuffle_is_distinguished_from_a_true_one():
    rng, buffer, order = np.random.default_rng(1), [], []
    for sample in range(20_000):
        buffer.append(sample)
        if len(buffer) == 1000:
            order.append(buffer.pop(rng.integers(1000)))
    order += buffer
    quality = measure(order)
    assert quality.rank_correlation > 0.9
    assert quality.bucket_chi_square_z > 50
    assert quality.displacement_ratio < 0.3


def test_closed_forms_over_all_permutations():
    every = np.array(list(permutations(range(5))))
    assert np.mean([neighbour_distance(order) for order in every]) == pytest.approx((5 + 1) / 3)
    assert np.mean([np.abs(order - np.arange(5)).mean() for order in every]) == pytest.approx((25 - 1) / 15)
    assert np.mean([rank_correlation(order) for order in every]) == pytest.approx(0)
    assert np.var([rank_correlation(order) for order in every]) == pytest.approx(1 / 4)
    assert np.mean([serial_correlation(order) for order in every]) == pytest.approx(-1 / 4)
    chi = [bucket_chi_square(order, 2).statistic for order in np.array(list(permutations(range(6))))]
    assert np.mean(chi) == pytest.approx(bucket_chi_square(np.arange(6), 2).degrees)


def test_chi_square_z_follows_the_chi_square_distribution():
    # Quantiles of chi-square with 100 degrees of freedom: 0.5, 0.95 and 0.999 (any table).
    for statistic, z in ((99.334, 0.0), (124.342, 1.645), (149.449, 3.090)):
        assert ChiSquare(statistic, 100).z == pytest.approx(z, abs=0.01)


def test_figures_are_printable_facts():
    assert dataclasses.asdict(measure(np.arange(8)))["num_samples"] == 8


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (np.arange(7), "at least 8 samples, got 7"),
        (np.zeros(9, dtype=int), "each of 0 .. 8 once"),
        (np.arange(1, 10), "each of 0 .. 8 once"),
        (np.arange(-1, 8), "each of 0 .. 8 once"),
        (np.arange(9.0), "1-D array of integers, got shape \\(9,\\), dtype float64"),
        (np.arange(16).reshape(2, 8), "got shape \\(2, 8\\)"),
    ],
)
def test_what_is_no_order_is_refused(order, text):
    with pytest.raises(OrderError, match=text):
        as_order(order)


def test_more_buckets_than_samples_are_refused():
    with pytest.raises(OrderError, match=r"num_buckets must be in 2 .. 8"):
        bucket_chi_square(np.arange(8), 9)
