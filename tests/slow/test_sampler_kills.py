"""A torch DataLoader with workers over our order, killed 200 or 300 times, gives the uninterrupted batches."""

from __future__ import annotations

import pytest

from support.sampler_kills import BALANCED, BUCKETED, PACKED, run_kills

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(1800)]


def test_two_hundred_kills_of_a_loader_with_workers(tmp_path):
    assert run_kills(tmp_path, 200, seed=1) > 200


@pytest.mark.parametrize("spec", [PACKED, BALANCED, BUCKETED])
def test_three_hundred_kills_of_a_loader_of_packs_and_buckets_on_changing_ranks(tmp_path, spec):
    assert run_kills(tmp_path, 300, seed=2, spec=spec) > 300
