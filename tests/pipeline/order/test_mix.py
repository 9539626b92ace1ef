"""Mixes: exact shares in each block, each dataset in its own order through its own epochs, any position alone."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.compile import mix_orders
from fuelrail.pipeline.order.mix import (
    MAX_BLOCK,
    MixedOrder,
    MixSchedule,
    MixStage,
)
from fuelrail.pipeline.order.spec import CompiledOrder, OrderSpec


def order(num_samples, seed=0, kind="shuffled"):
    return CompiledOrder(
        OrderSpec(kind=kind, seed=seed),
        {"seed": seed, "n": num_samples},
        [num_samples],
    )


def make(parts, **options):
    orders = [order(n, seed=number) for number, (n, _) in enumerate(parts)]
    return MixedOrder(orders, [ratio for _, ratio in parts], **options)


def test_an_epoch_lasts_until_every_sample_has_come():
    assert make([(100, 4), (10, 1)]).epoch_length == 25 * 5
    assert make([(100, 4), (30, 1)]).epoch_length == 30 * 5
    mix = make([(100, 4), (30, 1)], epoch_length=7)
    assert len(mix.epoch(0)) == mix.epoch_length == 10


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
    [
        593424983,
        538972187,
        30650054,
        82920124,
        724347,
        712637236,
        366914775,
        632600952,
        882302166,
        197970708,
    ],
]


def test_identity_holds_ratios_and_all_parts():
    identity = make([(10, 4), (20, 1)], seed=3).identity
    assert identity == {
        "kind": "mix",
        "seed": 3,
        "ratios": [4, 1],
        "epoch_length": 100,
        "parts": [{"seed": 0, "n": 10}, {"seed": 1, "n": 20}],
    }


RATIOS = st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any)


def make_stages(ratios, lengths, ramps):
    """Stages of some numbers of blocks; and the block."""
    named = [dict(zip("abc", shares, strict=True)) for shares in ratios]
    block = int(np.lcm.reduce([sum(shares) for shares in ratios]))
    ends = [block * int(end) for end in np.cumsum(lengths)]
    stages = [
        MixStage(ratios=stage_ratios, until=end, ramp=r)
        for stage_ratios, end, r in zip(named, ends, ramps, strict=False)
    ]
    return [*stages, MixStage(ratios=named[-1])], block


@given(
    st.lists(RATIOS, min_size=2, max_size=4),
    st.lists(st.integers(1, 60), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_counts_of_a_schedule_are_the_exact_shares_at_every_block_end(ratios, lengths, ramps):
    lengths = lengths[: len(ratios) - 1]
    ramps = ramps[: len(ratios) - 1]
    stages, block = make_stages(ratios, lengths, ramps)
    assume(block <= MAX_BLOCK)
    before, counts = MixSchedule(stages, "abc").blocks(np.arange(sum(lengths) + 20))
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == block).all()
    assert (before[0] == 0).all()
    assert (np.diff(before, axis=0) == counts[:-1]).all()
    shares = [
        [Fraction(ratio * block, sum(stage_ratios)) for ratio in stage_ratios]
        for stage_ratios in ratios
    ]
    first_block = 0
    for number, length in enumerate([*lengths, 20]):
        old = shares[number]
        new = shares[min(number + 1, len(shares) - 1)]
        is_ramp = number < len(ramps) and ramps[number]
        for step in range(length):
            for part, (a, b) in enumerate(zip(old, new, strict=True)):
                exact = a * step + (Fraction((b - a) * step * step, 2 * length) if is_ramp else 0)
                off = abs(int(before[first_block + step, part] - before[first_block, part]) - exact)
                assert off < 2 if is_ramp else off == 0
        first_block += length


def test_two_datasets_are_less_than_one_sample_off_a_ramp():
    schedule = MixSchedule(
        [
            MixStage(ratios={"a": 7, "b": 1}, until=8000, ramp=True),
            MixStage(ratios={"a": 1, "b": 3}),
        ],
        "ab",
    )
    before, _ = schedule.blocks(np.arange(1001))
    exact = [7 * step - Fraction(5 * step * step, 2000) for step in range(1001)]
    assert all(
        0 <= count - share < 1 for count, share in zip(before[:, 0].tolist(), exact, strict=True)
    )


def make_staged(stages, sizes=(50, 70, 40), **options):
    data = dict(zip("abc", sizes, strict=True))
    return mix_orders(
        stages,
        OrderSpec(**options),
        data,
        lambda _, name, dataset_spec, __: CompiledOrder(dataset_spec, {}, [data[name]]),
    )


def test_each_dataset_continues_through_the_stages_of_a_schedule():
    """Whatever the ratios, the samples of a dataset are its own epochs, one after the other."""
    stages, block = make_stages([(5, 1, 0), (1, 1, 1), (0, 2, 1)], (9, 4), (True, True))
    mix = make_staged(stages, seed=4)
    assert (block, mix.epoch_length) == (6, 20 * 6), (
        "the last stage's ratios decide an epoch's length"
    )
    entries = [mix.epoch(epoch).entries(np.arange(mix.epoch_length)) for epoch in range(3)]
    parts, samples = (
        np.concatenate([getattr(epoch_entries, name) for epoch_entries in entries])
        for name in ("parts", "samples")
    )
    _, counts = mix.schedule.blocks(np.arange(3 * 20))
    for part, order in enumerate(mix.orders):
        mixed = samples[parts == part]
        alone = np.concatenate([order.epoch(e)(np.arange(order.epoch_length)) for e in range(10)])
        assert mixed.tolist() == alone[: len(mixed)].tolist()
        assert (parts.reshape(-1, block) == part).sum(axis=1).tolist() == counts[:, part].tolist()
    entry = mix.epoch(1).entries(np.array([30]))
    assert (entry.parts[0], entry.samples[0]) == (
        entries[1].parts[30],
        entries[1].samples[30],
    )


def test_a_schedule_of_one_stage_is_a_plain_mix():
    plain = make_staged({"a": 3, "b": 1, "c": 2})
    staged = make_staged([MixStage(ratios={"a": 3, "b": 1, "c": 2})])
    for name in ("parts", "samples"):
        columns = [
            getattr(mix.epoch(2).entries(np.arange(mix.epoch_length)), name).tolist()
            for mix in (plain, staged)
        ]
        assert columns[0] == columns[1]


def test_a_state_names_the_stages():
    stages, _ = make_stages([(5, 1, 0), (1, 1, 1)], (9,), (True,))
    assert make_staged(stages).identity["mix"] == [
        {"ratios": {"a": 5, "b": 1, "c": 0}, "until": 54, "ramp": True},
        {"ratios": {"a": 1, "b": 1, "c": 1}, "until": None, "ramp": False},
    ]


def stage(a, b, c, **options):
    return MixStage(ratios={"a": a, "b": b, "c": c}, **options)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "the last stage"),
        ([{"a": 1}], "a MixStage"),
        ([MixStage(ratios={"a": 1, "b": 1})], "stage 0 .* needs integers >= 0"),
        ([stage(0, 0, 0)], "stage 0 .* needs integers >= 0"),
        ([stage(1, -1, 1)], "stage 0 .* needs integers >= 0"),
        ([stage(1, 1, 1, until=6)], "the last stage"),
        ([stage(1, 1, 1, ramp=True)], "the last stage"),
        ([stage(1, 1, 1, until=7), stage(1, 1, 1)], "block of 3"),
        ([stage(1, 1, 1), stage(1, 1, 1)], "end in turn"),
        ([stage(999, 1, 1, until=3), stage(1, 1, 0)], "at most 1024"),
        (
            [stage(1, 0, 0, until=2**32, ramp=True), stage(0, 1, 0)],
            "may have 2147483648",
        ),
        (
            [stage(1023, 1, 0, until=2**37, ramp=True), stage(0, 1, 0)],
            "134217728 blocks of 1024, and may have 67141",
        ),
    ],
)
def test_stages_that_make_no_schedule_are_refused(stages, message):
    with pytest.raises(OrderError, match=message):
        make_staged(stages)
