"""A model, divided over the ranks as the settings say, and one step of its training.

:func:`parallelise` applies everything in one order: stages, tensor parallel, recomputation, compilation, sharding or
copies, optimiser. :class:`Parallel` is the result, the same to the loop for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils import checkpoint

from fuelrail.bench.trainer.models.build import build_model, draft
from fuelrail.bench.trainer.strategies.data_parallel import data_parallel, shard
from fuelrail.bench.trainer.strategies.optimiser import SharedGradScaler, autocast, clip_gradients, make_optimiser
from fuelrail.bench.trainer.strategies.pipeline import V_SHAPED, Pipeline, Stage
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings, Precision, stages_of

if TYPE_CHECKING:
    from fuelrail.bench.measure.accelerator import Accelerator
    from fuelrail.bench.trainer.models.settings import ModelSettings
    from fuelrail.bench.trainer.models.staged import StagedModel

# Costly to compute again, for their size: matrix products, convolutions and attention.
_KEPT = ("aten.mm", "aten.addmm", "aten.bmm", "aten.convolution", "aten._scaled_dot_product")


@dataclass(eq=False)
class Parallel:
    """This rank's part of a model with what trains it.

    ``models`` are the module, or a pipeline's stages on this rank; ``inputs`` makes its arguments of a batch; ``mesh``
    is None without a composed strategy. Gradients of a step are the mean over its micro-batches and over the
    data-parallel ranks. ``teacher`` adds to the inputs what it makes of them. Of the settings those of a step count.
    ``accelerator`` measures the phases of a step; None: nothing does.
    """

    models: list[nn.Module]
    optimiser: torch.optim.Optimizer
    inputs: Callable[[Mapping[str, Any]], tuple[Tensor, ...]]
    _: KW_ONLY
    settings: ParallelSettings = field(default_factory=ParallelSettings)
    precision: Precision = "fp32"
    mesh: DeviceMesh | None = None
    accelerator: Accelerator | None = None
    pipeline: Pipeline | None = None
    teacher: Callable[..., tuple[Tensor, ...]] | None = None

    def __post_init__(self) -> None:
        device = next(self.models[0].parameters()).device.type
        self.scaler = SharedGradScaler(device, self.settings.max_skipped, enabled=self.precision == "fp16")
        self.start_schedule(0)

    def start_schedule(self, num_steps: int) -> None:
        """Set the learning rate to that of the settings after a number of steps."""
        warmup = max(1, self.settings.rate_warmup)
        self.schedule: LRScheduler = LambdaLR(
            self.optimiser, lambda step: min(1.0, (step + 1) / warmup), last_epoch=num_steps - 1
        )

    @property
    def counts(self) -> bool:
        """Whether this rank counts its samples: others of its model-parallel group have the same."""
        axes = () if self.mesh is None else {"pp", "tp"}.intersection(self.mesh.mesh_dim_names or ())
        return self.mesh is None or all(self.mesh.get_local_rank(axis) == 0 for axis in axes)

    def forward_backward(
        self, inputs: tuple[Tensor, ...], rows: tuple[int, int] = (0, 0), *, accumulation: int = 1, last: bool = True
    ) -> Tensor:
        """Add one micro-batch's share of ``accumulation`` to the gradients; return that share of its loss.

        ``inputs`` are what :meth:`inputs` returned, on the model's device; ``rows`` are its numbers of samples and
        images, for the accelerator. Gradients are reduced over the ranks with the ``last`` micro-batch of a step.
        """
        precise, timer = autocast(inputs[0].device, self.precision), self.accelerator
        if self.teacher is not None:
            with nullcontext() if timer is None else timer.forward(*rows), torch.no_grad(), precise:
                inputs = (*inputs, *self.teacher(*inputs))
        if self.pipeline is not None:
            scale = self.scaler.scale(inputs[0].new_ones((), dtype=torch.float))
            with precise:
                return self.pipeline.run(inputs, rows, scale, accumulation)
        (model,) = self.models
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
            with nullcontext() if timer is None else timer.forward(*rows), precise:
                loss: Tensor = model(*inputs) / accumulation
            with nullcontext() if timer is None else timer.backward():
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        """Clip the gradients, let the optimiser step, unless fp16 overflowed, and forget the gradients."""
        self.scaler.unscale_(self.optimiser)
        if self.settings.clip_norm is not None:
            group = None if self.pipeline is None else self.pipeline.group
            clip_gradients((p for model in self.models for p in model.parameters()), self.settings.clip_norm, group)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad()
        if not self.scaler.num_skipped:
            self.schedule.step()

    def own_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of this rank's samples; in a pipeline the rank of the last stage sends it to the others."""
        if self.pipeline is not None:
            dist.all_reduce(loss, group=self.pipeline.group)
        return loss


def make_mesh(degrees: Degrees, device_type: str) -> DeviceMesh | None:
    """Make the mesh of a composed strategy, without axes of one rank; None where whole models are copied."""
    if not degrees.composed:
        return None
    # Copies of divided models are groups of FSDP, which wants both of its axes.
    sizes = {
        axis: size
        for axis, size in degrees._asdict().items()
        if size > 1 or (axis == "dp_shard" and degrees.dp_replicate > 1)
    }
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def parallelise(
    model: StagedModel,
    settings: ParallelSettings,
    degrees: Degrees,
    mesh: DeviceMesh | None,
    *,
    batch_size: int,
    learning_rate: float = 1e-3,
    precision: Precision = "fp32",
    accelerator: Accelerator | None = None,
) -> Parallel:
    """Divide a model that lies on this rank's device, or a draft; all ranks must call this.

    ``mesh`` is :func:`make_mesh`'s; :func:`check_fits` has found nothing against the degrees. ``batch_size`` is the
    number of samples per data-parallel rank in a micro-batch. With Degrees() a rank trains alone in any world.
    Of a pipeline's model the parts that are not this rank's are given up.
    """
    schedule, num_stages = settings.pipeline_schedule, stages_of(settings, degrees)
    stages: dict[int, nn.Module] = {0: model}
    if mesh is not None and degrees.pp > 1:
        rank = mesh.get_local_rank("pp")
        numbers = [rank, num_stages - 1 - rank] if schedule in V_SHAPED else range(rank, num_stages, degrees.pp)
        stages = {number: Stage(model, number, num_stages) for number in numbers}
        del model.stem, model.blocks, model.head  # the model lives on for its inputs
    for part in stages.values():
        if mesh is not None and degrees.tp > 1:
            there = {name for name, _ in part.named_children()}  # a stage may lack stem or head
            styles = {name: style for name, style in model.plan.items() if name.split(".")[0] in there}
            parallelize_module(part, mesh["tp"], styles)
        for block in part.get_submodule("blocks").children():
            if settings.recompute != "none":
                _recompute(block, selective=settings.recompute == "selective")
            if settings.compile != "none":
                block.compile(backend=settings.compile)
        if mesh is not None:
            shard(part, mesh, settings, precision)
    parts: list[nn.Module] = list(stages.values())
    if model.fill is not None:
        model.fill(parts, settings.offload)
    if mesh is None and degrees.data > 1:
        parts = [data_parallel(model, accelerator, settings)]
    pipeline = None
    if mesh is not None and degrees.pp > 1:
        micro_batches = settings.micro_batches or batch_size
        pipeline = Pipeline(stages, num_stages, mesh["pp"].get_group(), schedule, micro_batches, accelerator)
    return Parallel(
        parts,
        make_optimiser(parts, settings, learning_rate),
        model.inputs,
        settings=settings,
        precision=precision,
        mesh=mesh,
        accelerator=accelerator,
        pipeline=pipeline,
    )


def _recompute(block: nn.Module, *, selective: bool) -> None:
    """Compute a block again in the backward pass instead of keeping its activations: all of it, or what is cheap."""

    def policy(_: object, operation: object, *__: Any, **___: Any) -> checkpoint.CheckpointPolicy:
        policies = checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if str(operation).startswith(_KEPT) else policies.PREFER_RECOMPUTE

    selected = partial(checkpoint.create_selective_checkpoint_contexts, policy)
    block.forward = partial(
        checkpoint.checkpoint,
        block.forward,
        use_reentrant=False,
        context_fn=selected if selective else checkpoint.noop_context_fn,
    )


def build(
    settings: ModelSettings,
    device: str,
    seed: int,
    mesh: DeviceMesh | None = None,
    wrap: Callable[[StagedModel], StagedModel] | None = None,
) -> StagedModel:
    """Make the model with the weights that the seed says, on a device; the same on every rank.

    For a ``mesh`` it is a draft: it gets its values when :func:`parallelise` has divided it. ``wrap`` makes of it what
    is to be trained.
    """

    def make() -> StagedModel:
        return build_model(settings) if wrap is None else wrap(build_model(settings))

    if mesh is not None:
        return draft(make, device, seed)
    torch.manual_seed(seed)
    return make().to(device)
