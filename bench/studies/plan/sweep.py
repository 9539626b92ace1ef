"""Every strategy, micro-batch and recomputation of a scenario, planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.planner.choice import (
    USABLE,
    beside_teacher,
    check_state,
    composed,
    inputs_of,
    named,
    peak,
    stages,
    work_of,
)
from fuelrail.bench.planner.hardware import GIB, ClusterSettings
from fuelrail.bench.planner.quick import can_be_quick, quick_stages
from fuelrail.bench.planner.shape import private_parts_are_there
from fuelrail.bench.planner.step_time import step_time
from fuelrail.bench.trainer.strategies.settings import ParallelSettings, Strategy, check_fits, degrees_of
from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.planner.scenario import Data, Recompute, Scenario

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
_SIMPLE: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp2")


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One of the sweep: what of it fails, or memory and rate, the data's limit included."""

    strategy: str
    nodes: int
    micro_batch: int
    fails: str | None
    peak_gib: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None


def sweep(asked: Scenario, cluster: ClusterSettings, data: Data) -> list[Planned]:
    """Plan every strategy, with and without recomputation, at each micro-batch, on all nodes and on fewer.

    Transformers are shaped by :mod:`fuelrail.bench.planner.quick`. What does not fit is not tried with more samples.
    """
    found = []
    for nodes in _numbers(cluster.nodes):
        part = msgspec.structs.replace(cluster, nodes=nodes)
        for settings in _strategies(part, whole=nodes == cluster.nodes):
            too_large: str | None = None
            for size in _MICRO_BATCHES:
                tried = msgspec.structs.replace(asked, micro_batch=size)
                name = named(settings) + ("" if nodes == cluster.nodes else f" on {counted(nodes, 'node')}")
                try:
                    if too_large is not None:
                        raise ConfigError(too_large)
                    found.append(_planned(tried, part, settings, data, name))
                except _TooLargeError as error:
                    too_large = f"a smaller micro-batch {error}"
                    found.append(Planned(strategy=name, nodes=nodes, micro_batch=size, fails=str(error)))
                except ConfigError as error:
                    found.append(Planned(strategy=name, nodes=nodes, micro_batch=size, fails=str(error)))
    return found


class _TooLargeError(ConfigError):
    """It does not fit into memory."""


def _planned(asked: Scenario, cluster: ClusterSettings, settings: ParallelSettings, data: Data, name: str) -> Planned:
    degrees = degrees_of(settings, cluster.num_devices)
    settings, inputs = inputs_of(asked, settings, degrees)
    usable = USABLE * cluster.device.memory_gib.value * GIB
    try:
        check_state(asked, settings, degrees, usable)
    except ConfigError as error:
        raise _TooLargeError(str(error)) from error
    model = asked.settings
    image = (asked.height or 0, asked.width or 0) if asked.reads_images else (0, 0)
    check_fits(settings, degrees, model, asked.micro_batch * inputs.micro_batches, image)
    shaped = quick_stages if can_be_quick(model) and private_parts_are_there() else stages
    shapes = beside_teacher(asked, degrees, inputs, shaped(model, settings, degrees, inputs, asked.precision))
    if peak(shapes) > usable:
        raise _TooLargeError(f"needs {peak(shapes) / GIB:.1f} GiB, and {usable / GIB:.1f} GiB of a device are usable")
    plain = msgspec.structs.replace(settings, recompute="none")
    once = shapes
    if settings != plain:
        once = beside_teacher(asked, degrees, inputs, shaped(model, plain, degrees, inputs, asked.precision))
    work = work_of(asked, settings, degrees, inputs, shapes, once)
    time = step_time(work, cluster, asked.precision, asked.efficiency)
    seconds = max(time.total, *data_seconds(asked, cluster, data).values())
    useful = sum(shape.flop for shape in once) / len(once) * inputs.micro_batches
    return Planned(
        strategy=name, nodes=cluster.nodes, micro_batch=asked.micro_batch, fails=None, peak_gib=peak(shapes) / GIB,
        samples_per_s=asked.global_batch / seconds, mfu=useful / (seconds * cluster.peak_flops(asked.precision)),
    )  # fmt: skip


def _numbers(nodes: int) -> list[int]:
    """All nodes, half of them, and so on."""
    found = [nodes]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found


def data_seconds(asked: Scenario, cluster: ClusterSettings, data: Data) -> dict[str, float]:
    """Seconds that decoding and storage need for a step."""
    images = asked.global_batch * (asked.cameras or 0) / cluster.nodes if asked.reads_images else 0
    read = asked.global_batch * (asked.stored_bytes or 0)
    return {"decoding": images / data.images_per_node_s, "storage": read / data.storage_gb_per_s / 1e9}


def _strategies(cluster: ClusterSettings, *, whole: bool) -> Iterator[ParallelSettings]:
    """Whole models, sharded ones, and all stages of divided layers; each without and with recomputation.

    A model that takes all devices is planned on the whole cluster only.
    """
    for recompute in _RECOMPUTE:
        for strategy in _SIMPLE if cluster.num_devices > 1 else _SIMPLE[:1]:
            yield ParallelSettings(strategy=strategy, recompute=recompute)
        for tp in (1, 2, 8):
            for pp in (1, 2, 4, 8):
                divides = cluster.devices_per_node % tp == 0 and cluster.num_devices % (tp * pp) == 0
                if tp * pp > 1 and divides and (whole or tp * pp < cluster.num_devices):
                    yield composed(cluster, pp, tp, recompute)
