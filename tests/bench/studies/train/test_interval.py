from __future__ import annotations

import numpy as np
import pytest

from fuelrail.bench.studies.train.checkpoints import suggested_interval_s


@pytest.mark.parametrize("failures_per_day", [0.1, 1.0, 24.0, 200.0])
@pytest.mark.parametrize("stall_s", [0.05, 1.0, 20.0])
def test_the_interval_costs_little_more_than_the_best_one(stall_s, failures_per_day):
    """The expected time of work with failures is Daly's equation 20, which has no closed minimum."""
    mean_s = 86_400 / failures_per_day

    def lost(interval_s):
        return mean_s * np.expm1((interval_s + stall_s) / mean_s) / interval_s

    best = lost(np.geomspace(1e-2, 10 * mean_s, 200_000)).min()
    assert lost(suggested_interval_s(stall_s, 0.0, failures_per_day)) < 1.001 * best


def test_saves_do_not_overlap_and_hopeless_machines_save_once_a_failure():
    assert suggested_interval_s(0.001, 300.0, 24.0) == 300.0
    assert suggested_interval_s(1000.0, 1000.0, 864.0) == pytest.approx(1000.0)
    assert suggested_interval_s(300.0, 0.0, 864.0) == pytest.approx(100.0)
