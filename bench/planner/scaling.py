"""Weak and strong scaling of a plan: the same strategy on other numbers of devices, planned one by one.

The number of data-parallel ranks changes; stages and divided layers stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from fuelrail.bench.planner.choice import Fit, fit
from fuelrail.bench.planner.hardware import ClusterSettings, Sourced
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.planner.scenario import Data, Scenario

MAX_DEVICES = 1024
_SLOW = (0.01, 0.2)  # share of slow devices, and by how much


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A number of devices; ``efficiency``: samples/s over those of the curve's first point, a device."""

    devices: int
    global_batch: int
    step_s: float
    samples_per_s: float
    efficiency: float
    occupancy: float


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Devices from a model's smallest group to 1,024: with equal batches a rank, or one batch for all."""

    scaling: Literal["weak", "strong"]
    name: str
    points: list[Point]


def scaling_curves(asked: Scenario, cluster: ClusterSettings, chosen: Fit, data: Data) -> list[Curve]:
    """Return weak and strong scaling, as planned and with 1 % of the devices 20 % slower.

    A cluster without a link between nodes scales to one node.
    """
    found = []
    kinds: tuple[Literal["weak", "strong"], ...] = ("weak", "strong")
    for scaling in kinds:
        for name, share in (("as planned", 0.0), (f"{_SLOW[0]:.0%} of the devices {_SLOW[1]:.0%} slower", _SLOW[0])):
            points: list[Point] = []
            # A sharded model is sharded over two ranks at least.
            first_power = 1 if chosen.degrees.dp_shard > 1 else 0
            for ranks in (2**power for power in range(first_power, MAX_DEVICES.bit_length())):
                devices = ranks * chosen.degrees.pp * chosen.degrees.tp
                if devices > (MAX_DEVICES if cluster.between is not None else cluster.devices_per_node):
                    break
                if devices % min(devices, cluster.devices_per_node):  # which no number of whole nodes has
                    continue
                try:
                    grown = _grown(cluster, devices, share)
                    first = points[0].samples_per_s / points[0].devices if points else None
                    points.append(_point(asked, grown, chosen, ranks, scaling, data, first))
                except ConfigError:  # it does not fit into memory, or does not divide the batch
                    continue
            found.append(Curve(scaling=scaling, name=name, points=points))
    return found


def _grown(cluster: ClusterSettings, devices: int, slow_share: float) -> ClusterSettings:
    """The cluster with that number of devices; one slow device holds up all of them."""
    slowest = cluster.slowest_device
    if round(slow_share * devices) > 0 and (slowest is None or slowest.value > 1 / (1 + _SLOW[1])):
        slowest = Sourced(value=1 / (1 + _SLOW[1]), source="a case of the scaling curves")
    return msgspec.structs.replace(
        cluster, nodes=-(-devices // cluster.devices_per_node),
        devices_per_node=min(devices, cluster.devices_per_node), slowest_device=slowest,
    )  # fmt: skip


def _point(
    asked: Scenario, cluster: ClusterSettings, chosen: Fit, ranks: int, scaling: str, data: Data, first: float | None
) -> Point:
    """Plan ``ranks`` data-parallel ranks. Raises ConfigError where that cannot be."""
    batch = asked.global_batch if scaling == "strong" else asked.global_batch // chosen.degrees.data * ranks
    if asked.max_global_batch is not None and batch > asked.max_global_batch:
        raise ConfigError(f"a global batch of {batch} no longer trains as well")
    sized = msgspec.structs.replace(asked, global_batch=batch)
    how, degrees = msgspec.structs.replace(chosen.settings, micro_batches=None), chosen.degrees
    if degrees.composed:
        shards = min(degrees.dp_shard, ranks) if degrees.dp_replicate > 1 else ranks
        how = msgspec.structs.replace(how, mesh=str(degrees._replace(dp_replicate=ranks // shards, dp_shard=shards)))
    time = fit(sized, cluster, how).time.total
    step_s = max(time, *data_seconds(sized, cluster, data).values())
    rate = batch / step_s
    return Point(
        devices=cluster.num_devices, global_batch=batch, step_s=step_s, samples_per_s=rate,
        efficiency=1.0 if first is None else rate / cluster.num_devices / first, occupancy=time / step_s,
    )  # fmt: skip


def data_seconds(asked: Scenario, cluster: ClusterSettings, data: Data) -> dict[str, float]:
    """Seconds that decoding and storage need for a step."""
    images = asked.global_batch * (asked.cameras or 0) / cluster.nodes if asked.reads_images else 0
    read = asked.global_batch * (asked.stored_bytes or 0)
    return {"decoding": images / data.images_per_node_s, "storage": read / data.storage_gb_per_s / 1e9}
