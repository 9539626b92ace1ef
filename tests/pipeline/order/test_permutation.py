"""The keyed permutation: pinned values, a plain reference, bijection, inverse, memory, and quality over keys."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from fuelrail.pipeline.order.permutation import (
    MAX_LENGTH,
    TABLE_LIMIT,
    KeyedPermutation,
    as_positions,
    derive_key,
)

KEYS = st.integers(0, 2**128 - 1)
LENGTHS = st.one_of(
    st.integers(1, 3000),
    st.integers(1, 10**9),
    st.integers(1, MAX_LENGTH),
    st.integers(2, 31622).map(lambda root: root * root),
    st.integers(2, 31622).map(lambda root: root * root + 1),
    st.integers(2, 62).map(lambda power: 2**power),
)


def distinct_positions(n):
    """Up to 200 distinct positions of 0 .. n-1, the two ends among them."""
    inner = st.lists(st.integers(0, n - 1), max_size=198, unique=True)
    return inner.map(lambda chosen: np.array(sorted({0, n - 1, *chosen}), dtype=np.int64))


# Everybody who has saved a training state relies on these: an epoch of a released version must continue with the same
# samples under the next one. They may change only together with `fuelrail.pipeline.order.spec.ORDER_VERSION`, so that
# older states are refused instead of being continued with other samples.
GOLDEN = {
    1: ([0], 0),
    2: ([0, 1], 1),
    10: ([9, 1, 5, 7, 3, 0, 6, 8], 4),
    1000: ([9, 542, 915, 834, 182, 169, 681, 887], 768),
    1024: ([879, 630, 602, 463, 615, 821, 860, 392], 871),
    1025: ([889, 130, 43, 856, 818, 11, 175, 716], 59),
    100_000: ([7762, 45167, 40389, 94317, 73751, 41986, 4127, 91518], 76869),
    10**9: (
        [
            547180140,
            48676980,
            146260414,
            654053799,
            423613180,
            272965545,
            72019729,
            256103460,
        ],
        461798212,
    ),
    2**62: (
        [
            3327517909327737873,
            2977913567064960699,
            1944251271388201666,
            3001433762947296515,
            3870884456258027762,
            3456275629859520676,
            1026961060582583289,
            1623402338949185846,
        ],
        3097433599116969213,
    ),
}


@pytest.mark.parametrize("n", GOLDEN)
def test_values_are_those_of_every_release(n):
    first, last = GOLDEN[n]
    shuffle = KeyedPermutation(n, derive_key("golden"))
    assert shuffle(np.arange(len(first))).tolist() == first
    assert shuffle(n - 1).tolist() == last


def test_keys_are_those_of_every_release():
    assert derive_key("test") == 0xEFADDDCFDC2660633354621B1D4B43CB
    assert derive_key("test", 1, 2) == 0xE6459275FDA70D524B9452B7C574E75E


@given(LENGTHS, KEYS, st.data())
def test_distinct_in_range_and_inverted(n, key, data):
    positions = data.draw(distinct_positions(n))
    shuffle = KeyedPermutation(n, key)
    values = shuffle(positions)
    assert len(set(values.tolist())) == len(positions)
    assert values.min() >= 0
    assert values.max() < n
    assert np.array_equal(shuffle.inverse(values), positions)
    assert np.array_equal(shuffle(shuffle.inverse(positions)), positions)


@given(LENGTHS, KEYS, st.data())
def test_a_value_depends_on_its_position_alone(n, key, data):
    positions = data.draw(distinct_positions(n))
    shuffle = KeyedPermutation(n, key)
    given_positions = positions.copy()
    values = shuffle(positions)
    assert np.array_equal(positions, given_positions)
    shape = (1, len(positions), 1)
    assert np.array_equal(shuffle(positions.reshape(shape)), values.reshape(shape))
    assert np.array_equal(shuffle(positions[::-2]), values[::-2])
    assert [int(shuffle(p)) for p in positions[:3]] == values[:3].tolist()
    assert np.array_equal(pickle.loads(pickle.dumps(shuffle))(positions), values)


def test_a_whole_million_across_chunks_comes_once():
    n = 1_000_003
    shuffle = KeyedPermutation(n, 5)
    values = shuffle(np.arange(n))
    assert np.array_equal(np.bincount(values, minlength=n), np.ones(n, dtype=np.int64))
    assert np.array_equal(shuffle.inverse(values), np.arange(n))


@pytest.mark.parametrize("n", [2, 3, 7, 30, TABLE_LIMIT + 1])
def test_every_sample_has_an_equal_chance_at_every_position(n):
    num_keys = 20 * n if n < 100 else 5 * n
    orders = np.stack(
        [KeyedPermutation(n, derive_key("chance", i))(np.arange(n)) for i in range(num_keys)]
    )
    cells = np.stack([np.bincount(samples, minlength=n) for samples in orders.T])
    # Permutation matrices less their mean span (n - 1)^2 dimensions, with variance 1 / (n - 1) in each.
    statistic = (np.square(cells - num_keys / n) / (num_keys / n)).sum() * (n - 1) / n
    assert 3e-5 < chi2.cdf(statistic, (n - 1) ** 2) < 1 - 3e-5


def test_keys_differ_in_every_part():
    parts = [
        ("a", 1, 2),
        ("a", 2, 1),
        ("a", 1),
        ("a", 1, 2, 0),
        ("b", 1, 2),
        ("", 0),
        ("a", 0),
        ("a", 2**64 + 1, 2),
    ]
    assert len({derive_key(*part) for part in parts}) == len(parts)


def test_no_positions_give_no_values():
    assert KeyedPermutation(10**9, 1)([]).shape == (0,)
    assert KeyedPermutation(10, 1)(np.empty((3, 0))).shape == (3, 0)
    assert as_positions([], 1).dtype == np.int64


def test_length_and_name():
    assert len(KeyedPermutation(10**9, 1)) == 10**9
    assert repr(KeyedPermutation(10, 255)) == "KeyedPermutation(n=10, key=0xff)"
