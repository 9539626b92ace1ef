"""Every strategy, micro-batch and recomputation of a scenario, planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.planner.choice import Fit, TooLargeError, composed, fit, hybrid, named, peak
from fuelrail.bench.planner.hardware import GIB, ClusterSettings
from fuelrail.bench.planner.scaling import data_seconds
from fuelrail.bench.trainer.strategies.settings import ParallelSettings, Strategy
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

    What does not fit is not tried with more samples.
    """
    found = []
    for nodes in _numbers(cluster.nodes):
        part = msgspec.structs.replace(cluster, nodes=nodes)
        for settings in _strategies(part, whole=nodes == cluster.nodes):
            too_large: str | None = None
            name = named(settings) + ("" if nodes == cluster.nodes else f" on {counted(nodes, 'node')}")
            for size in _MICRO_BATCHES:
                tried = msgspec.structs.replace(asked, micro_batch=size)
                try:
                    if too_large is not None:
                        raise ConfigError(too_large)
                    found.append(_planned(tried, part, fit(tried, part, settings), data, name))
                except ConfigError as error:
                    found.append(Planned(strategy=name, nodes=nodes, micro_batch=size, fails=str(error)))
                    if isinstance(error, TooLargeError):
                        too_large = f"a smaller micro-batch {error}"
    return found


def _planned(asked: Scenario, cluster: ClusterSettings, fit: Fit, data: Data, name: str) -> Planned:
    seconds = max(fit.time.total, *data_seconds(asked, cluster, data).values())
    return Planned(
        strategy=name, nodes=cluster.nodes, micro_batch=asked.micro_batch, fails=None, peak_gib=peak(fit.stages) / GIB,
        samples_per_s=asked.global_batch / seconds,
        mfu=fit.useful_flop / (seconds * cluster.peak_flops(asked.precision)),
    )  # fmt: skip


def _numbers(nodes: int) -> list[int]:
    """Return the numbers of all nodes, half of them, and so on."""
    found = [nodes]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found


def _strategies(cluster: ClusterSettings, *, whole: bool) -> Iterator[ParallelSettings]:
    """Yield settings of whole, sharded and divided models, with and without recomputation.

    A model that takes all devices is planned on the whole cluster only.
    """
    for recompute in _RECOMPUTE:
        for strategy in _SIMPLE if cluster.num_devices > 1 else _SIMPLE[:1]:
            yield ParallelSettings(strategy=strategy, recompute=recompute)
        yield from hybrid(cluster, recompute)
        for tp in (1, 2, 8):
            for pp in (1, 2, 4, 8):
                divides = cluster.devices_per_node % tp == 0 and cluster.num_devices % (tp * pp) == 0
                if tp * pp > 1 and divides and (whole or tp * pp < cluster.num_devices):
                    yield composed(cluster, pp, tp, recompute)
