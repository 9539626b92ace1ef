"""Data parallel: copies by DDP, whose all-reduce is timed and may be compressed, or shards by FSDP2."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its own types and refuses text.

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fuelrail.bench.trainer.models.staged import Block
from fuelrail.bench.trainer.strategies.optimiser import DTYPES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.bench.measure.accelerator import Accelerator
    from fuelrail.bench.trainer.strategies.settings import ParallelSettings, Precision

Reduced = torch.futures.Future[torch.Tensor]

# PowerSGD queues several collectives a bucket, and gloo mixes up those of two buckets: it gets one bucket.
_ONE_BUCKET_MIB = 1e6
_POWERSGD_RANK = 4
# What the argument is called depends on torch's version.
_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"


def data_parallel(
    model: nn.Module, accelerator: "Accelerator | None", settings: "ParallelSettings"
) -> DistributedDataParallel:
    """Wrap a model that already lies on the accelerator's device; needs an initialised process group."""
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    bucket_mib = settings.bucket_mib
    reduce: Any = fp16_compress_hook if settings.compression == "fp16" else allreduce_hook
    state: Any = dist.group.WORLD
    if settings.compression == "powersgd":
        bucket_mib, reduce = _ONE_BUCKET_MIB, powerSGD_hook
        state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=_POWERSGD_RANK, start_powerSGD_iter=2)
    num_ready_bytes = 0

    def timed(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG001
        """Reduce a bucket, all of whose gradients are computed, and report it; called in the order of the buckets."""
        nonlocal num_ready_bytes
        if accelerator is None:
            return reduce(state, bucket)  # type: ignore[no-any-return]
        size = bucket.buffer().numel() * bucket.buffer().element_size()
        num_ready_bytes += size
        accelerator.gradients_ready(1.0 if bucket.is_last() else num_ready_bytes / num_bytes)
        if bucket.is_last():
            num_ready_bytes = 0
        accelerator.all_reduce_started(size)

        def finished(future: Reduced) -> torch.Tensor:
            accelerator.all_reduce_finished()
            return future.value()

        return reduce(state, bucket).then(finished)  # type: ignore[no-any-return]

    wrapped = DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_mib,
        gradient_as_bucket_view=True,
        # They are constants, or statistics of each rank's own. Sent around they would make every rank wait for the
        # slowest one's batch at the beginning of its forward pass, in which nothing depends on the others.
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
    )
    wrapped.register_comm_hook(dist.group.WORLD, timed)
    return wrapped


def shard(part: nn.Module, mesh: "DeviceMesh", settings: "ParallelSettings", precision: "Precision") -> None:
    """Shard parameters, gradients and optimiser state of each block, and the rest, over the data-parallel axes."""
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis.startswith("dp_"))
    if not axes:
        return
    common: dict[str, Any] = {
        "mesh": mesh[axes],
        "reshard_after_forward": settings.strategy != "zero2",
        "offload_policy": CPUOffloadPolicy(torch.cuda.is_available()) if settings.offload else OffloadPolicy(),
    }
    for block in part.get_submodule("blocks").children():
        # Blocks of transformers keep their residual path in low precision too, as is usual; other parts have norms
        # with statistics, and geometry: they are gathered in full, and autocast decides.
        low = isinstance(block, Block) and precision != "fp32"
        policy = MixedPrecisionPolicy(DTYPES[precision], torch.float32) if low else MixedPrecisionPolicy()
        fully_shard(block, mp_policy=policy, **common)
    fully_shard(part, **common)
