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

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fuelrail.bench.measure.collectives import Collective, Counter, summed
from fuelrail.bench.planner.formulas import in_flight, passes_of, schedule_order
from fuelrail.bench.planner.state import FP32, MOMENTS
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import GptSettings, ModelSettings, VitSettings
from fuelrail.bench.trainer.strategies.optimiser import DTYPES, autocast
from fuelrail.bench.trainer.strategies.parallel import Parallel, make_mesh, parallelise
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings, Precision, check_fits
from fuelrail.pipeline.errors import ConfigError, FuelrailError

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.staged import StagedModel

_PLANNED_SCHEDULES = ("GPipe", "1F1B")
_GROWS = torch.device("meta")  # on which the tracker sees nothing else


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: ``parameters`` of its own; bytes at the peak of a step, by kind and in all; FLOP of a micro-batch.

    ``kept_bytes`` are the activations that a micro-batch keeps from its forward pass to its backward pass, of which
    ``in_flight`` lie in memory at once; ``hidden_bytes`` go to the next stage. ``collectives`` are those of a step of
    ``micro_batches``; without stages each further one adds those of ``repeated``.
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
    micro_batches: int
    collectives: list[Collective]
    repeated: list[Collective]


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank trains on: samples of a micro-batch, number of micro-batches in a step, and images of a sample."""

    micro_batch: int
    micro_batches: int = 1
    cameras: int = 6
    height: int = 256
    width: int = 704


class Line:
    """Bytes in memory after each operator of a forward and of a backward pass, and those that the former kept.

    All are pairs: bytes that do not depend on the micro-batch, and bytes for each of its samples. A block of memory is
    of the second kind where its size is a multiple of the run's ``rows``, a prime that no size of a model has.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.forward: list[tuple[int, int]] = []
        self.backward: list[tuple[int, int]] = []
        self.kept = (0, 0)
        self.sent: tuple[list[Collective], list[Collective], list[Collective]] = ([], [], [])
        """Collectives of a forward pass, of a backward pass, and of what closes a pipeline's step."""

    def watch(self, tracker: Any) -> None:  # noqa: ANN401 - torch's
        """Let the tracker count what grows with the rows as another device's, and look for no peaks: it takes long."""
        update = tracker._update_snap  # noqa: SLF001

        def noted(kind: Any, block: Any, **old: Any) -> None:  # noqa: ANN401 - torch's
            if kind.name == "ADD" and block.mem_consumed % self.rows == 0:
                block.device = _GROWS
            update(kind, block, **old)

        tracker._update_snap, tracker._update_peak_stats = noted, lambda _: None  # noqa: SLF001

    def parts(self, tracker: Any, kind: str) -> tuple[int, int]:  # noqa: ANN401 - torch's
        """Return the bytes of a kind that lie in memory now."""
        grows = fixed = 0
        for device, sizes in tracker._curr_mem_snap.items():  # noqa: SLF001 - its own method copies them
            size = next((size for key, size in sizes.items() if str(getattr(key, "value", key)) == kind), 0)
            grows, fixed = (size // self.rows, fixed) if device == _GROWS else (grows, size)
        return fixed, grows


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tracker: Any, line: Line, into: list[tuple[int, int]]) -> None:  # noqa: ANN401 - torch's
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker, self._line, self._into = tracker, line, into

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        """Run an operator and note the bytes after it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come here by themselves
        result = func(*args, **(kwargs or {}))
        self._into.append(self._line.parts(self._tracker, "Total"))
        return result


def _noting(tracker: Any, line: Line | None, way: str) -> AbstractContextManager[Any]:  # noqa: ANN401 - torch's
    return nullcontext() if line is None else _Noting(tracker, line, getattr(line, way))


class PrivateParts(NamedTuple):
    """What of torch is private: the fake store, two memory trackers, how DTensors find placements, their caches."""

    fake_store: Any
    tracker: Any
    sharded_tracker: Any
    propagator: Any
    forget: tuple[Callable[[], None], ...]


def private_parts() -> PrivateParts:
    """Return what is private. Raises FuelrailError where this torch has it elsewhere."""
    try:
        from torch._C import _clear_DTensor_sharding_propagator_cache as forget_native
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
        from torch.distributed._tools.mem_tracker import MemTracker
        from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
        from torch.distributed.tensor._sharding_prop import ShardingPropagator
        from torch.distributed.tensor.debug import _clear_python_sharding_prop_cache as forget_python
        from torch.testing._internal.distributed.fake_pg import FakeStore

        attrgetter("_update_snap", "_update_peak_stats")(MemTracker)  # which Line replaces
        attrgetter("_propagate_tensor_meta_non_cached")(ShardingPropagator)
    except (ImportError, AttributeError) as error:
        raise FuelrailError(
            f"torch {torch.__version__} has moved a part that the planner runs ({error}); it was tested with torch "
            "2.13; `fuelrail plan` then plans GPT models by closed formulas"
        ) from error
    forget = (forget_native, forget_python, clear_redistribute_planner_cache, _gen_transform_infos.cache_clear)
    return PrivateParts(FakeStore, MemTracker, FSDPMemTracker, ShardingPropagator, forget)


def private_parts_are_there() -> bool:
    """Whether this torch has what the planner runs."""
    try:
        private_parts()
    except FuelrailError:
        return False
    return True


def shape_of(
    model: ModelSettings, settings: ParallelSettings, degrees: Degrees, inputs: Inputs, *, rank: int = 0,
    precision: Precision = "fp32", line: Line | None = None,
) -> Shape:  # fmt: skip
    """Run one rank. Raises ConfigError for degrees that do not divide, and FuelrailError as :func:`private_parts`.

    ``line`` gets the bytes in memory after each operator of the last of two passes; the shape then has no peak.

    The process must have no process group of its own.
    """
    image = (0, 0) if isinstance(model, GptSettings) else (inputs.height, inputs.width)
    batch = inputs.micro_batch * (inputs.micro_batches if degrees.pp > 1 else 1)
    check_fits(settings, degrees, model, batch, image)
    check_schedule(settings, degrees)
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
        return _run(parallel, (model, settings, degrees, precision), inputs, (example, hidden, line), (rank, stage))


def check_schedule(settings: ParallelSettings, degrees: Degrees) -> None:
    """Raise ConfigError for a pipeline's schedule whose order is not planned."""
    if degrees.pp > 1 and settings.pipeline_schedule not in _PLANNED_SCHEDULES:
        raise ConfigError(
            f"pipeline_schedule {settings.pipeline_schedule} gives each rank two stages, and the planner shapes one a "
            f"rank: it would misjudge activations and bubble; use {' or '.join(_PLANNED_SCHEDULES)}"
        )


@contextmanager
def _fake_group(rank: int, world: int) -> Iterator[None]:
    if dist.is_initialized():
        raise FuelrailError("the planner needs a process without a process group; call it in one of its own")
    parts = private_parts()
    find = parts.propagator._propagate_tensor_meta_non_cached  # noqa: SLF001 - torch's

    def unseen(*args: Any) -> Any:  # noqa: ANN401 - torch's
        """Let DTensors find placements, by operators at global sizes, where neither tracker nor counter looks."""
        with _disable_current_modes():
            return find(*args)

    hook = sys.excepthook  # to which each group adds its rank
    dist.init_process_group("fake", rank=rank, world_size=world, store=parts.fake_store())
    parts.propagator._propagate_tensor_meta_non_cached = unseen  # noqa: SLF001
    try:
        yield
    finally:
        parts.propagator._propagate_tensor_meta_non_cached = find  # noqa: SLF001
        dist.destroy_process_group()
        sys.excepthook = hook
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
    given_to: tuple[Sequence[Tensor], Tensor | None, Line | None],
    place: tuple[int, int],
) -> Shape:
    model, settings, degrees, precision = how
    example, hidden, line = given_to
    parts = private_parts()
    with FakeTensorMode(allow_non_fake_inputs=True):
        part = parallel.models[0]
        part.to_empty(device="cpu")
        given = tuple(torch.empty(one.shape, dtype=one.dtype) for one in example)
        received = None
        if hidden is not None:
            low = degrees.dp_shard > 1 and isinstance(model, (GptSettings, VitSettings))
            received = torch.empty(hidden.shape, dtype=DTYPES[precision] if low else torch.float32)
        tracker = parts.sharded_tracker(part) if degrees.dp_shard > 1 else parts.tracker()
        if line is not None:
            line.watch(tracker)
        if degrees.dp_shard == 1:
            tracker.track_external(part, *given)
        else:
            tracker.track_inputs(given)
        copied = degrees.data > 1 and not degrees.composed
        learnt = [parameter for parameter in part.parameters() if parameter.requires_grad]
        buckets = [torch.empty_like(parameter) for parameter in learnt] if copied else []
        if buckets:  # of DDP, which exist all the time
            tracker.track_external(*buckets)
        passes = _Passes(parallel, part, (given, received), precision, pipeline=degrees.pp > 1)
        count = min(2, inputs.micro_batches)  # a third one's activations lie beside the same gradients
        with tracker:
            for number in range(count):
                last = number == count - 1
                if number:
                    tracker.reset_mod_stats()
                if last and copied:  # DDP copies a gradient into its bucket, and frees it, once it is whole
                    for parameter, bucket in zip(learnt, buckets, strict=True):
                        parameter.register_post_accumulate_grad_hook(partial(_into_bucket, bucket=bucket))  # type: ignore[no-untyped-call]
                kept = passes.run(tracker, last=last, line=line if last else None)
        found = _by_kind(tracker.get_tracker_snapshot("peak"))
    own = sum(_local(parameter).numel() for parameter in learnt)
    moments = FP32 * MOMENTS[settings.optimiser] * own
    if settings.strategy == "zero1" and settings.mesh is None:
        moments //= degrees.data
    flying = in_flight(settings.pipeline_schedule, degrees.pp, place[1], inputs.micro_batches)
    memory = {**found, "moments": moments}
    memory["activations in flight"] = kept * (flying - 1)
    if degrees.pp > 1:  # a stage has the whole batch's inputs, also where it reads the targets alone
        memory["inputs of other micro-batches"] = (inputs.micro_batches - 1) * sum(one.nbytes for one in given)
    repeated: list[Collective] = []
    if degrees.pp > 1:
        order = schedule_order(settings.pipeline_schedule, degrees.pp, inputs.micro_batches)[place[1]]
        collectives = passes.of_order(order)
    else:
        collectives = [one for found in passes.counted[: inputs.micro_batches] for one in found]
        repeated = passes.counted[0] if inputs.micro_batches > 1 else []
    if degrees.pp * degrees.dp_shard * degrees.tp == 1 and degrees.data > 1:
        collectives, repeated = [], []
        collectives = [
            Collective(kind="all_reduce", axis="dp_replicate", ranks=degrees.data, count=1, bytes=FP32 * own)
        ]
    return Shape(
        rank=place[0], stage=place[1], parameters=own, memory=memory, peak_bytes=sum(memory.values()),
        kept_bytes=kept, in_flight=flying, flop=passes.flop,
        hidden_bytes=0 if received is None else received.numel() * received.element_size(),
        micro_batches=inputs.micro_batches, collectives=summed(collectives), repeated=repeated,
    )  # fmt: skip


class _Passes:
    """Micro-batches of one rank, each forward and backward, with what they send; a stage's as the schedule calls them.

    ``counted`` has each pass's collectives, ``flop`` those of one.
    """

    def __init__(
        self, parallel: Parallel, part: nn.Module, inputs: tuple[tuple[Tensor, ...], Tensor | None],
        precision: Precision, *, pipeline: bool,
    ) -> None:  # fmt: skip
        self._parallel, self._part, self._precision, self._pipeline = parallel, part, precision, pipeline
        self._given, self._received = inputs
        self._forward: list[Collective] = []
        self._backward: list[Collective] = []
        self._closing: list[Collective] = []
        self.counted: list[list[Collective]] = []
        self.flop = 0

    def run(self, tracker: Any, *, last: bool, line: Line | None = None) -> int:  # noqa: ANN401 - torch's, private
        """Run one pass, whose gradients are reduced if it is the last; return what it kept for its backward pass."""
        part, mesh = self._part, self._parallel.mesh
        sharded = part if isinstance(part, FSDPModule) else None
        if sharded is not None and self._pipeline:
            sharded.set_is_last_backward(False)
            sharded.set_reshard_after_backward(False)
            sharded.set_requires_gradient_sync(False)
        elif sharded is not None:
            sharded.set_requires_gradient_sync(last)
        with (
            _noting(tracker, line, "forward"),
            Counter(mesh) as forward,
            autocast(torch.device("cpu"), self._precision),
        ):
            result = self._result()
        kept = 0 if tracker is None else _by_kind(tracker.get_tracker_snapshot("current")).get("Activation", 0)
        if line is not None:
            line.kept = line.parts(tracker, "Activation")
        with _noting(tracker, line, "backward"), Counter(mesh) as backward:
            torch.autograd.backward(result, None if result.dim() == 0 else torch.empty_like(result))
        with Counter(mesh) as closing:
            if last and self._pipeline:
                PipelineStage.perform_reduce_grad(cast("PipelineStage", SimpleNamespace(submod=part)), 1)
        parts = [forward.collectives(), backward.collectives(), closing.collectives()]
        if not self.counted:
            self._forward, self._backward = parts[:2]
        elif line is not None:  # the first pass alone gathered all of a stage's weights
            self._forward, self._backward = (
                [one for one in was if is_gather_of_weights(one)]
                + [one for one in now if not is_gather_of_weights(one)]
                for was, now in zip((self._forward, self._backward), parts, strict=False)
            )
            line.sent = (self._forward, self._backward, parts[2])
        self.flop = forward.flop + backward.flop
        self._closing = parts[2]
        self.counted.append([one for found in parts for one in found])
        return kept

    def _result(self) -> Tensor:
        named = {f"input_{number}": tensor for number, tensor in enumerate(self._given)}
        result: Tensor
        if self._received is None:
            result = self._part(*self._given)
        elif getattr(self._part, "stem", None) is not None:
            result = self._part(**named)
        else:
            result = self._part(self._received.requires_grad_(), **named)
        return result

    def of_order(self, order: Sequence[str]) -> list[Collective]:
        """Return the collectives of a stage's whole order of work, reduction of gradients included."""
        found = []
        for way, sent in (("F", self._forward), ("B", self._backward)):
            every, gathering = passes_of(order, way)
            for one in sent:
                found += [one] * (gathering if is_gather_of_weights(one) else every)
        return found + self._closing


def is_gather_of_weights(one: Collective) -> bool:
    """Whether a collective gathers what the ranks of a sharded model hold."""
    return one.kind == "all_gather" and one.axis.startswith("dp_")


def _into_bucket(parameter: Tensor, bucket: Tensor) -> None:
    parameter.grad = bucket


def _by_kind(snapshot: Mapping[Any, Mapping[Any, int]]) -> dict[str, int]:
    """Bytes by kind of a tracker's snapshot, of all devices, without its total and kinds without bytes."""
    found: dict[str, int] = {}
    for device in snapshot.values():
        for kind, size in device.items():
            name = str(getattr(kind, "value", kind)).replace("Other", "Inputs and buckets")
            if name != "Total" and size:
                found[name] = found.get(name, 0) + size
    return found


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
