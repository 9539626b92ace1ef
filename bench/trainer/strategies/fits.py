"""Does a model fit in memory? Checked before it is made, from its shapes on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import ModelSettings
    from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings

_FP32 = 4
_MOMENTS = {"adamw": 2, "sgd": 1}


def state_bytes(model: ModelSettings, settings: ParallelSettings, degrees: Degrees) -> int:
    """Bytes of weights, gradients and optimiser state on one rank, in fp32 (arXiv 1910.02054, section 3.1).

    With shards also the largest block in full, with its gradient. Activations come on top. Tensor parallel and
    pipelines are taken to divide everything, which is the least.
    """
    with torch.device("meta"):
        made = build_model(model)
    numbers: list[int] = [sum(p.numel() for p in part.parameters()) for part in (made, *made.blocks)]
    number, block = numbers[0] / degrees.tp / degrees.pp, max(numbers[1:], default=0) / degrees.tp
    moments = _MOMENTS[settings.optimiser] * number
    if settings.shards_optimiser:
        moments /= degrees.data
    if degrees.dp_shard == 1:
        return round(_FP32 * (2 * number + moments))
    kept = 0 if settings.offload else (2 * number + moments) / degrees.dp_shard
    return round(_FP32 * (kept + 2 * block))


def check_memory(name: str, settings: ParallelSettings, degrees: Degrees, available: int, *, alone: bool) -> None:
    """Check that the state of a model fits in the ``available`` bytes of a rank.

    ``alone``: the rank's memory is its own, as a GPU's, so that more ranks bring more of it. Raises ConfigError, which
    says what would fit.
    """
    model = MODELS[name]
    needed = state_bytes(model, settings, degrees)
    if needed <= available:
        return

    def fits(size: ModelSettings, dp_shard: int = degrees.dp_shard) -> bool:
        return state_bytes(size, settings, degrees._replace(dp_shard=dp_shard)) <= available

    more = (2**power for power in range(1, 13) if alone and 2**power > degrees.dp_shard)
    would = [f"dp_shard={degree}" for degree in more if fits(model, degree)][:1]
    would += [f"model {other}" for other, size in MODELS.items() if type(size) is type(model) and fits(size)][-1:]
    raise ConfigError(
        f"model '{name}' needs at least {needed / 2**30:.1f} GiB on each rank for weights, gradients and "
        f"{settings.optimiser}, and {available / 2**30:.1f} GiB are available ({degrees}); "
        + (f"it would fit with {' or '.join(would)}" if would else "no degree of sharding makes it fit here")
    )
