"""What a checkpoint holds: tensors by name, whole over all ranks, and a manifest.

Names are those of the whole model on one process: no wrapper, stage or rank is in them. So a checkpoint of one mesh
restores on any other; each rank asks for the tensors, or the parts of DTensors, that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from fuelrail.bench.trainer.strategies.parallel import parameters_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.metadata import Metadata

    from fuelrail.bench.trainer.strategies.parallel import Parallel


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The file ``checkpoint.json``: what is not a tensor, and the bytes and digest (xxh3) of each file by name.

    ``step`` steps were done. ``identity`` says what was trained. ``progress`` holds the states of loader, schedule and
    scaler as plain JSON, and the learning rate.
    """

    step: int
    world_size: int
    identity: dict[str, str]
    progress: dict[str, Any]
    files: dict[str, tuple[int, str]]


def tensors_of(parallel: Parallel, rank: int) -> dict[str, Tensor]:
    """The tensors of this rank by name, as they are: model, optimiser, and this rank's random generators."""
    tensors = model_tensors(parallel)
    state = _inner(parallel.optimiser).state
    for name, parameter in parameters_of(parallel.models):
        for key, value in state.get(parameter, {}).items():
            if value is not None:  # the momentum of a parameter that has had no gradient
                tensors[f"optimiser.{name}.{key}"] = value
    return tensors | {f"rng.{rank}.{device}": state for device, state in _generators().items()}


def model_tensors(parallel: Parallel) -> dict[str, Tensor]:
    """Parameters and buffers of this rank's part of the model."""
    states = (cast("dict[str, Tensor]", get_model_state_dict(module)) for module in parallel.models)
    return {f"model.{name}": value for state in states for name, value in state.items()}


def targets_of(parallel: Parallel, saved: Metadata, rank: int, world_size: int) -> dict[str, Tensor]:
    """Tensors to load into: the model's own, and new ones where the saved state has more than a fresh optimiser.

    A rank that was not there when the state was saved takes the generators of rank ``rank % world_size``.
    """
    targets = model_tensors(parallel)
    known = {name: item for name, item in saved.state_dict_metadata.items() if isinstance(item, TensorStorageMetadata)}
    moments: dict[str, list[str]] = {}
    for name in known:
        if name.startswith("optimiser."):
            moments.setdefault(name.removeprefix("optimiser.").rpartition(".")[0], []).append(name)
    optimiser = _inner(parallel.optimiser)
    mine = {parameter for group in optimiser.param_groups for parameter in group["params"]}
    on_device = any(group.get("fused") or group.get("capturable") for group in optimiser.param_groups)
    for name, parameter in parameters_of(parallel.models):
        for moment in moments.get(name, []) if parameter in mine else []:
            item = known[moment]
            if item.size == parameter.shape:
                targets[moment] = torch.zeros_like(parameter, dtype=item.properties.dtype, requires_grad=False)
            else:  # a counter of steps
                device = parameter.device if on_device else "cpu"
                targets[moment] = torch.zeros(item.size, dtype=item.properties.dtype, device=device)
    for device in _generators():
        if (name := f"rng.{rank % world_size}.{device}") in known:
            targets[name] = torch.empty(known[name].size, dtype=torch.uint8)
    return targets


def put_back(parallel: Parallel, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    """Give the loaded state to optimiser, generators, schedule and scaler; the model's tensors were loaded in place."""
    moments: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            parameter_name, _, key = name.removeprefix("optimiser.").rpartition(".")
            moments.setdefault(parameter_name, {})[key] = value
    optimiser = _inner(parallel.optimiser)
    for name, parameter in parameters_of(parallel.models):
        if name in moments:
            optimiser.state[parameter] = moments[name]
    for name, value in tensors.items():
        if name.startswith("rng."):
            torch.set_rng_state(value) if name.endswith(".cpu") else torch.cuda.set_rng_state(value)
    groups = parallel.optimiser.param_groups
    for group in groups:
        group["lr"] = progress["learning_rate"]
    if parallel.schedule is not None:
        own = parallel.schedule.state_dict()
        # Of a list there was one entry for each group of parameters, all alike.
        state = {k: [v] * len(groups) if isinstance(own.get(k), list) else v for k, v in progress["schedule"].items()}
        parallel.schedule.load_state_dict(state)
    if parallel.scaler is not None and progress["scaler"] is not None:
        parallel.scaler.load_state_dict(dict(progress["scaler"]))


def progress_of(parallel: Parallel, loader_state: Mapping[str, Any]) -> dict[str, Any]:
    """What is not a tensor, as plain JSON types.

    The number of the optimiser's groups depends on the mesh; all of them have the same learning rate.
    """
    (rate,) = {float(group["lr"]) for group in parallel.optimiser.param_groups}
    schedule = {} if parallel.schedule is None else parallel.schedule.state_dict()
    return {
        "loader": dict(loader_state),
        "learning_rate": rate,
        "schedule": {key: value[0] if isinstance(value, list) else value for key, value in schedule.items()},
        "scaler": None if parallel.scaler is None else parallel.scaler.state_dict(),
    }


def parameters_digest(parallel: Parallel) -> str:
    """xxh3 (hex) over the bytes of all parameters, in order; equal on ranks that agree. All ranks must call this."""
    digest = xxhash.xxh3_64()
    for model in parallel.models:
        for parameter in model.parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(whole.detach().cpu().contiguous().numpy().tobytes())
    digests = [digest.hexdigest()]
    if parallel.mesh is not None and "pp" in (parallel.mesh.mesh_dim_names or ()):
        group = parallel.mesh["pp"].get_group()
        digests *= dist.get_world_size(group)
        dist.all_gather_object(digests, digest.hexdigest(), group=group)
    return digests[0] if len(digests) == 1 else xxhash.xxh3_64_hexdigest("".join(digests).encode())


def _inner(optimiser: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser that has the state: the one inside ZeroRedundancyOptimizer, for this rank's share of parameters."""
    # Not by its class: the import of torch.distributed.optim takes long, and warns.
    inner = getattr(optimiser, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimiser


def _generators() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})  # type: ignore[no-untyped-call]
