"""Ranks that train on episodes are killed 200 times, and continue as another number of ranks with another batch."""

from __future__ import annotations

import pytest

from support.lerobot_kills import ORDERS, run_kills

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("order", ORDERS)
def test_two_hundred_kills_of_ranks_that_change(order, tmp_path):
    assert run_kills(tmp_path, 200, seed=2, order=order) > 400
