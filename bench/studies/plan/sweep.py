"""Every strategy, micro-batch and recomputation of a scenario, planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.planner.choice import composed, fit, named, peak
from fuelrail.bench.planner.hardware import GIB
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuelrail.bench.planner.hardware import ClusterSettings
    from fuelrail.bench.planner.scenario import Data, Recompute, Scenario
    from fuelrail.bench.trainer.strategies.settings import Strategy

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
_SIMPLE: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp2")


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One of the sweep: what of it fails, or memory and rate, the data's limit included."""

    strategy: str
    micro_batch: int
    fails: str | None
    peak_gib: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None


def sweep(asked: Scenario, cluster: ClusterSettings, data: Data) -> list[Planned]:
    """Plan every strategy, with and without recomputation, at each micro-batch that divides the global batch."""
    found = []
    for settings in _strategies(cluster):
        for size in _MICRO_BATCHES:
            tried = msgspec.structs.replace(asked, micro_batch=size)
            name = named(settings)
            try:
                fits = fit(tried, cluster, settings)
            except ConfigError as error:
                found.append(Planned(strategy=name, micro_batch=size, fails=str(error)))
                continue
            seconds = max(fits.time.total, *data_seconds(asked, cluster, data).values())
            useful = sum(shape.flop for shape in fits.once) / len(fits.once) * fits.inputs.micro_batches
            found.append(
                Planned(
                    strategy=name, micro_batch=size, fails=None, peak_gib=peak(fits.stages) / GIB,
                    samples_per_s=asked.global_batch / seconds,
                    mfu=useful / (seconds * cluster.peak_flops(asked.precision)),
                )
            )  # fmt: skip
    return found


def data_seconds(asked: Scenario, cluster: ClusterSettings, data: Data) -> dict[str, float]:
    """Seconds that decoding and storage need for a step."""
    images = asked.global_batch * (asked.cameras or 0) / cluster.nodes if asked.reads_images else 0
    read = asked.global_batch * (asked.sample_bytes or 0)
    return {"decoding": images / data.images_per_node_s, "storage": read / data.storage_gb_per_s / 1e9}


def _strategies(cluster: ClusterSettings) -> Iterator[ParallelSettings]:
    """Whole models, sharded ones, and all stages of divided layers; each without and with recomputation."""
    for recompute in _RECOMPUTE:
        for strategy in _SIMPLE if cluster.num_devices > 1 else _SIMPLE[:1]:
            yield ParallelSettings(strategy=strategy, recompute=recompute)
        for tp in (1, 2, 4, 8):
            for pp in (1, 2, 4, 8):
                if tp * pp > 1 and cluster.devices_per_node % tp == 0 and cluster.num_devices % (tp * pp) == 0:
                    yield composed(cluster, pp, tp, recompute)
