"""Orders of an epoch: pinned values, exact cover, windows, purity, memory, and what is refused."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuelrail.pipeline.order.spec as order_module
from fuelrail.pipeline.order.spec import ORDER_VERSION, OrderSpec, position_map
from fuelrail.pipeline.settings import convert

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 2**40)
SHARDS = st.lists(st.integers(1, 60), min_size=1, max_size=30).map(tuple)


def specs(seeds=SEEDS):
    return st.one_of(
        st.builds(
            OrderSpec,
            kind=st.sampled_from(["shuffled", "sequential"]),
            seed=seeds,
        ),
        st.builds(
            OrderSpec,
            kind=st.just("windowed"),
            seed=seeds,
            window=st.integers(1, 40),
        ),
    )


SMALL = (3, 1, 4, 2, 5)
LARGE = (10**6,) * 1000

# Everybody who has saved a training state relies on these; see the same note in test_permutation.py. A change of
# them needs another ORDER_VERSION, which makes older states refused.
GOLDEN = [
    (
        {"kind": "shuffled", "seed": 7},
        0,
        [7, 8, 9, 12, 6, 1, 4, 13, 10, 0, 14, 2, 3, 11, 5],
    ),
    (
        {"kind": "shuffled", "seed": 7},
        1,
        [13, 12, 7, 1, 9, 11, 0, 2, 6, 4, 5, 8, 10, 14, 3],
    ),
    (
        {"kind": "windowed", "seed": 7, "window": 2},
        0,
        [2, 0, 1, 8, 9, 5, 7, 4, 6, 12, 11, 14, 13, 3, 10],
    ),
    (
        {"kind": "windowed", "seed": 7, "window": 2},
        1,
        [2, 0, 1, 5, 6, 9, 7, 8, 4, 11, 12, 3, 14, 13, 10],
    ),
    ({"kind": "sequential", "seed": 7}, 1, list(range(15))),
]


@pytest.mark.parametrize(("spec", "epoch", "samples"), GOLDEN)
def test_orders_are_those_of_every_release(spec, epoch, samples):
    order = position_map(OrderSpec(**spec), SMALL, epoch)
    assert order(np.arange(15)).tolist() == samples
    assert ORDER_VERSION == 1


def test_a_billion_samples_are_ordered_as_in_every_release():
    positions = [0, 1, 2, 10**9 // 2, 10**9 - 1]
    shuffled = position_map(OrderSpec(seed=7), LARGE, 3)
    windowed = position_map(OrderSpec(kind="windowed", seed=7, window=2), LARGE, 3)
    assert shuffled(positions).tolist() == [
        473407553,
        887283042,
        622802318,
        979023553,
        357266510,
    ]
    assert windowed(positions).tolist() == [
        555671733,
        396774567,
        396904436,
        57589754,
        305200159,
    ]


@given(specs(), SHARDS, EPOCHS)
def test_every_sample_comes_once(spec, shards, epoch):
    order = position_map(spec, shards, epoch)
    samples = order(np.arange(len(order)))
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(sum(shards)))


@given(
    st.lists(st.sampled_from([1, 2, 3, 900, 5000]), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_shards_that_are_very_short_beside_others_change_nothing_but_the_time(shards, window, seed):
    spec = OrderSpec(kind="windowed", seed=seed, window=window)
    positions = np.random.default_rng(seed).permutation(sum(shards))
    samples = position_map(spec, shards, 0)(positions)
    assert np.array_equal(np.sort(samples), np.arange(sum(shards)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "_MAX_RUNS", 0)  # bisection everywhere
        assert np.array_equal(position_map(spec, shards, 0)(positions), samples)
        patch.setattr(order_module, "_MAX_RUNS", 2**40)  # the table everywhere
        assert np.array_equal(position_map(spec, shards, 0)(positions), samples)


def test_memory_does_not_grow_with_the_number_of_samples():
    def peak_bytes(num_samples):
        spec = OrderSpec(kind="shuffled", seed=1)
        positions = np.linspace(0, num_samples - 1, 1024).astype(np.int64)
        tracemalloc.start()
        try:
            position_map(spec, [num_samples], 0)(positions)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(15)  # imports and caches
    assert peak_bytes(10**9) < peak_bytes(1025) + 10_000


def test_a_spec_comes_from_settings_and_goes_to_plain_types():
    spec = convert({"kind": "windowed", "seed": 3, "window": 8}, OrderSpec, "order.yaml")
    assert spec == OrderSpec(kind="windowed", seed=3, window=8)
    assert convert(msgspec.to_builtins(spec), OrderSpec, "state") == spec


def test_sequential_gives_a_copy():
    positions = np.arange(5)
    position_map(OrderSpec(kind="sequential"), SMALL, 0)(positions)[0] = 9
    assert positions[0] == 0
