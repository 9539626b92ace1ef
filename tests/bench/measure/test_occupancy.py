from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.measure.occupancy import (
    MIN_MEASURED_STEPS,
    measured_steps,
    occupancy_of,
    rolling_occupancy,
    window_of,
)
from support.bench_runs import MS, step, steps


@given(
    wait_ms=st.floats(0, 200),
    reduce_ms=st.floats(0, 50),
    warmup=st.integers(0, 5),
)
def test_occupancy_is_busy_over_wall_of_the_measured_steps(wait_ms, reduce_ms, warmup):
    # Warm-up steps wait for ever; they must not count.
    first = steps(warmup, wait_ms=10_000)
    start = first[-1].end_ns if first else 5_000
    records = first + steps(10, start, wait_ms=wait_ms, reduce_ms=reduce_ms)
    result = occupancy_of([records], window_of([records], warmup))
    assert result.mean == pytest.approx(31 / (31 + wait_ms + reduce_ms), rel=1e-6)
    assert result.ranks[0].including_all_reduce == pytest.approx(
        (31 + reduce_ms) / (31 + wait_ms + reduce_ms), rel=1e-6
    )


def test_occupancy_is_the_mean_over_ranks_and_names_the_lowest():
    ranks = [steps(10), steps(10, wait_ms=31)]
    result = occupancy_of(ranks, window_of(ranks, 0))
    assert result.mean == pytest.approx(0.75)
    assert result.lowest == pytest.approx(0.5)
    assert [row.rank for row in result.ranks] == [0, 1]


def test_the_window_ends_where_the_shortest_rank_ends():
    ranks = [steps(20), steps(15)]
    window = window_of(ranks, 4)
    assert window.num_measured_steps == 11
    assert [record.step for record in measured_steps(ranks[0], window)] == list(range(4, 15))


@pytest.mark.parametrize(
    ("count", "warmup"),
    [(0, 0), (4, 4), (4 + MIN_MEASURED_STEPS - 1, 4), (3, 10)],
)
def test_too_few_steps_give_no_window_and_say_so(count, warmup):
    window = window_of([steps(count)], warmup)
    assert f"{count} steps - {warmup} warm-up" in window.too_short


def test_no_ranks_give_no_window():
    assert window_of([], 0).too_short


def test_rolling_occupancy_looks_back_a_few_steps():
    busy = steps(3)
    idle = step(3, busy[-1].end_ns, wait_ms=31)
    after = step(4, idle.end_ns)
    assert rolling_occupancy([*busy, idle, after], 2) == pytest.approx([1, 1, 1, 62 / 93, 62 / 93])
    assert rolling_occupancy([], 2) == []
    assert all(record.end_ns - record.start_ns == 31 * MS for record in busy)
