"""What one rank of a cluster holds, computes and sends: arithmetic from runs on fake tensors.

A run says memory after each operator as a line over the micro-batch, so its peak is the largest of
many lines. Three parts are arithmetic, as torch cannot run them so: what copies send (DDP's buckets
are views, so they take no memory besides their gradients), the order of a pipeline's micro-batches,
of which a stage runs one, and the optimiser's moments, for torch counts DTensors in full in a step
under fake tensors.

Many plans share a run, for what ranks share is divided by their number, and models of equal blocks
are run with 2 and 3 blocks a stage: the peaks of the forward pass and of the first and the last
operators of the backward pass (as many as the smaller run has in each half) are linear in blocks,
as FLOP, parameters, collectives and what a pass keeps are. All of them are linear in the experts of
a mixture, too, of which many are run with 4 and 8. Padding of small shards is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import msgspec
import numpy as np

from fuelrail.bench.measure.collectives import Collective, summed
from fuelrail.bench.planner.fake_rank import (
    ROWS,
    Inputs,
    RankRun,
    is_gather_of_weights,
    run_rank,
)
from fuelrail.bench.planner.formulas import (
    chunks_in_flight,
    in_flight,
    passes_of,
    schedule_order,
)
from fuelrail.bench.planner.state import (
    FP32,
    MOMENTS,
    expert_parameters,
    num_parameters,
)
from fuelrail.bench.trainer.models.settings import (
    GptSettings,
    ModelSettings,
    VitSettings,
    num_blocks,
)
from fuelrail.bench.trainer.strategies.settings import (
    Degrees,
    ParallelSettings,
    Precision,
    check_fits,
)
from fuelrail.pipeline.errors import ConfigError

_PLANNED_SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
_BLOCKS = (2, 3)  # of the small runs
_SHARDS = 8
_REDUCED = ("reduce_scatter", "dp_shard")
_EXPERTS = (4, 8)  # of the small runs of a mixture
_DIVIDED = ("Sharded Param", "Sharded Grad")
_WEIGHTS = ("Parameter", "Gradient", *_DIVIDED)
_GRADIENTS = ("Gradient", "Sharded Grad", "Unsharded Grad")

Value = Callable[[RankRun], float]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: ``parameters`` of its own; bytes at the peak of a step, by kind and in all; FLOP of
    a micro-batch.

    ``kept_bytes`` are the activations that a micro-batch keeps from its forward pass to its
    backward pass, of which ``in_flight`` lie in memory at once, of interleaved stages a fraction;
    ``hidden_bytes`` go to the next stage. ``attention`` and ``convolution`` are FLOP among the
    others. ``operators`` are those that the host launches for a micro-batch. ``collectives`` are
    those of a step of ``micro_batches``, ``forward`` those of them that forward passes wait for.
    """

    rank: int
    stage: int
    parameters: int
    memory: dict[str, int]
    peak_bytes: int
    kept_bytes: int
    in_flight: float
    flop: int
    attention: int = 0
    convolution: int = 0
    operators: int = 0
    hidden_bytes: int
    micro_batches: int
    collectives: list[Collective]
    forward: list[Collective]


def blocks_of(model: ModelSettings | str) -> int:
    """Return the number of blocks, or of the parts of an own model that its attribute ``wrap``
    or ``blocks`` names.
    """
    if isinstance(model, str):
        return num_parameters(model).blocks
    return num_blocks(model)


def shape_of(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    inputs: Inputs,
    *,
    rank: int = 0,
    precision: Precision = "fp32",
) -> Shape:
    """Run one rank of the whole model.

    Raises ConfigError for degrees that do not divide, and as :func:`run_rank`.
    """
    _check(settings, degrees, model, inputs)
    run = _run(
        model,
        settings=settings,
        degrees=degrees,
        inputs=inputs,
        rank=rank,
        precision=precision,
    )
    ranks = _Ranks([run], weights=[1.0], small=degrees)
    return ranks.shape(
        settings,
        degrees,
        inputs,
        stage=rank // (degrees.data * degrees.tp),
        rank=rank,
    )


def stages(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    inputs: Inputs,
    precision: Precision,
    *,
    virtual: int = 1,
) -> list[Shape]:
    """Shape the first rank of each stage by shared runs. Raises as :func:`shape_of`.

    ``virtual`` is the number of stages of a rank in an interleaved schedule.
    """
    _check(settings, degrees=degrees, model=model, inputs=inputs, virtual=virtual)
    blocks = blocks_of(model) / degrees.pp
    # Of stages of equal blocks the inner ones are alike; of many blocks each stage is run with two
    # numbers of them.
    equal = isinstance(model, (GptSettings, VitSettings)) and (
        degrees.pp > 3 or blocks > _BLOCKS[-1]
    )
    numbers = _BLOCKS if blocks > _BLOCKS[-1] else (round(blocks),)
    spared = recomputed = 0
    if inputs.low:
        spared = _spared(
            model,
            settings=settings,
            degrees=degrees,
            blocks=blocks,
            inputs=inputs,
        )
        if settings.recompute == "selective" and degrees.dp_shard > 1:
            outputs, recomputed = _recomputed_products(model, degrees, blocks)
            spared += outputs
    experts = 0.0
    if isinstance(model, GptSettings) and inputs.expert_parallel > 1:
        experts = expert_parameters(model) * blocks
    models: dict[ModelSettings | str, float] = {model: 1.0}
    if isinstance(model, GptSettings) and model.experts > _EXPERTS[-1]:
        # Few experts, each of which takes as many tokens as those of a mixture of many.
        models = {}
        for count, share in _line_through(_EXPERTS, model.experts).items():
            active = model.active_experts * count / model.experts
            models[msgspec.structs.replace(model, experts=count, active_experts=active)] = share
    shapes = []
    for stage in range(degrees.pp):
        # The first and the last of many stages are those of two, an inner one is that of three.
        is_inner = 0 < stage < degrees.pp - 1
        num_stages = degrees.pp
        if equal:
            num_stages = min(degrees.pp, 3 if is_inner else 2)
        small = Degrees(
            pp=num_stages,
            dp_replicate=min(2, degrees.dp_replicate) if degrees.dp_shard == 1 else 1,
            dp_shard=_SHARDS if degrees.dp_shard > 1 else 1,
            tp=degrees.tp,
        )
        like = min(stage, 1) if equal else stage
        run = partial(_run, settings=settings, inputs=inputs, precision=precision)
        runs: list[RankRun] = []
        weights: list[float] = []
        halves: list[int] = []
        for size, share in models.items():
            if not equal or isinstance(size, str):
                runs.append(run(size, degrees=small, rank=like * small.data * small.tp))
                weights.append(share)
                halves.append(len(runs[-1].backward) // 2)
                continue
            smallest = msgspec.structs.replace(size, depth=numbers[0] * num_stages)
            runs.append(run(smallest, degrees=small, rank=like * small.data * small.tp))
            weights.append(share)
            halves.append(len(runs[-1].backward) // 2)
            if len(numbers) == 1:
                continue
            # A block more is the same in an inner stage as in the last one, which tells what it is.
            # The halves of a backward pass are those of the run with the fewest blocks.
            outer = small._replace(pp=min(degrees.pp, 2))
            for number, part in _line_through(numbers, blocks).items():
                larger = msgspec.structs.replace(size, depth=number * outer.pp)
                runs.append(run(larger, degrees=outer, rank=like * outer.data * outer.tp))
                weights.append(share * (part - (number == numbers[0])))
            halves += [len(runs[-2].backward) // 2] * 2
        ranks = _Ranks(
            runs=runs,
            weights=weights,
            small=small,
            halves=halves,
            spared=spared,
            experts=experts,
        )
        rank = stage * degrees.data * degrees.tp
        shape = ranks.shape(settings, degrees, inputs, stage=stage, rank=rank, virtual=virtual)
        flop = shape.flop + inputs.micro_batch * recomputed
        shapes.append(msgspec.structs.replace(shape, flop=flop))
    return shapes


def _line_through(numbers: Sequence[int], count: float) -> dict[int, float]:
    """Return the weight of each number's value in the value of ``count``, on the line through
    them.
    """
    if len(numbers) == 1:
        return {numbers[0]: 1.0}
    fewer_blocks, more_blocks = numbers
    beyond = (count - fewer_blocks) / (more_blocks - fewer_blocks)
    return {fewer_blocks: 1 - beyond, more_blocks: beyond}


def _spared(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    blocks: float,
    inputs: Inputs,
) -> int:
    """Return bytes of a sample's activations that our model keeps and Megatron's does not.

    Its tensor parallel keeps its part of two tensors a block in place of the whole (arXiv
    2205.05198, section 4.2.2). Where whole copies of a stage are trained, its gate is one operator,
    which keeps its inputs alone, and products in 8 bits keep their inputs in 8 bits.
    """
    if not isinstance(model, GptSettings) or settings.recompute == "full":
        return 0
    undivided = 2 * 2 * model.width * (1 - 1 / degrees.tp)
    divided = 0.0
    if degrees.dp_shard == 1:
        inner = model.active_experts * (model.ffn or 4 * model.width)
        if model.gated:
            divided += 2 * inner
        if inputs.stores_8_bits:
            attended = model.heads * model.channels_of_head
            divided += 2 * model.width + attended + inner
    bytes_per_token = undivided + divided / degrees.tp
    return round(model.context * blocks * bytes_per_token)


def _recomputed_products(
    model: ModelSettings | str,
    degrees: Degrees,
    blocks: float,
) -> tuple[int, int]:
    """Return bytes of a sample that torchtitan's selective recomputation saves, and the FLOP that
    it takes.

    It computes every other matrix product of a block again: keys, attention's output, and of a
    gated perceptron the second matrix, else the last one. Ours keeps all.
    """
    if not isinstance(model, GptSettings):
        return 0, 0
    attended = model.heads * model.channels_of_head
    keys = (model.kv_heads or model.heads) * model.channels_of_head
    inner = model.ffn or 4 * model.width
    outputs = keys + model.width + (inner if model.gated else model.width)
    products = keys * model.width + attended * model.width + inner * model.width
    share = model.context * blocks / degrees.tp
    return round(2 * outputs * share), round(2 * products * share)


def _check(
    settings: ParallelSettings,
    degrees: Degrees,
    model: ModelSettings | str,
    inputs: Inputs,
    virtual: int = 1,
) -> None:
    if isinstance(model, str):
        if degrees.pp * degrees.tp > 1:
            raise ConfigError(
                f"the mesh is {degrees}, and the planner divides neither layers nor stages "
                "of an own model; use ddp, zero1, zero2, fsdp2 or hsdp"
            )
        return
    if degrees.tp > 1 and isinstance(model, GptSettings) and model.experts > 1:
        raise ConfigError(
            f"tp={degrees.tp} with a mixture of experts is not planned: which ranks of tp share an "
            "expert differs between trainers (Megatron folds them into the groups of experts, "
            "arXiv 2504.14960); use tp=1 with expert_parallel, as DeepSeek-V3 was trained (arXiv "
            "2412.19437), or with dp_shard"
        )
    image = (0, 0) if isinstance(model, GptSettings) else (inputs.height, inputs.width)
    batch = inputs.micro_batch * (inputs.micro_batches if degrees.pp > 1 else 1)
    if degrees.pp > 1 and settings.pipeline_schedule not in _PLANNED_SCHEDULES:
        raise ConfigError(
            f"pipeline_schedule {settings.pipeline_schedule} is not planned, for its "
            f"activations and bubble are not modelled: use one of {', '.join(_PLANNED_SCHEDULES)}"
        )
    if virtual > 1 and settings.pipeline_schedule == "Interleaved1F1B":
        blocks = num_blocks(model)
        stages_each = virtual * degrees.pp
        if blocks % stages_each or inputs.micro_batches % degrees.pp:
            raise ConfigError(
                f"{virtual} virtual stages of pp={degrees.pp} need a multiple of "
                f"{stages_each} layers and of {degrees.pp} micro-batches, and there are "
                f"{blocks} and {inputs.micro_batches}"
            )
        settings = msgspec.structs.replace(settings, pipeline_schedule="1F1B")
    check_fits(settings, degrees=degrees, model=model, batch_size=batch, image=image)


def _run(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    inputs: Inputs,
    rank: int,
    precision: Precision,
) -> RankRun:
    """Run a rank, or take the run of another plan that differs in nothing that a run shows."""
    how = ParallelSettings(
        strategy="zero2" if settings.strategy == "zero2" else "ddp",
        recompute=settings.recompute,
        pipeline_schedule="GPipe" if settings.pipeline_schedule == "GPipe" else "1F1B",
        micro_batches=degrees.pp if degrees.pp > 1 else None,
    )
    small_inputs = msgspec.structs.replace(
        inputs,
        micro_batch=ROWS,
        micro_batches=min(2, inputs.micro_batches),
        gradient_bytes=FP32,
        tied_parameters=0,
        expert_parallel=1,
        stores_8_bits=False,
    )
    return run_rank(
        model,
        settings=how,
        degrees=degrees,
        inputs=small_inputs,
        rank=rank,
        precision=precision,
    )


class _Ranks:
    """Ranks that are like that of ``runs``, which had the degrees ``small``: one run, or of 2 and 3
    blocks.

    A figure is the sum of the runs' figures with these ``weights``. ``halves`` is the number of
    operators of each run that are the first part of its backward pass; the last part has one more.
    ``spared`` are bytes of a sample that are not kept, ``experts`` the parameters of a stage that
    expert-parallel ranks hold a part of.
    """

    def __init__(
        self,
        runs: Sequence[RankRun],
        weights: Sequence[float],
        small: Degrees,
        halves: Sequence[int] | None = None,
        spared: int = 0,
        experts: float = 0.0,
    ) -> None:
        self._runs = runs
        self._weights = weights
        self._small = small
        self._halves = halves or [len(run.backward) // 2 for run in runs]
        self._spared = spared
        self._experts = experts

    def shape(
        self,
        settings: ParallelSettings,
        degrees: Degrees,
        inputs: Inputs,
        stage: int,
        rank: int,
        virtual: int = 1,
    ) -> Shape:
        """Shape a rank of that stage."""
        schedule = settings.pipeline_schedule
        count = inputs.micro_batches
        rows = inputs.micro_batch
        is_offloaded = settings.offload and degrees.dp_shard > 1
        parameters = self._extrapolate(lambda run: run.parameters)
        tied = inputs.tied_parameters / degrees.tp / self._small.dp_shard if degrees.pp == 1 else 0
        untied = 1 - tied / parameters
        parameters = round(parameters * untied)
        divided = parameters * self._small.dp_shard // degrees.dp_shard
        # Each expert-parallel rank shares its experts with fewer ranks than the rest of the model.
        local = self._experts / degrees.tp / self._small.dp_shard / parameters
        wider = 1 + local * (inputs.expert_parallel - 1)
        moments = FP32 * MOMENTS[settings.optimiser] * divided
        if inputs.low:  # an fp32 copy of the weights, to update them
            moments += FP32 * divided
        copied = inputs.low and degrees.dp_shard == 1
        if settings.shards_optimiser or copied:
            moments //= degrees.data
        if settings.shards_optimiser or copied or degrees.dp_shard > 1:
            moments = round(moments * wider)
        forward_bytes = self._extrapolate(
            lambda run: run.forward_bytes[0] + rows * run.forward_bytes[1]
        )
        kept_bytes = forward_bytes - rows * self._spared
        flying: float = in_flight(schedule, degrees.pp, stage, count)
        if schedule == "Interleaved1F1B" and degrees.pp > 1:
            flying = chunks_in_flight(degrees.pp, stage, count, virtual) / virtual
        beyond = round(kept_bytes * (flying - 1))
        memory = {
            **self._peak(rows, degrees, has_own_gradients=not copied),
            "moments": moments,
            "activations in flight": beyond,
        }
        if is_offloaded:  # in the host's memory
            for kind in (*_DIVIDED, "moments"):
                memory.pop(kind, None)
        for kind in memory.keys() & set(_WEIGHTS):
            share = wider if kind in _DIVIDED else 1
            memory[kind] = round(memory[kind] * untied * share)
        if self._spared:
            activation_bytes = memory.get("Activation", 0) - rows * self._spared
            memory["Activation"] = max(0, activation_bytes)
        if copied:
            # Torch's shards of one rank are copied to be gathered.
            memory.pop("Unsharded Param", None)
            # One buffer of all gradients, into which each pass adds.
            memory["gradients"] = inputs.gradient_bytes * divided
        order = None
        if degrees.pp > 1:
            order = schedule_order(schedule, degrees.pp, stage, count)
            # A stage has the whole batch's inputs, also where it reads the targets alone.
            input_bytes = self._extrapolate(lambda run: run.input_bytes)
            memory["inputs of other micro-batches"] = rows * (count - 1) * input_bytes
        sent = [self._sent(way, order, degrees, inputs) for way in range(3)]
        if degrees.data > 1 and not degrees.composed:
            sent[2] = [_replicated("all_reduce", degrees, 1, FP32 * parameters)]
            if settings.shards_optimiser:  # which sends what it changed, tensor by tensor
                tensors = self._extrapolate(lambda run: run.tensors)
                sent[2].append(_replicated("broadcast", degrees, tensors, FP32 * parameters))
        elif degrees.dp_shard > 1 and degrees.dp_replicate > self._small.dp_replicate == 1:
            times = 0
            for item in chain.from_iterable(sent):
                if (item.kind, item.axis) == _REDUCED:
                    times += item.count
            weight_bytes = FP32 * parameters * self._small.dp_shard // degrees.dp_shard
            sent[2].append(_replicated("all_reduce", degrees, times, weight_bytes))
        if inputs.low and inputs.gradient_bytes != FP32:
            # What is reduced over data-parallel ranks, in 16 bits.
            for way in sent:
                for number, item in enumerate(way):
                    if item.axis.startswith("dp_") and "reduce" in item.kind:
                        way[number] = msgspec.structs.replace(item, bytes=item.bytes // 2)
        return Shape(
            rank=rank,
            stage=stage,
            parameters=divided,
            memory=memory,
            peak_bytes=sum(memory.values()),
            kept_bytes=kept_bytes,
            in_flight=flying,
            flop=rows * self._extrapolate(lambda run: run.flop[0]),
            attention=rows * self._extrapolate(lambda run: run.flop[1]),
            convolution=rows * self._extrapolate(lambda run: run.flop[2]),
            operators=self._extrapolate(lambda run: run.operators),
            hidden_bytes=rows * self._extrapolate(lambda run: run.hidden_bytes),
            micro_batches=count,
            collectives=summed(list(chain.from_iterable(sent))),
            forward=sent[0],
        )

    def _extrapolate(self, value: Value) -> int:
        """Extrapolate a figure that is linear in blocks and experts."""
        return self._line([value(run) for run in self._runs])

    def _line(self, values: Sequence[float]) -> int:
        terms = [weight * value for weight, value in zip(self._weights, values, strict=True)]
        return round(sum(terms))

    def _peak(
        self,
        rows: int,
        degrees: Degrees,
        *,
        has_own_gradients: bool = True,
    ) -> dict[str, int]:
        """Return bytes by kind at the peak of a pass, without ``has_own_gradients`` but for
        gradients.

        Then what does not grow with the samples of the kinds that are temporary or buckets is of
        gradients, too.
        """
        phases: list[dict[str, int]] = []
        for phase in range(3):
            peaks: list[dict[str, float]] = []
            for run, half in zip(self._runs, self._halves, strict=True):
                parts = (
                    run.forward,
                    run.backward[:half],
                    run.backward[-half - 1 :],
                )
                part = parts[phase]
                if not has_own_gradients:
                    part = part.copy()
                    for number, kind in enumerate(run.kinds):
                        if kind in _GRADIENTS:
                            part[:, number] = 0
                        elif kind in ("Temp", "Inputs and buckets"):
                            part[:, number, 0] = 0
                sizes = part @ np.array([1, rows])
                largest = sizes.sum(axis=1).argmax()
                peaks.append(dict(zip(run.kinds, sizes[largest], strict=True)))
            kinds = sorted({kind for peak in peaks for kind in peak})
            memory = {}
            for kind in kinds:
                memory[kind] = self._line([peak.get(kind, 0) for peak in peaks])
                if kind in _DIVIDED:
                    memory[kind] = memory[kind] * self._small.dp_shard // degrees.dp_shard
            phases.append(memory)
        memory = max(phases, key=lambda phase: sum(phase.values()))
        return {kind: size for kind, size in memory.items() if size}

    def _sent(
        self,
        way: int,
        order: Sequence[str] | None,
        degrees: Degrees,
        inputs: Inputs,
    ) -> list[Collective]:
        """Return the collectives of all forward passes, all backward passes, or the end of a
        step.
        """
        # Without stages each pass gathers.
        every = gathering = 1 if way == 2 else inputs.micro_batches
        if order is not None and way < 2:
            every, gathering = passes_of(order, "FB"[way])
        collectives = []
        for item in self._runs[0].sent[way]:
            of_data = item.axis.startswith("dp_")
            times = every
            if of_data and is_gather_of_weights(item):
                times = gathering
            elif of_data and order is not None:  # else a pass reduces only where each one does
                times = 1
            counts = []
            sizes = []
            for run in self._runs:
                count = 0
                size = 0
                for sent in run.sent[way]:
                    if (sent.kind, sent.axis) == (item.kind, item.axis):
                        count = sent.count
                        size = sent.bytes
                        break
                if not of_data:
                    size = size % ROWS + size // ROWS * inputs.micro_batch
                counts.append(count)
                sizes.append(size)
            ranks = item.ranks
            if item.axis == "dp_shard":
                ranks = degrees.dp_shard
            elif item.axis == "dp_replicate":
                ranks = degrees.dp_replicate
            collective = Collective(
                kind=item.kind,
                axis=item.axis,
                ranks=ranks,
                count=times * self._line(counts),
                bytes=times * self._line(sizes),
            )
            collectives.append(collective)
        return collectives


def _replicated(kind: str, degrees: Degrees, count: int, size: int) -> Collective:
    return Collective(
        kind=kind,
        axis="dp_replicate",
        ranks=degrees.dp_replicate,
        count=count,
        bytes=size,
    )
