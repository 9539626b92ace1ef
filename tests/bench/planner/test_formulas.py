"""Closed formulas against the figures that their papers print."""

from __future__ import annotations

import pytest

from fuelrail.bench.planner import formulas


@pytest.mark.parametrize(
    ("stage", "ranks", "published_gb"), [(0, 64, 120), (1, 64, 31.4), (2, 64, 16.6), (3, 64, 1.88), (2, 1024, 15.1)]
)
def test_zero_states_are_those_of_its_figure(stage, ranks, published_gb):
    """arXiv 1910.02054, figure 1 and table 1: 7.5B parameters."""
    assert formulas.zero_state_bytes(7.5e9, ranks, stage) / 1e9 == pytest.approx(published_gb, rel=0.01)


def test_bubbles_and_rings():
    """arXiv 2104.04473, section 2.2; nccl-tests, doc/PERFORMANCE.md."""
    assert formulas.bubble(8, 64) == 0.109375
    assert formulas.sent_bytes("all_reduce", 8, 1e9) == 1.75e9
    assert formulas.sent_bytes("all_gather", 16, 1e9) == formulas.sent_bytes("reduce_scatter", 16, 1e9) == 937.5e6
