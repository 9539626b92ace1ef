"""A shape from closed formulas alone: the fallback where this torch has moved what the planner runs.

Of a GPT under copies, ZeRO or sharding, tensor parallel and stages: weights and AdamW's moments in fp32 (arXiv
1910.02054), 16-bit activations of each layer (arXiv 2205.05198, table 2), FLOP of its equations 7 and 8, and a ring's
whole tensors. Kernels' own memory, gathered weights beyond two layers and padding are not in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.measure.collectives import Collective
from fuelrail.bench.planner.formulas import (
    Transformer,
    hardware_flop,
    in_flight,
    layer_activation_bytes,
    parameters,
    zero_state_bytes,
)
from fuelrail.bench.planner.shape import Inputs, Shape, check_schedule
from fuelrail.bench.planner.state import FP32, MOMENTS, zero_stage
from fuelrail.bench.trainer.models.settings import GptSettings, ModelSettings
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings


def closed_shape(
    model: ModelSettings, settings: ParallelSettings, degrees: Degrees, inputs: Inputs, stage: int
) -> Shape:
    """Shape the first rank of a stage by formulas. Raises ConfigError for models that they do not describe."""
    if not isinstance(model, GptSettings):
        raise ConfigError(
            f"closed formulas describe GPT models, and this one is {type(model).__name__}; install torch 2.13, with "
            "which the planner runs the model's own strategies"
        )
    check_schedule(settings, degrees)
    size = Transformer(
        layers=model.depth, hidden=model.width, heads=model.heads, seq=model.context, vocab=model.vocabulary
    )
    own = parameters(size) / (degrees.pp * degrees.tp)
    zero, shards = zero_stage(settings, degrees)
    state = zero_state_bytes(own, shards, zero, FP32, FP32, FP32 * MOMENTS[settings.optimiser])
    layers = model.depth / degrees.pp
    kept = layers * layer_activation_bytes(
        size, inputs.micro_batch, degrees.tp, recompute=settings.recompute, sequence_parallel=degrees.tp > 1, flash=True
    )
    flying = in_flight(settings.pipeline_schedule, degrees.pp, stage, inputs.micro_batches)
    memory = {
        "weights, gradients, moments": round(state),
        "gathered": round(2 * own / layers * FP32) if zero == 3 else 0,
        "activations": round(kept),
        "activations in flight": round(kept * (flying - 1)),
    }
    flop = hardware_flop(size, inputs.micro_batch, settings.recompute) / (degrees.pp * degrees.tp)
    return Shape(
        rank=stage * degrees.data * degrees.tp, stage=stage, parameters=round(own / (degrees.dp_shard)),
        memory=memory, peak_bytes=sum(memory.values()), kept_bytes=round(kept), in_flight=flying, flop=round(flop),
        hidden_bytes=2 * inputs.micro_batch * model.context * model.width // degrees.tp if degrees.pp > 1 else 0,
        micro_batches=inputs.micro_batches, collectives=_collectives(degrees, inputs, own, model), repeated=[],
    )  # fmt: skip


def _collectives(degrees: Degrees, inputs: Inputs, own: float, model: GptSettings) -> list[Collective]:
    """Weights twice and gradients once; around each layer's two halves, forward and backward, the hidden tensor."""
    found = []
    count, whole = inputs.micro_batches, round(FP32 * own)
    if degrees.dp_shard > 1:
        for kind, times in (("all_gather", 2 * count), ("reduce_scatter", 1)):
            found.append(
                Collective(kind=kind, axis="dp_shard", ranks=degrees.dp_shard, count=times, bytes=times * whole)
            )
    if degrees.dp_replicate > 1:
        size = whole // degrees.dp_shard
        found.append(
            Collective(kind="all_reduce", axis="dp_replicate", ranks=degrees.dp_replicate, count=1, bytes=size)
        )
    if degrees.tp > 1:
        hidden = 2 * inputs.micro_batch * model.context * model.width
        times = 4 * model.depth // degrees.pp * count
        found += [
            Collective(kind=kind, axis="tp", ranks=degrees.tp, count=times, bytes=times * hidden)
            for kind in ("all_gather", "reduce_scatter")
        ]
    return found
