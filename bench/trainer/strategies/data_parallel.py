"""DDP: its all-reduce of gradients, timed, and compressed where that is wanted."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its own types and refuses text.

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from fuelrail.bench.measure.accelerator import Accelerator
    from fuelrail.bench.trainer.strategies.settings import ParallelSettings

Reduced = torch.futures.Future[torch.Tensor]

# Gradients are reduced in about this many buckets when the model is smaller than DDP's usual 25 MB bucket, so that
# the all-reduce of a small model, too, overlaps its backward pass.
_NUM_BUCKETS = 4
_DDP_BUCKET_MIB = 25.0
# PowerSGD queues several collectives a bucket, and gloo mixes up those of two buckets: it gets one bucket.
_ONE_BUCKET_MIB = 1e6
_POWERSGD_RANK = 4
# torch.compile refuses buckets below the size of DDP's first one.
_COMPILED_BUCKET_MIB = 1.0
# What the argument is called depends on torch's version.
_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"


class TimedGradientSync:
    """Averages gradient buckets over the ranks, and reports progress to the accelerator."""

    def __init__(
        self, accelerator: "Accelerator | None", num_gradient_bytes: int, reduce: Callable[[GradBucket], Reduced]
    ) -> None:
        self._accelerator = accelerator
        self._num_gradient_bytes = num_gradient_bytes
        self._num_ready_bytes = 0
        self._reduce = reduce

    def hook(self, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG002
        """DDP's hook: called in backward, in bucket order, as soon as all gradients of a bucket are computed."""
        accelerator = self._accelerator
        if accelerator is None:
            return self._reduce(bucket)
        gradients = bucket.buffer()
        self._num_ready_bytes += gradients.numel() * gradients.element_size()
        accelerator.gradients_ready(1.0 if bucket.is_last() else self._num_ready_bytes / self._num_gradient_bytes)
        if bucket.is_last():
            self._num_ready_bytes = 0
        accelerator.all_reduce_started(gradients.numel() * gradients.element_size())

        def reduced(future: Reduced) -> torch.Tensor:
            accelerator.all_reduce_finished()
            return future.value()

        return self._reduce(bucket).then(reduced)


def data_parallel(
    model: nn.Module, accelerator: "Accelerator | None", settings: "ParallelSettings"
) -> DistributedDataParallel:
    """Wrap a model that already lies on the accelerator's device; needs an initialised process group."""
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    bucket_mib = settings.bucket_mib or min(_DDP_BUCKET_MIB, num_bytes / _NUM_BUCKETS / 2**20)
    if settings.compile != "none":
        bucket_mib = max(bucket_mib, _COMPILED_BUCKET_MIB)
    hook: Callable[[Any, GradBucket], Reduced] = allreduce_hook
    state: object = dist.group.WORLD
    if settings.compression == "fp16":
        hook = fp16_compress_hook
    elif settings.compression == "powersgd":
        bucket_mib, hook = _ONE_BUCKET_MIB, powerSGD_hook
        state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=_POWERSGD_RANK, start_powerSGD_iter=2)
    wrapped = DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_mib,
        gradient_as_bucket_view=True,
        # They are constants, or statistics of each rank's own. Sent around they would make every rank wait for the
        # slowest one's batch at the beginning of its forward pass, in which nothing depends on the others.
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
    )
    wrapped.register_comm_hook(dist.group.WORLD, TimedGradientSync(accelerator, num_bytes, partial(hook, state)).hook)
    return wrapped
