"""The planner's memory and collectives are those of real steps, for every pair of model and strategy."""

from __future__ import annotations

import pytest

from support.planner_truth import compare, measure, pairs

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_memory_is_within_its_limit_and_the_bytes_sent_are_equal(world, tmp_path):
    """1 % of the allocator's peak in one process, 4 % where the model is divided; every collective to the byte."""
    asked = [pair for pair in pairs() if pair.world == world]
    compared = [compare(real) for real in measure(world, asked, tmp_path)]
    assert len(compared) == world * len(asked) > 0
    assert [(one.pair, one.rank, one.error) for one in compared if not one.within] == []
    assert [
        (one.pair, one.rank, one.differences) for one in compared if not one.same_collectives
    ] == []
