"""What to change first of a plan, and what it would bring: each change is planned as the plan itself was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.planner.choice import fit, named
from fuelrail.bench.planner.scaling import data_seconds
from fuelrail.bench.trainer.models.settings import GptSettings
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.planner.choice import Fit
    from fuelrail.bench.planner.hardware import ClusterSettings
    from fuelrail.bench.planner.scenario import Data, Scenario

_WORTH = 1.02  # below which a change is not named


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change, and the rate with it; ``gain`` is that over the plan's own, less one."""

    change: str
    samples_per_s: float
    gain: float


def remedies(
    asked: Scenario, cluster: ClusterSettings, chosen: Fit, data: Data, rates: Mapping[str, float]
) -> list[Remedy]:
    """Return the changes that make a plan faster, the best first; ``rates`` are those of other strategies' devices."""
    own = _rate(asked, cluster, chosen, data)
    found = dict(_changed(asked, cluster, chosen, data))
    data_s = max(data_seconds(asked, cluster, data).values())
    for strategy, rate in rates.items():
        found[f"use {strategy}"] = asked.global_batch / max(asked.global_batch / rate, data_s)
    listed = [
        Remedy(change=change, samples_per_s=rate, gain=rate / own - 1)
        for change, rate in found.items()
        if rate > own * _WORTH
    ]
    return sorted(listed, key=lambda one: -one.gain)


def _rate(asked: Scenario, cluster: ClusterSettings, found: Fit, data: Data) -> float:
    return asked.global_batch / max(found.time.total, *data_seconds(asked, cluster, data).values())


def _changed(asked: Scenario, cluster: ClusterSettings, chosen: Fit, data: Data) -> Iterator[tuple[str, float]]:
    """Yield changes that are possible and fit, with their rates. They share the plan's runs on fake tensors."""
    total, waits = chosen.time.total, data_seconds(asked, cluster, data)
    for what, wait in waits.items():
        if wait > total:
            rest = max(total, *(other for name, other in waits.items() if name != what))
            yield (
                f"make {what} {wait / rest:.2g} times as fast "
                + ("(more CPUs a node, smaller stored images)" if what == "decoding" else "(a cache, smaller samples)"),
                asked.global_batch / rest,
            )
    how = msgspec.structs.replace(chosen.settings, micro_batches=None)
    changes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (f"micro_batch {size}", {"micro_batch": size}, {}) for size in (2 * asked.micro_batch, 4 * asked.micro_batch)
    ]
    faster = {"fp32": ("tf32", "bf16"), "tf32": ("bf16",), "bf16": ("fp8",), "fp16": ("fp8",), "fp8": ()}
    changes += [
        (f"precision {kind}, if it trains as well", {"precision": kind}, {})
        for kind in faster[asked.precision]
        if kind in cluster.device.peak_tflops and (kind != "fp8" or isinstance(asked.settings, GptSettings))
    ]
    if chosen.degrees.pp > 1 and how.pipeline_schedule == "1F1B":
        interleaved = "Interleaved1F1B"
        changes.append((f"pipeline_schedule {interleaved}", {"virtual_stages": 2}, {"pipeline_schedule": interleaved}))
    for change, facts, settings in changes:
        scenario = msgspec.structs.replace(asked, **facts)
        try:
            found = fit(scenario, cluster, msgspec.structs.replace(how, **settings))
        except ConfigError:  # it does not fit into memory, or does not divide the model or the batch
            continue
        yield f"{change}, with {named(found.settings)}", _rate(scenario, cluster, found, data)
