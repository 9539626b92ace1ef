"""Detect this process's data-parallel rank and the number of ranks, under any kind of parallelism.

Ranks that work on one copy of the model's input (tensor, pipeline and context parallel) form one
data-parallel rank: each of them runs a loader, and all get the same batches. Where the answer comes
from, first that applies:

1. the argument: a `World`, or a `DeviceMesh` whose axis names distinguish data from model
   parallelism;
2. Megatron-Core's parallel state, once initialised;
3. torch.distributed, once initialised: every rank a data-parallel one;
4. the launcher's RANK and WORLD_SIZE;
5. one rank of one.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import get_worker_info

from fuelrail.pipeline.errors import WorldError
from fuelrail.pipeline.order.batching import WorkerShard, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


DATA_AXES: Final = frozenset(
    {
        "dp",
        "data",
        "data_parallel",
        "batch",
        "ddp",
        "fsdp",
        "hsdp",
        "dp_replicate",
        "dp_shard",
        "replicate",
        "shard",
        "replica",
    }
)
"""Mesh axes along which ranks get different samples; HSDP's two axes together are data parallel."""

MODEL_AXES: Final = frozenset(
    {
        "tp",
        "tensor",
        "tensor_parallel",
        "mp",
        "model",
        "model_parallel",
        "pp",
        "pipe",
        "pipeline",
        "pipeline_parallel",
        "stage",
        "cp",
        "context",
        "context_parallel",
        "sp",
        "seq",
        "sequence",
        "sequence_parallel",
        "spatial",
    }
)
"""Mesh axes along which ranks share their samples."""


def resolve_world(world: World | DeviceMesh | None) -> World:
    """Return the data-parallel world from what a loader was given; None looks around
    (:func:`detect_world`).
    """
    if isinstance(world, World):
        return world
    if world is not None and not hasattr(world, "mesh_dim_names"):
        raise WorldError(f"world={world!r} is neither a World(rank, size) nor a DeviceMesh")
    if world is None:
        return detect_world()
    return mesh_world(world)


def mesh_world(mesh: DeviceMesh, data_axes: Collection[str] | None = None) -> World:
    """Return the data-parallel world of a device mesh.

    ``data_axes`` names the axes along which ranks get different samples; None: those in
    ``DATA_AXES``, where every other axis must be in ``MODEL_AXES``. The rank counts row by row in
    the mesh's order of axes, so that HSDP's ("dp_replicate", "dp_shard") is counted as one axis
    would be. A mesh of one axis without a name is data parallel.

    Raises WorldError for an axis that could be either, and on a process that is not part of the
    mesh.
    """
    names = tuple(mesh.mesh_dim_names or ())
    sizes = tuple(mesh.shape)
    if not names:
        if len(sizes) != 1:
            raise WorldError(
                f"a device mesh of shape {sizes} without mesh_dim_names does not "
                "distinguish data from model "
                'parallelism: name its axes, e.g. init_device_mesh("cuda", (4, 2), '
                'mesh_dim_names=("dp", "tp"))'
            )
        names = ("dp",)
    if data_axes is not None:
        unknown = sorted(set(data_axes) - set(names))
        if unknown:
            raise WorldError(
                f"data_axes names {', '.join(unknown)}, but the mesh's axes are {', '.join(names)}"
            )
    else:
        unclear = [name for name in names if name not in DATA_AXES | MODEL_AXES]
        if unclear:
            raise WorldError(
                f"device mesh axis {unclear[0]!r} of {names} may be data or model parallel; "
                f"data-parallel names: {', '.join(sorted(DATA_AXES))}; model-parallel ones: "
                f"{', '.join(sorted(MODEL_AXES))}; say it with fuelrail.mesh_world(mesh, "
                "data_axes=(...)) and hand over the World it returns"
            )
        data_axes = DATA_AXES
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise WorldError(f"this process is not part of the device mesh {names} of shape {sizes}")
    rank = 0
    for name, size, coordinate in zip(names, sizes, coordinates, strict=True):
        if name in data_axes:
            rank = rank * size + coordinate
    return World(
        rank,
        math.prod(size for name, size in zip(names, sizes, strict=True) if name in data_axes),
    )


def detect_world() -> World:
    """Return the data-parallel world of this process, from what is initialised here; see the
    module's list.

    Raises WorldError when RANK and WORLD_SIZE are not numbers that fit.
    """
    # An initialised parallel state has been imported already; never import it here.
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None and megatron.is_initialized():
        # Without context parallelism: its ranks split one sample's sequence, so they need the same
        # sample.
        return World(
            rank=megatron.get_data_parallel_rank(),
            size=megatron.get_data_parallel_world_size(),
        )
    if dist.is_available() and dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    rank = os.environ.get("RANK")
    size = os.environ.get("WORLD_SIZE")
    if rank is None or size is None:
        return World(rank=0, size=1)
    try:
        return World(rank=int(rank), size=int(size))
    except ValueError as error:
        raise WorldError(
            f"the environment says RANK={rank!r} and WORLD_SIZE={size!r}: {error}"
        ) from error


class _Claim(msgspec.Struct, frozen=True):
    """What one process says of itself: data-parallel rank and size, digests of its settings and
    of its first batch.
    """

    rank: int
    size: int
    settings: int
    batch: int


def check_ranks_agree(
    settings: Mapping[str, Any],
    world: World,
    batch: object,
) -> None:
    """Compare settings and first batch over all processes of the default process group; every one
    must call this.

    ``settings`` are plain JSON types that must be equal on all ranks; ``batch`` must be equal on
    those with the same data-parallel rank. Does nothing without a process group. Raises WorldError,
    on all ranks alike, showing what differs and where.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    encoded = msgspec.json.encode(settings, order="sorted")
    own_claim = _Claim(
        rank=world.rank,
        size=world.size,
        settings=_signed(xxhash.xxh3_64_intdigest(encoded)),
        batch=batch_digest(batch),
    )
    is_on_host = "cpu:" in str(dist.get_backend_config())
    device = (
        torch.device("cpu") if is_on_host else torch.device("cuda", torch.cuda.current_device())
    )
    numbers = torch.tensor(msgspec.structs.astuple(own_claim), device=device)
    gathered = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, numbers)
    claims = [_Claim(*claim.tolist()) for claim in gathered]
    # Every process holds the same claims, so all of them take the same way from here on.
    if len({(claim.settings, claim.size) for claim in claims}) > 1:
        stated: list[dict[str, Any]] = [{}] * len(claims)
        dist.all_gather_object(stated, {"world size": world.size, **settings})
        differences = []
        for name in stated[0]:
            processes_by_value: dict[str, list[int]] = {}
            for process, stated_settings in enumerate(stated):
                value = repr(stated_settings.get(name))
                processes_by_value.setdefault(value, []).append(process)
            if len(processes_by_value) == 1:
                continue
            sides = []
            for value, processes in processes_by_value.items():
                examples = ", ".join(map(str, processes[:4]))
                rest = f" and {len(processes) - 4} more" if len(processes) > 4 else ""
                sides.append(f"{value} on rank {examples}{rest}")
            differences.append(f"{name}: {', '.join(sides)}")
        raise WorldError(f"ranks have different loader settings; {'; '.join(differences)}")
    first: dict[int, int] = {}
    for process, claim in enumerate(claims):
        earlier = first.setdefault(claim.rank, process)
        if claims[earlier].batch != claim.batch:
            raise WorldError(
                f"processes {earlier} and {process} are both data-parallel rank "
                f"{claim.rank} but got different batches; a transform or collate_fn must "
                "depend on the sample alone (its `seed` included), not on the process"
            )
    missing = sorted(set(range(world.size)) - set(first))
    if missing:
        raise WorldError(
            f"no process is data-parallel rank {missing[0]} of {world.size}: {len(claims)} "
            f"processes claim the ranks {sorted(first)}; pass each one its World, or the "
            "device mesh"
        )


def rank_weight(batch: Mapping[str, Any]) -> float:
    """Return what the mean loss of a batch is multiplied with before `backward`, so that the
    average of the ranks' gradients is the gradient of the global batch's mean loss.

    A rank with B of the G rows of the global batch, on R ranks, has the weight B R / G: the mean
    over the ranks of (B R / G) x (sum over its rows / B) is the sum over all rows / G. It is 1, and
    no entry of the batch, where R divides G. A row is a sample, in packs a pack; rows that are not
    valid count.
    """
    return float(batch.get("weight", 1.0))


def batch_digest(batch: object) -> int:
    """Return a signed 64-bit digest of a batch: tensors, arrays, numbers, strings, in dicts,
    lists and tuples.
    """
    digest = xxhash.xxh3_64()
    _feed(digest, batch)
    return _signed(digest.intdigest())


def _feed(digest: xxhash.xxh3_64, value: object) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        # Numpy hands over arrays of one entry with a stride of 0, which a view as bytes would
        # refuse.
        dense = value.as_strided((value.numel(),), (1,))
        digest.update(dense.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elif isinstance(value, dict):
        for name, entry in value.items():
            digest.update(str(name).encode())
            _feed(digest, entry)
    elif isinstance(value, (list, tuple)):
        digest.update(str(len(value)).encode())
        for entry in value:
            _feed(digest, entry)
    elif isinstance(value, (str, int, float, bool, bytes, type(None))):
        digest.update(repr(value).encode())

    # Anything else is the user's own; its repr may hold an address, so it cannot be compared.


def _signed(digest: int) -> int:
    return digest - (1 << 63)


def check_process(world: World | None, share: WorkerShard) -> None:
    """Check that this process is the one that a loader was made for.

    Raises WorldError where it is another rank by now than ``world``, which the loader has detected
    (None: it was told). Warns where it is one of several workers of torch's DataLoader, and the
    steps are not shared out.
    """
    if world is not None and (detected := detect_world()) != world:
        raise WorldError(
            f"this loader was made as {world}, but the process is {detected} by now: "
            "make it after torch.distributed is initialised (in Lightning: in "
            "`train_dataloader`), or pass world="
        )
    worker = get_worker_info()
    if worker is not None and share.stride < worker.num_workers:
        warnings.warn(
            f"a fuelrail DataLoader is iterated in worker {worker.id} of "
            f"{worker.num_workers} of torch's DataLoader: each worker gives every batch, "
            f"{worker.num_workers} times in all; wrap it in fuelrail.IterableView, which "
            "shares the steps out, or use num_workers=0",
            stacklevel=3,
        )
