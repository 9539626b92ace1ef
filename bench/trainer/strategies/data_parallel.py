"""Data parallel: copies by DDP, whose all-reduce is timed and may be compressed, or shards by
FSDP2.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its own
# types and refuses text.

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from fuelrail.bench.trainer.models.staged import Block
from fuelrail.bench.trainer.strategies.optimiser import DTYPES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.bench.measure.accelerator import Accelerator
    from fuelrail.bench.trainer.strategies.settings import (
        ParallelSettings,
        Precision,
    )


def data_parallel(
    model: nn.Module,
    accelerator: "Accelerator | None",
    settings: "ParallelSettings",
) -> DistributedDataParallel:
    """Wrap a model that already lies on the accelerator's device; needs an initialised process
    group.
    """
    bucket_mib = settings.bucket_mib
    reduce: Any = fp16_compress_hook if settings.compression == "fp16" else allreduce_hook
    state: Any = dist.group.WORLD
    if settings.compression == "powersgd":
        # It queues several collectives a bucket, and gloo mixes up those of two buckets: it gets
        # one bucket.
        bucket_mib = 1e6
        reduce = powerSGD_hook
        state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2)
    wrapped = DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_mib,
        gradient_as_bucket_view=True,
        find_unused_parameters=settings.find_unused,
    )
    # Buffers are constants, or statistics of each rank's own. Sent around they would make every
    # rank wait for the slowest one's batch at the beginning of its forward pass, in which nothing
    # depends on the others.
    wrapped.broadcast_buffers = False
    if accelerator is None:
        wrapped.register_comm_hook(state, reduce)
        return wrapped
    num_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    num_ready_bytes = 0

    def timed(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket, all of whose gradients are computed, and report that to the accelerator.

        It is called in the order of the buckets.
        """
        nonlocal num_ready_bytes
        num_ready_bytes += bucket.buffer().nbytes
        accelerator.gradients_ready(1.0 if bucket.is_last() else num_ready_bytes / num_bytes)
        if bucket.is_last():
            num_ready_bytes = 0
        accelerator.all_reduce_started()

        def finished(future: torch.futures.Future[Tensor]) -> Tensor:
            accelerator.all_reduce_finished()
            return future.value()

        return reduce(state, bucket).then(finished)  # type: ignore[no-any-return]

    wrapped.register_comm_hook(state, timed)
    return wrapped


def shard(
    part: nn.Module,
    units: Iterable[nn.Module],
    mesh: "DeviceMesh",
    settings: "ParallelSettings",
    precision: "Precision",
) -> None:
    """Shard parameters, gradients and optimiser state of each unit, and the rest, over the
    data-parallel axes.
    """
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis.startswith("dp_"))
    if not axes:
        return
    common: dict[str, Any] = {
        "mesh": mesh[axes],
        "reshard_after_forward": settings.strategy != "zero2",
        "offload_policy": CPUOffloadPolicy(torch.cuda.is_available())
        if settings.offload
        else OffloadPolicy(),
    }
    for block in units:
        # Blocks of transformers keep their residual path in low precision too, as is usual; other
        # parts have norms with statistics, and geometry: they are gathered in full, and autocast
        # decides.
        low = isinstance(block, Block) and precision != "fp32"
        policy = (
            MixedPrecisionPolicy(DTYPES[precision], torch.float32)
            if low
            else MixedPrecisionPolicy()
        )
        fully_shard(block, mp_policy=policy, **common)
    fully_shard(part, **common)
