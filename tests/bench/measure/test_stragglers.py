from __future__ import annotations

from fuelrail.bench.measure.occupancy import occupancy_of, window_of
from support.bench_runs import steps


def paces(*ranks):
    return occupancy_of(ranks, window_of(ranks, 4)).ranks


def test_the_rank_that_comes_last_is_named_with_the_phase_that_costs_it():
    fast = steps(30, wait_ms=1, reduce_ms=9)
    slow = steps(30, wait_ms=10)
    first, second, third = paces(fast, slow, fast)
    assert not first.is_slow
    assert not third.is_slow
    assert second.is_slow
    assert (second.rank, second.most_in, second.last_in) == (
        1,
        "data_wait",
        1.0,
    )
    assert second.slower == (31 + 10) / (31 + 1) - 1
    assert first.own_ms == 32.0


def test_ranks_that_take_turns_are_not_slow():
    # Each is 10 ms behind in every second step.
    prompt_steps = steps(30, wait_ms=0)
    late_steps = steps(30, wait_ms=10)
    mixed = [
        a if number % 2 else b
        for number, (a, b) in enumerate(zip(prompt_steps, late_steps, strict=True))
    ]
    inverse = [
        b if number % 2 else a
        for number, (a, b) in enumerate(zip(prompt_steps, late_steps, strict=True))
    ]
    assert not any(pace.is_slow for pace in paces(mixed, inverse))


def test_a_single_rank_waits_for_nobody():
    (alone,) = paces(steps(30))
    assert (alone.slower, alone.is_slow) == (0, False)
