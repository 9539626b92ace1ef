"""Mixes: exact shares in each block, each dataset in its own order through its own epochs, any position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.compile import CompiledOrder
from fuelrail.pipeline.order.mix import MAX_BLOCK, MixedOrder
from fuelrail.pipeline.order.spec import OrderSpec


def order(num_samples, seed=0, kind="shuffled"):
    return CompiledOrder(OrderSpec(kind=kind, seed=seed), {"seed": seed, "n": num_samples}, [num_samples])


PARTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4)


def make(parts, **options):
    orders = [order(n, seed=number) for number, (n, _) in enumerate(parts)]
    return MixedOrder(orders, [ratio for _, ratio in parts], **options)


@given(PARTS, st.integers(0, 9), st.integers(0, 5))
def test_every_block_has_the_exact_shares(parts, seed, epoch):
    mix = make(parts, seed=seed)
    entries = mix.epoch(epoch).entries(np.arange(mix.epoch_length))
    blocks = entries.parts.reshape(-1, mix.block)
    for block in blocks:
        assert np.bincount(block, minlength=len(parts)).tolist() == list(mix.ratios)


@given(PARTS, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 60)))
def test_each_dataset_goes_through_its_own_epochs_across_the_mixs(parts, num_epochs, length):
    mix = make(parts, epoch_length=length)
    seen = [mix.epoch(epoch).entries(np.arange(mix.epoch_length)) for epoch in range(num_epochs)]
    for part, own in enumerate(mix.orders):
        samples = np.concatenate([entries.samples[entries.parts == part] for entries in seen])
        n = own.epoch_length
        expected = np.concatenate([own.epoch(e)(np.arange(n)) for e in range(len(samples) // n + 1)])
        assert np.array_equal(samples, expected[: len(samples)])


@given(PARTS, st.integers(0, 5), st.data())
def test_any_position_alone_is_what_it_is_in_the_whole(parts, epoch, data):
    mix = make(parts)
    at = np.array(data.draw(st.lists(st.integers(0, mix.epoch_length - 1), max_size=12)), dtype=np.int64)
    whole = mix.epoch(epoch).entries(np.arange(mix.epoch_length))
    some = mix.epoch(epoch).entries(at)
    assert np.array_equal(some.parts, whole.parts[at])
    assert np.array_equal(some.samples, whole.samples[at])


def test_an_epoch_lasts_until_every_sample_has_come():
    assert make([(100, 4), (10, 1)]).epoch_length == 25 * 5
    assert make([(100, 4), (30, 1)]).epoch_length == 30 * 5
    mix = make([(100, 4), (30, 1)], epoch_length=7)
    assert len(mix.epoch(0)) == mix.epoch_length == 10


def test_arrangements_are_shuffled_block_by_block():
    mix = make([(4000, 2), (4000, 2)])
    parts = mix.epoch(0).entries(np.arange(mix.epoch_length)).parts.reshape(-1, 4)
    kinds, counts = np.unique(parts, axis=0, return_counts=True)
    assert len(kinds) == 6
    assert counts.min() > 2000 / 6 * 0.7  # 333 expected of each of the six arrangements
    assert not np.array_equal(parts, mix.epoch(1).entries(np.arange(mix.epoch_length)).parts.reshape(-1, 4))


def test_billions_are_mixed_from_any_position():
    mix = MixedOrder([order(10**9), order(10**6, seed=1)], [9, 1])
    entries = mix.epoch(3).entries(mix.epoch_length - 1 - np.arange(1000))
    assert np.bincount(entries.parts).tolist() == [900, 100]
    assert entries.samples[entries.parts == 0].max() > 10**8
    # Saved training states rely on these, as on the values in test_permutation.py.
    first = mix.epoch(0).entries(np.arange(10))
    assert first.parts.tolist() == GOLDEN[0]
    assert first.samples.tolist() == GOLDEN[1]


GOLDEN = [
    [0, 0, 0, 0, 1, 0, 0, 0, 0, 0],
    [593424983, 538972187, 30650054, 82920124, 724347, 712637236, 366914775, 632600952, 882302166, 197970708],
]


def test_identity_holds_ratios_and_all_parts():
    identity = make([(10, 4), (20, 1)], seed=3).identity
    assert identity == {
        "kind": "mix", "seed": 3, "ratios": [4, 1], "epoch_length": 100,
        "parts": [{"seed": 0, "n": 10}, {"seed": 1, "n": 20}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("orders", "ratios", "options", "text"),
    [
        ([], [], {}, "got 0 and 0"),
        ([order(5)], [1, 2], {}, "a ratio for each of its datasets, got 1 and 2"),
        ([order(5), order(5)], [1, 0], {}, "integers >= 1, at most 1024 in sum, got \\[1, 0\\]"),
        ([order(5)], [MAX_BLOCK + 1], {}, "got \\[1025\\]"),
        ([order(5)], [1], {"seed": -1}, "mix seed"),
        ([order(5)], [1], {"epoch_length": 0}, "at least 1 position, got 0"),
    ],
)
def test_mixes_that_cannot_be_are_refused(orders, ratios, options, text):
    with pytest.raises(OrderError, match=text):
        MixedOrder(orders, ratios, **options)


@pytest.mark.parametrize("epoch", [-1, 2**62])
def test_epochs_out_of_range_are_refused(epoch):
    with pytest.raises(OrderError, match=f"got {epoch}"):
        make([(5, 1)]).epoch(epoch)


def test_positions_outside_are_refused():
    with pytest.raises(OrderError, match=r"position 5 is outside 0 .. 4"):
        make([(5, 1)]).epoch(0).entries([5])
