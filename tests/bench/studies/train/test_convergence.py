"""Loss curves of chosen shape: noise is not taken for a difference, a difference is found where it begins."""

from __future__ import annotations

import numpy as np
import pytest

from fuelrail.bench.studies.train.convergence import compare_losses, time_to
from fuelrail.bench.studies.train.series import Series


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


def test_noise_is_not_a_difference():
    verdicts = [compared(curve(seed), curve(1000 + seed)).verdict for seed in range(200)]
    assert verdicts.count("parted") <= 4


@pytest.mark.parametrize("at", [40, 100, 160])
def test_curves_part_where_the_difference_begins(at):
    for seed in range(20):
        ours = curve(seed) + np.where(np.arange(200) >= at, 0.15, 0)
        result = compared(ours, curve(1000 + seed))
        assert result.verdict == "parted"
        assert at - 20 <= result.part_at_step <= at + 20
        assert result.part_at == pytest.approx(result.part_at_step * 8, abs=8)
        assert result.difference == pytest.approx(0.15, abs=0.1)


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
