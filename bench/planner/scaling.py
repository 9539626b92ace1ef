"""Scaling: curves over numbers of ranks, of a simulation of measured ranks (`bench scale`) or of
plans (`plan`).

A plan's curve is the same strategy planned again for each number of devices: the number of
data-parallel ranks changes, stages and divided layers stay.

In the simulation a rank's loader makes batches one after another into a queue of bounded length.
The rank takes one, computes, and waits until every rank has; then the gradients' exposed all-reduce
and the rank's own overhead follow. With service times given, every event's time follows from
earlier ones by ``max`` and ``+``, so the simulation is exact for any number of ranks and costs one
pass over the steps, vectorised over ranks (a max-plus recurrence, as in F. Baccelli et al.,
*Synchronization and Linearity*, 1992)::

    made[s]    = max(made[s-1], taken[s-Q]) + service[s]        Q batches fit into the queue
    taken[s]   = max(free[s], made[s])                          free: the step before is over
    computed   = taken[s] + compute[s]
    free[s+1]  = max over ranks of computed + all_reduce + overhead[s+1]

Service times and overheads are drawn from those that were measured, independently of each other
(seeded). Loaders on one host share its CPUs; all ranks share the storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np

from fuelrail.bench.planner.formulas import sent_bytes
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.planner.choice import Fit
    from fuelrail.bench.planner.hardware import ClusterSettings
    from fuelrail.bench.planner.scenario import Scenario

NUM_WARM_UP = 60
NUM_STEPS = 300
MAX_DEVICES = 1024

Scaling = Literal["weak", "strong"]
C = TypeVar("C")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A number of ranks. ``occupancy`` is the mean over ranks.

    ``efficiency``: samples/s of a rank over those of the first point of the curve that nothing
    holds up.
    """

    num_ranks: int
    global_batch: int
    step_ms: float
    samples_per_s: float
    occupancy: float
    efficiency: float = 1.0


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of ranks under one condition: with equal batches a rank (weak), or one batch for all
    (strong).

    ``is_bound``: steps are not shorter than they say, so rates are at most theirs, occupancy and
    efficiency at least.
    """

    name: str
    scaling: Scaling
    points: list[Point]
    is_bound: bool = False

    @property
    def line(self) -> list[tuple[int, float]]:
        """Ranks and efficiency of each point."""
        return [(point.num_ranks, point.efficiency) for point in self.points]


def draw_curves(
    scaling: Scaling,
    cases: Mapping[str, C],
    counts: Sequence[int],
    point: Callable[[C, int], Point | None],
) -> list[Curve]:
    """Return a curve of each case; nothing holds ranks up in the first one.

    ``point`` computes a number of ranks, or returns None for a number that cannot be.
    """
    curves = []
    rate = 0.0
    for name, case in cases.items():
        points = [
            point_found for count in counts if (point_found := point(case, count)) is not None
        ]
        rate = rate or next(
            (point_found.samples_per_s / point_found.num_ranks for point_found in points),
            0.0,
        )
        points = [
            msgspec.structs.replace(
                point_found,
                efficiency=point_found.samples_per_s / point_found.num_ranks / rate,
            )
            for point_found in points
        ]
        curves.append(Curve(name=name, scaling=scaling, points=points))
    return curves


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Times of steps outside the rank's phases, with this number of ranks on the host."""

    ranks_on_host: int
    ms: list[float]


class HostFit(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements on one host from which a simulation draws.

    ``service_ms``: times between batches of a loader alone on the host, for ``service_batch``
    samples. ``forward_backward_ms`` a sample and ``optimiser_ms`` a step on the device.
    ``overheads``: what of the steps was none of that (book-keeping, copies, late wake-ups).
    ``all_reduce_ms``: mean exposed all-reduce of two ranks; none in one. ``trainer_cpus``: CPUs
    that a rank keeps busy besides loading, of ``host_cpus``. ``queue_batches``: finished batches
    that may wait.
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

    ``slow_share`` of the ranks compute ``slow_by`` (0.2 for 20 %) longer; ``storage_bytes_per_s``
    is what all of them together can read, infinite by default.
    """

    num_ranks: int
    batch_size: int
    ranks_per_host: int
    slow_share: float = 0.0
    slow_by: float = 0.0
    storage_bytes_per_s: float = math.inf


def simulate(host: HostFit, cluster: Cluster, seed: int = 0, num_steps: int = NUM_STEPS) -> Point:
    """Run a cluster for ``num_steps`` steps after warm-up; all figures are means."""
    rng = np.random.default_rng(seed)
    ranks = cluster.num_ranks
    total = NUM_WARM_UP + num_steps
    service_ms = _service_ms(host, cluster)
    overhead_ms = np.asarray(_overhead(host, min(ranks, cluster.ranks_per_host)))
    device_ms = cluster.batch_size * host.forward_backward_ms + host.optimiser_ms
    compute_ms = np.full(ranks, device_ms)
    if cluster.slow_share:
        num_slow = int(cluster.slow_share * ranks + 0.5)
        compute_ms[rng.choice(ranks, num_slow, replace=False)] *= 1 + cluster.slow_by
    all_reduce_ms = exposed_all_reduce_ms(host, ranks)
    batch_ready = np.zeros(ranks)
    free = np.zeros(ranks)
    batch_taken = np.zeros((host.queue_batches, ranks))  # of the last steps, in turns
    ends = np.empty(total)
    for step in range(total):
        batch_ready = np.maximum(batch_ready, batch_taken[step % host.queue_batches]) + rng.choice(
            service_ms, ranks
        )
        start = np.maximum(free, batch_ready)
        batch_taken[step % host.queue_batches] = start
        everyone_ms = float((start + compute_ms).max()) + all_reduce_ms
        free = everyone_ms + rng.choice(overhead_ms, ranks)
        ends[step] = everyone_ms
    mean_ms = float(np.diff(ends)[NUM_WARM_UP - 1 :].mean())
    global_batch = ranks * cluster.batch_size
    return Point(
        num_ranks=ranks,
        global_batch=global_batch,
        step_ms=mean_ms,
        samples_per_s=1e3 * global_batch / mean_ms,
        occupancy=device_ms / mean_ms,
    )


def exposed_all_reduce_ms(host: HostFit, num_ranks: int) -> float:
    """Extrapolate the exposed all-reduce from two ranks by the bytes that a rank of a ring sends.

    That is 2 (p - 1) / p of the gradients: of many ranks twice what two take.
    """
    return (
        host.all_reduce_ms * sent_bytes("all_reduce", num_ranks, 1) / sent_bytes("all_reduce", 2, 1)
    )


def _service_ms(host: HostFit, cluster: Cluster) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the times of a batch: as measured, longer by the other users of CPUs and storage."""
    ranks_here = min(cluster.num_ranks, cluster.ranks_per_host)
    # Trainers and loaders get fair shares where they want more than there is.
    free_cpus = max(host.host_cpus - ranks_here * host.trainer_cpus, 0.5 * host.host_cpus)
    shared = ranks_here * host.host_cpus / free_cpus
    measured = np.asarray(host.service_ms, dtype=np.float64)
    from_cpus = measured * (cluster.batch_size / host.service_batch) * shared
    from_storage = (
        1e3
        * cluster.batch_size
        * host.sample_bytes
        * cluster.num_ranks
        / cluster.storage_bytes_per_s
    )
    return np.maximum(from_cpus, from_storage)


def _overhead(host: HostFit, ranks_per_host: int) -> list[float]:
    """Return the overhead of as many ranks on a host as were measured: the most that are not
    more, else the fewest.
    """
    fewer = [entry for entry in host.overheads if entry.ranks_on_host <= ranks_per_host]
    if fewer:
        return max(fewer, key=lambda entry: entry.ranks_on_host).ms
    return min(host.overheads, key=lambda entry: entry.ranks_on_host).ms


def scaling_curves(scenario: Scenario, cluster: ClusterSettings, chosen: Fit) -> list[Curve]:
    """Return a plan's scaling from its smallest group to 1,024 devices.

    A cluster without a link between nodes scales to one node.
    """
    from fuelrail.bench.planner.choice import (
        is_bound,
    )  # needs torch, and the simulation does not

    max_devices = MAX_DEVICES if cluster.between is not None else cluster.devices_per_node

    def point(scaling: Scaling, ranks: int) -> Point | None:
        devices = ranks * chosen.degrees.pp * chosen.degrees.tp
        if devices > max_devices or devices % min(
            devices, cluster.devices_per_node
        ):  # which no number of whole nodes has
            return None
        grown = msgspec.structs.replace(
            cluster,
            nodes=-(-devices // cluster.devices_per_node),
            devices_per_node=min(devices, cluster.devices_per_node),
        )
        try:
            return _planned(
                scenario,
                cluster=grown,
                chosen=chosen,
                ranks=ranks,
                scaling=scaling,
            )
        except ConfigError:  # it does not fit into memory, or does not divide the batch
            return None

    # A sharded model is sharded over two ranks at least.
    first_power = 1 if chosen.degrees.dp_shard > 1 else 0
    counts = [2**power for power in range(first_power, MAX_DEVICES.bit_length())]
    scalings: tuple[Scaling, ...] = get_args(Scaling)
    is_lower = is_bound(scenario, cluster, chosen.settings)
    return [
        msgspec.structs.replace(curve, is_bound=is_lower)
        for scaling_name in scalings
        for curve in draw_curves(scaling_name, {"as planned": scaling_name}, counts, point)
    ]


def _planned(
    scenario: Scenario,
    cluster: ClusterSettings,
    chosen: Fit,
    ranks: int,
    scaling: Scaling,
) -> Point:
    """Plan ``ranks`` data-parallel ranks. Raises ConfigError where that cannot be."""
    from fuelrail.bench.planner.choice import (
        fit,
    )  # needs torch, and the simulation does not

    batch = (
        scenario.global_batch
        if scaling == "strong"
        else scenario.global_batch // chosen.degrees.data * ranks
    )
    if scenario.max_global_batch is not None and batch > scenario.max_global_batch:
        raise ConfigError(f"a global batch of {batch} no longer trains as well")
    sized = msgspec.structs.replace(scenario, global_batch=batch)
    how = msgspec.structs.replace(chosen.settings, micro_batches=None)
    degrees = chosen.degrees
    if degrees.composed:
        shards = min(degrees.dp_shard, ranks) if degrees.dp_replicate > 1 else ranks
        how = msgspec.structs.replace(
            how,
            mesh=str(degrees._replace(dp_replicate=ranks // shards, dp_shard=shards)),
        )
    time = fit(sized, cluster, how).time.total
    step_s = max(time, *data_seconds(sized, cluster).values())
    return Point(
        num_ranks=cluster.num_devices,
        global_batch=batch,
        step_ms=1e3 * step_s,
        samples_per_s=batch / step_s,
        occupancy=time / step_s,
    )


def data_seconds(scenario: Scenario, cluster: ClusterSettings) -> dict[str, float]:
    """Return seconds that decoding and storage need for a step."""
    images = (
        scenario.global_batch * (scenario.cameras or 0) / cluster.nodes
        if scenario.reads_images
        else 0
    )
    read = scenario.global_batch * (scenario.stored_bytes or 0)
    return {
        "decoding": images / cluster.images_per_node_s,
        "storage": read / cluster.storage_gb_per_s.value / 1e9,
    }
