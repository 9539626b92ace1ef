"""Precision, optimiser, and the norm of gradients, over tensors and DTensors of several meshes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer

from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from fuelrail.bench.trainer.strategies.settings import (
        ParallelSettings,
        Precision,
    )

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MOMENTUM = 0.9

Named = list[tuple[str, nn.Parameter]]
"""Parameters that are trained, by their names in the undivided model."""


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Compute in the precision what torch's autocast says can be; weights stay fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision])


def usual_optimiser(named: Named, settings: ParallelSettings) -> Optimizer:
    """Make AdamW, or SGD with a momentum of 0.9, of all parameters."""
    parameters = [parameter for _, parameter in named]
    rate = settings.learning_rate
    if settings.optimiser == "adamw":
        return AdamW(parameters, rate)
    return SGD(parameters, rate, _MOMENTUM)


def make_optimiser(
    named: Named,
    make: Callable[[Named], Optimizer],
    *,
    sharded: bool,
) -> Optimizer:
    """Make an optimiser of named parameters; with ``sharded`` each rank has the state of some of
    them.
    """
    optimiser = make(named)
    groups = []
    for group in optimiser.param_groups:
        settings = {name: value for name, value in group.items() if name != "param_names"}
        for part in _by_mesh(group["params"]):
            group_of_mesh = {**settings, "params": part}
            groups.append(group_of_mesh)
    if not sharded:
        optimiser.param_groups = groups
        return optimiser
    with warnings.catch_warnings():
        # Torch's own module compiles with what torch has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    parameters = inspect.signature(type(optimiser)).parameters
    options = {name: value for name, value in optimiser.defaults.items() if name in parameters}
    return ZeroRedundancyOptimizer(groups, type(optimiser), **options)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters of each mesh, and those of none: torch computes on lists of one kind
    only.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    largest: float,
    pipeline: dist.ProcessGroup | None,
) -> None:
    """Scale all gradients so that their norm, over all ranks' parts and stages, is at most
    ``largest``.
    """
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    # By the groups of ranks that have a part each. DTensor's own norm warns on every rank where two
    # axes divide it.
    divided: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    gradients = _local_gradients(with_gradients)
    for parameter, gradient in zip(with_gradients, gradients, strict=True):
        groups = list[dist.ProcessGroup]()
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    group = parameter.device_mesh.get_group(axis)
                    groups.append(group)
        divided.setdefault(tuple(groups), []).append(gradient)
    if not divided:
        divided[()] = []
    squares = {}
    for shared, gradients in divided.items():
        squares[shared] = get_total_norm(gradients).square()
    for shared, square in squares.items():
        for group in shared:
            dist.all_reduce(square, group=group)
    square = torch.stack(list(squares.values())).sum()
    if pipeline is not None:
        dist.all_reduce(square, group=pipeline)
    for same_mesh in _by_mesh(with_gradients):
        clip_grads_with_norm_(same_mesh, largest, square.sqrt())


def _local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's parts of all gradients, summed over the ranks where that is still to be
    done.
    """
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            gradients.append(gradient.to_local())
        elif gradient is not None:
            gradients.append(gradient)
    return gradients


class SharedGradScaler(torch.amp.GradScaler):
    """Torch's GradScaler for gradients that are divided over ranks, as tensors and DTensors of
    several meshes.

    A step is skipped on all ranks if one of them has a gradient that is not finite. ``num_skipped``
    counts those in a row; at ``max_skipped`` :meth:`unscale_` raises FuelrailError, which shows the
    scaler's state.
    """

    def __init__(self, device: str, max_skipped: int, *, enabled: bool = True) -> None:
        # A sixteenth of torch's scale: most models then skip none of their first steps, and it
        # grows.
        super().__init__(device, init_scale=2.0**12, enabled=enabled)
        self.num_skipped = 0
        self._max_skipped = max_skipped

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        *_: object,
    ) -> dict[torch.device, Tensor]:
        parameters = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        gradients = _local_gradients(parameters)
        for gradient in gradients:
            gradient.mul_(inv_scale.to(gradient.device))
        is_finite = get_total_norm(gradients).isfinite()
        found_inf.copy_(is_finite.logical_not())
        if dist.is_initialized():
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        self.num_skipped = self.num_skipped + 1 if bool(found_inf) else 0
        if self.num_skipped >= self._max_skipped:
            raise FuelrailError(
                f"{self.num_skipped} steps in a row had gradients that are not finite, and "
                f"were skipped; the loss scale is {self.get_scale():g} by now; lower the "
                "learning rate, clip gradients, or use bf16"
            )
        return {found_inf.device: found_inf}
