"""What one rank of a cluster holds, computes and sends: the trainer's own strategies, run as that rank without others.

A fake process group stands for the other ranks, the model is divided on the meta device, and fake tensors run a forward
and a backward pass: torch's memory tracker says what lies in memory at the peak, its FLOP counter what is computed, and
a dispatch mode what is sent. No weight is ever allocated.

Two parts are arithmetic, as torch cannot run them so: DDP's buckets (their bytes are the gradients'; they are views, so
they take no memory besides), and the order of a pipeline's micro-batches, of which a stage runs one. The optimiser's
moments are added by their number, for torch counts DTensors in full in a step under fake tensors.

The fake store, the trackers and DTensor's caches are private parts of torch: :func:`private_parts` finds them or says
so.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import GptSettings, VitSettings
from fuelrail.bench.trainer.strategies.parallel import make_mesh, parallelise
from fuelrail.bench.trainer.strategies.precision import DTYPES, autocast
from fuelrail.bench.trainer.strategies.settings import Degrees, check_fits
from fuelrail.pipeline.errors import ConfigError, FuelrailError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.bench.trainer.models.settings import ModelSettings
    from fuelrail.bench.trainer.models.staged import StagedModel
    from fuelrail.bench.trainer.strategies.parallel import Parallel
    from fuelrail.bench.trainer.strategies.settings import ParallelSettings, Precision

MOMENTS = {"adamw": 2, "sgd": 1}
_FP32 = 4
_KINDS = {
    "all_reduce": ("allreduce", "all_reduce"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("allgather", "all_gather"),
    "broadcast": ("broadcast",),
}
_PLANNED_SCHEDULES = ("GPipe", "1F1B")


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind over one axis in a micro-batch; ``bytes`` are those of the whole tensors."""

    kind: str
    axis: str
    ranks: int
    count: int
    bytes: int


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: ``parameters`` of its own; bytes at the peak of a step, by kind and in all; FLOP of a micro-batch.

    ``kept_bytes`` are the activations that a micro-batch keeps from its forward pass to its backward pass, of which
    ``in_flight`` lie in memory at once; ``hidden_bytes`` go to the next stage.
    """

    rank: int
    stage: int
    parameters: int
    memory: dict[str, int]
    peak_bytes: int
    kept_bytes: int
    in_flight: int
    flop: int
    hidden_bytes: int
    collectives: list[Collective]


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank trains on: samples of a micro-batch, number of micro-batches in a step, and images of a sample."""

    micro_batch: int
    micro_batches: int = 1
    cameras: int = 6
    height: int = 256
    width: int = 704


class PrivateParts(NamedTuple):
    """What of torch is private: the fake store, two memory trackers, and what forgets DTensor's caches."""

    fake_store: Any
    tracker: Any
    sharded_tracker: Any
    forget: tuple[Callable[[], None], ...]


def private_parts() -> PrivateParts:
    """Return what is private. Raises FuelrailError where this torch has it elsewhere."""
    try:
        from torch._C import _clear_DTensor_sharding_propagator_cache as forget_native
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
        from torch.distributed._tools.mem_tracker import MemTracker
        from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
        from torch.distributed.tensor.debug import _clear_python_sharding_prop_cache as forget_python
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise FuelrailError(
            f"torch {torch.__version__} has moved a part that the planner runs ({error}); it was tested with torch "
            "2.13; the formulas of fuelrail.bench.planner.formulas need none of it"
        ) from error
    forget = (forget_native, forget_python, clear_redistribute_planner_cache, _gen_transform_infos.cache_clear)
    return PrivateParts(FakeStore, MemTracker, FSDPMemTracker, forget)


def shape_of(
    model: ModelSettings, settings: ParallelSettings, degrees: Degrees, inputs: Inputs, *, rank: int = 0,
    precision: Precision = "fp32",
) -> Shape:  # fmt: skip
    """Run one rank. Raises ConfigError for degrees that do not divide, and FuelrailError as :func:`private_parts`.

    The process must have no process group of its own.
    """
    image = (0, 0) if isinstance(model, GptSettings) else (inputs.height, inputs.width)
    batch = inputs.micro_batch * (inputs.micro_batches if degrees.pp > 1 else 1)
    check_fits(settings, degrees, model, batch, image)
    if degrees.pp > 1 and settings.pipeline_schedule not in _PLANNED_SCHEDULES:
        raise ConfigError(
            f"the planner knows the pipeline schedules {' and '.join(_PLANNED_SCHEDULES)}, not "
            f"{settings.pipeline_schedule}; choose one of them"
        )
    world = degrees.pp * degrees.data * degrees.tp
    with _fake_group(rank, world):
        whole = degrees.pp * degrees.dp_shard * degrees.tp == 1
        mesh = None if whole else make_mesh(degrees, "cpu")
        with torch.device("meta"):
            made = build_model(model)
            example = _example(model, inputs)
        stage = 0 if degrees.pp == 1 or mesh is None else int(mesh.get_local_rank("pp"))
        hidden = _hidden(made, example, stage, degrees, model) if degrees.pp > 1 else None
        parallel = parallelise(
            made, settings, Degrees() if whole else degrees, mesh, batch_size=batch, precision="fp32" if
            precision == "fp16" else precision,
        )  # fmt: skip
        return _run(parallel, (model, settings, degrees, precision), inputs, example, hidden, (rank, stage))


@contextmanager
def _fake_group(rank: int, world: int) -> Iterator[None]:
    if dist.is_initialized():
        raise FuelrailError("the planner needs a process without a process group; call it in one of its own")
    parts = private_parts()
    dist.init_process_group("fake", rank=rank, world_size=world, store=parts.fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # They know meshes by their ranks, and would bring this one's groups to the next of the same ranks.
        for forget in parts.forget:
            forget()


def _example(model: ModelSettings, inputs: Inputs) -> tuple[Tensor, ...]:
    """Arguments of the model's forward, as its method ``inputs`` returns them."""
    count, cameras = inputs.micro_batch, inputs.cameras
    if isinstance(model, GptSettings):
        return torch.zeros(count, model.context + 1, dtype=torch.long), torch.ones(count)
    return (
        torch.zeros(count, cameras, 3, inputs.height, inputs.width, dtype=torch.uint8),
        torch.ones(count, cameras),
        torch.zeros(count, cameras, 3, 3),
        torch.zeros(count, cameras, 4, 4),
        torch.zeros(count, model.grid**2),
        torch.ones(count),
    )


def _hidden(
    model: StagedModel, example: Sequence[Tensor], stage: int, degrees: Degrees, settings: ModelSettings
) -> Tensor:
    """What a stage receives, or the first one sends, on the meta device."""
    with torch.no_grad():
        hidden: Tensor = model.stem(*example)
        for block in list(model.blocks)[: len(model.blocks) * stage // degrees.pp]:
            hidden = block(hidden)
    if isinstance(settings, (GptSettings, VitSettings)):  # whose tokens tensor parallel divides
        hidden = hidden.narrow(1, 0, hidden.shape[1] // degrees.tp)
    return hidden


def _run(
    parallel: Parallel,
    how: tuple[ModelSettings, ParallelSettings, Degrees, Precision],
    inputs: Inputs,
    example: Sequence[Tensor],
    hidden: Tensor | None,
    place: tuple[int, int],
) -> Shape:
    model, settings, degrees, precision = how
    parts = private_parts()
    with FakeTensorMode(allow_non_fake_inputs=True):
        part = parallel.models[0]
        part.to_empty(device="cpu")
        given = tuple(torch.empty(one.shape, dtype=one.dtype) for one in example)
        received = None
        if hidden is not None:
            low = degrees.dp_shard > 1 and isinstance(model, (GptSettings, VitSettings))
            received = torch.empty(hidden.shape, dtype=DTYPES[precision] if low else torch.float32)
        if degrees.tp > 1:
            # DTensors find their placements in the first pass by running operators at global sizes: not this rank's.
            _pass(parallel, part, given, received, precision)
            parallel.optimiser.zero_grad()
        tracker = parts.sharded_tracker(part) if degrees.dp_shard > 1 else parts.tracker()
        if degrees.dp_shard == 1:
            tracker.track_external(part)
        counter = _Counter(parallel.mesh)
        with tracker:
            # In a step of several micro-batches the gradients of the first lie beside the activations of the second.
            with counter:
                kept = _pass(parallel, part, given, received, precision, tracker)
            if inputs.micro_batches > 1:
                tracker.reset_mod_stats()
                kept = _pass(parallel, part, given, received, precision, tracker)
        found = _by_kind(tracker.get_tracker_snapshot("peak"))
    own = sum(_local(p).numel() for p in part.parameters() if p.requires_grad)
    moments = _FP32 * MOMENTS[settings.optimiser] * own
    if settings.strategy == "zero1" and settings.mesh is None:
        moments //= degrees.data
    in_flight = 1
    if degrees.pp > 1:
        ahead = inputs.micro_batches if settings.pipeline_schedule == "GPipe" else degrees.pp - place[1]
        in_flight = min(inputs.micro_batches, ahead)
    memory = {**found, "moments": moments}
    memory["activations in flight"] = kept * (in_flight - 1)
    collectives = counter.collectives()
    if degrees.pp * degrees.dp_shard * degrees.tp == 1 and degrees.data > 1:
        collectives = [
            Collective(kind="all_reduce", axis="dp_replicate", ranks=degrees.data, count=1, bytes=_FP32 * own)
        ]
    return Shape(
        rank=place[0], stage=place[1], parameters=own, memory=memory, peak_bytes=sum(memory.values()),
        kept_bytes=kept, in_flight=in_flight, flop=counter.flop,
        hidden_bytes=0 if received is None else received.numel() * received.element_size(), collectives=collectives,
    )  # fmt: skip


def _pass(
    parallel: Parallel,
    part: nn.Module,
    given: tuple[Tensor, ...],
    received: Tensor | None,
    precision: Precision,
    tracker: Any = None,  # noqa: ANN401 - torch's, private
) -> int:
    """One micro-batch, forward and backward, a stage's as the schedule calls it; return what it kept in between."""
    with autocast(torch.device("cpu"), precision):
        if received is None:
            result: Tensor = part(*given)
        else:
            named = {f"input_{number}": tensor for number, tensor in enumerate(given)}
            first = getattr(part, "stem", None) is not None
            result = part(**named) if first else part(received.requires_grad_(), **named)
    kept = 0 if tracker is None else _by_kind(tracker.get_tracker_snapshot("current")).get("Activation", 0)
    torch.autograd.backward(result, None if result.dim() == 0 else torch.empty_like(result))
    for module in parallel.models:
        assert any(p.grad is not None for p in module.parameters()), "a backward pass leaves gradients"
    return kept


def _by_kind(snapshot: Mapping[Any, Mapping[Any, int]]) -> dict[str, int]:
    """Bytes by kind of a tracker's snapshot, of all devices, without its total and kinds without bytes."""
    found: dict[str, int] = {}
    for device in snapshot.values():
        for kind, size in device.items():
            name = str(getattr(kind, "value", kind))
            if name != "Total" and size:
                found[name] = found.get(name, 0) + size
    return found


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# Attention on a CPU is an operator of its own, which torch's registry does not know. Its backward pass computes the
# scores again: a tenth more than the papers' formulas where attention is all there is.
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts this rank's FLOP, and what is sent by kind and axis of the mesh.

    Torch's own counter takes a DTensor's operators at their global size.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        groups = {} if mesh is None else {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}
        self._axes = {str(group.group_name): (axis, group.size()) for axis, group in groups.items()}
        self._found: dict[tuple[str, str, int], list[int]] = {}
        self.flop = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        """Run and count an operator."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators and collectives come here by themselves
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), None)
            if kind is not None:
                self._note(kind, args, result)
        elif name.startswith(f"{_ATTENTION}_backward"):
            self.flop += sdpa_backward_flop_count(*(one.shape for one in args[:4]))  # type: ignore[no-untyped-call]
        elif name.startswith(_ATTENTION):
            self.flop += sdpa_flop_count(*(one.shape for one in args[:3]))  # type: ignore[no-untyped-call]
        elif func.overloadpacket in flop_registry:
            self.flop += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result

    def _note(self, kind: str, args: Sequence[Any], result: object) -> None:
        names = [name for name in map(_group_name, args) if name in self._axes]
        axis, ranks = self._axes[names[-1]] if names else ("world", dist.get_world_size())
        noted = self._found.setdefault((kind, axis, ranks), [0, 0])
        noted[0] += 1
        noted[1] += max(_bytes(one) for one in (*args[:2], result))

    def collectives(self) -> list[Collective]:
        """What was counted."""
        return [
            Collective(kind=kind, axis=axis, ranks=ranks, count=count, bytes=size)
            for (kind, axis, ranks), (count, size) in sorted(self._found.items())
        ]


def _group_name(argument: object) -> str:
    """Name of a collective's group, which operators take by name or as an object; "" for other arguments."""
    if isinstance(argument, str):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return str(dist.ProcessGroup.unbox(argument).group_name)
        except RuntimeError:
            return ""  # how to reduce, which is an object too
    return ""


def _bytes(argument: object) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(argument) if isinstance(leaf, Tensor))
