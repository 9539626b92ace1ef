"""The range planner: every span in one range, and no range longer or fuller of gaps than allowed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.loaders.storage.ranges import (
    PlannedRange,
    WantedSpan,
    plan_ranges,
)
from fuelrail.pipeline.errors import ConfigError

spans = st.lists(
    st.builds(WantedSpan, st.integers(0, 2), st.integers(0, 400), st.integers(0, 60)),
    max_size=30,
)  # overlapping and repeated ones too


@given(spans, st.integers(0, 100), st.integers(1, 300))
def test_each_span_lies_in_exactly_one_range_which_obeys_the_limits(requests, gap, longest):
    ranges = plan_ranges(requests, max_gap_bytes=gap, max_range_bytes=longest)
    assert sorted(m for planned in ranges for m in planned.members) == list(range(len(requests)))
    for planned in ranges:
        inside = sorted(requests[m] for m in planned.members)
        assert {span.shard for span in inside} == {planned.shard}
        assert planned.start == inside[0].offset
        assert planned.end == max(span.offset + span.length for span in inside)
        assert planned.end - planned.start <= longest or len(inside) == 1
        far = inside[0].offset + inside[0].length
        for span in inside[1:]:
            assert span.offset - far <= gap
            far = max(far, span.offset + span.length)


@given(spans, st.integers(0, 100), st.integers(1, 300))
def test_ranges_come_in_the_order_of_need(requests, gap, longest):
    firsts = [
        min(planned.members)
        for planned in plan_ranges(requests, max_gap_bytes=gap, max_range_bytes=longest)
    ]
    assert firsts == sorted(firsts)


@given(spans, st.integers(0, 100), st.integers(1, 300))
def test_no_two_ranges_could_have_been_one(requests, gap, longest):
    ranges = sorted(
        plan_ranges(requests, max_gap_bytes=gap, max_range_bytes=longest),
        key=lambda p: (p.shard, p.start),
    )
    for before, after in itertools.pairwise(ranges):
        if before.shard != after.shard:
            continue
        first = min(requests[m] for m in after.members)
        joined = max(before.end, first.offset + first.length) - before.start
        assert first.offset - before.end > gap or joined > longest


def test_neighbours_are_joined_over_a_gap_and_strangers_are_not():
    requests = [
        WantedSpan(0, 900, 100),
        WantedSpan(0, 0, 100),
        WantedSpan(0, 150, 50),
        WantedSpan(1, 0, 10),
    ]
    assert plan_ranges(requests, max_gap_bytes=50, max_range_bytes=1000) == [
        PlannedRange(0, 900, 1000, (0,)),
        PlannedRange(0, 0, 200, (1, 2)),
        PlannedRange(1, 0, 10, (3,)),
    ]
    assert len(plan_ranges(requests, max_gap_bytes=50, max_range_bytes=199)) == 4, (
        "the two together are 200"
    )
    assert plan_ranges([]) == []


@pytest.mark.parametrize("limits", [{"max_gap_bytes": -1}, {"max_range_bytes": 0}])
def test_limits_out_of_range_are_named(limits):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        plan_ranges([], **limits)
