"""Plans of a scenario: the first strategy that fits, every strategy and micro-batch, and what to
change first.
"""

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
    gib,
    hybrid,
    is_bound,
    named,
    peak,
)
from fuelrail.bench.planner.hardware import GIB, ClusterSettings
from fuelrail.bench.planner.scaling import data_seconds
from fuelrail.bench.trainer.models.settings import GptSettings
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings,
    Strategy,
)
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.planner.scenario import Recompute, Scenario

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
_RECOMPUTED: tuple[Recompute, ...] = ("none", "selective", "full")
_MOST_NODES = 1024
_SIMPLE: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp2")
_WORTH = 1.02  # below which a change is not named


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy with a micro-batch: what of it fails, or memory and rate, the data's limit
    included.

    ``is_bound``: the rate is at most this.
    """

    strategy: str
    micro_batch: int
    fails: str | None = None
    peak_gib: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    is_bound: bool = False


def planned(scenario: Scenario, cluster: ClusterSettings, fit: Fit) -> Planned:
    """Return what fits, with its rate."""
    seconds = max(fit.time.total, *data_seconds(scenario, cluster).values())
    return Planned(
        strategy=named(fit.settings),
        micro_batch=scenario.micro_batch,
        peak_gib=peak(fit.stages) / GIB,
        samples_per_s=scenario.global_batch / seconds,
        mfu=fit.useful_flop / (seconds * cluster.peak_flops(scenario.precision)),
        is_bound=is_bound(scenario, cluster, fit.settings),
    )


def choose(scenario: Scenario, cluster: ClusterSettings) -> tuple[Fit, list[Planned]]:
    """Return the simplest strategy that fits, or the asked one, and all that were tried.

    Raises ConfigError.

    Other ways to train without recomputation and without divided layers are tried too, for some may
    be faster; where a plan is a bound they are not, for nothing says so.
    """
    tried: list[Planned] = []
    chosen: Fit | None = None
    for settings in candidates(scenario, cluster):
        if chosen is not None and settings.recompute != "none":
            break
        try:
            result = fit(scenario, cluster, settings)
        except ConfigError as error:
            if scenario.parallel == "auto" and isinstance(error, IndivisibleError):
                raise ConfigError(_uneven_batch(scenario, cluster)) from error
            if scenario.parallel != "auto":
                would = ""
                if isinstance(error, TooLargeError):
                    would = _nearest_in_words(scenario, cluster, settings)
                raise ConfigError(f"strategy {named(settings)}: {error}{would}") from error
            tried.append(
                Planned(
                    strategy=named(settings),
                    micro_batch=scenario.micro_batch,
                    fails=str(error),
                )
            )
            continue
        chosen = chosen or result
        tried.append(planned(scenario, cluster, result))
        if tried[-1].is_bound:
            break  # bounds of other strategies rank nothing
    if chosen is not None:
        return chosen, tried
    if scenario.global_batch % (cluster.num_devices * scenario.micro_batch):
        raise ConfigError(_uneven_batch(scenario, cluster))
    reasons = list(dict.fromkeys(entry.fails for entry in tried))
    why = (
        reasons[0]
        if len(reasons) == 1
        else "; ".join(f"{entry.strategy}: {entry.fails}" for entry in tried)
    )
    if isinstance(scenario.settings, GptSettings) and not scenario.low:
        why = (
            f"{why}; this is with fp32 weights and whole gradients, as Fuelrail's trainer "
            "has them: --weights bf16 plans a trainer with less"
        )
    would = _nearest_in_words(scenario, cluster, None)
    raise ConfigError(
        f"model '{scenario.named}' does not fit on {cluster.num_devices} x "
        f"{cluster.device.name}{would}. What was tried: {why}"
    )


def _uneven_batch(scenario: Scenario, cluster: ClusterSettings) -> str:
    """Say that the devices cannot share the global batch, and which batches they could."""
    at_once = cluster.num_devices * scenario.micro_batch
    below = scenario.global_batch // at_once * at_once
    near = f"{below} or {below + at_once}" if below else f"{at_once} or {2 * at_once}"
    return (
        f"a global batch of {scenario.global_batch} cannot be shared evenly by "
        f"{cluster.num_devices} devices with micro-batches of {scenario.micro_batch}; use a "
        f"multiple of {at_once}, such as {near}"
    )


def _nearest_in_words(
    scenario: Scenario,
    cluster: ClusterSettings,
    settings: ParallelSettings | None,
) -> str:
    """Return the plan that fits and is nearest to the refused one, in words."""
    for change, facts, how in _nearer(scenario, cluster, settings):
        try:
            fitting = fit(msgspec.structs.replace(scenario, **facts), cluster, how)
        except ConfigError:
            continue
        return f"; it would fit with {change}: {gib(peak(fitting.stages))}"
    nodes = cluster.nodes
    while nodes < _MOST_NODES and cluster.between is not None:
        nodes *= 2
        larger = msgspec.structs.replace(cluster, nodes=nodes)
        batch = larger.num_devices
        sized = msgspec.structs.replace(
            scenario,
            global_batch=max(batch, scenario.global_batch // batch * batch),
            micro_batch=1,
        )
        try:
            fit(
                sized,
                larger,
                ParallelSettings(strategy="fsdp2", recompute="full"),
            )
        except ConfigError:
            continue
        return (
            "; no change fits on this cluster, and fsdp2, full recomputation would on "
            f"{nodes} nodes ({larger.num_devices} devices)"
        )
    return (
        "; no change of recomputation, micro-batch, sharding or offload makes it fit on this "
        "cluster"
    )


def _nearer(
    scenario: Scenario,
    cluster: ClusterSettings,
    settings: ParallelSettings | None,
) -> Iterator[tuple[str, dict[str, Any], ParallelSettings]]:
    """Yield changes of a plan, the smallest first: in words, of the scenario, and the strategy."""
    small = {"micro_batch": 1} if scenario.micro_batch > 1 else {}
    if settings is not None:
        more = _RECOMPUTED[_RECOMPUTED.index(settings.recompute) + 1 :]
        recomputing = [msgspec.structs.replace(settings, recompute=kind) for kind in more]
        for how in recomputing:
            yield f"recompute: {how.recompute}", {}, how
        for how in (settings, *recomputing) if small else ():
            yield f"micro_batch: 1 ({named(how)})", small, how
    if cluster.num_devices == 1:
        for kind in _RECOMPUTED if small and settings is None else ():
            how = ParallelSettings(recompute=kind)
            yield f"micro_batch: 1 ({named(how)})", small, how
        return
    sharded = [ParallelSettings(strategy="fsdp2", recompute=kind) for kind in _RECOMPUTED]
    if settings is not None:
        for how in sharded:
            yield named(how), {}, how
    if small:
        for how in sharded:
            yield f"{named(how)} and micro_batch: 1", small, how
    if not isinstance(scenario.settings, str) and settings is not None:
        for tp in (2, 4, 8):
            if cluster.devices_per_node % tp == 0 and cluster.num_devices > tp:
                how = composed(cluster, 1, tp)
                yield f"mesh: {named(how)}", small, how
    for how in sharded:
        how = msgspec.structs.replace(how, offload=True)
        words = named(how)
        if small:
            words += " and micro_batch: 1"
        yield words, small, how


def sweep(scenario: Scenario, cluster: ClusterSettings) -> list[Planned]:
    """Plan every strategy, with and without recomputation, at each micro-batch.

    What does not fit is not tried with more samples.
    """
    plans = []
    for settings in _strategies(cluster):
        too_large: str | None = None
        for size in _MICRO_BATCHES:
            tried = msgspec.structs.replace(scenario, micro_batch=size)
            try:
                if too_large is not None:
                    raise ConfigError(too_large)
                fitting = fit(tried, cluster, settings)
                plan = planned(tried, cluster, fitting)
                plans.append(plan)
            except ConfigError as error:
                failure = Planned(
                    strategy=named(settings),
                    micro_batch=size,
                    fails=str(error),
                )
                plans.append(failure)
                if isinstance(error, TooLargeError):
                    too_large = f"a smaller micro-batch {error}"
    return plans


def _strategies(cluster: ClusterSettings) -> Iterator[ParallelSettings]:
    """Yield settings of whole, sharded and divided models, with and without recomputation."""
    strategies = _SIMPLE if cluster.num_devices > 1 else _SIMPLE[:1]
    for recompute in _RECOMPUTE:
        for strategy in strategies:
            yield ParallelSettings(strategy=strategy, recompute=recompute)
        yield from hybrid(cluster, recompute)
        for tp in (1, 2, 8):
            if cluster.devices_per_node % tp:
                continue
            for pp in (1, 2, 4, 8):
                ranks = tp * pp
                if ranks > 1 and cluster.num_devices % ranks == 0:
                    yield composed(cluster, pp, tp, recompute)


def remedies(
    scenario: Scenario,
    cluster: ClusterSettings,
    chosen: Fit,
    tried: Sequence[Planned],
) -> dict[str, float]:
    """Return changes that make a plan faster, each with its rate, the best first; other strategies
    were ``tried``.

    A bound has none.
    """
    if is_bound(scenario, cluster, chosen.settings):
        return {}  # the gain of one bound over another says nothing of the steps
    rates: dict[str, float] = {}
    total = chosen.time.total
    waits = data_seconds(scenario, cluster)
    for part, wait in waits.items():
        if wait > total:
            others = [seconds for name, seconds in waits.items() if name != part]
            rest = max(total, *others)
            way = "(a cache, smaller samples)"
            if part == "decoding":
                way = "(more CPUs a node, smaller stored images)"
            change = f"make {part} {wait / rest:.2g} times as fast {way}"
            rates[change] = scenario.global_batch / rest
    how = msgspec.structs.replace(chosen.settings, micro_batches=None)
    changes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (f"micro_batch {size}", {"micro_batch": size}, {})
        for size in (2 * scenario.micro_batch, 4 * scenario.micro_batch)
    ]
    faster_types = {
        "fp32": ("tf32", "bf16"),
        "tf32": ("bf16",),
        "bf16": ("fp8",),
        "fp16": ("fp8",),
        "fp8": (),
    }
    for kind in faster_types[scenario.precision]:
        is_computed = kind != "fp8" or isinstance(scenario.settings, GptSettings)
        if kind in cluster.device.peak_tflops and is_computed:
            change = f"precision {kind}, if it trains as well"
            changes.append((change, {"precision": kind}, {}))
    if chosen.degrees.pp > 1 and how.pipeline_schedule == "1F1B":
        schedule = {"pipeline_schedule": "Interleaved1F1B"}
        change = "pipeline_schedule Interleaved1F1B"
        changes.append((change, {"virtual_stages": 2}, schedule))
    for change, facts, settings in changes:  # they share the plan's runs on fake tensors
        changed = msgspec.structs.replace(scenario, **facts)
        try:
            plan = fit(changed, cluster, msgspec.structs.replace(how, **settings))
        except ConfigError:  # it does not fit, or does not divide the model or the batch
            continue
        rates[f"{change}, with {named(plan.settings)}"] = _rate(changed, cluster, plan)
    for entry in tried:
        if entry.samples_per_s is not None:
            rates[f"use {entry.strategy}"] = entry.samples_per_s
    base_rate = _rate(scenario, cluster, chosen)
    faster = {change: rate for change, rate in rates.items() if rate > base_rate * _WORTH}
    return dict(sorted(faster.items(), key=lambda entry: -entry[1]))


def _rate(scenario: Scenario, cluster: ClusterSettings, plan: Fit) -> float:
    data_s = data_seconds(scenario, cluster).values()
    step_s = max(plan.time.total, *data_s)
    return scenario.global_batch / step_s
