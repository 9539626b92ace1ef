"""Shapes of transformers by arithmetic from two small runs, of 2 and 3 blocks a stage, which many plans share.

Their micro-batch is a large prime, which says of each size whether and how it grows with the micro-batch: FLOP, hidden
tensors and each block of memory either are multiples of it or do not grow. Memory after each operator is a line over
the micro-batch, so its peak is the largest of many lines. Over blocks, the peaks of the forward pass and of the first
and the last operators of the backward pass (as many as the smaller run has in each half) are linear, as FLOP,
parameters, collectives and what a pass keeps are. What ranks share is divided by their number. Padding of small shards
is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.collectives import Collective, summed
from fuelrail.bench.planner.formulas import in_flight, passes_of, schedule_order
from fuelrail.bench.planner.shape import Inputs, Line, Shape, is_gather_of_weights, shape_of
from fuelrail.bench.planner.state import MOMENTS
from fuelrail.bench.trainer.models.settings import GptSettings, ModelSettings, VitSettings, num_blocks
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings, Precision

_BLOCKS = (2, 3)
_ROWS = 16777259  # a prime, and more than the bytes that a step's smallest collectives send whatever the micro-batch
_SHARDS = 8  # of the small runs
_FP32 = 4


class _Run(NamedTuple):
    """``phases``: bytes [operator, 2] in memory, the second of them for each sample; ``kept`` [2] likewise.

    ``sent``: collectives of a forward pass, a backward pass and a step, in this order.
    """

    shape: Shape
    kept: tuple[int, int]
    sent: tuple[list[Collective], ...]
    phases: tuple[NDArray[np.float64], ...]


def can_be_quick(model: ModelSettings) -> bool:
    """Whether the model is of equal blocks."""
    return isinstance(model, (GptSettings, VitSettings))


def quick_stages(
    model: ModelSettings, settings: ParallelSettings, degrees: Degrees, inputs: Inputs, precision: Precision
) -> list[Shape]:
    """Shape the first and the last stage, which hold and compute most, or the only one."""
    assert isinstance(model, (GptSettings, VitSettings)), "a model of equal blocks"
    return [
        _scaled(model, settings, degrees, inputs, precision, last=last)
        for last in ((False, True) if degrees.pp > 1 else (False,))
    ]


@cache
def _small(
    model: ModelSettings, settings: ParallelSettings, degrees: Degrees, inputs: Inputs, precision: Precision, rank: int
) -> list[_Run]:
    found: list[_Run] = []
    early = late = 0
    for blocks in _BLOCKS:
        line = Line(_ROWS)
        size = msgspec.structs.replace(model, depth=blocks * degrees.pp)
        shape = shape_of(size, settings, degrees, inputs, rank=rank, precision=precision, line=line)
        if not found:
            early = len(line.backward) // 2
            late = len(line.backward) - early
        phases = (line.forward, line.backward[:early], line.backward[-late:])
        sent = line.sent if degrees.pp * degrees.dp_shard * degrees.tp > 1 else ([], [], shape.collectives)
        found.append(
            _Run(shape, line.kept, tuple(map(summed, sent)), tuple(np.asarray(one, dtype=np.float64) for one in phases))
        )
    return found


def _scaled(
    model: VitSettings | GptSettings, settings: ParallelSettings, degrees: Degrees, inputs: Inputs,
    precision: Precision, *, last: bool,
) -> Shape:  # fmt: skip
    small = Degrees(
        pp=min(2, degrees.pp), dp_replicate=min(2, degrees.dp_replicate) if degrees.dp_shard == 1 else 1,
        dp_shard=_SHARDS if degrees.dp_shard > 1 else 1, tp=degrees.tp,
    )  # fmt: skip
    two = msgspec.structs.replace(inputs, micro_batch=_ROWS, micro_batches=2)
    same = "ddp" if settings.strategy == "zero1" else settings.strategy  # but for the moments
    how = msgspec.structs.replace(
        settings, strategy=same, mesh=str(small) if settings.mesh else None, micro_batches=2 if small.pp > 1 else None
    )
    rank = small.data * small.tp if last else 0
    runs = _small(model, how, small, two, precision, rank)
    blocks, rows = num_blocks(model) / degrees.pp, inputs.micro_batch

    def at(value: Callable[[_Run], float]) -> int:
        """Extrapolate a figure that is linear in blocks."""
        few, many = map(value, runs)
        return round(few + (blocks - _BLOCKS[0]) * (many - few))

    own, flop = at(lambda run: run.shape.parameters), at(lambda run: run.shape.flop // _ROWS * rows)
    divided = own * small.dp_shard // degrees.dp_shard
    kept, flying = at(lambda run: run.kept[0] + rows * run.kept[1]), 1
    order = [f"{way}{number}" for number in range(inputs.micro_batches) for way in "FB"]
    if degrees.pp > 1:
        stage = degrees.pp - 1 if last else 0
        flying = in_flight(settings.pipeline_schedule, degrees.pp, stage, inputs.micro_batches)
        order = schedule_order(settings.pipeline_schedule, degrees.pp, inputs.micro_batches)[stage]
    moments = _FP32 * MOMENTS[settings.optimiser] * divided
    if settings.strategy == "zero1" and settings.mesh is None:
        moments //= degrees.data
    largest = max(at(lambda run, phase=phase: _largest(run.phases[phase], rows)) for phase in range(3))  # type: ignore[misc]
    if small.dp_replicate > 1 and inputs.micro_batches == 1:
        largest -= _FP32 * own  # the gradients of an earlier micro-batch, beside DDP's buckets
    waiting = at(lambda run: run.shape.memory.get("inputs of other micro-batches", 0) // _ROWS)
    memory = {
        "pass": largest - _FP32 * (own - divided),  # what other ranks have does not lie here
        "moments": moments,
        "activations in flight": kept * (flying - 1),
        "inputs of other micro-batches": waiting * rows * (inputs.micro_batches - 1),
    }
    return Shape(
        rank=0, stage=degrees.pp - 1 if last else 0, parameters=divided, memory=memory,
        peak_bytes=sum(memory.values()), kept_bytes=kept, in_flight=flying, flop=flop,
        hidden_bytes=at(lambda run: run.shape.hidden_bytes // _ROWS * rows), micro_batches=inputs.micro_batches,
        collectives=_collectives(runs, at, degrees, inputs, order, own * small.dp_shard), repeated=[],
    )  # fmt: skip


def _largest(phase: NDArray[np.float64], rows: int) -> float:
    return float((phase @ np.array([1, rows])).max())


def _collectives(
    runs: list[_Run], at: Callable[[Callable[[_Run], float]], int], degrees: Degrees, inputs: Inputs,
    order: Sequence[str], whole: int,
) -> list[Collective]:  # fmt: skip
    """Those of a step of ``order``: gradients are reduced once, of ``whole`` parameters before they are sharded."""
    found = []
    for part, way in enumerate(("F", "B", "")):
        every, gathering = passes_of(order, way) if way else (1, 1)
        for one in runs[0].sent[part]:
            of_data = one.axis.startswith("dp_")
            times = 1 if of_data else every
            if is_gather_of_weights(one):  # without stages each pass gathers
                times = gathering if degrees.pp > 1 else every

            def of(run: _Run, like: Collective = one, part: int = part) -> Collective:
                return next(each for each in run.sent[part] if (each.kind, each.axis) == (like.kind, like.axis))

            def size(run: _Run, of: Callable[[_Run], Collective] = of, of_data: bool = of_data) -> int:
                grows, fixed = divmod(of(run).bytes, _ROWS)
                return of(run).bytes if of_data else fixed + grows * inputs.micro_batch

            count = times * at(lambda run, of=of: of(run).count)  # type: ignore[misc]
            ranks = {"dp_shard": degrees.dp_shard, "dp_replicate": degrees.dp_replicate}.get(one.axis, one.ranks)
            found.append(Collective(kind=one.kind, axis=one.axis, ranks=ranks, count=count, bytes=times * at(size)))
    if degrees.dp_shard > 1 and degrees.dp_replicate > 1:  # which the small runs do not have
        count = sum(one.count for one in found if (one.kind, one.axis) == ("reduce_scatter", "dp_shard"))
        size_of_shards = _FP32 * whole // degrees.dp_shard
        found.append(
            Collective(
                kind="all_reduce", axis="dp_replicate", ranks=degrees.dp_replicate, count=count, bytes=size_of_shards
            )
        )
    return summed(found)
