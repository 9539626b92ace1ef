"""Mixes: exact shares in each block, each dataset in its own order through its own epochs, any position alone."""

from __future__ import annotations

import numpy as np

from fuelrail.pipeline.order.compile import CompiledOrder
from fuelrail.pipeline.order.mix import MixedOrder
from fuelrail.pipeline.order.spec import OrderSpec


def order(num_samples, seed=0, kind="shuffled"):
    return CompiledOrder(OrderSpec(kind=kind, seed=seed), {"seed": seed, "n": num_samples}, [num_samples])


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
    [593424983, 538972187, 30650054, 82920124, 724347, 712637236, 366914775, 632600952, 882302166, 197970708],
]


def test_identity_holds_ratios_and_all_parts():
    identity = make([(10, 4), (20, 1)], seed=3).identity
    assert identity == {
        "kind": "mix", "seed": 3, "ratios": [4, 1], "epoch_length": 100,
        "parts": [{"seed": 0, "n": 10}, {"seed": 1, "n": 20}],
    }  # fmt: skip
