"""Plans of a scenario: the first strategy that fits, every strategy and micro-batch, and what to change first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.planner.choice import (
    Fit,
    IndivisibleError,
    TooLargeError,
    candidates,
    composed,
    fit,
    hybrid,
    named,
    peak,
)
from fuelrail.bench.planner.hardware import GIB, ClusterSettings
from fuelrail.bench.planner.scaling import data_seconds
from fuelrail.bench.trainer.models.settings import GptSettings
from fuelrail.bench.trainer.strategies.settings import ParallelSettings, Strategy
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.planner.scenario import Recompute, Scenario

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
_SIMPLE: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp2")
_WORTH = 1.02  # below which a change is not named


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy with a micro-batch: what of it fails, or memory and rate, the data's limit included."""

    strategy: str
    micro_batch: int
    fails: str | None = None
    peak_gib: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None


def planned(asked: Scenario, cluster: ClusterSettings, fit: Fit) -> Planned:
    """Return what fits, with its rate."""
    seconds = max(fit.time.total, *data_seconds(asked, cluster).values())
    return Planned(
        strategy=named(fit.settings),
        micro_batch=asked.micro_batch,
        peak_gib=peak(fit.stages) / GIB,
        samples_per_s=asked.global_batch / seconds,
        mfu=fit.useful_flop / (seconds * cluster.peak_flops(asked.precision)),
    )


def choose(asked: Scenario, cluster: ClusterSettings) -> tuple[Fit, list[Planned]]:
    """Return the simplest strategy that fits, or the asked one, and all that were tried. Raises ConfigError.

    Other ways to train without recomputation and without divided layers are tried too, for some may be faster.
    """
    tried: list[Planned] = []
    chosen: Fit | None = None
    for settings in candidates(asked, cluster):
        if chosen is not None and settings.recompute != "none":
            break
        try:
            found = fit(asked, cluster, settings)
        except IndivisibleError as error:
            hint = (
                ""
                if asked.parallel != "auto"
                else ", or --mesh, which can divide the layers instead"
            )
            raise ConfigError(f"strategy {named(settings)}: {error}{hint}") from error
        except ConfigError as error:
            if asked.parallel != "auto":
                raise ConfigError(f"strategy {named(settings)}: {error}") from error
            tried.append(
                Planned(strategy=named(settings), micro_batch=asked.micro_batch, fails=str(error))
            )
            continue
        chosen = chosen or found
        tried.append(planned(asked, cluster, found))
    if chosen is not None:
        return chosen, tried
    reasons = list(dict.fromkeys(one.fails for one in tried))
    why = (
        reasons[0]
        if len(reasons) == 1
        else "; ".join(f"{one.strategy}: {one.fails}" for one in tried)
    )
    if isinstance(asked.settings, GptSettings) and not asked.low:
        why = (
            f"{why}; this is with fp32 weights and whole gradients, as Fuelrail's trainer has them: --weights bf16 "
            "plans a trainer with less"
        )
    raise ConfigError(
        f"model '{asked.named}' does not fit on {cluster.num_devices} x {cluster.device.name}: {why}"
    )


def sweep(asked: Scenario, cluster: ClusterSettings) -> list[Planned]:
    """Plan every strategy, with and without recomputation, at each micro-batch.

    What does not fit is not tried with more samples.
    """
    found = []
    for settings in _strategies(cluster):
        too_large: str | None = None
        for size in _MICRO_BATCHES:
            tried = msgspec.structs.replace(asked, micro_batch=size)
            try:
                if too_large is not None:
                    raise ConfigError(too_large)
                found.append(planned(tried, cluster, fit(tried, cluster, settings)))
            except ConfigError as error:
                found.append(Planned(strategy=named(settings), micro_batch=size, fails=str(error)))
                if isinstance(error, TooLargeError):
                    too_large = f"a smaller micro-batch {error}"
    return found


def _strategies(cluster: ClusterSettings) -> Iterator[ParallelSettings]:
    """Yield settings of whole, sharded and divided models, with and without recomputation."""
    for recompute in _RECOMPUTE:
        for strategy in _SIMPLE if cluster.num_devices > 1 else _SIMPLE[:1]:
            yield ParallelSettings(strategy=strategy, recompute=recompute)
        yield from hybrid(cluster, recompute)
        for tp in (1, 2, 8):
            for pp in (1, 2, 4, 8):
                divides = (
                    cluster.devices_per_node % tp == 0 and cluster.num_devices % (tp * pp) == 0
                )
                if tp * pp > 1 and divides:
                    yield composed(cluster, pp, tp, recompute)


def remedies(
    asked: Scenario, cluster: ClusterSettings, chosen: Fit, tried: Sequence[Planned]
) -> dict[str, float]:
    """Return changes that make a plan faster, each with its rate, the best first; other strategies were ``tried``."""
    found = dict(_changed(asked, cluster, chosen))
    found |= {
        f"use {one.strategy}": one.samples_per_s for one in tried if one.samples_per_s is not None
    }
    own = _rate(asked, cluster, chosen)
    faster = {change: rate for change, rate in found.items() if rate > own * _WORTH}
    return dict(sorted(faster.items(), key=lambda one: -one[1]))


def _rate(asked: Scenario, cluster: ClusterSettings, found: Fit) -> float:
    return asked.global_batch / max(found.time.total, *data_seconds(asked, cluster).values())


def _changed(asked: Scenario, cluster: ClusterSettings, chosen: Fit) -> Iterator[tuple[str, float]]:
    """Yield changes that are possible and fit, with their rates. They share the plan's runs on fake tensors."""
    total, waits = chosen.time.total, data_seconds(asked, cluster)
    for what, wait in waits.items():
        if wait > total:
            rest = max(total, *(other for name, other in waits.items() if name != what))
            yield (
                f"make {what} {wait / rest:.2g} times as fast "
                + (
                    "(more CPUs a node, smaller stored images)"
                    if what == "decoding"
                    else "(a cache, smaller samples)"
                ),
                asked.global_batch / rest,
            )
    how = msgspec.structs.replace(chosen.settings, micro_batches=None)
    changes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (f"micro_batch {size}", {"micro_batch": size}, {})
        for size in (2 * asked.micro_batch, 4 * asked.micro_batch)
    ]
    faster = {
        "fp32": ("tf32", "bf16"),
        "tf32": ("bf16",),
        "bf16": ("fp8",),
        "fp16": ("fp8",),
        "fp8": (),
    }
    changes += [
        (f"precision {kind}, if it trains as well", {"precision": kind}, {})
        for kind in faster[asked.precision]
        if kind in cluster.device.peak_tflops
        and (kind != "fp8" or isinstance(asked.settings, GptSettings))
    ]
    if chosen.degrees.pp > 1 and how.pipeline_schedule == "1F1B":
        interleaved = "Interleaved1F1B"
        changes.append(
            (
                f"pipeline_schedule {interleaved}",
                {"virtual_stages": 2},
                {"pipeline_schedule": interleaved},
            )
        )
    for change, facts, settings in changes:
        scenario = msgspec.structs.replace(asked, **facts)
        try:
            found = fit(scenario, cluster, msgspec.structs.replace(how, **settings))
        except (
            ConfigError
        ):  # it does not fit into memory, or does not divide the model or the batch
            continue
        yield f"{change}, with {named(found.settings)}", _rate(scenario, cluster, found)
