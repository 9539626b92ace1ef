"""What one rank of a cluster holds, computes and sends: arithmetic from runs on fake tensors.

A run says memory after each operator as a line over the micro-batch, so its peak is the largest of many lines. Three
parts are arithmetic, as torch cannot run them so: what copies send (DDP's buckets are views, so they take no memory
besides their gradients), the order of a pipeline's micro-batches, of which a stage runs one, and the optimiser's
moments, for torch counts DTensors in full in a step under fake tensors.

Many plans share a run, for what ranks share is divided by their number, and models of equal blocks are run with 2 and 3
blocks a stage: the peaks of the forward pass and of the first and the last operators of the backward pass (as many as
the smaller run has in each half) are linear in blocks, as FLOP, parameters, collectives and what a pass keeps are.
Padding of small shards is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from fuelrail.bench.measure.collectives import Collective, summed
from fuelrail.bench.planner.fake_rank import ROWS, Inputs, RankRun, is_gather_of_weights, run_rank
from fuelrail.bench.planner.formulas import chunks_in_flight, in_flight, passes_of, schedule_order
from fuelrail.bench.planner.state import FP32, MOMENTS, num_parameters
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
_DIVIDED = ("Sharded Param", "Sharded Grad")

Value = Callable[[RankRun], float]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: ``parameters`` of its own; bytes at the peak of a step, by kind and in all; FLOP of a micro-batch.

    ``kept_bytes`` are the activations that a micro-batch keeps from its forward pass to its backward pass, of which
    ``in_flight`` lie in memory at once, of interleaved stages a fraction; ``hidden_bytes`` go to the next stage.
    ``attention`` and ``convolution`` are FLOP among the others. ``collectives`` are those of a step of
    ``micro_batches``, ``forward`` those of them that forward passes wait for.
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
    hidden_bytes: int
    micro_batches: int
    collectives: list[Collective]
    forward: list[Collective]


def blocks_of(model: ModelSettings | str) -> int:
    """Return the number of blocks, or of the parts of an own model that its attribute ``wrap`` or ``blocks`` names."""
    return num_parameters(model).blocks if isinstance(model, str) else num_blocks(model)


def shape_of(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    inputs: Inputs,
    *,
    rank: int = 0,
    precision: Precision = "fp32",
) -> Shape:
    """Run one rank of the whole model. Raises ConfigError for degrees that do not divide, and as :func:`run_rank`."""
    _check(settings, degrees, model, inputs)
    ranks = _Ranks([_run(model, settings, degrees, inputs, rank, precision)], 0.0, degrees)
    return ranks.shape(settings, degrees, inputs, rank // (degrees.data * degrees.tp), rank)


def stages(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    inputs: Inputs,
    precision: Precision,
    *,
    once: bool = False,
    virtual: int = 1,
) -> list[Shape]:
    """Shape the first rank of each stage by shared runs. Raises as :func:`shape_of`.

    ``once`` runs a single micro-batch, which says what it computes and keeps, but not what lies beside its gradients.
    ``virtual`` is the number of stages of a rank in an interleaved schedule.
    """
    _check(settings, degrees, model, inputs, virtual)
    blocks = blocks_of(model) / degrees.pp
    # Of stages of equal blocks the inner ones are alike; of many blocks each stage is run with two numbers of them.
    equal = isinstance(model, (GptSettings, VitSettings)) and (
        degrees.pp > 3 or blocks > _BLOCKS[-1]
    )
    numbers = _BLOCKS if blocks > _BLOCKS[-1] else (round(blocks),)
    small = Degrees(
        pp=min(3, degrees.pp) if equal else degrees.pp,
        dp_replicate=min(2, degrees.dp_replicate) if degrees.dp_shard == 1 else 1,
        dp_shard=_SHARDS if degrees.dp_shard > 1 else 1,
        tp=degrees.tp,
    )
    sizes: list[ModelSettings | str] = [model]
    if equal and isinstance(model, (GptSettings, VitSettings)):
        sizes = [msgspec.structs.replace(model, depth=count * small.pp) for count in numbers]
    found = []
    for stage in range(degrees.pp):
        like = stage if small.pp == degrees.pp else min(stage, 1) + (stage == degrees.pp - 1)
        rank = like * small.data * small.tp
        runs = [
            _run(size, settings, small, inputs, rank, precision, 1 if once else 2) for size in sizes
        ]
        spared = _spared(model, settings, degrees, blocks) if inputs.low else 0
        ranks = _Ranks(runs, blocks - numbers[0], small, spared)
        found.append(
            ranks.shape(
                settings, degrees, inputs, stage, stage * degrees.data * degrees.tp, virtual
            )
        )
    return found


def _spared(
    model: ModelSettings | str, settings: ParallelSettings, degrees: Degrees, blocks: float
) -> int:
    """Return bytes of a sample's activations that our tensor parallel keeps and Megatron's does not.

    It keeps its part of two tensors a block in place of the whole (arXiv 2205.05198, section 4.2.2).
    """
    if not isinstance(model, GptSettings) or settings.recompute == "full":
        return 0
    return round(2 * 2 * model.context * model.width * (1 - 1 / degrees.tp) * blocks)


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
                f"the mesh is {degrees}, and the planner divides neither layers nor stages of an own model; use "
                "ddp, zero1, zero2, fsdp2 or hsdp"
            )
        return
    image = (0, 0) if isinstance(model, GptSettings) else (inputs.height, inputs.width)
    batch = inputs.micro_batch * (inputs.micro_batches if degrees.pp > 1 else 1)
    if degrees.pp > 1 and settings.pipeline_schedule not in _PLANNED_SCHEDULES:
        raise ConfigError(
            f"pipeline_schedule {settings.pipeline_schedule} is not planned, for its activations and bubble are not "
            f"modelled: use one of {', '.join(_PLANNED_SCHEDULES)}"
        )
    if virtual > 1 and settings.pipeline_schedule == "Interleaved1F1B":
        blocks, stages_each = num_blocks(model), virtual * degrees.pp
        if blocks % stages_each or inputs.micro_batches % degrees.pp:
            raise ConfigError(
                f"{virtual} virtual stages of pp={degrees.pp} need a multiple of {stages_each} layers and of "
                f"{degrees.pp} micro-batches, and there are {blocks} and {inputs.micro_batches}"
            )
        settings = msgspec.structs.replace(settings, pipeline_schedule="1F1B")
    check_fits(settings, degrees, model, batch, image)


def _run(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    inputs: Inputs,
    rank: int,
    precision: Precision,
    passes: int = 2,
) -> RankRun:
    """Run a rank, or take the run of another plan that differs in nothing that a run shows."""
    how = ParallelSettings(
        strategy="zero2" if settings.strategy == "zero2" else "ddp",
        recompute=settings.recompute,
        pipeline_schedule="GPipe" if settings.pipeline_schedule == "GPipe" else "1F1B",
        micro_batches=degrees.pp if degrees.pp > 1 else None,
    )
    few = msgspec.structs.replace(
        inputs, micro_batch=ROWS, micro_batches=min(passes, inputs.micro_batches)
    )
    return run_rank(model, how, degrees, few, rank, precision)


class _Ranks:
    """Ranks that are like that of ``runs``, which had the degrees ``small``: one run, or of 2 and 3 blocks.

    ``more`` is the number of blocks beyond those of the smaller run, ``spared`` bytes of a sample that are not kept.
    """

    def __init__(
        self, runs: Sequence[RankRun], more: float, small: Degrees, spared: int = 0
    ) -> None:
        self._runs, self._more, self._small, self._spared = runs, more, small, spared

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
        schedule, count, rows = settings.pipeline_schedule, inputs.micro_batches, inputs.micro_batch
        own = self._at(lambda run: run.parameters)
        divided = own * self._small.dp_shard // degrees.dp_shard
        moments = FP32 * MOMENTS[settings.optimiser] * divided
        if inputs.low:  # an fp32 copy of the weights, to update them
            moments += FP32 * divided
        copied = inputs.low and degrees.dp_shard == 1
        if settings.shards_optimiser or copied:
            moments //= degrees.data
        kept = self._at(lambda run: run.kept[0] + rows * run.kept[1]) - rows * self._spared
        flying: float = in_flight(schedule, degrees.pp, stage, count)
        if schedule == "Interleaved1F1B" and degrees.pp > 1:
            flying = chunks_in_flight(degrees.pp, stage, count, virtual) / virtual
        beyond = round(kept * (flying - 1))
        memory = {**self._peak(rows, degrees), "moments": moments, "activations in flight": beyond}
        if self._spared:
            memory["Activation"] = max(0, memory.get("Activation", 0) - rows * self._spared)
        if copied:
            memory.pop(
                "Unsharded Param", None
            )  # torch's shards of one rank are copied to be gathered
        if inputs.low and (
            degrees.data == 1 or not degrees.composed
        ):  # torch sums gradients of shards in fp32
            memory["fp32 of gradients"] = FP32 // 2 * divided
        if (
            degrees.pp > 1
        ):  # a stage has the whole batch's inputs, also where it reads the targets alone
            memory["inputs of other micro-batches"] = (
                rows * (count - 1) * self._at(lambda run: run.input_bytes)
            )
        order = schedule_order(schedule, degrees.pp, stage, count) if degrees.pp > 1 else None
        sent = [self._sent(way, order, degrees, inputs) for way in range(3)]
        if degrees.data > 1 and not degrees.composed:
            sent[2] = self._copied(settings, degrees, own)
        elif degrees.dp_shard > 1 and degrees.dp_replicate > self._small.dp_replicate == 1:
            times = sum(
                one.count for way in sent for one in way if (one.kind, one.axis) == _REDUCED
            )
            whole = FP32 * own * self._small.dp_shard // degrees.dp_shard
            sent[2].append(_replicated("all_reduce", degrees, times, whole))
        return Shape(
            rank=rank,
            stage=stage,
            parameters=divided,
            memory=memory,
            peak_bytes=sum(memory.values()),
            kept_bytes=kept,
            in_flight=flying,
            flop=rows * self._at(lambda run: run.flop[0]),
            attention=rows * self._at(lambda run: run.flop[1]),
            convolution=rows * self._at(lambda run: run.flop[2]),
            hidden_bytes=rows * self._at(lambda run: run.hidden_bytes),
            micro_batches=count,
            collectives=summed([one for way in sent for one in way]),
            forward=sent[0],
        )

    def _at(self, value: Value) -> int:
        """Extrapolate a figure that is linear in blocks."""
        return self._line([value(run) for run in self._runs])

    def _line(self, values: Sequence[float]) -> int:
        few, *many = values
        return round(few + self._more * (many[0] - few)) if many else round(few)

    def _peak(self, rows: int, degrees: Degrees) -> dict[str, int]:
        """Return bytes by kind at the peak of a pass."""
        early = len(self._runs[0].backward) // 2
        late = len(self._runs[0].backward) - early
        phases: list[dict[str, int]] = []
        for phase in range(3):
            peaks: list[dict[str, float]] = []
            for run in self._runs:
                sizes = (run.forward, run.backward[:early], run.backward[-late:])[phase] @ np.array(
                    [1, rows]
                )
                peaks.append(dict(zip(run.kinds, sizes[sizes.sum(axis=1).argmax()], strict=True)))
            kinds = sorted({kind for peak in peaks for kind in peak})
            phases.append(
                {kind: self._line([peak.get(kind, 0) for peak in peaks]) for kind in kinds}
            )
            for kind in _DIVIDED:
                if kind in kinds:
                    phases[-1][kind] = phases[-1][kind] * self._small.dp_shard // degrees.dp_shard
        return {
            kind: size
            for kind, size in max(phases, key=lambda phase: sum(phase.values())).items()
            if size
        }

    def _sent(
        self, way: int, order: Sequence[str] | None, degrees: Degrees, inputs: Inputs
    ) -> list[Collective]:
        """Return the collectives of all forward passes, all backward passes, or the end of a step."""
        every = gathering = (
            1 if way == 2 else inputs.micro_batches
        )  # without stages each pass gathers
        if order is not None and way < 2:
            every, gathering = passes_of(order, "FB"[way])
        found = []
        for one in self._runs[0].sent[way]:
            of_data = one.axis.startswith("dp_")
            each = (
                1 if order is not None else every
            )  # without stages a pass reduces only where each one does
            times = (gathering if is_gather_of_weights(one) else each) if of_data else every
            like = (one.kind, one.axis)
            alike = [
                next(each for each in run.sent[way] if (each.kind, each.axis) == like)
                for run in self._runs
            ]
            sizes = [each.bytes for each in alike]
            if not of_data:
                sizes = [size % ROWS + size // ROWS * inputs.micro_batch for size in sizes]
            ranks = {"dp_shard": degrees.dp_shard, "dp_replicate": degrees.dp_replicate}.get(
                one.axis, one.ranks
            )
            count = times * self._line([each.count for each in alike])
            found.append(
                Collective(
                    kind=one.kind,
                    axis=one.axis,
                    ranks=ranks,
                    count=count,
                    bytes=times * self._line(sizes),
                )
            )
        return found

    def _copied(self, settings: ParallelSettings, degrees: Degrees, own: int) -> list[Collective]:
        """Return the collectives of copies: gradients, and a sharded optimiser's changes, tensor by tensor."""
        found = [_replicated("all_reduce", degrees, 1, FP32 * own)]
        if settings.shards_optimiser:
            tensors = self._at(lambda run: run.tensors)
            found.append(_replicated("broadcast", degrees, tensors, FP32 * own))
        return found


def _replicated(kind: str, degrees: Degrees, count: int, size: int) -> Collective:
    return Collective(
        kind=kind, axis="dp_replicate", ranks=degrees.dp_replicate, count=count, bytes=size
    )
