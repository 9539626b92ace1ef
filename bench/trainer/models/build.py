"""A model from its settings: whole, or without memory until it is divided."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_module_registration_hook

from fuelrail.bench.trainer.models.bev import BevOccupancy
from fuelrail.bench.trainer.models.gpt import Gpt
from fuelrail.bench.trainer.models.resnet import ResNet
from fuelrail.bench.trainer.models.settings import BevSettings, GptSettings, ModelSettings, ResNetSettings
from fuelrail.bench.trainer.models.vit import MultiCameraVit

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.staged import StagedModel


def build_model(settings: ModelSettings) -> StagedModel:
    """Make the model on torch's default device (``with torch.device("meta")`` for shapes only)."""
    if isinstance(settings, BevSettings):
        return BevOccupancy(settings)
    if isinstance(settings, ResNetSettings):
        return ResNet(settings)
    return Gpt(settings) if isinstance(settings, GptSettings) else MultiCameraVit(settings)


def draft(make: Callable[[], StagedModel], device: str, seed: int) -> StagedModel:
    """Make a model without memory, on the meta device; its ``fill`` gives parts of it what ``make`` gives the whole.

    Filling makes the model once more and keeps of each module this rank's share as soon as it is made: so a rank never
    has the whole of more than one, and any division starts from the weights that the seed gives the undivided model.
    """
    modules: list[nn.Module] = []  # in the order in which they are made, which is always the same
    with torch.device("meta"), _seeing(modules.append):
        model = make()

    def fill(parts: Collection[nn.Module], offload: bool) -> None:
        for part in parts:
            part.to_empty(device="cpu" if offload else device)
        kept, targets = {module for part in parts for module in part.modules()}, iter(modules)

        def keep_share(made: nn.Module) -> None:
            target = next(targets)
            for name, value in list(made.named_parameters(recurse=False)):
                if target in kept and not value.is_meta:
                    _copy(value, target.get_parameter(name))
                setattr(made, name, nn.Parameter(value.to("meta"), value.requires_grad))
            if target in kept:
                for name, buffer in made.named_buffers(recurse=False):
                    setattr(target, name, buffer.to(device))

        torch.manual_seed(seed)
        with _seeing(keep_share):
            make()

    model.fill = fill
    return model


@torch.no_grad()
def _copy(whole: Tensor, share: Tensor) -> None:
    """Copy this rank's share of a tensor."""
    if isinstance(share, DTensor):
        sizes, starts = compute_local_shape_and_global_offset(share.shape, share.device_mesh, share.placements)
        for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            whole = whole.narrow(axis, min(start, whole.shape[axis]), size)
        share = share.to_local()
    share.copy_(whole)


@contextmanager
def _seeing(see: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``see`` with each module once another one has it as a part, and so once it is made."""
    handle = register_module_module_registration_hook(lambda parent, name, part: see(part))  # noqa: ARG005 - torch's
    try:
        yield
    finally:
        handle.remove()
