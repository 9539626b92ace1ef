"""Optimiser, learning rate and the norm of gradients, over tensors and DTensors of several meshes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from fuelrail.bench.trainer.strategies.precision import local_gradients

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from fuelrail.bench.trainer.strategies.settings import ParallelSettings

_MOMENTUM = 0.9


def make_optimiser(models: Iterable[nn.Module], settings: ParallelSettings, rate: float) -> Optimizer:
    """AdamW, or SGD with momentum; sharded over all ranks for zero1."""
    kind: type[Optimizer] = AdamW if settings.optimiser == "adamw" else SGD
    options: dict[str, Any] = {"lr": rate} if kind is AdamW else {"lr": rate, "momentum": _MOMENTUM}
    parameters = [p for model in models for p in model.parameters() if p.requires_grad]
    if settings.strategy == "zero1" and settings.mesh is None and dist.is_initialized():
        with warnings.catch_warnings():
            # Torch's own module compiles with what torch has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(parameters, kind, **options)
    return kind([{"params": part} for part in by_mesh(parameters)], **options)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of each mesh, and those of none: torch computes on lists of one kind only."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def make_schedule(optimiser: Optimizer, settings: ParallelSettings) -> LambdaLR:
    """Linear warm-up from 0, then a constant rate."""
    warmup = settings.rate_warmup
    return LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / warmup) if warmup else 1.0)


def scaled_rate(rate: float, settings: ParallelSettings, global_batch: int) -> float:
    """Learning rate in proportion to the global batch (arXiv 1706.02677), where it is given for a base batch."""
    return rate if settings.base_batch is None else rate * global_batch / settings.base_batch


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float, mesh: DeviceMesh | None) -> Tensor:
    """Scale all gradients so that their norm, over all ranks' parts, is at most ``largest``; return what it was."""
    groups = by_mesh(p for p in parameters if p.grad is not None)
    local_gradients(p for group in groups for p in group)  # sums what is still to be summed
    square = torch.zeros(())
    for group in groups:
        norm = get_total_norm([p.grad for p in group if p.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        square = square.to(whole.device) + whole.square()
    if mesh is not None and "pp" in (mesh.mesh_dim_names or ()):
        dist.all_reduce(square, group=mesh["pp"].get_group())
    total = square.sqrt()
    for group in groups:
        clip_grads_with_norm_(group, largest, total)
    return total
