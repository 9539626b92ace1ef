"""Weak and strong scaling of a plan: step times of the planner, put through the recurrence of :mod:`scale_model`.

The number of data-parallel ranks changes, and with it the bytes that a ring moves and the links that it passes; stages
and divided layers stay. Padding of small shards is not in it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from fuelrail.bench.planner.choice import TEACHER_WEIGHTS, USABLE, Fit
from fuelrail.bench.planner.formulas import bubble, sent_bytes
from fuelrail.bench.planner.hardware import GIB, ClusterSettings
from fuelrail.bench.planner.scale_model import Cluster, Overhead, Simulated, simulate
from fuelrail.bench.planner.scale_model import Fit as Measurements
from fuelrail.bench.planner.state import FP32
from fuelrail.bench.planner.step_time import step_time

if TYPE_CHECKING:
    from fuelrail.bench.planner.scenario import Scenario
    from fuelrail.bench.planner.shape import Shape

MAX_DEVICES = 1024
_STEPS = 40  # of the simulation, whose times here do not vary: enough for a queue to fill
_SLOW = (0.01, 0.2)  # share of slow devices, and by how much
_DIVIDED = ("Sharded Param", "Sharded Grad", "moments")


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


def scaling_curves(
    asked: Scenario, cluster: ClusterSettings, fit: Fit, images_per_node_s: float, storage_gb_per_s: float
) -> list[Curve]:
    """Return weak and strong scaling, as planned and with 1 % of the devices 20 % slower."""
    found = []
    # A group of divided models is as slow as its slowest device.
    group = fit.degrees.pp * fit.degrees.tp
    slow = {"slow_share": 1 - (1 - _SLOW[0]) ** group, "slow_by": _SLOW[1]}
    cases: list[tuple[str, dict[str, float]]] = [
        ("as planned", {}),
        (f"{_SLOW[0]:.0%} of the devices {_SLOW[1]:.0%} slower", slow),
    ]
    kinds: tuple[Literal["weak", "strong"], ...] = ("weak", "strong")
    for scaling in kinds:
        for name, case in cases:
            points: list[Point] = []
            for data in _numbers(asked, cluster, fit, scaling):
                result, batch = _simulated(
                    asked, cluster, fit, data, scaling, (images_per_node_s, storage_gb_per_s), case
                )
                devices = data * fit.degrees.pp * fit.degrees.tp
                rate = result.samples_per_s
                first = points[0].samples_per_s / points[0].devices if points else rate / devices
                points.append(
                    Point(
                        devices=devices, global_batch=batch, step_s=result.step_ms / 1e3, samples_per_s=rate,
                        efficiency=rate / devices / first, occupancy=result.occupancy,
                    )
                )  # fmt: skip
            found.append(Curve(scaling=scaling, name=name, points=points))
    return found


def _numbers(asked: Scenario, cluster: ClusterSettings, fit: Fit, scaling: str) -> list[int]:
    """Numbers of data-parallel ranks that fit into memory, divide the batch, and keep to its limit."""
    group = fit.degrees.pp * fit.degrees.tp
    own = asked.global_batch // fit.degrees.data
    found = []
    for power in range(int(math.log2(MAX_DEVICES // group)) + 1):
        data = 2**power
        if scaling == "strong" and asked.global_batch % (data * asked.micro_batch):
            continue
        if scaling == "strong" and asked.global_batch // (data * asked.micro_batch) < fit.degrees.pp:
            continue
        if scaling == "weak" and asked.max_global_batch is not None and own * data > asked.max_global_batch:
            continue
        usable = USABLE * cluster.device.memory_gib.value * GIB
        if max(_peak(shape, fit, data) for shape in fit.stages) <= usable:
            found.append(data)
    return found


def _peak(shape: Shape, fit: Fit, data: int) -> float:
    """Bytes at the peak with another number of data-parallel ranks: what they share changes."""
    kinds = [TEACHER_WEIGHTS]
    if fit.degrees.dp_shard > 1:
        kinds += _DIVIDED
    elif fit.settings.strategy == "zero1":
        kinds.append("moments")
    shared = sum(shape.memory.get(kind, 0) for kind in kinds)
    return shape.peak_bytes + shared * (fit.degrees.data / data - 1)


def _simulated(
    asked: Scenario, cluster: ClusterSettings, fit: Fit, data: int, scaling: str, rates: tuple[float, float],
    case: dict[str, float],
) -> tuple[Simulated, int]:  # fmt: skip
    degrees, group = fit.degrees, fit.degrees.pp * fit.degrees.tp
    devices = data * group
    grown = msgspec.structs.replace(
        cluster,
        nodes=-(-devices // cluster.devices_per_node),
        between=cluster.between or cluster.inside,
    )
    own = asked.global_batch // degrees.data if scaling == "weak" else asked.global_batch // data
    count = own // asked.micro_batch
    sharded = degrees.dp_shard > 1
    bytes_, collectives = fit.work.step_data_bytes, fit.work.step_collectives
    if degrees.data == 1:
        bytes_, collectives = (0.0, 0) if data == 1 else (sent_bytes("all_reduce", data, _gradients(fit)), 1)
    else:
        bytes_ *= (1 - 1 / data) / (1 - 1 / degrees.data)
        if sharded:  # which gathers with each micro-batch, and reduces with the last: a little too much
            bytes_ *= count / fit.work.micro_batches
            collectives = collectives * count // fit.work.micro_batches
    shared = sharded or fit.settings.strategy == "zero1"
    work = msgspec.structs.replace(
        fit.work,
        micro_batches=count,
        bubble=bubble(degrees.pp, count),
        pipeline_reach=devices,
        step_data_bytes=bytes_,
        step_collectives=collectives if data > 1 else 0,
        step_data_reach=data * degrees.tp,
        step_hidden=fit.work.step_hidden if sharded else fit.work.step_hidden * fit.work.micro_batches / count,
        step_state_bytes=fit.work.step_state_bytes * (degrees.data / data if shared else 1),
    )
    time = step_time(work, grown, asked.precision, asked.efficiency)
    images = own * (asked.cameras or 0) if asked.reads_images else 0
    # A rank whose group fills several nodes has the CPUs of all of them.
    hosts = max(1.0, group / cluster.devices_per_node)
    measured = Measurements(
        service_ms=[1e3 * images / rates[0] / hosts], service_batch=own,
        forward_backward_ms=1e3 * (time.total - time.data_exposed - time.optimiser) / own,
        optimiser_ms=1e3 * time.optimiser, overheads=[Overhead(ranks_on_host=1, ms=[0.0])], all_reduce_ms=0.0,
        trainer_cpus=0.0, host_cpus=1.0, queue_batches=2, sample_bytes=float(asked.stored_bytes or 0),
    )  # fmt: skip
    simulated = simulate(
        measured,
        Cluster(
            data,
            own,
            max(1, cluster.devices_per_node // group),
            storage_bytes_per_s=rates[1] * 1e9,
            all_reduce_ms=1e3 * time.data_exposed,
            **case,
        ),
        num_steps=_STEPS,
    )
    return simulated, own * data


def _gradients(fit: Fit) -> float:
    return float(max(shape.parameters for shape in fit.stages) * FP32)
