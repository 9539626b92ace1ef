"""Which strategy: the simplest that fits in memory, and its step time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fuelrail.bench.measure.collectives import Collective, summed
from fuelrail.bench.planner.closed import closed_shape
from fuelrail.bench.planner.formulas import bubble, in_flight, sent_bytes
from fuelrail.bench.planner.hardware import GIB, ClusterSettings
from fuelrail.bench.planner.shape import Inputs, Shape, private_parts_are_there, shape_of
from fuelrail.bench.planner.state import FP32, state_bytes, zero_stage
from fuelrail.bench.planner.step_time import StepTime, Work, step_time
from fuelrail.bench.trainer.models.settings import GptSettings, ModelSettings, VitSettings, num_blocks
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings, Precision, degrees_of
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.planner.scenario import Recompute, Scenario

USABLE = 0.9
"""Share of a device's memory; the rest is for the collective library, the allocator's gaps and scratch memory."""
TEACHER_WEIGHTS = "teacher's weights"
_STATE_MARGIN = 1.05  # what is over by less is shaped, and refused with its kinds
_STATE_PASSES = 7  # AdamW reads weight, gradient and two moments, and writes three of them
_BUCKET_BYTES = (1 << 20, 25 << 20)  # of torch's DDP: the first one, and the others
_BACKWARD = 2 / 3  # share of a micro-batch behind which DDP's buckets hide


class Taught(msgspec.Struct, frozen=True, kw_only=True):
    """A teacher in numbers: its parameters; FLOP and moved bytes of its forward pass of a micro-batch; bytes in memory.

    ``weights_bytes`` lie on a rank all the time, ``pass_bytes`` besides while it predicts.
    """

    parameters: int
    flop: int
    moved_bytes: int
    weights_bytes: int
    pass_bytes: int
    gathered: list[Collective]


class Fit(NamedTuple):
    """A strategy that fits: its stages, with recomputation and without, the busiest rank's work, and a step's time."""

    settings: ParallelSettings
    degrees: Degrees
    inputs: Inputs
    stages: list[Shape]
    once: list[Shape]
    work: Work
    time: StepTime


def candidates(asked: Scenario, cluster: ClusterSettings) -> Iterator[ParallelSettings]:
    """Strategies from the simplest on; what a scenario names is the only one.

    The order: copies, sharded optimiser state, gradients too, parameters too, activations computed again, layers
    divided within a node, stages.
    """
    if asked.parallel != "auto":
        yield asked.parallel
        return
    yield ParallelSettings(strategy="ddp")
    if cluster.num_devices == 1:
        yield ParallelSettings(strategy="ddp", recompute="selective")
        yield ParallelSettings(strategy="ddp", recompute="full")
        return
    yield ParallelSettings(strategy="zero1")
    yield ParallelSettings(strategy="zero2")
    yield ParallelSettings(strategy="fsdp2")
    yield ParallelSettings(strategy="fsdp2", recompute="selective")
    yield ParallelSettings(strategy="fsdp2", recompute="full")
    inside = [degree for degree in (2, 4, 8) if cluster.devices_per_node % degree == 0]
    for tp in inside:
        yield composed(cluster, 1, tp)
    for pp in (2, 4, 8, 16):
        if inside and cluster.num_devices % (pp * inside[-1]) == 0:
            yield composed(cluster, pp, inside[-1])


def composed(cluster: ClusterSettings, pp: int, tp: int, recompute: Recompute = "full") -> ParallelSettings:
    """Return stages of divided layers; what is left of the ranks shards."""
    sizes = {"pp": pp, "dp_shard": cluster.num_devices // (pp * tp), "tp": tp}
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    return ParallelSettings(mesh=text, recompute=recompute)


def named(settings: ParallelSettings) -> str:
    """Return a strategy in words."""
    again = "" if settings.recompute == "none" else f", {settings.recompute} recomputation"
    return (settings.mesh or settings.strategy) + again


def fit(asked: Scenario, cluster: ClusterSettings, settings: ParallelSettings) -> Fit:
    """Shape every stage and time a step. Raises ConfigError where the strategy does not divide or does not fit."""
    degrees = degrees_of(settings, cluster.num_devices)
    settings, inputs = inputs_of(asked, settings, degrees)
    usable = USABLE * cluster.device.memory_gib.value * GIB
    check_state(asked, settings, degrees, usable)
    found = beside_teacher(asked, degrees, inputs, stages(asked.settings, settings, degrees, inputs, asked.precision))
    if peak(found) > usable:
        worst = max(found, key=lambda shape: shape.peak_bytes)
        largest = sorted(worst.memory.items(), key=lambda item: -item[1])[:3]
        raise ConfigError(
            f"needs {worst.peak_bytes / GIB:.1f} GiB on stage {worst.stage} ("
            + ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in largest)
            + f"), and {usable / GIB:.1f} GiB of a device are usable"
        )
    plain = msgspec.structs.replace(settings, recompute="none")
    once = found
    if settings != plain:
        once = beside_teacher(asked, degrees, inputs, stages(asked.settings, plain, degrees, inputs, asked.precision))
    work = work_of(asked, settings, degrees, inputs, found, once)
    return Fit(
        settings, degrees, inputs, found, once, work, step_time(work, cluster, asked.precision, asked.efficiency)
    )


def inputs_of(asked: Scenario, settings: ParallelSettings, degrees: Degrees) -> tuple[ParallelSettings, Inputs]:
    """Divide the global batch. Raises ConfigError where that is not even."""
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
    return settings, inputs


def check_state(asked: Scenario, settings: ParallelSettings, degrees: Degrees, usable: float) -> None:
    """Refuse by arithmetic what cannot fit with no activation at all: shaping it would take time for nothing."""
    state = state_bytes(asked.settings, settings, degrees, asked.precision)
    if state > usable * _STATE_MARGIN:
        stage, _ = zero_stage(settings, degrees)
        raise ConfigError(
            f"needs {state / GIB:.1f} GiB for weights, gradients and optimiser state alone (ZeRO stage {stage}), and "
            f"{usable / GIB:.1f} GiB of a device are usable"
        )


def stages(
    model: ModelSettings, settings: ParallelSettings, degrees: Degrees, inputs: Inputs, precision: Precision
) -> list[Shape]:
    """Shape each stage once; inner stages of equal blocks differ in nothing but their micro-batches in flight."""

    def shaped(stage: int) -> Shape:
        if not private_parts_are_there():
            return closed_shape(model, settings, degrees, inputs, stage)
        return cached_shape(model, settings, degrees, inputs, stage * degrees.data * degrees.tp, precision)

    if degrees.pp < 4 or not isinstance(model, (GptSettings, VitSettings)):
        return [shaped(stage) for stage in range(degrees.pp)]
    inner = shaped(1)
    return [shaped(0), inner, *(_later(inner, stage, degrees, inputs, settings) for stage in range(2, degrees.pp - 1)),
            shaped(degrees.pp - 1)]  # fmt: skip


def _later(inner: Shape, stage: int, degrees: Degrees, inputs: Inputs, settings: ParallelSettings) -> Shape:
    count = in_flight(settings.pipeline_schedule, degrees.pp, stage, inputs.micro_batches)
    # What it gathers by its own order differs from the inner stage's by its warm-up only.
    memory = {**inner.memory, "activations in flight": inner.kept_bytes * (count - 1)}
    return msgspec.structs.replace(
        inner, rank=stage * degrees.data * degrees.tp, stage=stage, memory=memory, peak_bytes=sum(memory.values()),
        in_flight=count,
    )  # fmt: skip


@cache
def _shape(
    model: ModelSettings, settings: ParallelSettings, degrees: Degrees, inputs: Inputs, rank: int, precision: Precision
) -> Shape:
    return shape_of(model, settings, degrees, inputs, rank=rank, precision=precision)


def cached_shape(
    model: ModelSettings, settings: ParallelSettings, degrees: Degrees, inputs: Inputs, rank: int, precision: Precision
) -> Shape:
    """Shape a rank once. Without stages a third micro-batch of a step is as the second."""
    if degrees.pp == 1:
        few = msgspec.structs.replace(inputs, micro_batches=min(2, inputs.micro_batches))
        found = _shape(model, msgspec.structs.replace(settings, micro_batches=None), degrees, few, rank, precision)
        more = summed(found.repeated, inputs.micro_batches - few.micro_batches)
        return msgspec.structs.replace(
            found, micro_batches=inputs.micro_batches, collectives=summed([*found.collectives, *more])
        )
    return _shape(model, settings, degrees, inputs, rank, precision)


def taught(asked: Scenario, inputs: Inputs, devices: int) -> Taught | None:
    """Return what a teacher beside the student costs, whose weights are divided over all devices.

    Its forward pass is a third of the FLOP and of the moved activations of its own training, keeps nothing, and has one
    block's activations and two blocks' gathered weights in memory at once.
    """
    if asked.teacher is None:
        return None
    model = asked.sized(asked.teacher)
    alone = stages(
        model, ParallelSettings(), Degrees(), msgspec.structs.replace(inputs, micro_batches=1), asked.precision
    )[0]
    whole, blocks = FP32 * alone.parameters, num_blocks(model)
    gathers = [Collective(kind="all_gather", axis="dp_teacher", ranks=devices, count=blocks + 1, bytes=whole)]
    return Taught(
        parameters=alone.parameters, flop=alone.flop // 3, moved_bytes=alone.kept_bytes // 3,
        weights_bytes=whole // devices, gathered=gathers if devices > 1 else [],
        pass_bytes=alone.kept_bytes // blocks + (2 * whole // blocks if devices > 1 else 0),
    )  # fmt: skip


def beside_teacher(asked: Scenario, degrees: Degrees, inputs: Inputs, stages: list[Shape]) -> list[Shape]:
    """Add a teacher that predicts beside the student: before its forward pass, in memory that this needs next.

    Raises ConfigError in a pipeline, where it would predict on all ranks of a pipeline.
    """
    found = taught(asked, inputs, degrees.pp * degrees.data * degrees.tp)
    if found is None or asked.teacher_from == "layer":
        return stages
    if degrees.pp > 1:
        raise ConfigError(
            f"teacher '{asked.teacher}' would predict the whole batch on each of pp={degrees.pp} ranks; use pp=1, or "
            "teacher_from: layer"
        )
    gathered = summed(found.gathered, inputs.micro_batches)
    result = []
    for shape in stages:
        beyond = max(0, found.pass_bytes - shape.kept_bytes)
        memory = {**shape.memory, TEACHER_WEIGHTS: found.weights_bytes, "teacher's pass": beyond}
        result.append(
            msgspec.structs.replace(
                shape,
                memory=memory,
                peak_bytes=sum(memory.values()),
                flop=shape.flop + found.flop,
                collectives=[*shape.collectives, *gathered],
            )
        )
    return result


def buckets(gradient_bytes: int, bucket_mib: float | None) -> tuple[int, float]:
    """Return the number of DDP's buckets, and the share of the last, which hides behind nothing."""
    first, other = _BUCKET_BYTES if bucket_mib is None else [max(1, round(bucket_mib * 2**20))] * 2
    more = max(0, -(-(gradient_bytes - first) // other))
    return 1 + more, 1 - (first + (more - 1) * other) / gradient_bytes if more else 1.0


def peak(stages: list[Shape]) -> int:
    """Return the largest peak of all stages."""
    return max(shape.peak_bytes for shape in stages)


def work_of(
    asked: Scenario, settings: ParallelSettings, degrees: Degrees, inputs: Inputs, stages: list[Shape],
    once: list[Shape],
) -> Work:  # fmt: skip
    """Count the work of the stage that computes most, and of a teacher beside it."""
    beside = taught(asked, inputs, 1) if asked.teacher_from == "model" else None
    busiest = max(range(len(stages)), key=lambda number: stages[number].flop)
    shape, plain = stages[busiest], once[busiest]

    def sent(prefix: str) -> float:
        return sum(
            sent_bytes("all_reduce" if one.kind == "all_reduce" else "all_gather", one.ranks, one.bytes)
            for one in shape.collectives
            if one.axis.startswith(prefix)
        )

    sharded, count = degrees.dp_shard > 1, inputs.micro_batches
    collectives, last = sum(one.count for one in shape.collectives if one.axis.startswith("dp_")), 0.0
    if degrees.data > 1 and not degrees.composed:
        collectives, last = buckets(shape.parameters * FP32, settings.bucket_mib)
    state = shape.parameters * FP32 * _STATE_PASSES
    if settings.strategy == "zero1" and settings.mesh is None:
        state //= degrees.data
    again = shape.flop / plain.flop  # what is computed again moves its activations again
    return Work(
        flop=shape.flop,
        activation_bytes=plain.kept_bytes * again + (0 if beside is None else beside.moved_bytes),
        tensor_bytes=sent("tp") / count,
        tensor_reach=degrees.tp,
        pipeline_bytes=2 * shape.hidden_bytes,
        pipeline_reach=degrees.pp * degrees.data * degrees.tp,
        micro_batches=count,
        bubble=bubble(degrees.pp, count),
        step_data_bytes=sent("dp_"),
        step_collectives=collectives,
        step_data_reach=degrees.data * degrees.tp,
        step_data_stride=degrees.tp,
        step_hidden=1.0 if sharded else _BACKWARD / count,
        step_last=last,
        step_state_bytes=state,
    )
