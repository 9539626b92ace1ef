"""Who am I: this process's data-parallel rank and the number of ranks, under any kind of parallelism.

Ranks that work on one copy of the model's input (tensor, pipeline and context parallel) form one data-parallel rank:
each of them runs a loader, and all get the same batches. Where the answer comes from, first that applies:

1. what the caller says: a `World`, or a `DeviceMesh` whose axis names tell data from model parallelism;
2. Megatron-Core's parallel state, once initialised;
3. torch.distributed, once initialised: every rank a data-parallel one;
4. the launcher's RANK and WORLD_SIZE;
5. one rank of one.
"""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from fuelrail.pipeline.errors import WorldError
from fuelrail.pipeline.world import World

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.distributed.device_mesh import DeviceMesh

DATA_AXES: Final = frozenset(
    {
        *("dp", "data", "data_parallel", "batch", "ddp", "fsdp", "hsdp"),
        *("dp_replicate", "dp_shard", "replicate", "shard", "replica"),
    }
)
"""Mesh axes along which ranks get different samples; HSDP's two axes together are data parallel."""

MODEL_AXES: Final = frozenset(
    {
        *("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel"),
        *("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
        *("cp", "context", "context_parallel", "sp", "seq", "sequence", "sequence_parallel", "spatial"),
    }
)
"""Mesh axes along which ranks share their samples."""


def resolve_world(world: World | DeviceMesh | None) -> World:
    """The data-parallel world from what a loader was given; None looks around (:func:`detect_world`)."""
    if isinstance(world, World):
        return world
    if world is not None and not hasattr(world, "mesh_dim_names"):
        raise WorldError(f"world={world!r} is neither a World(rank, size) nor a DeviceMesh")
    return detect_world() if world is None else mesh_world(world)


def mesh_world(mesh: DeviceMesh, data_axes: Collection[str] | None = None) -> World:
    """The data-parallel world of a device mesh.

    ``data_axes`` names the axes along which ranks get different samples; None: those in ``DATA_AXES``, where every
    other axis must be in ``MODEL_AXES``. The rank counts row by row in the mesh's order of axes, so that HSDP's
    ("dp_replicate", "dp_shard") is counted as one axis would be. A mesh of one axis without a name is data parallel.

    Raises WorldError for an axis that could be either, and on a process that is not part of the mesh.
    """
    names = tuple(mesh.mesh_dim_names or ())
    sizes = tuple(mesh.shape)
    if not names:
        if len(sizes) != 1:
            raise WorldError(
                f"a device mesh of shape {sizes} without mesh_dim_names does not tell data from model parallelism: "
                'name its axes, e.g. init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))'
            )
        names = ("dp",)
    if data_axes is not None:
        unknown = sorted(set(data_axes) - set(names))
        if unknown:
            raise WorldError(f"data_axes names {', '.join(unknown)}, but the mesh's axes are {', '.join(names)}")
    else:
        unclear = [name for name in names if name not in DATA_AXES | MODEL_AXES]
        if unclear:
            raise WorldError(
                f"device mesh axis {unclear[0]!r} of {names} may be data or model parallel; data-parallel names: "
                f"{', '.join(sorted(DATA_AXES))}; model-parallel ones: {', '.join(sorted(MODEL_AXES))}; say it with "
                "fuelrail.loaders.mesh_world(mesh, data_axes=(...)) and hand over the World it returns"
            )
        data_axes = DATA_AXES
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise WorldError(f"this process is not part of the device mesh {names} of shape {sizes}")
    rank = 0
    for name, size, at in zip(names, sizes, coordinates, strict=True):
        if name in data_axes:
            rank = rank * size + at
    return World(rank, math.prod(size for name, size in zip(names, sizes, strict=True) if name in data_axes))


def detect_world() -> World:
    """The data-parallel world of this process, from what is initialised here; see the module's list.

    Raises WorldError when RANK and WORLD_SIZE are not numbers that fit.
    """
    megatron = _megatron_world()
    if megatron is not None:
        return megatron
    if dist.is_available() and dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or size is None:
        return World(rank=0, size=1)
    try:
        return World(rank=int(rank), size=int(size))
    except ValueError as error:
        raise WorldError(f"the environment says RANK={rank!r} and WORLD_SIZE={size!r}: {error}") from error


def _megatron_world() -> World | None:
    # A parallel state that is initialised has been imported by whoever did that; never import it here.
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.is_initialized():
        return None
    # Without context parallelism: its ranks split one sample's sequence, so they need the same sample.
    return World(rank=state.get_data_parallel_rank(), size=state.get_data_parallel_world_size())
