"""A model, divided over the ranks as the settings say.

:func:`parallelise` applies everything in one order: stages, tensor parallel, recomputation,
compilation, sharding or copies, optimiser. :class:`Parallel` is the result, the same to the loop
for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint

from fuelrail.bench.trainer.models.build import Fill, draft
from fuelrail.bench.trainer.models.staged import Attention, StagedModel
from fuelrail.bench.trainer.strategies.data_parallel import data_parallel, shard
from fuelrail.bench.trainer.strategies.optimiser import (
    Named,
    make_optimiser,
    usual_optimiser,
)
from fuelrail.bench.trainer.strategies.pipeline import V_SHAPED, Pipeline, Stage
from fuelrail.bench.trainer.strategies.settings import (
    Degrees,
    ParallelSettings,
    Precision,
    check_pipeline,
    degrees_of,
    divisors,
    stages_of,
)
from fuelrail.bench.trainer.strategies.step import (
    Losses,
    Parallel,
    named_parameters,
    precision_of,
)
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import make_options

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from fuelrail.bench.measure.accelerator import Accelerator


# Costly to compute again, for their size: matrix products, convolutions and attention.
_SAVED_OPERATIONS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.convolution",
    "aten._scaled_dot_product",
)


def join_world() -> torch.device:
    """Join torchrun's world, if this process is of one and has not yet, and return this rank's
    device.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        on_gpu = device.type == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    return device


def degrees_of_mesh(mesh: DeviceMesh) -> Degrees:
    """Return the sizes of a mesh's axes. Raises ConfigError for axes of other names."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if sizes.keys() - {*Degrees._fields} or not sizes:
        raise ConfigError(
            f"the mesh has the axes {list(sizes)}; name them {', '.join(Degrees._fields)}, "
            "each once"
        )
    return Degrees(**sizes)


def make_mesh(degrees: Degrees, device_type: str) -> DeviceMesh | None:
    """Make the mesh of a composed strategy, without axes of one rank; None where whole models
    are copied.
    """
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
    model: nn.Module | Callable[[], nn.Module],
    settings: ParallelSettings | None = None,
    *,
    mesh: DeviceMesh | str | None = None,
    wrap: Sequence[type[nn.Module]] = (),
    loss: Callable[[Any, Any], Losses] | None = None,
    optimiser: Callable[[Named], torch.optim.Optimizer] | str | None = None,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    accelerator: Accelerator | None = None,
    **changes: Any,  # fields of ParallelSettings
) -> Parallel:
    """Divide a model over the ranks and return what trains it; all ranks must call this.

    ``fr.bench.parallelise(build, strategy="fsdp2", wrap=[Block])`` takes the fields of
    :class:`ParallelSettings` as keywords. Under torchrun it joins that world, on several hosts too.

    ``model`` is a function that makes the model, which is made without memory and divided before it
    gets the values that the seed says; or a module, which takes those of rank 0. A plain module has
    ``forward(batch)``, of any inputs. It returns what ``loss(outputs, batch)`` makes a loss of, or
    without that the loss: a tensor without axes, or a dict of them, whose sum is trained. A model
    that pads may have ``real_share(batch)``, see :class:`Parallel`. Of a pipeline and of tensor
    parallel the model is a :class:`~fuelrail.bench.trainer.models.staged.StagedModel`.

    ``mesh`` has the axes pp, dp_replicate, dp_shard and tp, or some of them; a text makes one.
    ``wrap`` are the classes of modules that are sharded, recomputed and compiled one by one
    (default: the model's ``blocks``). ``optimiser`` gets the parameters to train as pairs of name
    and parameter, as torch's optimisers take them; ``schedule`` gets the optimiser, and steps with
    it. Raises ConfigError for what does not fit.
    """
    if isinstance(mesh, str):
        changes["mesh"] = mesh
    if isinstance(optimiser, str):
        changes["optimiser"] = optimiser
        optimiser = None
    if changes or not isinstance(settings, ParallelSettings):
        settings = make_options(ParallelSettings, settings, changes)
    if accelerator is None:
        drafted = isinstance(model, nn.Module) and next(model.parameters()).is_meta
        device = torch.device("cpu") if drafted else join_world()
    else:
        device = torch.device(accelerator.torch_device)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if isinstance(mesh, DeviceMesh):
        degrees = degrees_of_mesh(mesh)
    else:
        degrees = degrees_of(settings, world)
        mesh = make_mesh(degrees, device.type)
    module, fill = _materialise(model, settings, str(device), divided=mesh is not None)
    inputs: Any = getattr(module, "inputs", lambda batch: (batch,))
    # A model must have what a pipeline and tensor parallel ask of it.
    of_stages = (
        "stem",
        "blocks",
        "head",
        "loss",
        "inputs",
        "beside",
        "real_share",
    )
    attributes = {"pp": of_stages, "tp": ("plan",)}
    for axis, names in attributes.items():
        missing = [name for name in names if not hasattr(module, name)]
        if getattr(degrees, axis) > 1 and missing:
            raise ConfigError(
                f"the mesh has {axis}={getattr(degrees, axis)}, and model "
                f"{type(module).__name__} has no {', '.join(missing)}: make it a StagedModel "
                "(fuelrail.bench.trainer.models.staged), or use ddp, zero1, zero2, fsdp2 or "
                "hsdp, which take any module"
            )
    if degrees.pp > 1:
        if settings.micro_batches is None:
            raise ConfigError(
                "a pipeline needs micro_batches, the parts of a rank's batch; give micro_batches=N"
            )
        check_pipeline(settings, degrees, len(module.blocks), settings.micro_batches)
    stages: dict[int, nn.Module] = {0: module}
    if mesh is not None and degrees.pp > 1:
        rank = mesh.get_local_rank("pp")
        num_stages = stages_of(settings, degrees)
        numbers: Sequence[int] = range(rank, num_stages, degrees.pp)
        if settings.pipeline_schedule in V_SHAPED:
            numbers = [rank, num_stages - 1 - rank]
        stages = {number: Stage(module, number, num_stages) for number in numbers}
        del (
            module.stem,
            module.blocks,
            module.head,
        )  # the model lives on for its inputs
    _divide(
        stages,
        model=module,
        degrees=degrees,
        mesh=mesh,
        settings=settings,
        wrap=wrap,
        precision=precision_of(settings, device),
    )
    parts: list[nn.Module] = list(stages.values())
    if fill is not None:
        fill(parts, settings.offload)
    if mesh is None and degrees.data > 1:
        parts = [data_parallel(module, accelerator, settings)]
    pipeline = None
    if mesh is not None and settings.micro_batches is not None and degrees.pp > 1:
        group = mesh["pp"].get_group()
        pipeline = Pipeline(
            modules=stages,
            num_stages=stages_of(settings, degrees),
            group=group,
            schedule=settings.pipeline_schedule,
            micro_batches=settings.micro_batches,
            accelerator=accelerator,
        )
    named = [
        (name, parameter) for name, parameter in named_parameters(parts) if parameter.requires_grad
    ]
    sharded = settings.shards_optimiser and dist.is_initialized()
    return Parallel(
        parts,
        make_optimiser(
            named,
            optimiser or partial(usual_optimiser, settings=settings),
            sharded=sharded,
        ),
        inputs,
        settings=settings,
        mesh=mesh,
        accelerator=accelerator,
        pipeline=pipeline,
        loss=loss,
        make_schedule=schedule,
        device=device,
        real_share=getattr(module, "real_share", lambda *_: None),
        mean_of_real=isinstance(module, StagedModel),
    )


def _divide(
    stages: Mapping[int, nn.Module],
    model: Any,
    degrees: Degrees,
    mesh: DeviceMesh | None,
    settings: ParallelSettings,
    wrap: Sequence[type[nn.Module]],
    precision: Precision,
) -> None:
    """Divide tensors, recompute, compile and shard, in this order.

    What is recomputed in the backward pass keeps no activations, or (selective) the costly ones.
    """

    def policy(
        _: object,
        operation: object,
        *__: Any,
        **___: Any,
    ) -> checkpoint.CheckpointPolicy:
        policies = checkpoint.CheckpointPolicy
        return (
            policies.MUST_SAVE
            if str(operation).startswith(_SAVED_OPERATIONS)
            else policies.PREFER_RECOMPUTE
        )

    contexts: Any = checkpoint.noop_context_fn
    if settings.recompute == "selective":
        contexts = partial(checkpoint.create_selective_checkpoint_contexts, policy)
    for part in stages.values():
        if mesh is not None and degrees.tp > 1:
            children = {name for name, _ in part.named_children()}  # a stage may lack stem or head
            styles = {
                name: style for name, style in model.plan.items() if name.split(".")[0] in children
            }
            _check_tensor_parallel(part, styles, degrees.tp)
            parallelize_module(part, mesh["tp"], styles)
        units = units_of(part, wrap)
        for unit in units:
            if settings.recompute != "none":
                unit.forward = partial(
                    checkpoint.checkpoint,
                    unit.forward,
                    use_reentrant=False,
                    context_fn=contexts,
                )
            if settings.compile != "none":
                unit.compile(backend=settings.compile)
        if mesh is not None:
            shard(
                part,
                units=units,
                mesh=mesh,
                settings=settings,
                precision=precision,
            )


def _check_tensor_parallel(
    part: nn.Module,
    styles: Mapping[str, ParallelStyle],
    tp: int,
) -> None:
    """Check that tensor parallel of a degree divides weights, heads and, in each pass, activations.

    What it does not divide, torch would divide into parts of several sizes, of which gloo aborts
    the process, and local layers fail. Raises ConfigError; for activations the forward pass does.
    """
    for name, module in part.named_modules():
        parent = part.get_submodule(name.rpartition(".")[0])
        for pattern, style in styles.items():
            atoms = list(zip_longest(name.split("."), pattern.split("."), fillvalue=""))
            if not all(fnmatchcase(atom, wildcard) for atom, wildcard in atoms):
                continue
            if isinstance(parent, Attention) and isinstance(style, ColwiseParallel):
                heads = module.get_parameter("weight").shape[0] // parent.head_width
                _check_divides(tp, heads, f"heads of '{name}'")
            _check_style(name, module, style, tp)


def _check_style(name: str, module: nn.Module, style: ParallelStyle, tp: int) -> None:
    """Check what one style divides of a module; see `_check_tensor_parallel`."""
    layouts: Sequence[Any] = ()
    on_input = False
    if isinstance(style, ColwiseParallel):
        if isinstance(module, nn.Linear) and style.output_layouts == (Shard(-1),):
            _check_divides(tp, module.out_features, f"outputs of '{name}'")
        if style.output_layouts != (Shard(-1),):
            layouts = style.output_layouts
    elif isinstance(style, RowwiseParallel):
        if isinstance(module, nn.Linear) and style.input_layouts == (Shard(-1),):
            _check_divides(tp, module.in_features, f"inputs of '{name}'")
        layouts = style.output_layouts
    elif isinstance(style, PrepareModuleOutput):
        layouts = style.desired_output_layouts
    elif isinstance(style, PrepareModuleInput):
        on_input = True
        layouts = [
            desired if layout == Replicate() else None
            for layout, desired in zip(
                style.input_layouts or (),
                style.desired_input_layouts or (),
                strict=True,
            )
        ]
    if not any(isinstance(layout, Shard) for layout in layouts):
        return

    def check(values: Any) -> None:
        tensors = values if isinstance(values, tuple) else (values,)
        for tensor, layout in zip(tensors, layouts, strict=False):
            if isinstance(layout, Shard) and isinstance(tensor, Tensor):
                size = tensor.shape[layout.dim]
                side = "what goes into" if on_input else "what comes out of"
                axis = f"axis {layout.dim} of {side} '{name}', of shape {list(tensor.shape)}"
                _check_divides(tp, size, f"entries of {axis}")

    if on_input:
        module.register_forward_pre_hook(lambda _, inputs: check(inputs))
    else:
        module.register_forward_hook(lambda _, __, outputs: check(outputs))


def _check_divides(tp: int, size: int, subject: str) -> None:
    if size % tp:
        raise ConfigError(f"tp={tp} does not divide the {size} {subject}; {divisors('tp', size)}")


def _materialise(
    model: nn.Module | Callable[[], nn.Module],
    settings: ParallelSettings,
    device: str,
    *,
    divided: bool,
) -> tuple[Any, Fill | None]:
    """Return the model on the device; one that is to be divided without memory, with what gives
    it values.
    """
    if isinstance(model, nn.Module):
        module = set_batch_norm(model, settings.batch_norm)
        if not next(module.parameters()).is_meta:
            module.to(device)
            for tensor in (*module.parameters(), *module.buffers()) if divided else ():
                dist.broadcast(tensor.detach(), 0)
        return module, None

    def make() -> nn.Module:
        return set_batch_norm(model(), settings.batch_norm)

    if divided:
        return draft(make, device, settings.seed)
    torch.manual_seed(settings.seed)
    return make().to(device), None


def set_batch_norm(model: nn.Module, kind: str) -> nn.Module:
    """Return the model with batch norm of statistics over all ranks (sync), or that keeps what
    it has (frozen).
    """
    if kind == "sync":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    for part in model.modules() if kind == "frozen" else ():
        if isinstance(part, _BatchNorm):
            part.requires_grad_(requires_grad=False)
            # Whoever calls train() on the model.
            part.register_forward_pre_hook(_to_evaluation)
    return model


def _to_evaluation(norm: nn.Module, _: object) -> None:
    norm.eval()


def units_of(part: nn.Module, wrap: Sequence[type[nn.Module]]) -> list[nn.Module]:
    """Return the parts that are sharded, recomputed and compiled one by one, inner ones first."""
    wrap = wrap or getattr(part, "wrap", ())
    if not wrap:
        return list(part.get_submodule("blocks").children()) if hasattr(part, "blocks") else []
    units = [
        module
        for module in part.modules()
        if isinstance(module, tuple(wrap)) and module is not part
    ]
    if not units:
        names = ", ".join(module.__name__ for module in wrap)
        raise ConfigError(
            f"wrap names {names}, and model {type(part).__name__} has no part of it; name "
            "classes it has"
        )
    return units[::-1]
