"""Scaling of data-parallel training: a discrete-event simulation of ranks that load, compute and wait.

One rank's loader makes batches one after another into a queue of bounded length; the rank takes one, computes, and
waits until every rank has; then the gradients' exposed all-reduce and the rank's own overhead follow. With service
times given, every event's time follows from earlier ones by ``max`` and ``+``, so the simulation is exact for any
number of ranks and costs one pass over the steps, vectorised over ranks (a max-plus recurrence, as in F. Baccelli et
al., *Synchronization and Linearity*, 1992)::

    made[s]    = max(made[s-1], taken[s-Q]) + service[s]        Q batches fit into the queue
    taken[s]   = max(free[s], made[s])                          free: the step before is over
    computed   = taken[s] + compute[s]
    free[s+1]  = max over ranks of computed + all_reduce + overhead[s+1]

Service times and overheads are drawn from those that were measured, independently of each other (seeded). Loaders on
one host share its CPUs; all ranks share the storage.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np

from fuelrail.bench.planner.formulas import sent_bytes

NUM_WARM_UP = 60
NUM_STEPS = 300


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Times of steps outside the rank's phases, with this number of ranks on the host."""

    ranks_on_host: int
    ms: list[float]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements on one host from which a simulation draws.

    ``service_ms``: times between batches of a loader alone on the host, for ``service_batch`` samples.
    ``forward_backward_ms`` a sample and ``optimiser_ms`` a step on the device. ``overheads``: what of the steps was
    none of that (book-keeping, copies, late wake-ups).
    ``all_reduce_ms``: mean exposed all-reduce of two ranks; none in one. ``trainer_cpus``: CPUs that a rank keeps busy
    besides loading, of ``host_cpus``. ``queue_batches``: finished batches that may wait.
    """

    service_ms: list[float]
    service_batch: int
    forward_backward_ms: float
    optimiser_ms: float
    overheads: list[Overhead]
    all_reduce_ms: float
    trainer_cpus: float
    host_cpus: float
    queue_batches: int
    sample_bytes: float


class Cluster(NamedTuple):
    """Parameters of a simulation.

    ``slow_share`` of the ranks compute ``slow_by`` (0.2 for 20 %) longer; ``storage_bytes_per_s`` is what all of them
    together can read, infinite by default.
    """

    num_ranks: int
    batch_size: int
    ranks_per_host: int
    slow_share: float = 0.0
    slow_by: float = 0.0
    storage_bytes_per_s: float = math.inf


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """Result: mean and 99th percentile of the step time, rate of all ranks, occupancy (mean over ranks)."""

    num_ranks: int
    batch_size: int
    step_ms: float
    step_p99_ms: float
    samples_per_s: float
    occupancy: float


def simulate(fit: Fit, cluster: Cluster, seed: int = 0, num_steps: int = NUM_STEPS) -> Simulated:
    """Run a cluster for ``num_steps`` steps after warm-up."""
    rng = np.random.default_rng(seed)
    ranks, total = cluster.num_ranks, NUM_WARM_UP + num_steps
    service_ms = _service_ms(fit, cluster)
    overhead_ms = np.asarray(_overhead(fit, min(ranks, cluster.ranks_per_host)))
    device_ms = cluster.batch_size * fit.forward_backward_ms + fit.optimiser_ms
    compute_ms = np.full(ranks, device_ms)
    if cluster.slow_share:
        num_slow = int(cluster.slow_share * ranks + 0.5)
        compute_ms[rng.choice(ranks, num_slow, replace=False)] *= 1 + cluster.slow_by
    all_reduce_ms = exposed_all_reduce_ms(fit, ranks)
    made = np.zeros(ranks)
    free = np.zeros(ranks)
    taken = np.zeros((fit.queue_batches, ranks))  # of the last steps, in turns
    ends = np.empty(total)
    for step in range(total):
        made = np.maximum(made, taken[step % fit.queue_batches]) + rng.choice(service_ms, ranks)
        start = np.maximum(free, made)
        taken[step % fit.queue_batches] = start
        everyone_ms = float((start + compute_ms).max()) + all_reduce_ms
        free = everyone_ms + rng.choice(overhead_ms, ranks)
        ends[step] = everyone_ms
    steps_ms = np.diff(ends)[NUM_WARM_UP - 1 :]
    mean_ms = float(steps_ms.mean())
    return Simulated(
        num_ranks=ranks,
        batch_size=cluster.batch_size,
        step_ms=mean_ms,
        step_p99_ms=float(np.percentile(steps_ms, 99)),
        samples_per_s=1e3 * ranks * cluster.batch_size / mean_ms,
        occupancy=device_ms / mean_ms,
    )


def exposed_all_reduce_ms(fit: Fit, num_ranks: int) -> float:
    """Extrapolate the exposed all-reduce from two ranks by the bytes that a rank of a ring sends.

    That is 2 (p - 1) / p of the gradients: of many ranks twice what two take.
    """
    return fit.all_reduce_ms * sent_bytes("all_reduce", num_ranks, 1) / sent_bytes("all_reduce", 2, 1)


def _service_ms(fit: Fit, cluster: Cluster) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Times of a batch: as measured, longer by the CPUs' and the storage's other users."""
    ranks_here = min(cluster.num_ranks, cluster.ranks_per_host)
    # Trainers and loaders get fair shares where they want more than there is.
    left = max(fit.host_cpus - ranks_here * fit.trainer_cpus, 0.5 * fit.host_cpus)
    shared = ranks_here * fit.host_cpus / left
    measured = np.asarray(fit.service_ms, dtype=np.float64)
    from_cpus = measured * (cluster.batch_size / fit.service_batch) * shared
    from_storage = 1e3 * cluster.batch_size * fit.sample_bytes * cluster.num_ranks / cluster.storage_bytes_per_s
    return np.maximum(from_cpus, from_storage)


def _overhead(fit: Fit, ranks_per_host: int) -> list[float]:
    """Of as many ranks on a host as were measured: the most that are not more, else the fewest."""
    fewer = [entry for entry in fit.overheads if entry.ranks_on_host <= ranks_per_host]
    if fewer:
        return max(fewer, key=lambda entry: entry.ranks_on_host).ms
    return min(fit.overheads, key=lambda entry: entry.ranks_on_host).ms
