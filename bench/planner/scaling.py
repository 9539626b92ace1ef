"""A plan's scaling: the same strategy planned again for each number of devices.

The number of data-parallel ranks changes; stages and divided layers stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.planner.choice import Fit
    from fuelrail.bench.planner.hardware import ClusterSettings
    from fuelrail.bench.planner.scenario import Scenario

MAX_DEVICES = 1024

Scaling = Literal["weak", "strong"]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A number of ranks. ``occupancy`` is the mean over ranks.

    ``efficiency``: samples/s of a rank over those of the curve's first point.
    """

    num_ranks: int
    global_batch: int
    step_ms: float
    samples_per_s: float
    occupancy: float
    efficiency: float = 1.0


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of ranks with equal batches a rank (weak scaling), or one batch for all (strong).

    ``is_bound``: steps are not shorter than they say, so rates are at most theirs, occupancy and
    efficiency at least.
    """

    scaling: Scaling
    points: list[Point]
    is_bound: bool = False


def scaling_curves(
    scenario: Scenario,
    cluster: ClusterSettings,
    chosen: Fit,
) -> list[Curve]:
    """Return a plan's scaling from its smallest group to 1,024 devices.

    A cluster without a link between nodes scales to one node.
    """
    from fuelrail.bench.planner.choice import is_bound  # needs torch

    # A sharded model is sharded over two ranks at least.
    first_power = 1 if chosen.degrees.dp_shard > 1 else 0
    counts = [2**power for power in range(first_power, MAX_DEVICES.bit_length())]
    is_lower = is_bound(scenario, cluster, chosen.settings)
    curves = []
    for scaling in get_args(Scaling):
        points: list[Point] = []
        for ranks in counts:
            point = plan_ranks(scenario, cluster, chosen=chosen, ranks=ranks, scaling=scaling)
            if point is None:
                continue
            first = points[0] if points else point
            first_rate = first.samples_per_s / first.num_ranks
            efficiency = point.samples_per_s / point.num_ranks / first_rate
            points.append(msgspec.structs.replace(point, efficiency=efficiency))
        curve = Curve(scaling=scaling, points=points, is_bound=is_lower)
        curves.append(curve)
    return curves


def plan_ranks(
    scenario: Scenario,
    cluster: ClusterSettings,
    chosen: Fit,
    ranks: int,
    scaling: Scaling,
) -> Point | None:
    """Return the point of ``ranks`` data-parallel ranks; None: it cannot be.

    It cannot where they fill no whole number of nodes, do not fit into memory, do not divide the
    batch, or need a batch that no longer trains as well.
    """
    from fuelrail.bench.planner.choice import fit  # needs torch

    degrees = chosen.degrees
    devices = ranks * degrees.pp * degrees.tp
    max_devices = MAX_DEVICES if cluster.between is not None else cluster.devices_per_node
    on_node = min(devices, cluster.devices_per_node)
    if devices > max_devices or devices % on_node:
        return None
    batch = scenario.global_batch
    if scaling == "weak":
        batch = batch // degrees.data * ranks
    if scenario.max_global_batch is not None and batch > scenario.max_global_batch:
        return None
    grown = msgspec.structs.replace(
        cluster,
        nodes=-(-devices // cluster.devices_per_node),
        devices_per_node=on_node,
    )
    try:
        sized = msgspec.structs.replace(scenario, global_batch=batch)
        settings = msgspec.structs.replace(chosen.settings, micro_batches=None)
        if degrees.composed:
            shards = ranks
            if degrees.dp_replicate > 1:
                shards = min(degrees.dp_shard, ranks)
            mesh = degrees._replace(dp_replicate=ranks // shards, dp_shard=shards)
            settings = msgspec.structs.replace(settings, mesh=str(mesh))
        step_s = fit(sized, grown, settings).time.total
    except ConfigError:  # it does not fit into memory, or does not divide the batch
        return None
    longest_s = max(step_s, *data_seconds(sized, grown).values())
    return Point(
        num_ranks=grown.num_devices,
        global_batch=batch,
        step_ms=1e3 * longest_s,
        samples_per_s=batch / longest_s,
        occupancy=step_s / longest_s,
    )


def data_seconds(scenario: Scenario, cluster: ClusterSettings) -> dict[str, float]:
    """Return seconds that decoding and storage need for a step."""
    images = 0.0
    if scenario.reads_images:
        images = scenario.global_batch * (scenario.cameras or 0) / cluster.nodes
    bytes_read = scenario.global_batch * (scenario.stored_bytes or 0)
    return {
        "decoding": images / cluster.images_per_node_s,
        "storage": bytes_read / cluster.storage_gb_per_s.value / 1e9,
    }
