"""Loss curves of chosen shape: noise is not taken for a difference, a difference is found where it begins."""

from __future__ import annotations

import numpy as np
import pytest

from fuelrail.bench.studies.train.convergence import Series, compare_losses, time_to


def series(losses, first_step=0, rank=0):
    losses = [None if np.isnan(loss) else float(loss) for loss in losses]
    return Series(
        rank=rank, first_step=first_step, end_s=[0.5 * (step + 1) for step in range(len(losses))], occupancy=[],
        loss=losses, wall_ms=[], phases_ms={},
    )  # fmt: skip


def curve(seed, num_steps=200, noise=0.05, batch=8):
    samples = (np.arange(num_steps) + 0.5) * batch
    return 0.3 + 2 * np.exp(-samples / 400) + np.random.default_rng(seed).normal(0, noise, num_steps)


def compared(ours, theirs, batch=8, their_batch=8):
    return compare_losses([series(ours)], batch, [series(theirs)], their_batch, "other")


def test_equal_runs_are_equal():
    result = compared(curve(0), curve(0) + 1e-7)
    assert (result.verdict, result.part_at) == ("within noise", None)
    assert result.largest_difference == pytest.approx(1e-7)
    assert "no step differs by more than 1e-07" in result.sentence()


def correlated(seed, correlation, num_steps=200, noise=0.05, change=1.0):
    """A curve whose noise follows that of the step before."""
    drawn = np.random.default_rng(seed).normal(0, noise, num_steps)
    for step in range(1, num_steps):
        drawn[step] = correlation * drawn[step - 1] + (1 - correlation**2) ** 0.5 * drawn[step]
    return change * curve(0, num_steps, noise=0) + drawn


@pytest.mark.parametrize(("correlation", "num_steps"), [(0, 200), (0.5, 60), (0.5, 200)])
def test_noise_is_not_a_difference(correlation, num_steps):
    """Two in a hundred equal pairs may part where steps are independent; a few more where they follow each other."""
    pairs = [[correlated(half + 2 * seed, correlation, num_steps) for half in (0, 1)] for seed in range(200)]
    alarms = [compared(*pair).verdict for pair in pairs].count("parted")
    assert alarms <= (10 if correlation == 0 else 16)


@pytest.mark.parametrize(("num_steps", "noise", "missed"), [(200, 0.05, 40), (200, 0.02, 0)])
def test_a_run_that_ends_a_tenth_worse_is_seen_or_said_to_be_too_small(num_steps, noise, missed):
    """Of 200 pairs; noise of 0.05 is a sixth of the loss."""
    results = [
        compared(correlated(2 * seed, 0, num_steps, noise, change=1.1), correlated(2 * seed + 1, 0, num_steps, noise))
        for seed in range(200)
    ]
    unseen = [result for result in results if result.verdict == "within noise"]
    assert len(unseen) <= missed
    # What was not seen was below what would have been seen, for nearly all; that is said.
    assert sum(result.smallest < 0.03 for result in unseen) <= 6
    assert all(f"a difference of {result.smallest:.2g} would have been seen" in result.sentence() for result in unseen)


@pytest.mark.costly
def test_the_smallest_difference_that_would_have_been_seen_is_mostly_seen():
    smallest = np.mean([compared(curve(seed), curve(1000 + seed)).smallest for seed in range(200)])
    seen = [compared(curve(seed) + smallest, curve(1000 + seed)).verdict for seed in range(200)].count("parted")
    assert seen >= 150


@pytest.mark.parametrize("at", [40, 100, 140])
def test_curves_part_where_the_difference_begins(at):
    for seed in range(20):
        ours = curve(seed) + np.where(np.arange(200) >= at, 0.15, 0)
        result = compared(ours, curve(1000 + seed))
        assert result.verdict == "parted"
        assert at - 20 <= result.part_at_step <= at + 20
        assert result.part_at == pytest.approx(result.part_at_step * 8, abs=8)
        assert result.difference == pytest.approx(0.15 * min(1, 3 * (200 - at) / 200), abs=0.03)


def test_a_loss_that_is_no_longer_finite_parts():
    broken = curve(0)
    broken[120:] = np.nan
    result = compared(broken, curve(1))
    assert (result.verdict, result.difference) == ("parted", None)
    assert "after" in result.sentence()


def test_other_batch_sizes_are_compared_at_equal_samples():
    half = curve(1, num_steps=100, noise=0.05 / 2**0.5, batch=16)
    result = compared(half, curve(0), batch=16)
    assert (result.verdict, result.num_samples, result.largest_difference) == ("within noise", 1600, None)
    late = compared(half + 0.2, curve(0), batch=16)
    assert (late.verdict, late.part_at_step) == ("parted", 0)


def test_a_continued_run_is_compared_from_where_it_continued_and_a_few_steps_say_nothing():
    whole = curve(0)
    result = compare_losses([series(whole[50:], first_step=50)], 8, [series(whole)], 8, "other")
    assert (result.largest_difference, result.num_samples) == (0.0, 1200)
    short = compared(whole[:5], curve(1))
    assert short.verdict == "too short"
    assert "too few steps" in short.sentence()


def test_a_target_is_reached_by_the_mean_of_five_steps_of_all_ranks():
    losses = np.array([5, 4, 3, 2, 0.1, 2, 1, 1, 1, 1, 1], dtype=float)
    ranks = [series(losses + 0.5, rank=0), series(losses - 0.5, rank=1)]
    found = time_to(1.2, ranks, 4)
    assert (found.step, found.seconds, found.samples) == (8, 4.5, 36)
    assert found.sentence() == "The loss reached 1.2 at step 8, after 4.5 s and 36 samples."
    assert time_to(0.5, ranks, 4).step is None
    continued = [series(losses, first_step=100)]
    assert (time_to(1.2, continued, 4).step, time_to(1.2, continued, 4).samples) == (108, 436)
