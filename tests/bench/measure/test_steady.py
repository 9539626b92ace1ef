from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.measure.rates import interval_of, warm_up_length


@given(
    transient=st.integers(1, 15),
    slowness=st.floats(3, 100),
    seed=st.integers(0, 1000),
)
def test_a_slow_start_is_cut_off(transient, slowness, seed):
    noise = np.random.default_rng(seed).normal(1, 0.02, 40)
    noise[:transient] *= slowness
    assert transient <= warm_up_length(noise.tolist()) <= 20


@given(st.lists(st.floats(0, 100), max_size=40))
def test_at_most_half_is_cut_off(values):
    assert 0 <= warm_up_length(values) <= len(values) / 2


def test_what_is_constant_is_steady_from_the_start():
    assert warm_up_length([0.25] * 30) == 0
    assert warm_up_length([]) == warm_up_length([1.0]) == 0


def test_the_rule_is_the_definition():
    values = np.random.default_rng(3).exponential(1, 30)
    errors = [values[cut:].var() / (30 - cut) for cut in range(16)]
    assert warm_up_length(values.tolist()) == int(np.argmin(errors))


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=9))
def test_an_interval_holds_its_median(values):
    interval = interval_of(values)
    assert interval.low <= interval.median <= interval.high
    assert interval.num_repeats == len(values)


def test_an_interval_covers_the_median_as_often_as_it_says():
    rng = np.random.default_rng(0)
    draws = rng.lognormal(0, 1, (4000, 5))  # its median is 1
    covered = [
        low <= 1 <= high
        for low, high in ((i.low, i.high) for i in map(interval_of, draws.tolist()))
    ]
    assert interval_of([1.0] * 5).confidence == pytest.approx(1 - 2**-4)
    assert np.mean(covered) == pytest.approx(1 - 2**-4, abs=0.015)
