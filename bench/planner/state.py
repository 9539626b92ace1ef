"""Weights, gradients and optimiser state of a strategy: their bytes on a rank, and whether they
fit in its memory.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from fuelrail.bench.planner.formulas import zero_state_bytes
from fuelrail.bench.planner.hardware import GIB
from fuelrail.bench.trainer.models.build import build_model, maker
from fuelrail.bench.trainer.models.settings import (
    MODELS,
    GptSettings,
    ModelSettings,
)
from fuelrail.bench.trainer.strategies.optimiser import DTYPES
from fuelrail.bench.trainer.strategies.parallel import units_of
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.runtime.stages import stage_error

if TYPE_CHECKING:
    from fuelrail.bench.trainer.strategies.settings import (
        Degrees,
        ParallelSettings,
        Precision,
    )

FP32 = 4
MOMENTS = {"adamw": 2, "sgd": 1}


class Counted(NamedTuple):
    """Numbers of a model: its parameters, those that are trained, those of its largest block,
    and its blocks.
    """

    total: int
    trained: int
    block: int
    blocks: int


@cache
def num_parameters(model: ModelSettings | str) -> Counted:
    """Count the parameters of a model on the meta device; a text is ``MODULE:FUNCTION``."""
    with torch.device("meta"):
        module: Any = make_own(model) if isinstance(model, str) else build_model(model)
    units = units_of(module, ())
    blocks = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]
    total = 0
    trained = 0
    for parameter in module.parameters():
        total += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()
    return Counted(
        total=total,
        trained=trained,
        block=max(blocks, default=0),
        blocks=len(units),
    )


def expert_parameters(model: GptSettings) -> int:
    """Return the number of parameters of all experts of a block; 0 for a block of one
    perceptron.
    """
    if model.experts == 1:
        return 0
    inner = model.ffn or 4 * model.width
    num_matrices = 3 if model.gated else 2
    matrices = num_matrices * model.width * inner
    biases = (num_matrices - 1) * inner + model.width
    return model.experts * (matrices + biases)


def make_own(name: str) -> Any:
    """Make the module that a name of ours or ``MODULE:FUNCTION`` says, on torch's default device.

    Raises ConfigError where that is no module, and StageError for an error of the function's own.
    """
    make = maker(name)
    try:
        module = make()
    except FuelrailError:
        raise
    except Exception as error:
        raise stage_error(f"model '{name}' cannot be made", error) from error
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"model '{name}' returned {type(module).__name__}, and a torch.nn.Module is "
            "needed; name a function without arguments that makes one"
        )
    return module


def zero_stage(settings: ParallelSettings, degrees: Degrees) -> tuple[int, int]:
    """Return the stage of ZeRO that a strategy is, 0 for none, and the number of ranks that
    share.
    """
    if settings.shards_optimiser:
        return 1, degrees.data
    if degrees.dp_shard == 1:
        return 0, 1
    stage = 2 if settings.strategy == "zero2" else 3
    return stage, degrees.dp_shard


class State(NamedTuple):
    """Bytes on a rank."""

    weights: float
    gradients: float
    optimiser: float


def state_of(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    precision: Precision,
    *,
    low: bool = False,
    gradient_bytes: int = FP32,
    tied_parameters: int = 0,
    expert_parallel: int = 1,
) -> State:
    """Return weights, gradients and optimiser state on one rank (arXiv 1910.02054, section 3.1).

    Tensor parallel and pipelines are taken to divide everything, which is the least. ``low``:
    weights in 16 bits, and gradients of ``gradient_bytes``; ``tied_parameters`` are those that two
    layers share. Of ``expert_parallel`` ranks each has its part of the experts, which fewer ranks
    share than the rest.
    """
    stage, ranks = zero_stage(settings, degrees)
    # ZeRO-2 keeps what it gathered, in the precision of computing, beside the shards that the
    # optimiser updates.
    weights = DTYPES[precision].itemsize + FP32 / ranks if stage == 2 else FP32
    moments = FP32 * MOMENTS[settings.optimiser]
    if low:  # 16-bit weights, of which the optimiser has a copy in fp32
        weights = FP32 / 2 * (1 + (stage == 2) / ranks)
        moments = moments + FP32
        if stage == 0:
            stage = 1
            ranks = degrees.data
    counted = num_parameters(model)
    experts = 0
    if isinstance(model, GptSettings):
        experts = expert_parameters(model) * model.depth
    dense = counted.trained - tied_parameters - experts
    experts_of_rank = experts / expert_parallel
    ranks_of_expert = max(1, ranks // expert_parallel)
    grad = gradient_bytes if low else FP32
    frozen_shards = ranks if stage == 3 else 1
    frozen = (counted.total - counted.trained) * weights / frozen_shards
    parts = []
    for param_bytes, grad_bytes, optimiser_bytes in (
        (weights, 0, 0),
        (0, grad, 0),
        (0, 0, moments),
    ):
        bytes_of = partial(
            zero_state_bytes,
            stage=stage,
            param_bytes=param_bytes,
            grad_bytes=grad_bytes,
            optimiser_bytes=optimiser_bytes,
        )
        dense_bytes = bytes_of(dense, ranks=ranks)
        expert_bytes = bytes_of(experts_of_rank, ranks=ranks_of_expert)
        parts.append(dense_bytes + expert_bytes)
    parts[0] += frozen
    return State(*(part / degrees.pp / degrees.tp for part in parts))


def state_bytes(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    precision: Precision,
) -> float:
    """Return the bytes of the state in all, as :func:`state_of`."""
    return sum(state_of(model, settings, degrees, precision))


def least_bytes(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    precision: Precision,
) -> int:
    """Return the least bytes that a rank has at once, with shards also the largest block in full
    with its gradient.

    Activations come on top.
    """
    block = num_parameters(model).block
    state = 0.0 if settings.offload else state_bytes(model, settings, degrees, precision)
    gathered = 2 * FP32 * block / degrees.tp if degrees.dp_shard > 1 else 0.0
    return round(state + gathered)


def check_memory(
    name: str,
    settings: ParallelSettings,
    degrees: Degrees,
    precision: Precision,
    available: int,
    *,
    alone: bool,
) -> None:
    """Check that the state of a model fits in the ``available`` bytes of a rank.

    ``alone``: the rank's memory is its own, as a GPU's, so that more ranks bring more of it; else
    it is the host's, to which an offload moves nothing. Raises ConfigError, which says what would
    fit.
    """
    model: ModelSettings | str = MODELS.get(name, name)
    settings = settings if alone else msgspec.structs.replace(settings, offload=False)
    needed_bytes = least_bytes(model, settings, degrees, precision)
    if needed_bytes <= available:
        return

    def fits(size: ModelSettings | str, dp_shard: int = degrees.dp_shard) -> bool:
        divided = degrees._replace(dp_shard=dp_shard)
        return least_bytes(size, settings, divided, precision) <= available

    more = (2**power for power in range(1, 13) if alone and 2**power > degrees.dp_shard)
    changes = [f"dp_shard={degree}" for degree in more if fits(model, degree)][:1]
    sizes = {word: size for word, size in MODELS.items() if type(size) is type(model)}
    changes += [f"model {word}" for word, size in sizes.items() if fits(size)][-1:]
    remedy = "no degree of sharding makes it fit here"
    if changes:
        remedy = f"it would fit with {' or '.join(changes)}"
    raise ConfigError(
        f"model '{name}' needs at least {needed_bytes / GIB:.1f} GiB on each rank for weights, "
        f"gradients and {settings.optimiser}, and {available / GIB:.1f} GiB are available "
        f"({degrees}); {remedy}"
    )
