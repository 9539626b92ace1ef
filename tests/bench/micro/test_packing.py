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
    assert sorted(length for lengths in packs for length in lengths) == sorted(LENGTHS.tolist())
    assert max(map(sum, packs)) <= 2048


def test_the_figures_are_of_the_same_lengths():
    figures = measure({"few": LENGTHS}).figures
    figures_by_case = {(figure.packer, figure.budget): figure for figure in figures}
    for (packer, budget), figure in figures_by_case.items():
        assert figure.fill == pytest.approx(
            (LENGTHS.sum() - figure.tokens_lost) / (budget * figure.packs)
        ), packer
        assert (
            figure.fill <= figure.best_fill == LENGTHS.sum() / budget / -(-LENGTHS.sum() // budget)
        )
    assert [rank.tokens for rank in figures_by_case["fuelrail", 32768].ranks] == [None, None]


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
    for waits in (plain, packs):
        assert 0 < waits.wait_s <= waits.total_s
        assert waits.longest_wait_ms <= 1e3 * waits.wait_s
    assert plain.steps == 3 * 10 - 1
    assert packs.steps >= plain.steps


def test_the_documentation_texts_are_of_the_standard_library():
    texts = list(islice(documentation_texts(), 200))
    assert texts[0] == inspect.getdoc(__import__("__future__"))
    assert len(texts) == 200
    assert all(texts)
