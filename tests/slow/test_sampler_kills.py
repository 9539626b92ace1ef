"""A torch DataLoader with workers over our order, killed 200 times, gives the uninterrupted run's batches."""

from __future__ import annotations

import pytest

from support.sampler_kills import run_kills

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(1800)]


def test_two_hundred_kills_of_a_loader_with_workers(tmp_path):
    assert run_kills(tmp_path, 200, seed=1) > 200
