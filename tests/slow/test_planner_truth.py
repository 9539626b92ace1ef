"""The planner's memory and collectives are those of real steps, for every pair of model and strategy."""

from __future__ import annotations

import pytest

from support.planner_truth import compare, measure, pairs

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_memory_is_within_its_limit_and_the_bytes_sent_are_equal(world, tmp_path):
    """1 % of the allocator's peak in one process, 4 % where the model is divided; every collective to the byte."""
    chosen_pairs = [pair for pair in pairs() if pair.world == world]
    comparisons = [compare(real) for real in measure(world, chosen_pairs, tmp_path)]
    assert len(comparisons) == world * len(chosen_pairs) > 0
    assert [
        (comparison.pair, comparison.rank, comparison.error)
        for comparison in comparisons
        if not comparison.within
    ] == []
    assert [
        (comparison.pair, comparison.rank, comparison.differences)
        for comparison in comparisons
        if not comparison.same_collectives
    ] == []
