"""A plan: the simplest strategy that fits in memory, its step time, what it needs of the data, and its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from fuelrail.bench.measure.machine import dataset_facts
from fuelrail.bench.planner.formulas import bubble, sent_bytes
from fuelrail.bench.planner.hardware import GIB, ClusterSettings, load_cluster
from fuelrail.bench.planner.shape import MOMENTS, Inputs, Shape, shape_of
from fuelrail.bench.planner.step_time import Efficiency, StepTime, Work, step_time
from fuelrail.bench.trainer.checkpoints.interval import suggested_interval_s
from fuelrail.bench.trainer.models.settings import MODELS, GptSettings, ModelName, Positive
from fuelrail.bench.trainer.strategies.settings import (
    Degrees,
    ParallelSettings,
    Precision,
    degrees_of,
)
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.settings import Settings, load_yaml, make_options

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

# Of a device's memory; the rest is for the collective library, the allocator's gaps and kernels' scratch memory.
_USABLE = 0.9
_FP32 = 4
_STATE_PASSES = 7  # AdamW reads weight, gradient and two moments, and writes three of them
_BACKWARD = 2 / 3  # share of a micro-batch behind which DDP's buckets hide


class Scenario(Settings, frozen=True, kw_only=True):
    """What is to be trained, on what. ``parallel`` None: the simplest strategy that fits is looked for.

    ``cameras``, ``height`` and ``width`` (pixels) are of a sample's images, and needed by every model but GPT's.
    ``sample_bytes`` are those stored of a sample. ``efficiency`` is a fit to measured steps.
    """

    name: str
    model: ModelName
    cluster: str
    global_batch: Positive
    micro_batch: Positive = 1
    precision: Precision = "bf16"
    parallel: ParallelSettings | None = None
    cameras: Positive | None = None
    height: Positive | None = None
    width: Positive | None = None
    sample_bytes: Positive | None = None
    samples_per_epoch: Positive | None = None
    failures_per_day: Annotated[float, msgspec.Meta(gt=0)] | None = None
    efficiency: Efficiency = Efficiency()


class PlanOptions(Settings, frozen=True, kw_only=True):
    """Options of `fuelrail.plan`, and flags of ``fuelrail plan``."""

    data: (
        Annotated[
            str,
            msgspec.Meta(
                description="Fuelrail dataset: says bytes, cameras and number of samples", extra={"metavar": "DATASET"}
            ),
        ]
        | None
    ) = None
    split: Annotated[str, msgspec.Meta(description="split of --data")] = "train"
    sweep: Annotated[bool, msgspec.Meta(description="plan all strategies, not only up to the first that fits")] = False
    explain: Annotated[bool, msgspec.Meta(description="say formula, inputs and source of each figure")] = False


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy: what of it fails, or the rate that it reaches."""

    strategy: str
    fails: str | None
    peak_gib: float | None = None
    samples_per_s: float | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The report. Times in seconds; bytes and rates of the whole cluster unless a name says otherwise.

    ``step`` is the devices' time by parts; ``step_s`` that of the slowest of devices, decoding and storage. A figure is
    None where the scenario does not say what it needs.
    """

    scenario: Scenario
    cluster: str
    devices: int
    strategy: str
    memory_by_stage: list[dict[str, int]]
    peak_gib: float
    usable_gib: float
    stages: list[Shape]
    step: StepTime
    step_s: float
    bottleneck: str
    occupancy: float
    mfu: float
    samples_per_s: float
    images_per_node_s: float | None
    decode_images_per_node_s: float
    read_gb_per_s: float | None
    storage_gb_per_s: float
    device_hours_per_million: float
    usd_per_million: float | None
    device_hours_per_epoch: float | None
    checkpoint_gb: float
    checkpoint_s: float
    checkpoint_interval_s: float | None
    tried: list[Tried]
    assumed: list[str]
    explained: dict[str, str]


class _Fit(NamedTuple):
    """A strategy that fits: its stages, with recomputation and without."""

    settings: ParallelSettings
    degrees: Degrees
    inputs: Inputs
    stages: list[Shape]
    once: list[Shape]
    time: StepTime


def plan(
    scenario: str | os.PathLike[str] | Scenario,
    options: PlanOptions | None = None,
    **changes: Any,  # noqa: ANN401 - fields of PlanOptions
) -> Plan:
    """Plan a scenario, given as a struct or the path of its YAML file.

    ``fuelrail.plan("SCENARIO.yaml", data="DATASET")`` takes the fields of :class:`PlanOptions` as keywords. Raises
    ConfigError for what a scenario leaves out or what cannot be divided, and where nothing fits: with the reason for
    each strategy.
    """
    options = make_options(PlanOptions, options, changes)
    asked = scenario if isinstance(scenario, Scenario) else load_yaml(scenario, Scenario)
    if options.data is not None:
        asked = _with_data(asked, options.data, options.split)
    _check(asked)
    cluster = load_cluster(asked.cluster)
    tried: list[Tried] = []
    chosen: _Fit | None = None
    for settings in _candidates(asked, cluster):
        name = _named(settings)
        try:
            fit = _fit(asked, cluster, settings)
        except ConfigError as error:
            tried.append(Tried(strategy=name, fails=str(error)))
            continue
        rate = asked.global_batch / fit.time.total
        tried.append(Tried(strategy=name, fails=None, peak_gib=_peak(fit.stages) / GIB, samples_per_s=rate))
        chosen = chosen or fit
        if not options.sweep:
            break
    if chosen is None:
        reasons = "; ".join(f"{one.strategy}: {one.fails}" for one in tried)
        raise ConfigError(
            f"model '{asked.model}' does not fit on {cluster.num_devices} x {cluster.device.name}: {reasons}"
        )
    return _report(asked, cluster, chosen, tried, explain=options.explain)


def _with_data(asked: Scenario, dataset: str, split: str) -> Scenario:
    facts = dataset_facts(open_dataset(dataset), split)
    size = None if facts.mean_sample_bytes is None else max(1, round(facts.mean_sample_bytes))
    return msgspec.structs.replace(
        asked,
        cameras=asked.cameras or len(facts.cameras) or None,
        sample_bytes=asked.sample_bytes or size,
        samples_per_epoch=asked.samples_per_epoch or facts.num_samples or None,
    )


def _check(asked: Scenario) -> None:
    if isinstance(MODELS[asked.model], GptSettings):
        return
    missing = [name for name in ("cameras", "height", "width") if getattr(asked, name) is None]
    if missing:
        raise ConfigError(
            f"scenario '{asked.name}': model '{asked.model}' reads images, and {', '.join(missing)} of a sample "
            f"{'is' if len(missing) == 1 else 'are'} not given; add {'it' if len(missing) == 1 else 'them'}, such as "
            "cameras: 6, height: 256, width: 704"
        )


def _candidates(asked: Scenario, cluster: ClusterSettings) -> Iterator[ParallelSettings]:
    """Strategies from the simplest on; what a scenario names is the only one."""
    if asked.parallel is not None:
        yield asked.parallel
        return
    yield ParallelSettings(strategy="ddp")
    if cluster.num_devices == 1:
        yield ParallelSettings(strategy="ddp", recompute="full")
        return
    yield ParallelSettings(strategy="zero1")
    yield ParallelSettings(strategy="zero2")
    yield ParallelSettings(strategy="fsdp2")
    yield ParallelSettings(strategy="fsdp2", recompute="full")
    inside = [degree for degree in (2, 4, 8) if cluster.devices_per_node % degree == 0]
    for tp in inside:
        yield _mesh(cluster, 1, tp)
    for pp in (2, 4, 8, 16):
        if inside and cluster.num_devices % (pp * inside[-1]) == 0:
            yield _mesh(cluster, pp, inside[-1])


def _mesh(cluster: ClusterSettings, pp: int, tp: int) -> ParallelSettings:
    sizes = {"pp": pp, "dp_shard": cluster.num_devices // (pp * tp), "tp": tp}
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    return ParallelSettings(mesh=text, recompute="full")


def _named(settings: ParallelSettings) -> str:
    again = "" if settings.recompute == "none" else f", {settings.recompute} recomputation"
    return (settings.mesh or settings.strategy) + again


def _fit(asked: Scenario, cluster: ClusterSettings, settings: ParallelSettings) -> _Fit:
    """Shape every stage and time a step. Raises ConfigError where the strategy does not divide or does not fit."""
    degrees = degrees_of(settings, cluster.num_devices)
    at_once = degrees.data * asked.micro_batch
    if asked.global_batch % at_once:
        raise ConfigError(
            f"{degrees.data} data-parallel ranks with micro-batches of {asked.micro_batch} do not divide the global "
            f"batch of {asked.global_batch}; use a multiple of {at_once}"
        )
    inputs = Inputs(
        micro_batch=asked.micro_batch, micro_batches=asked.global_batch // at_once, cameras=asked.cameras or 1,
        height=asked.height or 1, width=asked.width or 1,
    )  # fmt: skip
    if degrees.pp > 1 and settings.micro_batches not in (None, inputs.micro_batches):
        raise ConfigError(
            f"parallel.micro_batches is {settings.micro_batches}, and a global batch of {asked.global_batch} is "
            f"{inputs.micro_batches} micro-batches of {asked.micro_batch} on {degrees.data} data-parallel ranks; leave "
            "it out, or change global_batch or micro_batch"
        )
    if degrees.pp > 1 and settings.micro_batches is None:
        settings = msgspec.structs.replace(settings, micro_batches=inputs.micro_batches)
    model, usable = MODELS[asked.model], _USABLE * cluster.device.memory_gib.value * GIB

    def stages(settings: ParallelSettings) -> list[Shape]:
        ranks = [stage * degrees.data * degrees.tp for stage in range(degrees.pp)]
        return [shape_of(model, settings, degrees, inputs, rank=rank, precision=asked.precision) for rank in ranks]

    found = stages(settings)
    if _peak(found) > usable:
        worst = max(found, key=lambda shape: shape.peak_bytes)
        largest = sorted(worst.memory.items(), key=lambda item: -item[1])[:3]
        raise ConfigError(
            f"needs {worst.peak_bytes / GIB:.1f} GiB on stage {worst.stage} ("
            + ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in largest)
            + f"), and {usable / GIB:.1f} GiB of a device are usable"
        )
    once = found if settings.recompute == "none" else stages(msgspec.structs.replace(settings, recompute="none"))
    time = _time(asked, cluster, settings, degrees, (inputs, found, once))
    return _Fit(settings, degrees, inputs, found, once, time)


def _peak(stages: list[Shape]) -> int:
    return max(shape.peak_bytes for shape in stages)


def _time(
    asked: Scenario,
    cluster: ClusterSettings,
    settings: ParallelSettings,
    degrees: Degrees,
    counted: tuple[Inputs, list[Shape], list[Shape]],
) -> StepTime:
    """Time a step of the stage that computes most."""
    inputs, stages, once = counted
    busiest = max(range(len(stages)), key=lambda number: stages[number].flop)
    shape, plain = stages[busiest], once[busiest]

    def sent(prefix: str) -> float:
        return sum(
            sent_bytes("all_reduce" if one.kind == "all_reduce" else "all_gather", one.ranks, one.bytes)
            for one in shape.collectives
            if one.axis.startswith(prefix)
        )

    sharded, count = degrees.dp_shard > 1, inputs.micro_batches
    state = shape.parameters * _FP32 * _STATE_PASSES
    if settings.strategy == "zero1" and settings.mesh is None:
        state //= degrees.data
    again = shape.flop / plain.flop  # what is computed again moves its activations again
    work = Work(
        flop=shape.flop,
        activation_bytes=plain.kept_bytes * again,
        tensor_bytes=sent("tp"),
        tensor_reach=degrees.tp,
        pipeline_bytes=2 * shape.hidden_bytes,
        pipeline_reach=cluster.num_devices,
        micro_batches=count,
        bubble=bubble(degrees.pp, count),
        step_data_bytes=sent("dp_") * (count if sharded else 1),
        step_collectives=sum(one.count for one in shape.collectives if one.axis.startswith("dp_"))
        * (count if sharded else 1),
        step_data_reach=degrees.data * degrees.tp,
        step_data_stride=degrees.tp,
        step_hidden=1.0 if sharded else _BACKWARD / count,
        step_state_bytes=state,
    )
    return step_time(work, cluster, asked.precision, asked.efficiency)


def _report(asked: Scenario, cluster: ClusterSettings, fit: _Fit, tried: list[Tried], *, explain: bool) -> Plan:
    time, batch, host = fit.time, asked.global_batch, cluster.host
    decode = host.cpus.value * host.images_per_cpu_s.value
    storage = cluster.storage_gb_per_s.value
    images = 0 if isinstance(MODELS[asked.model], GptSettings) else batch * (asked.cameras or 0) / cluster.nodes
    seconds = {"decoding": images / decode, "storage": batch * (asked.sample_bytes or 0) / storage / 1e9}
    parts = {
        "computing": time.compute + time.memory + time.optimiser,
        "communication": time.tensor + time.pipeline + time.data_exposed,
        "pipeline bubble": time.bubble,
    }
    waits = {name: value for name, value in seconds.items() if value > time.total}
    bottleneck = max(waits or parts, key=lambda name: (waits or parts)[name])
    step_s = max(time.total, *seconds.values())
    rate, devices = batch / step_s, cluster.num_devices
    useful = sum(shape.flop for shape in fit.once) / len(fit.once) * fit.inputs.micro_batches
    hours = 1e6 / rate / 3600 * devices
    price = cluster.usd_per_device_hour
    weights = sum(shape.parameters for shape in fit.stages) * fit.degrees.tp * fit.degrees.dp_shard
    saved_gb = weights * _FP32 * (1 + MOMENTS[fit.settings.optimiser]) / 1e9
    interval = None
    if asked.failures_per_day is not None:
        interval = suggested_interval_s(saved_gb / storage, saved_gb / storage, asked.failures_per_day)
    return Plan(
        scenario=asked, cluster=cluster.name, devices=devices, strategy=_named(fit.settings),
        memory_by_stage=[shape.memory for shape in fit.stages], peak_gib=_peak(fit.stages) / GIB,
        usable_gib=_USABLE * cluster.device.memory_gib.value, stages=fit.stages, step=time, step_s=step_s,
        bottleneck=bottleneck, occupancy=time.total / step_s,
        mfu=useful / (step_s * cluster.peak_flops(asked.precision)), samples_per_s=rate,
        images_per_node_s=images / step_s or None, decode_images_per_node_s=decode,
        read_gb_per_s=None if asked.sample_bytes is None else rate * asked.sample_bytes / 1e9,
        storage_gb_per_s=storage, device_hours_per_million=hours,
        usd_per_million=None if price is None else hours * price.value,
        device_hours_per_epoch=None if asked.samples_per_epoch is None else hours * asked.samples_per_epoch / 1e6,
        checkpoint_gb=saved_gb, checkpoint_s=saved_gb / storage, checkpoint_interval_s=interval, tried=tried,
        assumed=_assumed(asked, cluster), explained=_explained(asked, cluster, fit) if explain else {},
    )  # fmt: skip


def _assumed(asked: Scenario, cluster: ClusterSettings) -> list[str]:
    """What the figures rest on that nobody measured."""
    found = [f"{1 - _USABLE:.0%} of a device's memory is left for the collective library, gaps and scratch memory"]
    if asked.efficiency == Efficiency():
        found.append(
            f"efficiency: {asked.efficiency.compute:.0%} of the peak, activations moved {asked.efficiency.passes:g} "
            "times; not fitted to this model"
        )
    if asked.sample_bytes is None:
        found.append("storage is taken to keep up: bytes of a sample are not given (sample_bytes, or --data)")
    if cluster.usd_per_device_hour is None:
        found.append(f"no price: cluster '{cluster.name}' has no usd_per_device_hour")
    numbers = {
        "inside.gb_per_s": cluster.inside.gb_per_s,
        "host.images_per_cpu_s": cluster.host.images_per_cpu_s,
        "storage_gb_per_s": cluster.storage_gb_per_s,
        **({} if cluster.between is None else {"between.gb_per_s": cluster.between.gb_per_s}),
    }
    return found + [f"{name} {one.value:g}: {one.source}" for name, one in numbers.items() if "assumed" in one.source]


def _explained(asked: Scenario, cluster: ClusterSettings, fit: _Fit) -> dict[str, str]:
    """Formula, inputs and source of each figure."""
    device, used, count = cluster.device, asked.efficiency, fit.inputs.micro_batches
    peak = device.peak_tflops[asked.precision]
    flop = max(shape.flop for shape in fit.stages)
    return {
        "peak_gib": "torch's memory tracker over the trainer's strategy on fake tensors, plus moments and "
        f"micro-batches in flight ({[shape.in_flight for shape in fit.stages]})",
        "step.compute": f"{count} micro-batches x {flop:.4g} FLOP / ({used.compute:g} x {peak.value:g} TFLOP/s); "
        f"FLOP counted in the run; peak: {peak.source}",
        "step.memory": f"micro-batches x {used.passes:g} passes x activations kept / "
        f"{device.memory_gb_per_s.value:g} GB/s; {device.memory_gb_per_s.source}",
        "step.tensor": f"bytes sent on axis tp / {cluster.bytes_per_s(fit.degrees.tp) / 1e9:g} GB/s; "
        f"{cluster.inside.gb_per_s.source}",
        "step.bubble": f"(p - 1) / m with p={fit.degrees.pp}, m={count} (arXiv 2104.04473, section 2.2)",
        "step.data_exposed": "bytes sent on axes dp_* / "
        f"{cluster.bytes_per_s(fit.degrees.data * fit.degrees.tp, fit.degrees.tp) / 1e9:g} GB/s, less what hides "
        "behind computing",
        "mfu": "FLOP without recomputation / (step_s x peak)",
        "images_per_node_s": f"compared with {cluster.host.cpus.value:g} CPUs x "
        f"{cluster.host.images_per_cpu_s.value:g} images/s; {cluster.host.images_per_cpu_s.source}",
        "checkpoint_interval_s": "J. T. Daly, Future Generation Computer Systems 22 (2006) 303-312, equation 37",
    }  # fmt: skip
