from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.measure.clock import Clock, summarise_ns


def test_a_wait_ends_at_or_after_its_deadline_and_says_how_late():
    clock = Clock()
    deadline_ns = clock.now_ns() + 300_000
    lateness_ns = clock.wait_until(deadline_ns)
    assert 0 <= lateness_ns <= clock.now_ns() - deadline_ns


def test_a_deadline_that_has_passed_is_late_by_what_has_passed():
    clock = Clock()
    assert clock.wait_until(clock.now_ns() - 5_000_000) >= 5_000_000


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50))
def test_a_summary_lies_within_its_durations(durations_ns):
    summary = summarise_ns(durations_ns)
    low = min(durations_ns) / 1e6
    high = max(durations_ns) / 1e6
    assert low <= summary.p50_ms <= summary.p99_ms <= summary.max_ms == high
    assert low <= summary.mean_ms * (1 + 1e-12) and summary.mean_ms <= high * (1 + 1e-12)
    assert summary.count == len(durations_ns)


def test_percentiles_are_numpys():
    durations_ns = np.random.default_rng(0).integers(0, 10**9, 101)
    summary = summarise_ns(durations_ns.tolist())
    assert summary.p99_ms == pytest.approx(np.percentile(durations_ns, 99) / 1e6)
