"""DDP's all-reduce of gradients, timed: a communication hook that tells the accelerator what happens when."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its own types and refuses text.

import inspect
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from fuelrail.bench.measure.accelerator import Accelerator

# Gradients are reduced in about this many buckets when the model is smaller than DDP's usual 25 MB bucket, so that
# the all-reduce of a small model, too, overlaps its backward pass.
_NUM_BUCKETS = 4
_DDP_BUCKET_MIB = 25.0
# What the argument is called depends on torch's version.
_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"


class TimedGradientSync:
    """Averages gradient buckets over the ranks as DDP does by itself, and reports progress to the accelerator."""

    def __init__(self, accelerator: "Accelerator", num_gradient_bytes: int) -> None:
        self._accelerator = accelerator
        self._num_gradient_bytes = num_gradient_bytes
        self._num_ready_bytes = 0

    def hook(self, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's hook: called in backward, in bucket order, as soon as all gradients of a bucket are computed."""
        gradients = bucket.buffer()
        self._num_ready_bytes += gradients.numel() * gradients.element_size()
        share = 1.0 if bucket.is_last() else self._num_ready_bytes / self._num_gradient_bytes
        self._accelerator.gradients_ready(share)
        if bucket.is_last():
            self._num_ready_bytes = 0
        # Divided before the sum, as DDP's own hook does: the sum of many ranks must not overflow low precision.
        gradients.div_(group.size())
        self._accelerator.all_reduce_started()
        work = dist.all_reduce(gradients, group=group, async_op=True)
        assert work is not None, "an asynchronous all-reduce of a member of the group has a handle"

        def reduced(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self._accelerator.all_reduce_finished()
            return future.value()[0]

        result: torch.futures.Future[torch.Tensor] = work.get_future().then(reduced)
        return result


def data_parallel(model: nn.Module, accelerator: "Accelerator") -> DistributedDataParallel:
    """Wrap a model that already lies on the accelerator's device; needs an initialised process group."""
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    wrapped = DistributedDataParallel(
        model,
        bucket_cap_mb=min(_DDP_BUCKET_MIB, num_bytes / _NUM_BUCKETS / 2**20),
        gradient_as_bucket_view=True,
        # They are constants, or statistics of each rank's own. Sent around they would make every rank wait for the
        # slowest one's batch at the beginning of its forward pass, in which nothing depends on the others.
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
    )
    wrapped.register_comm_hook(dist.group.WORLD, TimedGradientSync(accelerator, num_bytes).hook)
    return wrapped
