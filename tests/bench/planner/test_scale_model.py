"""The simulation against what can be computed without one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fuelrail.bench.planner.scale_model import Cluster, Overhead, exposed_all_reduce_ms, simulate
from support.scale_runs import fit

QUIET = {"overheads": [Overhead(ranks_on_host=1, ms=[0.0])], "trainer_cpus": 0.0}


def test_an_accelerator_that_is_the_bottleneck_is_always_occupied():
    result = simulate(fit(service_ms=[20.0], **QUIET), Cluster(1, 2, 1))
    assert result.step_ms == pytest.approx(101.0)
    assert result.occupancy == pytest.approx(1.0)
    assert result.samples_per_s == pytest.approx(2000 / 101)


def test_a_loader_that_is_the_bottleneck_sets_the_pace():
    result = simulate(fit(service_ms=[150.0], **QUIET), Cluster(1, 2, 1))
    assert result.step_ms == pytest.approx(150.0)
    assert result.occupancy == pytest.approx(101 / 150)


def test_batches_cost_in_proportion():
    small, large = (simulate(fit(service_ms=[150.0], **QUIET), Cluster(1, size, 1)) for size in (2, 8))
    assert large.step_ms == pytest.approx(4 * small.step_ms)


def test_ranks_of_one_host_share_its_loaders():
    alone, crowded = (simulate(fit(service_ms=[40.0], **QUIET), Cluster(4, 2, here)) for here in (1, 4))
    assert alone.step_ms == pytest.approx(101 + 1.5 * 1.5)
    assert crowded.step_ms == pytest.approx(160.0)


def test_storage_feeds_all_ranks_together():
    # 16 ranks x 2 samples x 1 MB = 32 MB a step, at 100 MB/s.
    result = simulate(fit(service_ms=[10.0], **QUIET), Cluster(16, 2, 1, storage_bytes_per_s=1e8))
    assert result.step_ms == pytest.approx(320.0)


@pytest.mark.parametrize(("ranks", "slower"), [(4, False), (16, True), (1024, True)])
def test_one_straggler_holds_all_ranks_up(ranks, slower):
    cluster = Cluster(ranks, 2, 1, slow_share=0.05, slow_by=0.5)  # of 4 ranks, 0.2: none
    model = fit(service_ms=[10.0], all_reduce_ms=0.0, **QUIET)
    assert simulate(model, cluster).step_ms == pytest.approx(151.5 if slower else 101.0)


def test_queues_even_out_what_a_batch_now_and_then_takes_longer():
    """A mean below the accelerator's time, in bursts: more room behind the loader, less waiting."""
    bursts = [50.0] * 9 + [400.0]
    waits = [
        simulate(fit(service_ms=bursts, queue_batches=room, **QUIET), Cluster(1, 2, 1), num_steps=3000).step_ms
        for room in (1, 2, 8)
    ]
    assert waits[0] > waits[1] > waits[2] > 101.0


def test_against_an_event_by_event_simulation():
    """The recurrence, for one rank, beside a plain one that keeps a queue."""
    rng = np.random.default_rng(5)
    services = rng.gamma(4, 25.0, 50).tolist()
    model = fit(service_ms=services, queue_batches=2, **QUIET)
    simulated = simulate(model, Cluster(1, 2, 1), seed=1, num_steps=4000)

    draw = np.random.default_rng(9)
    clock = free = 0.0
    waiting, taken, ends = [], [], []
    for step in range(4000):
        # The loader begins its next batch when it is done with the last and there is room for one more.
        begun = max(clock, taken[step - 2] if step >= 2 else 0.0)
        clock = begun + draw.choice(services)
        waiting.append(clock)
        start = max(free, waiting[step])
        taken.append(start)
        free = start + 101.0
        ends.append(free)
    assert simulated.step_ms == pytest.approx((ends[-1] - ends[100]) / 3899, rel=0.02)


def test_what_is_drawn_depends_on_the_seed_alone():
    results = [simulate(fit(service_ms=[60.0, 140.0]), Cluster(4, 2, 1), seed) for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]


def test_the_all_reduce_grows_with_the_bytes_of_a_ring():
    model = fit()
    assert [exposed_all_reduce_ms(model, ranks) for ranks in (1, 2, 4, 1024)] == pytest.approx(
        [0.0, 1.5, 2.25, 3.0], rel=1e-3
    )


def test_more_ranks_never_help_the_slowest():
    steps = [simulate(fit(), Cluster(ranks, 2, 1)).step_ms for ranks in (1, 8, 64, 512)]
    assert steps == sorted(steps)
    assert all(math.isfinite(step) for step in steps)
