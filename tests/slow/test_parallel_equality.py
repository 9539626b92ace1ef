"""Every way of dividing every tiny model over 2, 4 and 8 ranks trains as one process does."""

from __future__ import annotations

import pytest

from support.parallel_equality import cases_of, measure

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_train_as_one_process(world, tmp_path):
    cases = list(cases_of(world))
    compared = measure(world, cases, tmp_path)
    assert [one.case for one in compared] == cases
    assert [(one.case, one.difference, one.same_samples) for one in compared if not one.holds] == []
    assert all(one.first_loss != one.last_loss for one in compared)
