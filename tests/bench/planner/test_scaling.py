"""The simulation against what can be computed without one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fuelrail.bench.planner.scaling import (
    Cluster,
    Overhead,
    exposed_all_reduce_ms,
    simulate,
)
from support.scale_runs import fit

QUIET = {
    "overheads": [Overhead(ranks_on_host=1, ms=[0.0])],
    "trainer_cpus": 0.0,
}


@pytest.mark.parametrize(
    ("changes", "cluster", "step_ms"),
    [
        (
            {"service_ms": [20.0]},
            Cluster(1, 2, 1),
            101.0,
        ),  # the accelerator is the bottleneck
        (
            {"service_ms": [150.0]},
            Cluster(1, 2, 1),
            150.0,
        ),  # the loader is, and batches cost in proportion
        ({"service_ms": [150.0]}, Cluster(1, 8, 1), 600.0),
        # Ranks of one host share its loaders.
        ({"service_ms": [40.0]}, Cluster(4, 2, 1), 101 + 1.5 * 1.5),
        ({"service_ms": [40.0]}, Cluster(4, 2, 4), 160.0),
        # Storage feeds all ranks: 16 ranks x 2 samples x 1 MB = 32 MB a step, at 100 MB/s.
        (
            {"service_ms": [10.0]},
            Cluster(16, 2, 1, storage_bytes_per_s=1e8),
            320.0,
        ),
        # One straggler holds all ranks up; of 4 ranks, 0.2 are slow: none.
        *(
            (
                {"service_ms": [10.0], "all_reduce_ms": 0.0},
                Cluster(ranks, 2, 1, slow_share=0.05, slow_by=0.5),
                101.0 if ranks == 4 else 151.5,
            )
            for ranks in (4, 16, 1024)
        ),
    ],
)
def test_what_is_slowest_sets_the_pace(changes, cluster, step_ms):
    result = simulate(fit(**changes, **QUIET), cluster)
    assert result.step_ms == pytest.approx(step_ms)
    assert result.samples_per_s == pytest.approx(
        cluster.num_ranks * cluster.batch_size * 1e3 / step_ms
    )
    if cluster.num_ranks == 1:
        assert result.occupancy == pytest.approx(min(1.0, (50 * cluster.batch_size + 1) / step_ms))


@pytest.mark.costly
def test_queues_even_out_what_a_batch_now_and_then_takes_longer():
    """A mean below the accelerator's time, in bursts: more room behind the loader, less waiting."""
    bursts = [50.0] * 9 + [400.0]
    waits = [
        simulate(
            fit(service_ms=bursts, queue_batches=room, **QUIET),
            Cluster(1, 2, 1),
            num_steps=3000,
        ).step_ms
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
    waiting = []
    start_times = []
    ends = []
    for step in range(4000):
        # The loader begins its next batch when it is done with the last and there is room for one more.
        begun = max(clock, start_times[step - 2] if step >= 2 else 0.0)
        clock = begun + draw.choice(services)
        waiting.append(clock)
        start = max(free, waiting[step])
        start_times.append(start)
        free = start + 101.0
        ends.append(free)
    assert simulated.step_ms == pytest.approx((ends[-1] - ends[100]) / 3899, rel=0.02)


def test_what_is_drawn_depends_on_the_seed_alone():
    results = [
        simulate(fit(service_ms=[60.0, 140.0]), Cluster(4, 2, 1), seed) for seed in (1, 1, 2)
    ]
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
