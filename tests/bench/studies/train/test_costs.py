"""The cost model against steps of known cost, and designs that it must refuse; padding and imbalance by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.bench.studies.train.costs import Loss, fit_cost, losses_of
from fuelrail.pipeline.order.cost import Cost
from support.bench_runs import step

MS = 1e6
COLUMNS = ("num_tokens", "num_boxes")


def draw(seed, num_steps=240, rows=8, **columns):
    """The columns of each sample of some steps."""
    rng = np.random.default_rng(seed)
    sizes = [rows] * num_steps
    return [{name: make(rng, size) for name, make in columns.items()} for size in sizes]


def lengths(rng, size):
    return np.clip(rng.lognormal(5, 1, size), 16, 1024).astype(int)


def boxes(rng, size):
    return rng.integers(0, 80, size)


def sums_of(steps):
    return [
        {name: (len(x), float(x.sum()), float((x**2).sum())) for name, x in values.items()}
        for values in steps
    ]


def times_of(steps, seed, noise=0.02, base=20 * MS, sample_ns=0.0, **terms):
    """The nanoseconds of steps: a part of all, one of each sample, ``terms`` (linear, quadratic), and noise."""
    exact = [
        base
        + sum(
            a * x.sum() + b * (x**2).sum()
            for (a, b), x in ((terms[name], values[name]) for name in values)
        )
        + sample_ns * len(next(iter(values.values())))
        for values in steps
    ]
    return np.array(exact) * np.random.default_rng(seed).normal(1, noise, len(exact))


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    linear=st.floats(5_000, 50_000),
    ratio=st.floats(1e-3, 1e-2),
)
def test_known_coefficients_come_out(seed, linear, ratio):
    steps = draw(seed, num_tokens=lengths)
    times = times_of(steps, seed, num_tokens=(linear, linear * ratio))
    fit = fit_cost(sums_of(steps), times)
    assert fit.refused is None and fit.num_steps > 200 and fit.residual < 0.03
    for name, true in (
        ("num_tokens", linear),
        ("num_tokens squared", linear * ratio),
    ):
        ns, error = fit.terms_ns[name]
        assert abs(ns - true) < 5 * error
        assert ns == pytest.approx(true, rel=0.3)


def test_several_columns_and_a_part_of_each_sample_come_out_and_make_a_cost():
    rng = np.random.default_rng(1)
    steps = [
        {"num_tokens": lengths(rng, size), "num_boxes": boxes(rng, size)}
        for size in rng.integers(4, 40, 400)
    ]
    times = times_of(
        steps,
        2,
        0.005,
        sample_ns=3 * MS,
        num_tokens=(9_000, 30),
        num_boxes=(200_000, 0),
    )
    fit = fit_cost(sums_of(steps), times)
    assert list(fit.terms_ns) == [
        "sample",
        "num_tokens",
        "num_tokens squared",
        "num_boxes",
    ]
    assert (
        fit.left_out == ["num_boxes squared"]
        and "Not certain, so left out: num_boxes squared;" in fit.sentence()
    )
    cost = fit.cost
    assert (
        cost.divisor == 10
        and list(cost.linear) == list(COLUMNS)
        and list(cost.quadratic) == ["num_tokens"]
    )
    for name, true in (("num_tokens", 9_000), ("num_boxes", 200_000)):
        assert cost.linear[name] / cost.divisor == pytest.approx(true, rel=0.1)
    assert cost.quadratic["num_tokens"] / cost.divisor == pytest.approx(30, rel=0.1)
    assert f"Balance(cost={cost!r})" in fit.sentence()


def test_steps_that_something_else_held_up_do_not_count():
    steps = draw(4, num_tokens=lengths)
    times = times_of(steps, 4, num_tokens=(9_000, 30))
    times[::20] *= 8
    fit = fit_cost(sums_of(steps), times)
    assert fit.num_measured == 240 and fit.num_steps <= 228
    assert fit.terms_ns["num_tokens squared"][0] == pytest.approx(30, rel=0.2)
    assert "of 240 steps take" in fit.sentence()


def test_a_time_that_does_not_follow_the_column_gives_no_model():
    steps = draw(5, num_tokens=lengths)
    fit = fit_cost(sums_of(steps), times_of(steps, 5, num_tokens=(0, 0)))
    assert fit.cost is None or fit.residual == pytest.approx(
        0.02, rel=0.2
    )  # chance tells one in twenty from 0
    fit = fit_cost(sums_of(steps), -times_of(steps, 5, num_tokens=(9_000, 30)) + 10**12)
    assert fit.cost is None
    assert fit.sentence() == "No cost model from 240 steps: times do not follow the columns."


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            draw(1, num_tokens=lambda _, size: np.full(size, 512)),
            "num_tokens is the same in all of them",
        ),
        (
            [
                {"num_tokens": x["num_tokens"], "twice": 2 * x["num_tokens"]}
                for x in draw(1, num_tokens=lengths)
            ],
            "num_tokens and num_tokens squared and twice and twice squared rise and fall together",
        ),
        (
            draw(1, num_tokens=lambda rng, size: rng.choice([128, 512], size)),
            "num_tokens and num_tokens squared rise and fall together",
        ),
        (draw(1, num_steps=7, num_tokens=lengths), "2 terms need 8 steps"),
    ],
)
def test_designs_that_tell_nothing_are_refused_by_name(steps, words):
    fit = fit_cost(sums_of(steps), np.linspace(1, 2, len(steps)) * 20 * MS)
    assert words in fit.refused and fit.cost is None and fit.terms_ns == {}
    assert fit.sentence().startswith(f"No cost model from {len(steps)} steps: ")


def rank(loads, padding=None, ms=30):
    """Steps of a rank: PROFILE's forward and backward (30 ms), and samples of these costs."""
    times = {
        "forward_ns": int(ms / 3 * MS),
        "backward_ns": int(ms * 2 / 3 * MS),
        "padding": padding,
    }
    return [
        step(number, 0, **times, sums={"x": (2, load, load**2)})
        for number, load in enumerate(loads)
    ]


def test_imbalance_is_what_the_mean_rank_waits_for_the_dearest():
    # Step 0: the mean of 20 waits a third of 30 ms; step 1: nobody waits.
    assert losses_of([rank([30, 10]), rank([10, 10], ms=15)], "x") == {
        "imbalance": Loss(0.25, pytest.approx(5.0))
    }
    squared = losses_of(
        [rank([30, 10]), rank([10, 10])],
        Cost(quadratic={"x": 1}, constant=1, divisor=7),
    )
    assert squared["imbalance"].size == pytest.approx((902 / 502 - 1) / 2)


def test_padding_is_a_share_of_forward_and_backward():
    assert losses_of([rank([1, 1], 0.25)], "x") == {"padding": Loss(0.25, pytest.approx(7.5))}
    assert losses_of([rank([1, 1])], None) == {}


def test_steps_that_cost_nothing_are_balanced():
    assert losses_of([rank([0, 0]), rank([0, 0])], "x") == {"imbalance": Loss(0.0, 0.0)}


def test_coefficients_of_very_unlike_size_still_make_a_cost():
    rng = np.random.default_rng(3)
    steps = [
        {
            "bytes": rng.integers(1, 2**36, 8).astype(float),
            "boxes": boxes(rng, 8),
        }
        for _ in range(300)
    ]
    cost = fit_cost(
        sums_of(steps),
        times_of(steps, 3, 0.001, bytes=(0, 1e-14), boxes=(10**7, 0)),
    ).cost
    assert cost.quadratic["bytes"] / cost.divisor == pytest.approx(1e-14, rel=0.01)
    assert cost.linear["boxes"] / cost.divisor == pytest.approx(10**7, rel=0.01)
    apart = [
        {
            "bytes": rng.integers(1, 2**38, 8).astype(float),
            "boxes": boxes(rng, 8),
        }
        for _ in range(300)
    ]
    cost = fit_cost(
        sums_of(apart),
        times_of(apart, 3, 0.001, bytes=(0, 1e-15), boxes=(10**8, 0)),
    ).cost
    assert cost.linear["boxes"] / cost.divisor == pytest.approx(10**8, rel=0.01)
