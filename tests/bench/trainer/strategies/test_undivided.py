"""Sizes of an own staged model that its strategy does not divide are refused in words."""

from __future__ import annotations

import json

import pytest

from support import undivided_ranks
from support.ranks import run_ranks

OF_2 = "tp=2 does not divide the "
CASES = {
    (7, 4, 32): OF_2 + "7 entries of axis 1 of what comes out of 'stem', of shape [4, 7, 24]; "
    "tp of 1, 7 would",
    (8, 3, 32): OF_2 + "3 heads of 'blocks.0.attention.query'; tp of 1, 3 would",
    (
        8,
        4,
        32,
        3,
    ): "micro_batches=3 does not divide the batch of 4 samples per rank; micro_batches of "
    "1, 2, 4 would",
    (8, 4, 15): OF_2 + "15 outputs of 'blocks.0.mlp.0'; tp of 1, 3, 5, 15 would",
}


@pytest.mark.process
def test_what_a_strategy_does_not_divide_is_refused_in_words(tmp_path):
    cases = [*CASES, (8, 4, 32)]
    run_ranks(2, undivided_ranks.__file__, tmp_path / "out.json", json.dumps(cases))
    *refused, loss = json.loads((tmp_path / "out.json").read_text())
    assert refused == list(CASES.values())
    assert float(loss) > 0
