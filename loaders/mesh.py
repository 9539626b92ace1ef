"""Who am I: this process's data-parallel rank and the number of ranks."""

from __future__ import annotations

import os

import torch.distributed as dist

from fuelrail.pipeline.errors import WorldError
from fuelrail.pipeline.world import World


def detect_world() -> World:
    """The data-parallel world of this process.

    From ``torch.distributed`` when its process group is up, else from the launcher's RANK and WORLD_SIZE (torchrun,
    Slurm wrappers and others set both), else one rank of one. Raises WorldError when the two variables are not numbers
    that fit.
    """
    if dist.is_available() and dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or size is None:
        return World(rank=0, size=1)
    try:
        return World(rank=int(rank), size=int(size))
    except ValueError as error:
        raise WorldError(f"the environment says RANK={rank!r} and WORLD_SIZE={size!r}: {error}") from error


def default_num_workers() -> int:
    """Decoding threads for this rank: its share of the CPUs that the process may use."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or "1")
    return max(1, len(os.sched_getaffinity(0)) // max(1, ranks_here))
