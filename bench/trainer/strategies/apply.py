"""Changes to a model or a stage in place: tensor parallel, recomputation, sharding."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fuelrail.bench.trainer.models.transformer import Block
from fuelrail.bench.trainer.strategies.precision import DTYPES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from fuelrail.bench.trainer.models.staged import TensorPlans
    from fuelrail.bench.trainer.strategies.settings import ParallelSettings, Precision

# Costly to compute again, for their size: matrix products, convolutions and attention.
_KEPT = ("aten.mm", "aten.addmm", "aten.bmm", "aten.convolution", "aten._scaled_dot_product")


def divide_tensors(part: nn.Module, plans: TensorPlans, mesh: DeviceMesh) -> None:
    """Apply tensor parallel to what this part has of stem, blocks and head."""
    stem_plan, block_plan, head_plan = plans
    for name, plan in (("stem", stem_plan), ("head", head_plan)):
        module = getattr(part, name)
        if module is not None:
            _apply(module, plan, mesh)
    for block in part.get_submodule("blocks").children():
        _apply(block, block_plan, mesh)


def _apply(module: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> None:
    inner = {name: style for name, style in plan.items() if name}
    if inner:
        parallelize_module(module, mesh, inner)
    if "" in plan:
        parallelize_module(module, mesh, plan[""])


def recompute(part: nn.Module, choice: str) -> None:
    """Compute blocks again in the backward pass instead of keeping their activations: all of it, or what is cheap."""
    if choice == "none":
        return

    def policy(_: object, operation: object, *__: Any, **___: Any) -> CheckpointPolicy:  # noqa: ANN401 - torch's
        keep = str(operation).startswith(_KEPT)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    blocks = part.get_submodule("blocks")
    for name, block in list(blocks.named_children()):
        options: dict[str, Any] = {}
        if choice == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        blocks.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False, **options))


def shard(part: nn.Module, mesh: DeviceMesh, settings: ParallelSettings, precision: Precision) -> None:
    """Shard parameters, gradients and optimiser state of each block, and the rest, over the data-parallel axes."""
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis.startswith("dp_"))
    if not axes:
        return
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if settings.offload else OffloadPolicy()
    common: dict[str, Any] = {
        "mesh": mesh[axes],
        "reshard_after_forward": settings.strategy != "zero2",
        "offload_policy": offload,
    }
    for block in part.get_submodule("blocks").children():
        inner = getattr(block, "_checkpoint_wrapped_module", block)
        # Blocks of transformers keep their residual path in low precision too, as is usual; other parts have norms
        # with statistics, and geometry: they are gathered in full, and autocast decides.
        low = isinstance(inner, Block) and precision != "fp32"
        policy = MixedPrecisionPolicy(DTYPES[precision], torch.float32) if low else MixedPrecisionPolicy()
        fully_shard(block, mp_policy=policy, **common)
    fully_shard(part, **common)
