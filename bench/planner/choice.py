"""Which strategy: the simplest that fits in memory, and its step time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fuelrail.bench.measure.accelerator import load_profile
from fuelrail.bench.measure.collectives import Collective, summed
from fuelrail.bench.planner.fake_rank import Inputs, is_gather_of_weights
from fuelrail.bench.planner.formulas import bubble, sent_bytes
from fuelrail.bench.planner.hardware import GIB, ClusterSettings
from fuelrail.bench.planner.scenario import TransformerShape
from fuelrail.bench.planner.shape import Shape, blocks_of, stages
from fuelrail.bench.planner.state import FP32, state_of, zero_stage
from fuelrail.bench.planner.step_time import (
    MIXTURE,
    Efficiency,
    StepTime,
    StepWork,
    Traffic,
    best_of,
    efficiency_of,
    has_range,
    step_time,
)
from fuelrail.bench.trainer.models.settings import (
    GptSettings,
    ModelSettings,
    num_blocks,
)
from fuelrail.bench.trainer.strategies.settings import (
    Degrees,
    ParallelSettings,
    degrees_of,
)
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.planner.scenario import Recompute, Scenario

USABLE = 0.9
"""Share of a device's memory; the rest is for the collective library, the allocator's gaps and
scratch memory.
"""
TEACHER_WEIGHTS = "teacher's weights"
_STATE_MARGIN = 1.05  # what is over by less is shaped, and refused with its kinds
_STATE_PASSES = 7  # AdamW reads weight, gradient and two moments, and writes three of them
_BUCKET_BYTES = (1 << 20, 25 << 20)  # of torch's DDP: the first one, and the others
_LARGEST = 3  # parts that a refusal names
# What torch's memory tracker calls them, and what they are.
_WORDS = {
    "Parameter": "weights",
    "Sharded Param": "weights",
    "Unsharded Param": "gathered weights of blocks",
    "All Gather": "gathered weights of blocks",
    "Gradient": "gradients",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients",
    "Reduce Scatter": "gradients",
    "moments": "optimiser state",
    "Activation": "activations of a micro-batch",
    "activations in flight": "activations of other micro-batches in the pipeline",
    "Inputs and buckets": "inputs and gradient buckets",
    "Temp": "temporary tensors of operators",
    "Buffer": "buffers of modules",
}


class Taught(msgspec.Struct, frozen=True, kw_only=True):
    """A teacher in numbers: its parameters; FLOP and moved bytes of its forward pass of a
    micro-batch; bytes in memory.

    ``weights_bytes`` lie on a rank all the time, ``pass_bytes`` besides while it predicts.
    """

    parameters: int
    flop: int
    moved_bytes: int
    weights_bytes: int
    pass_bytes: int
    gathered: list[Collective]


class Fit(NamedTuple):
    """A strategy that fits: its stages, with recomputation and without, the busiest rank's work,
    and a step's time.
    """

    settings: ParallelSettings
    degrees: Degrees
    inputs: Inputs
    stages: list[Shape]
    single_pass: list[Shape]
    work: StepWork
    time: StepTime

    @property
    def useful_flop(self) -> float:
        """FLOP of a device in a step, without what is computed again."""
        mean_flop = sum(shape.flop for shape in self.single_pass) / len(self.single_pass)
        return mean_flop * self.inputs.micro_batches


def is_bound(
    scenario: Scenario,
    cluster: ClusterSettings,
    settings: ParallelSettings,
) -> bool:
    """Return whether a plan says no time but a bound: the least that a step takes.

    So it is for families of models of which no steps of this device were published or measured, and
    for an offload, whose copies between device and host are not modelled.
    """
    if scenario.accelerator is not None:
        return False
    if settings.offload:
        return True
    if scenario.efficiency is not None:
        return False
    return not has_range(
        cluster.device.name,
        scenario.precision,
        scenario.family,
        scenario.software,
    )


def efficiency(
    scenario: Scenario,
    cluster: ClusterSettings,
    settings: ParallelSettings | None = None,
) -> Efficiency:
    """Return the efficiencies of a scenario: its own, else those of its row; the best for a
    bound.
    """
    used = scenario.efficiency or efficiency_of(
        cluster.device.name,
        scenario.precision,
        scenario.software,
        scenario.family,
    )
    if is_bound(scenario, cluster, settings or ParallelSettings()):
        return best_of(used)
    return used


def virtual_of(scenario: Scenario, settings: ParallelSettings) -> int:
    """Return the number of stages of a rank."""
    if settings.pipeline_schedule != "Interleaved1F1B":
        return 1
    return scenario.virtual_stages or 2


def model_of(
    scenario: Scenario,
    settings: ParallelSettings,
    degrees: Degrees,
) -> ModelSettings | str:
    """Return the model as a rank of a context- or expert-parallel group runs it.

    It has an equal number of layers a stage, and its part of the experts, each of which takes
    tokens of all ranks of the group.

    A shape whose layers the stages do not divide is planned as if each stage had as many as the
    largest.
    """
    model = scenario.settings
    if isinstance(model, GptSettings):
        depth = model.depth
        if isinstance(scenario.model, TransformerShape):
            num_stages = degrees.pp * virtual_of(scenario, settings)
            depth = -(-model.depth // num_stages) * num_stages
        return msgspec.structs.replace(
            model,
            depth=depth,
            context=model.context // (scenario.context_parallel or 1),
            experts=model.experts // (scenario.expert_parallel or 1),
        )
    return model


def candidates(scenario: Scenario, cluster: ClusterSettings) -> Iterator[ParallelSettings]:
    """Yield strategies from the simplest on; one that a scenario names is the only one.

    The order: copies, sharded optimiser state, gradients too, parameters too (within a node, with
    copies across nodes, then over all devices), activations computed again, layers divided within a
    node, stages.
    """
    if scenario.parallel != "auto":
        yield scenario.parallel
        return
    yield ParallelSettings(strategy="ddp")
    if cluster.num_devices == 1:
        yield ParallelSettings(strategy="ddp", recompute="selective")
        yield ParallelSettings(strategy="ddp", recompute="full")
        return
    yield ParallelSettings(strategy="zero1")
    yield ParallelSettings(strategy="zero2")
    yield from hybrid(cluster)
    yield ParallelSettings(strategy="fsdp2")
    yield ParallelSettings(strategy="fsdp2", recompute="selective")
    yield ParallelSettings(strategy="fsdp2", recompute="full")
    inside = [degree for degree in (2, 4, 8) if cluster.devices_per_node % degree == 0]
    for tp in inside:
        yield composed(cluster, 1, tp)
    for pp in (2, 4, 8, 16):
        if inside and cluster.num_devices % (pp * inside[-1]) == 0:
            yield composed(cluster, pp, inside[-1])


def hybrid(cluster: ClusterSettings, recompute: Recompute = "none") -> Iterator[ParallelSettings]:
    """Yield the settings of a model sharded within each node and copied across nodes, where
    there are several.
    """
    if cluster.nodes > 1 and cluster.devices_per_node > 1:
        mesh = f"dp_replicate={cluster.nodes},dp_shard={cluster.devices_per_node}"
        yield ParallelSettings(mesh=mesh, recompute=recompute)


def composed(
    cluster: ClusterSettings,
    pp: int,
    tp: int,
    recompute: Recompute = "full",
) -> ParallelSettings:
    """Return stages of divided layers; what is left of the ranks shards."""
    sizes = {"pp": pp, "dp_shard": cluster.num_devices // (pp * tp), "tp": tp}
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    return ParallelSettings(mesh=text, recompute=recompute)


def named(settings: ParallelSettings) -> str:
    """Return a strategy in words."""
    text = settings.mesh or settings.strategy
    if settings.recompute != "none":
        text += f", {settings.recompute} recomputation"
    if settings.offload:
        text += ", offload"
    return text


class TooLargeError(ConfigError):
    """It does not fit into memory."""


class IndivisibleError(ConfigError):
    """The global batch is larger than what all ranks compute at once, and no multiple of it."""


def fit(
    scenario: Scenario,
    cluster: ClusterSettings,
    settings: ParallelSettings,
    *,
    fits: bool = False,
) -> Fit:
    """Shape every stage and time a step.

    Raises ConfigError where the strategy does not divide the model, IndivisibleError where it does
    not divide the batch, and TooLargeError where it does not fit, unless it ``fits`` as it is known
    to.
    """
    degrees = degrees_of(settings, cluster.num_devices)
    settings, inputs = inputs_of(scenario, settings, degrees)
    usable = USABLE * cluster.device.memory_gib.value * GIB
    if not fits:
        check_state(scenario, settings, degrees, usable)
    shaped = partial(
        stages,
        model_of(scenario, settings, degrees),
        degrees=degrees,
        inputs=inputs,
        precision=scenario.run_precision,
        virtual=virtual_of(scenario, settings),
    )
    beside = partial(beside_teacher, scenario, degrees, inputs)
    shapes = beside(shaped(settings))
    if peak(shapes) > usable and not fits:
        worst = max(shapes, key=lambda shape: shape.peak_bytes)
        where = f" on stage {worst.stage}" if len(shapes) > 1 else ""
        raise TooLargeError(
            f"needs {gib(worst.peak_bytes)}{where} (the largest parts: "
            f"{largest_parts(worst.memory)}), and {gib(usable)} of a device are usable"
        )
    single_pass = shapes
    if settings.recompute != "none":
        single_pass = beside(shaped(msgspec.structs.replace(settings, recompute="none")))
    work = work_of(
        scenario,
        settings=settings,
        degrees=degrees,
        inputs=inputs,
        stages=shapes,
        single_pass=single_pass,
    )
    used = efficiency(scenario, cluster, settings)
    time = step_time(work, cluster, scenario.precision, used)
    return Fit(
        settings=settings,
        degrees=degrees,
        inputs=inputs,
        stages=shapes,
        single_pass=single_pass,
        work=work,
        time=time,
    )


def largest_parts(memory: Mapping[str, float]) -> str:
    """Return the largest parts of a rank's memory in words, with their sizes."""
    sizes: dict[str, float] = {}
    for kind, size in memory.items():
        words = _WORDS.get(kind, kind)
        sizes[words] = sizes.get(words, 0.0) + size
    by_size = sorted(sizes.items(), key=lambda item: -item[1])
    largest = by_size[:_LARGEST]
    return ", ".join(f"{words} {gib(size)}" for words, size in largest)


def gib(size: float) -> str:
    """Return bytes in GiB, or in MiB where they are less than one."""
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / 2**20:.3g} MiB"


def inputs_of(
    scenario: Scenario,
    settings: ParallelSettings,
    degrees: Degrees,
) -> tuple[ParallelSettings, Inputs]:
    """Divide the global batch. Raises ConfigError, or IndivisibleError, where that is not even."""
    shares = scenario.context_parallel or 1
    if degrees.data % shares:
        raise ConfigError(
            f"context_parallel is {shares}, which does not divide the {degrees.data} "
            "data-parallel ranks; use a divisor"
        )
    experts = scenario.expert_parallel or 1
    sharing = degrees.dp_shard if degrees.dp_shard > 1 else degrees.data
    if sharing % experts:
        raise ConfigError(
            f"expert_parallel is {experts}, which does not divide the {sharing} ranks that "
            "share the model's data; use a divisor"
        )
    at_once = degrees.data // shares * scenario.micro_batch
    if scenario.global_batch % at_once:
        # Of a smaller batch a smaller mesh has enough.
        kind = IndivisibleError if scenario.global_batch > at_once else ConfigError
        raise kind(
            f"{degrees.data} data-parallel ranks with micro-batches of "
            f"{scenario.micro_batch} do not divide the global batch of "
            f"{scenario.global_batch}; use a multiple of {at_once}"
        )
    inputs = Inputs(
        micro_batch=scenario.micro_batch,
        micro_batches=scenario.global_batch // at_once,
        cameras=scenario.cameras or 1,
        height=scenario.height or 1,
        width=scenario.width or 1,
        low=scenario.low,
        gradient_bytes=scenario.gradient_bytes,
        tied_parameters=scenario.tied_parameters,
        expert_parallel=scenario.expert_parallel or 1,
        stores_8_bits=scenario.precision == "fp8" and scenario.software == "nvidia",
    )
    if degrees.pp > 1 and settings.micro_batches not in (None, inputs.micro_batches):
        raise ConfigError(
            f"parallel.micro_batches is {settings.micro_batches}, and a global batch of "
            f"{scenario.global_batch} is {inputs.micro_batches} micro-batches of "
            f"{scenario.micro_batch} on {degrees.data} data-parallel ranks; leave it out, "
            "or change global_batch or micro_batch"
        )
    if degrees.pp > 1 and settings.micro_batches is None:
        settings = msgspec.structs.replace(settings, micro_batches=inputs.micro_batches)
    return settings, inputs


def check_state(
    scenario: Scenario,
    settings: ParallelSettings,
    degrees: Degrees,
    usable: float,
) -> None:
    """Refuse by arithmetic what cannot fit with no activation at all: shaping it would take time
    for nothing.
    """
    if settings.offload:
        return
    parts = state_of(
        scenario.settings,
        settings,
        degrees,
        scenario.run_precision,
        low=scenario.low,
        gradient_bytes=scenario.gradient_bytes,
        tied_parameters=scenario.tied_parameters,
        expert_parallel=scenario.expert_parallel or 1,
    )
    state = sum(parts)
    if state > usable * _STATE_MARGIN:
        stage, _ = zero_stage(settings, degrees)
        words = (
            f"weights {gib(parts.weights)}, gradients {gib(parts.gradients)}, optimiser state "
            f"{gib(parts.optimiser)}; ZeRO stage {stage}"
        )
        raise TooLargeError(
            f"needs {gib(state)} without any activations ({words}), and {gib(usable)} of a device "
            "are usable"
        )


def taught(scenario: Scenario, inputs: Inputs, devices: int) -> Taught | None:
    """Return what a teacher beside the student costs, whose weights are divided over all devices.

    Its forward pass is a third of the FLOP and of the moved activations of its own training, keeps
    nothing, and has one block's activations and two blocks' gathered weights in memory at once.
    """
    if scenario.teacher is None:
        return None
    model = scenario.sized(scenario.teacher)
    (alone,) = stages(
        model,
        settings=ParallelSettings(),
        degrees=Degrees(),
        inputs=msgspec.structs.replace(inputs, micro_batches=1),
        precision=scenario.run_precision,
    )
    weight_bytes = FP32 * alone.parameters
    blocks = num_blocks(model)
    pass_bytes = alone.kept_bytes // blocks
    gathered = []
    if devices > 1:
        pass_bytes += 2 * weight_bytes // blocks
        gather = Collective(
            kind="all_gather",
            axis="dp_teacher",
            ranks=devices,
            count=blocks + 1,
            bytes=weight_bytes,
        )
        gathered.append(gather)
    return Taught(
        parameters=alone.parameters,
        flop=alone.flop // 3,
        moved_bytes=alone.kept_bytes // 3,
        weights_bytes=weight_bytes // devices,
        gathered=gathered,
        pass_bytes=pass_bytes,
    )


def beside_teacher(
    scenario: Scenario,
    degrees: Degrees,
    inputs: Inputs,
    stages: list[Shape],
) -> list[Shape]:
    """Add a teacher that predicts beside the student: before its forward pass, in memory that this
    needs next.

    Raises ConfigError in a pipeline, where it would predict on all ranks of a pipeline.
    """
    teacher = taught(scenario, inputs, degrees.pp * degrees.data * degrees.tp)
    if teacher is None or scenario.teacher_from != "model":
        return stages
    if degrees.pp > 1:
        raise ConfigError(
            f"teacher '{scenario.teacher}' would predict the whole batch on each of "
            f"pp={degrees.pp} ranks; use pp=1, or teacher_from: layer"
        )
    gathered = summed(teacher.gathered, inputs.micro_batches)
    taught_stages = []
    for shape in stages:
        memory = {
            **shape.memory,
            TEACHER_WEIGHTS: teacher.weights_bytes,
            "teacher's pass": max(0, teacher.pass_bytes - shape.kept_bytes),
        }
        taught_stage = msgspec.structs.replace(
            shape,
            memory=memory,
            peak_bytes=sum(memory.values()),
            flop=shape.flop + teacher.flop,
            collectives=[*shape.collectives, *gathered],
        )
        taught_stages.append(taught_stage)
    return taught_stages


def buckets(gradient_bytes: int, bucket_mib: float | None) -> tuple[int, float]:
    """Return the number of DDP's buckets, and the share of the last, which hides behind nothing."""
    first, size = _BUCKET_BYTES
    if bucket_mib is not None:
        size = max(1, round(bucket_mib * 2**20))
        first = size
    if gradient_bytes <= first:
        return 1, 1.0
    num_further = -(-(gradient_bytes - first) // size)
    bytes_before_last = first + (num_further - 1) * size
    return 1 + num_further, 1 - bytes_before_last / gradient_bytes


def peak(stages: list[Shape]) -> int:
    """Return the largest peak of all stages."""
    return max(shape.peak_bytes for shape in stages)


def work_of(
    scenario: Scenario,
    settings: ParallelSettings,
    degrees: Degrees,
    inputs: Inputs,
    stages: list[Shape],
    single_pass: list[Shape],
) -> StepWork:
    """Count the work of the stage that computes most, and of a teacher beside it."""
    beside = taught(scenario, inputs, 1) if scenario.teacher_from == "model" else None
    busiest = max(range(len(stages)), key=lambda number: stages[number].flop)
    shape = stages[busiest]
    plain = single_pass[busiest]
    count = inputs.micro_batches
    tensor, messages = _sent(item for item in shape.collectives if item.axis == "tp")
    state = shape.parameters * FP32 * _STATE_PASSES
    if settings.shards_optimiser:
        state //= degrees.data
    teacher_flop = 0 if beside is None else beside.flop
    student_flop = plain.flop - teacher_flop
    blocks = blocks_of(scenario.settings)
    sent = list(
        traffic_of(
            settings,
            degrees=degrees,
            shape=shape,
            flop=student_flop,
            teacher_flop=teacher_flop,
            blocks=blocks,
            reduces_each=scenario.low and degrees.dp_shard > 1 and degrees.pp == 1,
        )
    )
    # What is computed again moves its activations again.
    recompute_ratio = (shape.flop - teacher_flop) / student_flop
    activation_bytes = plain.kept_bytes * recompute_ratio
    if beside is not None:
        activation_bytes += beside.moved_bytes
    # The tokens of a sample are on all ranks of a context-parallel group, and each attends to those
    # of the others.
    shares = scenario.context_parallel or 1
    attention = shape.attention * shares * scenario.attention_share
    flop = shape.flop + attention - shape.attention
    if shares > 1:
        ring = ring_of(
            scenario,
            degrees=degrees,
            inputs=inputs,
            hidden=attention / flop,
            blocks=blocks / degrees.pp,
        )
        sent.append(ring)
    if (scenario.expert_parallel or 1) > 1:
        exchange = exchange_of(scenario, degrees, inputs, blocks / degrees.pp)
        sent.append(exchange)
    virtual = virtual_of(scenario, settings)
    device_s = None
    if scenario.accelerator is not None:
        profile = load_profile(scenario.accelerator)
        images = inputs.micro_batch * (scenario.cameras or 1)
        pass_ms = profile.step_ms(inputs.micro_batch, images) - profile.optimiser_ms
        device_s = pass_ms / 1e3
    operators: float = shape.operators
    if settings.compile != "none" or scenario.family == MIXTURE:
        # A compiled block has fewer, and grouped products of a mixture do not launch each expert.
        operators = 0.0
    return StepWork(
        device_s=device_s,
        flop=flop,
        attention_flop=attention,
        convolution_flop=shape.convolution,
        activation_bytes=activation_bytes,
        tensor_bytes=tensor / count,
        tensor_count=messages / count,
        tensor_reach=degrees.tp,
        pipeline_bytes=2 * virtual * shape.hidden_bytes,
        pipeline_count=2 * virtual if degrees.pp > 1 else 0,
        pipeline_reach=degrees.pp * degrees.data * degrees.tp,
        micro_batches=count,
        bubble=bubble(degrees.pp, count, virtual),
        traffic=tuple(item for item in sent if item.times and item.count),
        step_state_bytes=state,
        operators=operators,
        is_fused=scenario.attention != "unfused",
    )


def exchange_of(
    scenario: Scenario,
    degrees: Degrees,
    inputs: Inputs,
    blocks: float,
) -> Traffic:
    """Return what expert-parallel ranks send each other in a micro-batch, which hides behind
    nothing.

    Tokens go to their experts and back, in the forward and in the backward pass (arXiv 2006.16668).
    """
    model = scenario.settings
    ranks = scenario.expert_parallel or 1
    assert isinstance(model, GptSettings), "only a mixture's experts are shared"
    tokens = inputs.micro_batch * model.context / (scenario.context_parallel or 1)
    bytes_one_way = 2 * tokens * model.active_experts * model.width * (1 - 1 / ranks)  # in 16 bits
    return Traffic(
        bytes=4 * blocks * bytes_one_way,
        count=4 * blocks,
        times=inputs.micro_batches,
        reach=degrees.tp * ranks,
        stride=degrees.tp,
    )


def ring_of(
    scenario: Scenario,
    degrees: Degrees,
    inputs: Inputs,
    hidden: float,
    blocks: float,
) -> Traffic:
    """Return what context-parallel ranks pass on in a micro-batch, behind their attention (arXiv
    2310.01889).

    Keys and values go round in the forward pass, and with their gradients in the backward pass.
    """
    model = scenario.settings
    shares = scenario.context_parallel or 1
    assert isinstance(model, GptSettings), "only tokens are shared"
    channels = model.channels_of_head * (model.kv_heads or model.heads) / degrees.tp
    pass_bytes = 2 * 2 * inputs.micro_batch * model.context / shares * channels  # in 16 bits
    turns = 3 * (shares - 1) * blocks
    return Traffic(
        bytes=turns * pass_bytes,
        count=turns,
        times=inputs.micro_batches,
        reach=degrees.tp * shares,
        stride=degrees.tp,
        hidden=hidden,
        last=1 / shares,
    )


def traffic_of(
    settings: ParallelSettings,
    degrees: Degrees,
    shape: Shape,
    flop: int,
    teacher_flop: int,
    blocks: int,
    *,
    reduces_each: bool = False,
) -> Iterator[Traffic]:
    """Yield the traffic of gradients and weights, and the share of a micro-batch's computing behind
    which it hides.

    ``flop`` are those of the student without recomputation; a forward pass is a third of them.
    Copies reduce behind the last backward pass, as their buckets fill; a sharded optimiser sends
    what it changed behind nothing. Shards gather a block's weights while the block before it
    computes, and reduce its gradients while the next one does: of each pass one block's hide behind
    nothing. A pipeline reduces when it is done; with ``reduces_each``, shards reduce after
    each micro-batch.
    """
    taught = teacher_flop / shape.flop
    forward = flop / 3 / shape.flop
    backward = 1 - forward - taught
    count = shape.micro_batches
    together = degrees.pp == 1
    one_block = 1 / (blocks / degrees.pp + 1)  # what is in no block is gathered as one, too
    shared = [item for item in shape.collectives if item.ranks > 1]
    axes = {item.axis for item in shared if item.axis.startswith("dp_")}
    for axis in sorted(axes):
        mine = [item for item in shape.collectives if item.axis == axis]
        # Where the ranks of the axis's group are; all of them share a teacher's weights.
        if axis == "dp_teacher":
            group = partial(Traffic, reach=degrees.pp * degrees.data * degrees.tp)
        else:
            stride = degrees.tp
            if axis == "dp_replicate":
                stride *= degrees.dp_shard
            reach = stride * getattr(degrees, axis)
            group = partial(Traffic, reach=reach, stride=stride)
        ahead, ahead_number = _sent(item for item in shape.forward if item.axis == axis)
        gathers, gathers_number = _sent(item for item in mine if is_gather_of_weights(item))
        reduced, others_number = _sent(item for item in mine if not is_gather_of_weights(item))
        if axis == "dp_teacher":
            last = count / gathers_number
            yield group(
                bytes=gathers / count,
                count=1 / last,
                times=count,
                hidden=taught,
                last=last,
            )
        elif not degrees.composed:
            number, last = buckets(shape.parameters * FP32, settings.bucket_mib)
            changed, changed_number = _sent(item for item in mine if item.kind == "broadcast")
            yield group(
                bytes=reduced - changed,
                count=number,
                hidden=backward,
                last=last,
            )
            yield group(bytes=changed, count=changed_number, last=1.0)
        else:
            behind = (gathers - ahead) / count
            messages = (gathers_number - ahead_number) / count
            yield group(
                bytes=ahead / count,
                count=ahead_number / count,
                times=count,
                hidden=forward,
                last=one_block,
            )
            if reduces_each:
                yield group(
                    bytes=behind + reduced / count,
                    count=messages + others_number / count,
                    times=count,
                    hidden=backward,
                    last=one_block,
                )
                continue
            yield group(
                bytes=behind,
                count=messages,
                times=count - together,
                hidden=backward,
                last=one_block,
            )
            yield group(
                bytes=reduced + together * behind,
                count=others_number + together * messages,
                hidden=together * backward,
                last=one_block if together else 1.0,
            )


def _sent(collectives: Iterable[Collective]) -> tuple[float, int]:
    """Return bytes that a rank sends in collectives, and their number."""
    listed = list(collectives)
    num_bytes = sum(sent_bytes(item.kind, item.ranks, item.bytes) for item in listed)
    count = sum(item.count for item in listed)
    return num_bytes, count
