"""Messages of several topics are matched in time, and cut into clips."""

from __future__ import annotations

import numpy as np

from fuelrail.sharding.sources.adapter.frame import thinned
from fuelrail.sharding.sources.logs import sync


def test_delays_are_estimated_and_each_message_used_once():
    reference = np.arange(20) * 100_000_000
    rng = np.random.default_rng(1)
    for delay in (-30, 0, 12, 49):
        stamps = reference + delay * 1_000_000 + rng.integers(-1_500_000, 1_500_000, 20)
        offset_ns = sync.estimated_offset_ns(reference, stamps)
        assert abs(offset_ns - delay * 1_000_000) < 1_000_000
        assert sync.matched(reference, stamps, offset_ns, 5_000_000).tolist() == list(range(20))
    assert sync.matched(np.array([0, 100]), np.array([40]), 0, 100).tolist() == [0, -1], (
        "the nearer frame has it"
    )
    slow = reference[::2] + 3_000_000
    rows = sync.matched(reference, slow, 0, 200_000_000)
    assert sorted(rows[rows >= 0].tolist()) == list(range(10))


def test_clips_end_at_gaps_and_after_their_length():
    times = np.concatenate([np.arange(30), np.arange(50, 60)]) * 100_000_000
    assert [len(clip) for clip in sync.cuts(times, 0.5e9, 2e9)] == [20, 10, 10]
    assert thinned(times[:30], 2.0).tolist() == times[[0, 5, 10, 15, 20, 25]].tolist()
