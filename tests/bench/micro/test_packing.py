"""The packers that `fuelrail.bench.micro.packing` compares: each packs all lengths, within the budget."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fuelrail.bench.micro.packing import knapsack, measure, ours, text_lengths

LENGTHS = np.random.default_rng(0).integers(16, 1025, 700)


@pytest.mark.parametrize("pack", [ours, knapsack])
def test_a_packer_packs_all_within_the_budget(pack):
    costs = pack(LENGTHS, 2048)
    assert sum(costs) == LENGTHS.sum()
    assert max(costs) <= 2048


def test_the_figures_are_of_the_same_lengths():
    figures = measure({"few": LENGTHS}).figures
    found = {(one.packer, one.budget): one for one in figures}
    for (packer, budget), one in found.items():
        assert one.fill == pytest.approx((LENGTHS.sum() - one.tokens_lost) / (budget * one.packs)), packer
    assert found["fuelrail", 32768].dearest_rank is None


def test_the_texts_of_modules_are_many():
    lengths = text_lengths(Path(json.__file__).parent)
    assert len(lengths) > 10
    assert 1 <= lengths.min() < lengths.max() <= 1024
