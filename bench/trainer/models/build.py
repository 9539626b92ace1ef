"""A model from its settings: whole, or without memory until it is divided."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset,
)
from torch.nn.modules.module import register_module_module_registration_hook

from fuelrail.bench.trainer.models.bev import BevOccupancy
from fuelrail.bench.trainer.models.gpt import Gpt
from fuelrail.bench.trainer.models.resnet import ResNet
from fuelrail.bench.trainer.models.settings import (
    MODELS,
    BevSettings,
    GptSettings,
    ModelSettings,
    ResNetSettings,
    import_function,
)
from fuelrail.bench.trainer.models.vit import MultiCameraVit

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.staged import StagedModel

_LOG = logging.getLogger(__name__)

Fill = Callable[[Collection[nn.Module], bool], None]
"""Gives parts of a model that was made without memory their values; True: in host memory, for an
offload.
"""


def build_model(settings: ModelSettings) -> StagedModel:
    """Make the model on torch's default device (``with torch.device("meta")`` for shapes only)."""
    if isinstance(settings, BevSettings):
        return BevOccupancy(settings)
    if isinstance(settings, ResNetSettings):
        return ResNet(settings)
    if isinstance(settings, GptSettings):
        return Gpt(settings)
    return MultiCameraVit(settings)


def maker(name: str) -> Callable[[], nn.Module]:
    """Return what makes a model: one of ours by its name, or what ``MODULE:FUNCTION`` names."""
    if name in MODELS:
        return partial(build_model, MODELS[name])
    function: Callable[[], nn.Module] = import_function(name)
    return function


def draft(make: Callable[[], nn.Module], device: str, seed: int) -> tuple[Any, Fill]:
    """Make a model without memory, on the meta device; the function beside it gives parts of it
    what ``make`` gives it.

    Filling makes the model once more and keeps of each module this rank's share as soon as another
    one has it as a part: so a rank never has the whole of more than one, and any division starts
    from the weights that the seed gives the undivided model. A model that changes parameters later,
    or that ties some, is made whole once on each rank's host, with a warning.
    """
    modules: list[nn.Module] = []  # in the order in which they are made, which is always the same
    with torch.device("meta"), _seeing(modules.append):
        model = make()
    modules.append(model)
    parts_of_model = list(model.modules())
    name_of_model = type(model).__name__
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    num_parameters = 0
    for part in parts_of_model:
        for name, value in part.named_parameters(recurse=False):
            owners[value] = part, name
            num_parameters += 1
    tied = num_parameters != len(owners)
    places = []
    for submodule in modules:
        parameters = submodule.named_parameters(recurse=False)
        places.append({name: owners.get(value) for name, value in parameters})

    def fill(parts: Collection[nn.Module], offload: bool) -> None:
        for part in parts:
            part.to_empty(device="cpu" if offload else device)
        modules_kept = {module for part in parts for module in part.modules()}
        missing = {place for place in owners.values() if place[0] in modules_kept}
        released: list[tuple[nn.Parameter, int]] = []  # with torch's count of changes in place
        following = iter(places)

        def keep_share(new_module: nn.Module) -> None:
            place = next(following)
            for name, value in list(new_module.named_parameters(recurse=False)):
                target = place.get(name)
                if value.is_meta or target is None:
                    continue
                if target in missing:
                    owner, name_in_owner = target
                    copy_share(value, owner.get_parameter(name_in_owner))
                    missing.remove(target)
                placeholder = nn.Parameter(value.to("meta"), value.requires_grad)
                setattr(new_module, name, placeholder)
                released.append((placeholder, placeholder._version))  # noqa: SLF001

        torch.manual_seed(seed)
        with nullcontext() if tied else _seeing(keep_share):
            full_model = make()
        if not tied:
            keep_share(full_model)
        is_changed = any(placeholder._version != version for placeholder, version in released)  # noqa: SLF001
        if missing or is_changed:
            _LOG.warning(
                "%s ties parameters or changes them after a module has them as its parts: "
                "each rank makes it whole on its host once; to avoid that, let each module "
                "set its own parameters in its constructor",
                name_of_model,
            )
            if not tied:
                torch.manual_seed(seed)
                full_model = make()
            for target, new_module in zip(parts_of_model, full_model.modules(), strict=True):
                if target in modules_kept:
                    for name, value in new_module.named_parameters(recurse=False):
                        copy_share(value, target.get_parameter(name))
        for target, new_module in zip(parts_of_model, full_model.modules(), strict=True):
            if target in modules_kept:
                for name, buffer in new_module.named_buffers(recurse=False):
                    setattr(target, name, buffer.to(device))

    return model, fill


@torch.no_grad()
def copy_share(tensor: Tensor, share: Tensor) -> None:
    """Copy this rank's share of a tensor."""
    if isinstance(share, DTensor):
        sizes, starts = compute_local_shape_and_global_offset(
            share.shape, share.device_mesh, share.placements
        )
        for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            start_inside = min(start, tensor.shape[axis])
            tensor = tensor.narrow(axis, start_inside, size)
        share = share.to_local()
    share.copy_(tensor)


@contextmanager
def _seeing(see: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``see`` with each module once another one has it as a part, and so once it is made."""

    def see_part(_parent: nn.Module, _name: str, part: Any) -> None:
        see(part)

    handle = register_module_module_registration_hook(see_part)
    try:
        yield
    finally:
        handle.remove()
