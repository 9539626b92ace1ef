"""Every way of dividing every tiny model over 2, 4 and 8 ranks trains as one process does."""

from __future__ import annotations

import pytest

from support.parallel_equality import cases_of, measure

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_train_as_one_process(world, tmp_path):
    cases = list(cases_of(world))
    comparisons = measure(world, cases, tmp_path)
    assert [comparison.case for comparison in comparisons] == cases
    assert [
        (comparison.case, comparison.difference, comparison.same_samples)
        for comparison in comparisons
        if not comparison.holds
    ] == []
    assert all(comparison.first_loss != comparison.last_loss for comparison in comparisons)
