"""Shapes of transformers by arithmetic from four small runs: 3 and 4 blocks a stage, micro-batches of 2 and 4.

FLOP, parameters, collectives and what a pass keeps are linear in blocks and, apart from parameters, in the micro-batch.
Memory after each operator is linear in the micro-batch, so its peak is the largest of many lines. Over blocks, the
peaks of the forward pass, and of the earlier and the later half of the backward pass, are linear. What ranks share
is divided by their number. Padding of small shards is not in it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from fuelrail.bench.measure.collectives import Collective
from fuelrail.bench.planner.shape import MOMENTS, Inputs, Line, Shape, in_flight, shape_of
from fuelrail.bench.trainer.models.settings import GptSettings, VitSettings, num_blocks
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings, Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from fuelrail.bench.trainer.models.settings import ModelSettings

_BLOCKS, _ROWS = (3, 4), (2, 4)
_SHARDS = 8  # of the small runs
_FP32 = 4


class _Run(NamedTuple):
    shape: Shape
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
) -> dict[tuple[int, int], _Run]:
    found = {}
    for blocks in _BLOCKS:
        for rows in _ROWS:
            line = Line()
            size = msgspec.structs.replace(model, depth=blocks * degrees.pp)
            given = msgspec.structs.replace(inputs, micro_batch=rows)
            shape = shape_of(size, settings, degrees, given, rank=rank, precision=precision, line=line)
            middle = len(line.backward) // 2
            phases = (line.forward, line.backward[:middle], line.backward[middle:])
            found[blocks, rows] = _Run(shape, tuple(np.asarray(one, dtype=np.float64) for one in phases))
    return found


def _scaled(
    model: VitSettings | GptSettings, settings: ParallelSettings, degrees: Degrees, inputs: Inputs,
    precision: Precision, *, last: bool,
) -> Shape:  # fmt: skip
    small = Degrees(
        pp=min(2, degrees.pp), dp_replicate=degrees.dp_replicate if degrees.dp_shard == 1 else 1,
        dp_shard=_SHARDS if degrees.dp_shard > 1 else 1, tp=degrees.tp,
    )  # fmt: skip
    two = msgspec.structs.replace(inputs, micro_batches=2)
    same = "ddp" if settings.strategy == "zero1" else settings.strategy  # but for the moments
    how = msgspec.structs.replace(
        settings, strategy=same, mesh=str(small) if settings.mesh else None, micro_batches=2 if small.pp > 1 else None
    )
    rank = small.data * small.tp if last else 0
    runs = _small(model, how, small, msgspec.structs.replace(two, micro_batch=1), precision, rank)
    blocks, rows = num_blocks(model) / degrees.pp, inputs.micro_batch

    def at(value: Callable[[Shape], float]) -> int:
        """Extrapolate a figure that is linear in blocks and in rows."""
        first, second = _BLOCKS
        by_rows = [_on_line(rows, value(runs[some, 2].shape), value(runs[some, 4].shape)) for some in (first, second)]
        return round(by_rows[0] + (blocks - first) * (by_rows[1] - by_rows[0]))

    own = at(lambda shape: shape.parameters)
    divided = own * small.dp_shard // degrees.dp_shard
    kept, flying = at(lambda shape: shape.kept_bytes), 1
    if degrees.pp > 1:
        stage = degrees.pp - 1 if last else 0
        flying = in_flight(settings.pipeline_schedule, degrees.pp, stage, inputs.micro_batches)
    moments = _FP32 * MOMENTS[settings.optimiser] * divided
    if settings.strategy == "zero1" and settings.mesh is None:
        moments //= degrees.data
    memory = {
        "pass": round(_peak(runs, blocks, rows) - _FP32 * (own - divided)),
        "moments": moments,
        "activations in flight": kept * (flying - 1),
    }
    return Shape(
        rank=0, stage=degrees.pp - 1 if last else 0, parameters=divided, memory=memory,
        peak_bytes=sum(memory.values()), kept_bytes=kept, in_flight=flying, flop=at(lambda shape: shape.flop),
        hidden_bytes=at(lambda shape: shape.hidden_bytes), micro_batches=inputs.micro_batches,
        collectives=_collectives(runs, at, degrees, inputs.micro_batches), repeated=[],
    )  # fmt: skip


def _on_line(rows: int, few: float, many: float) -> float:
    return few + (rows - _ROWS[0]) * (many - few) / (_ROWS[1] - _ROWS[0])


def _peak(runs: dict[tuple[int, int], _Run], blocks: float, rows: int) -> float:
    peaks = []
    share = (rows - _ROWS[0]) / (_ROWS[1] - _ROWS[0])
    for phase in range(3):
        found = []
        for some in _BLOCKS:
            few, many = (runs[some, number].phases[phase] for number in _ROWS)
            if len(few) == len(many):
                found.append(float((few + share * (many - few)).max()))
            else:  # some tensors were copied in one of them only
                found.append(_on_line(rows, float(few.max()), float(many.max())))
        peaks.append(found[0] + (blocks - _BLOCKS[0]) * (found[1] - found[0]))
    return max(peaks)


def _collectives(
    runs: dict[tuple[int, int], _Run], at: Callable[[Callable[[Shape], float]], int], degrees: Degrees, count: int
) -> list[Collective]:
    """Those of a step: a reduction of gradients once, everything else with each micro-batch."""
    found = []
    for one in runs[_BLOCKS[0], _ROWS[0]].shape.collectives:
        once = one.axis.startswith("dp_") and one.kind != "all_gather"

        def of(shape: Shape, name: str, like: Collective = one) -> float:
            return float(
                next(
                    getattr(each, name)
                    for each in shape.collectives
                    if (each.kind, each.axis) == (like.kind, like.axis)
                )
            )

        times = 1.0 if once else count / 2
        ranks = {"dp_shard": degrees.dp_shard, "dp_replicate": degrees.dp_replicate}.get(one.axis, one.ranks)
        found.append(
            Collective(
                kind=one.kind, axis=one.axis, ranks=ranks,
                count=round(times * at(lambda shape, of=of: of(shape, "count"))),  # type: ignore[misc]
                bytes=round(times * at(lambda shape, of=of: of(shape, "bytes"))),  # type: ignore[misc]
            )
        )  # fmt: skip
    return found
