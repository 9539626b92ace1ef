"""The packers that `fuelrail.bench.micro.packing` compares: each packs all lengths, within the budget."""

from __future__ import annotations

import inspect
from itertools import islice

import numpy as np
import pytest

from fuelrail.bench.micro.packing import (
    dearest,
    knapsack,
    measure,
    measure_large,
    measure_waits,
    ours,
)
from fuelrail.bench.micro.source import documentation_texts

LENGTHS = np.random.default_rng(0).integers(16, 1025, 700)


@pytest.mark.parametrize("pack", [ours, knapsack])
def test_a_packer_packs_all_within_the_budget(pack):
    packs = pack(LENGTHS, 2048)
    assert sorted(length for one in packs for length in one) == sorted(LENGTHS.tolist())
    assert max(map(sum, packs)) <= 2048


def test_the_figures_are_of_the_same_lengths():
    figures = measure({"few": LENGTHS}).figures
    found = {(one.packer, one.budget): one for one in figures}
    for (packer, budget), one in found.items():
        assert one.fill == pytest.approx(
            (LENGTHS.sum() - one.tokens_lost) / (budget * one.packs)
        ), packer
        assert one.fill <= one.best_fill == LENGTHS.sum() / budget / -(-LENGTHS.sum() // budget)
    assert [one.tokens for one in found["fuelrail", 32768].ranks] == [None, None]


def test_the_dearest_rank_is_that_of_its_definition():
    packs = [[3], *[[1, 1]] * 62, [1], *[[2]] * 64]
    in_turn = dearest(packs, 2, is_dealt=False)
    tokens = sum(map(sum, packs)) / 64
    attention = (9 + 2 * 62 + 1 + 4 * 64) / 64
    assert in_turn.tokens == pytest.approx(5 / tokens)  # of the first rank
    assert in_turn.attention == pytest.approx(11 / attention)
    dealt = dearest(packs, 2, is_dealt=True)  # the dearest with the cheapest: three and one
    assert dealt.tokens == pytest.approx(1)
    assert dearest(packs, 4, is_dealt=True).tokens is None


def test_many_lengths_and_a_loader_are_measured(tmp_path):
    large = measure_large(10_000, 1024)
    assert large.packs > 10_000 * 200 / 1024
    assert large.peak_bytes >= 0
    plain, packs = measure_waits(tmp_path, 80)
    for one in (plain, packs):
        assert 0 < one.wait_s <= one.total_s
        assert one.longest_wait_ms <= 1e3 * one.wait_s
    assert plain.steps == 3 * 10 - 1
    assert packs.steps >= plain.steps


def test_the_documentation_texts_are_of_the_standard_library():
    texts = list(islice(documentation_texts(), 200))
    assert texts[0] == inspect.getdoc(__import__("__future__"))
    assert len(texts) == 200
    assert all(texts)
