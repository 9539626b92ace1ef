"""A model, divided over the ranks as the settings say, and one step of its training.

:func:`parallelise` applies everything in one order: stages, tensor parallel, recomputation, compilation, sharding or
copies, optimiser. :class:`Parallel` is the result, the same to the loop for all of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.strategies.apply import divide_tensors, recompute, shard
from fuelrail.bench.trainer.strategies.data_parallel import data_parallel
from fuelrail.bench.trainer.strategies.optimiser import clip_gradients, make_optimiser, make_schedule
from fuelrail.bench.trainer.strategies.pipeline import Pipeline, Stage, local_stages
from fuelrail.bench.trainer.strategies.precision import SharedGradScaler, autocast
from fuelrail.bench.trainer.strategies.settings import AXES, Degrees, stages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from fuelrail.bench.measure.accelerator import Accelerator
    from fuelrail.bench.trainer.models.settings import ModelSettings
    from fuelrail.bench.trainer.models.staged import StagedModel
    from fuelrail.bench.trainer.strategies.settings import ParallelSettings, Precision


class Parallel:
    """This rank's part of a model with what trains it.

    ``model`` is the module, or the list of a pipeline's stages on this rank; ``mesh`` is None without a composed
    strategy. Gradients of a step are the mean over its micro-batches and over the data-parallel ranks. ``teacher``, set
    later, adds to the inputs what it makes of them.
    """

    def __init__(
        self,
        model: nn.Module | list[nn.Module],
        optimiser: Optimizer,
        inputs: Callable[[Mapping[str, Any]], tuple[Tensor, ...]],
        *,
        schedule: LRScheduler | None = None,
        scaler: SharedGradScaler | None = None,
        mesh: DeviceMesh | None = None,
        pipeline: Pipeline | None = None,
        precision: Precision = "fp32",
        clip_norm: float | None = None,
    ) -> None:
        self.model = model
        self.optimiser = optimiser
        self.inputs = inputs
        self.schedule = schedule
        self.scaler = scaler
        self.mesh = mesh
        self._pipeline = pipeline
        self._precision: Precision = precision
        self._clip_norm = clip_norm
        self.teacher: Callable[..., tuple[Tensor, ...]] | None = None

    @property
    def models(self) -> list[nn.Module]:
        """The modules on this rank: one, or the stages of a pipeline."""
        return self.model if isinstance(self.model, list) else [self.model]

    @property
    def counts(self) -> bool:
        """Whether this rank counts its samples: others of its model-parallel group have the same."""
        return self.mesh is None or all(
            self.mesh.get_local_rank(axis) == 0 for axis in self.mesh.mesh_dim_names or () if axis in ("pp", "tp")
        )

    def forward_backward(
        self,
        inputs: tuple[Tensor, ...],
        accelerator: Accelerator | None = None,
        rows: tuple[int, int] = (0, 0),
        *,
        accumulation: int = 1,
        last: bool = True,
    ) -> Tensor:
        """Add one micro-batch's share of ``accumulation`` to the gradients; return that share of its loss.

        ``inputs`` are what :meth:`inputs` returned, on the model's device; ``rows`` are its numbers of samples and
        images, for the accelerator. Gradients are reduced over the ranks with the ``last`` micro-batch of a step.
        """
        precise = autocast(inputs[0].device, self._precision)
        if self.teacher is not None:
            with nullcontext() if accelerator is None else accelerator.forward(*rows), torch.no_grad(), precise:
                inputs = (*inputs, *self.teacher(*inputs))
        if self._pipeline is not None:
            self._pipeline.accumulation = accumulation
            self._pipeline.scale = (
                1.0 if self.scaler is None else self.scaler.scale(inputs[0].new_ones((), dtype=torch.float))
            )
            with precise:
                return self._pipeline.run(inputs, accelerator, rows)
        assert isinstance(self.model, nn.Module), "a list of stages has a pipeline"
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        with self.model.no_sync() if isinstance(self.model, DistributedDataParallel) and not last else nullcontext():
            with nullcontext() if accelerator is None else accelerator.forward(*rows), precise:
                loss: Tensor = self.model(*inputs) / accumulation
            with nullcontext() if accelerator is None else accelerator.backward():
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        """Clip the gradients, let the optimiser step, unless fp16 overflowed, and forget the gradients."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimiser)
        if self._clip_norm is not None:
            clip_gradients((p for model in self.models for p in model.parameters()), self._clip_norm, self.mesh)
        if self.scaler is None:
            self.optimiser.step()
        else:
            self.scaler.step(self.optimiser)
            self.scaler.update()
        self.optimiser.zero_grad()
        if self.schedule is not None and (self.scaler is None or not self.scaler.skipped):
            self.schedule.step()

    def step(self, batch: Mapping[str, Any]) -> float:
        """Train on one batch of this rank; return the loss, the mean over all ranks."""
        device = next(parameter.device for model in self.models for parameter in model.parameters())
        loss = self.forward_backward(tuple(tensor.to(device) for tensor in self.inputs(batch)))
        self.update()
        loss = self.own_loss(loss)
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return float(loss)

    def own_loss(self, loss: Tensor) -> Tensor:
        """Loss of this rank's samples: a pipeline has it on the rank of its last stage, and sends it to the others."""
        if self._pipeline is not None and self.mesh is not None:
            dist.all_reduce(loss, group=self.mesh["pp"].get_group())
        return loss


def make_mesh(degrees: Degrees, device_type: str, *, sharded: bool = False) -> DeviceMesh | None:
    """The mesh of a composed strategy, without axes of one rank; None where whole models are copied.

    ``sharded`` shards over one rank too, which is how a single GPU offloads.
    """
    if sharded and not degrees.composed:
        return init_device_mesh(device_type, (1,), mesh_dim_names=("dp_shard",))
    if not degrees.composed:
        return None
    # Copies of divided models are groups of FSDP, which wants both of its axes.
    kept = [axis for axis, size in zip(AXES, degrees, strict=True) if size > 1]
    if "dp_replicate" in kept and "dp_shard" not in kept:
        kept.insert(kept.index("dp_replicate") + 1, "dp_shard")
    sizes = tuple(getattr(degrees, axis) for axis in kept)
    return init_device_mesh(device_type, sizes, mesh_dim_names=tuple(kept))


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
    """Divide a model that lies on this rank's device, the meta device included; all ranks must call this.

    ``mesh`` is :func:`make_mesh`'s; :func:`check_fits` has found nothing against the degrees. ``batch_size`` is the
    number of samples per data-parallel rank in a micro-batch. With Degrees() a rank trains alone, whatever the world.
    Of a pipeline's model the parts that are not this rank's are given up.
    """
    device = next(model.parameters()).device
    plans = model.tensor_plans()
    parts: list[nn.Module] = [model]
    numbers, num_stages = [0], 1
    if degrees.pp > 1:
        assert mesh is not None, "a pipeline has a mesh"
        num_stages = stages_of(settings, degrees)
        numbers = local_stages(mesh.get_local_rank("pp"), degrees.pp, num_stages, settings.pipeline_schedule)
        parts = [Stage(model, number, num_stages) for number in numbers]
        del model.stem, model.blocks, model.head  # the model lives on for its inputs
    for part in parts:
        if degrees.tp > 1:
            assert mesh is not None, "tensor parallel has a mesh"
            divide_tensors(part, plans, mesh["tp"])
        recompute(part, settings.recompute)
        if settings.compile != "none":
            for block in part.get_submodule("blocks").children():
                block.compile(backend=settings.compile)
        if mesh is not None:
            shard(part, mesh, settings, precision)
    if mesh is None and degrees.data > 1:
        parts = [data_parallel(model, accelerator, settings)]
    optimiser = make_optimiser(parts, settings, learning_rate)
    pipeline = None
    if degrees.pp > 1:
        assert mesh is not None, "a pipeline has a mesh"
        micro_batches = settings.micro_batches or batch_size
        pipeline = Pipeline(parts, numbers, num_stages, mesh["pp"], settings.pipeline_schedule, micro_batches, device)
    return Parallel(
        parts if degrees.pp > 1 else parts[0],
        optimiser,
        model.inputs,
        schedule=make_schedule(optimiser, settings),
        scaler=SharedGradScaler(device.type, settings.max_skipped) if precision == "fp16" else None,
        mesh=mesh,
        pipeline=pipeline,
        precision=precision,
        clip_norm=settings.clip_norm,
    )


def parameters_of(models: Iterable[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters, by the names that they have in the undivided model."""
    return [
        (name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), parameter)
        for model in models
        for name, parameter in model.named_parameters()
    ]


def build(settings: ModelSettings, device: str, seed: int) -> StagedModel:
    """Make the model with the weights that the seed says, on a device; the same on every rank."""
    torch.manual_seed(seed)
    return build_model(settings).to(device)
