"""Closed formulas against the figures that their papers print."""

from __future__ import annotations

import numpy as np
import pytest

from fuelrail.bench.planner import formulas
from support.published_formulas import first_stage_layers


@pytest.mark.parametrize(
    ("stage", "ranks", "published_gb"),
    [
        (0, 64, 120),
        (1, 64, 31.4),
        (2, 64, 16.6),
        (3, 64, 1.88),
        (2, 1024, 15.1),
    ],
)
def test_zero_states_are_those_of_its_figure(stage, ranks, published_gb):
    """arXiv 1910.02054, figure 1 and table 1: 7.5B parameters."""
    assert formulas.zero_state_bytes(7.5e9, ranks, stage) / 1e9 == pytest.approx(
        published_gb, rel=0.01
    )


def test_bubbles_and_rings():
    """arXiv 2104.04473, section 2.2; nccl-tests, doc/PERFORMANCE.md."""
    assert formulas.bubble(8, 64) == 0.109375
    assert formulas.sent_bytes("all_reduce", 8, 1e9) == 1.75e9
    assert (
        formulas.sent_bytes("all_gather", 16, 1e9)
        == formulas.sent_bytes("reduce_scatter", 16, 1e9)
        == 937.5e6
    )


def test_an_interleaved_first_stage_holds_the_papers_number_of_layers():
    """arXiv 2205.05198, section 4.2.3: L (1 + (p - 1) / (p v)) layers' worth, here of 96 in 8 stages of 3 parts."""
    chunks = formulas.chunks_in_flight(8, 0, 64, 3)
    assert chunks * 96 / 8 / 3 == first_stage_layers(96, 8, 3)
    assert formulas.chunks_in_flight(8, 7, 64, 3) == 17
    assert formulas.chunks_in_flight(8, 0, 1, 3) == 3, "no more than there are"


@pytest.mark.parametrize("failures_per_day", [0.1, 1.0, 24.0, 200.0])
@pytest.mark.parametrize("save_s", [0.05, 1.0, 20.0])
def test_the_interval_of_checkpoints_costs_little_more_than_the_best_one(save_s, failures_per_day):
    """The expected time of work with failures is Daly's equation 20, which has no closed minimum."""
    mean_s = 86_400 / failures_per_day

    def lost(interval_s):
        return mean_s * np.expm1((interval_s + save_s) / mean_s) / interval_s

    best = lost(np.geomspace(1e-2, 10 * mean_s, 200_000)).min()
    assert lost(formulas.checkpoint_interval_s(save_s, failures_per_day)) < 1.001 * best
    assert formulas.checkpoint_interval_s(1000.0, 864.0) == pytest.approx(1000.0), (
        "saves do not overlap"
    )


def test_what_failures_leave_of_the_time_is_that_of_a_simulated_job():
    """Failures at random times, M apart on average: a checkpoint or a step counts once it is whole."""
    save_s = 20.0
    step_s = 3.0
    failures_per_day = 86.4
    interval_s = formulas.checkpoint_interval_s(save_s, failures_per_day)
    random = np.random.default_rng(1)
    times_s = random.exponential(1000.0, 400_000)
    whole = np.floor(np.maximum(times_s - save_s, 0) / (interval_s + save_s))
    simulated = whole.sum() * interval_s / times_s.sum()
    kept = formulas.kept_by_restarts(interval_s, save_s, failures_per_day)
    assert kept == pytest.approx(simulated, rel=0.01)
    reshaped = formulas.kept_by_reshape(step_s, save_s, failures_per_day)
    assert reshaped == pytest.approx(1 - (step_s + save_s) / 1023)
    assert reshaped > kept
