"""One rank of a cluster, run without the others: the trainer's own strategies on fake tensors.

A fake process group stands for the other ranks, the model is divided on the meta device, and fake
tensors run a forward and a backward pass: torch's memory tracker says what lies in memory after
each operator, its FLOP counter what is computed, and a dispatch mode what is sent. No weight is
ever allocated.

The micro-batch is a large prime, which says of each size whether and how it grows with the samples:
FLOP, hidden tensors and each block of memory either are multiples of it or do not grow. So memory
after each operator is a line over the micro-batch, and one run is enough for all of them.

What of torch is private is in :mod:`~fuelrail.bench.planner.torch_private`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from fuelrail.bench.measure.collectives import (
    Collective,
    Counter,
    summed,
)
from fuelrail.bench.planner.state import make_own
from fuelrail.bench.planner.torch_private import (
    Bytes,
    FakeTensorMode,
    bytes_by_kind,
    fake_group,
    launches,
    private_parts,
    tree_leaves,
    tree_map,
    watch_growth,
)
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.gpt import VOCABULARY_PART
from fuelrail.bench.trainer.models.settings import (
    GptSettings,
    ModelSettings,
    VitSettings,
)
from fuelrail.bench.trainer.strategies.optimiser import DTYPES, autocast
from fuelrail.bench.trainer.strategies.parallel import make_mesh, parallelise
from fuelrail.bench.trainer.strategies.step import local
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.stages import stage_error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.bench.trainer.strategies.settings import (
        Degrees,
        ParallelSettings,
        Precision,
    )
    from fuelrail.bench.trainer.strategies.step import Parallel

# a prime, and more than the bytes that a step's smallest collectives send whatever the micro-batch
ROWS = 16777259


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank trains on: samples of a micro-batch, number of micro-batches in a step, and
    images of a sample.

    ``low``: weights and activations are in 16 bits, and shards reduce their gradients after each
    micro-batch. Then ``gradient_bytes`` are those of a gradient as it is kept and reduced, and
    ``tied_parameters`` the number of those of the model that are two layers' at once.
    ``expert_parallel`` ranks share the experts, of which each holds its part; ``stores_8_bits``:
    products keep their inputs in 8 bits.
    """

    micro_batch: int
    micro_batches: int = 1
    cameras: int = 6
    height: int = 256
    width: int = 704
    low: bool = False
    gradient_bytes: int = 4
    tied_parameters: int = 0
    expert_parallel: int = 1
    stores_8_bits: bool = False


class RankRun(NamedTuple):
    """A rank's forward and backward pass.

    Pairs are bytes that do not depend on the micro-batch, and those of a sample.

    ``parameters`` and their ``tensors`` are the rank's own; ``flop`` (all, of attention, of
    convolutions), ``hidden_bytes`` and ``input_bytes`` are those of a sample. ``operators`` is the
    number of those that the host launches in a micro-batch. ``forward`` and ``backward`` are the
    bytes in memory after each operator, [operator, kind, 2], by ``kinds``;
    ``forward_bytes`` is what the forward pass kept. ``sent``: collectives of a forward pass, of a
    backward pass, and of what the last micro-batch of a step adds to them, at ``ROWS`` samples.
    """

    parameters: int
    tensors: int
    flop: tuple[int, int, int]
    operators: int
    hidden_bytes: int
    input_bytes: int
    kinds: list[str]
    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    forward_bytes: tuple[int, int]
    sent: list[list[Collective]]


class _Memory(Counter):  # type: ignore[no-untyped-call]
    """A counter that notes the bytes in memory after each operator, too."""

    def __init__(self, mesh: DeviceMesh | None, tracker: Any) -> None:
        super().__init__(mesh)
        self._tracker = tracker
        self.noted: list[Bytes] = []
        self.operators = 0

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count an operator that ran, and note the bytes after it."""
        super().count(func, args, kwargs)
        self.noted.append(bytes_by_kind(self._tracker, ROWS))
        self.operators += launches(func)


@cache
def run_rank(
    model: ModelSettings | str,
    settings: ParallelSettings,
    degrees: Degrees,
    inputs: Inputs,
    rank: int,
    precision: Precision,
) -> RankRun:
    """Run one rank, whatever the samples of a micro-batch; with more than one of them in a step,
    the second one.

    A text names the function that makes a model, as for
    :func:`~fuelrail.bench.trainer.models.build.maker`: its method ``example(samples)`` returns a
    batch of tensors with that many samples, which ``forward`` makes a loss of, or a dict of losses.
    The process must have no process group of its own. Raises ConfigError for images that are too
    small for the model, and FuelrailError as
    :func:`~fuelrail.bench.planner.torch_private.private_parts`.
    """
    inputs = msgspec.structs.replace(inputs, micro_batch=ROWS)
    with fake_group(rank, degrees.pp * degrees.data * degrees.tp):
        is_whole = not degrees.composed
        mesh = make_mesh(degrees, "cpu")
        with torch.device("meta"):
            module: Any = _make_own_model(model) if isinstance(model, str) else build_model(model)
            example = module.example(ROWS) if isinstance(model, str) else _example(model, inputs)
        if inputs.low:
            module.to(torch.bfloat16)
            if degrees.tp > 1:  # such trainers compute the loss on a part of the vocabulary
                size = module.head.vocabulary
                with torch.device("meta"):
                    module.head.vocabulary = torch.nn.Linear(
                        size.in_features,
                        size.out_features // degrees.tp,
                        bias=False,
                        dtype=torch.bfloat16,
                    )
                module.plan = {
                    **module.plan,
                    "head.vocabulary": VOCABULARY_PART,
                }
        stage = 0 if degrees.pp == 1 or mesh is None else int(mesh.get_local_rank("pp"))
        hidden: Tensor | None = None
        if degrees.pp > 1:  # what the stage receives, or the first one sends
            num_blocks = len(module.blocks) * stage // degrees.pp
            with torch.no_grad():
                hidden = module.stem(*example)
                for block in list(module.blocks)[:num_blocks]:
                    hidden = block(hidden)
            assert hidden is not None
            if isinstance(model, (GptSettings, VitSettings)):  # tensor parallel divides its tokens
                hidden = hidden.narrow(1, 0, hidden.shape[1] // degrees.tp)
        rank_settings = msgspec.structs.replace(
            settings,
            precision="fp32" if precision == "fp16" else precision,
            alone=is_whole,
            micro_batches=settings.micro_batches or ROWS,
        )
        parallel = parallelise(module, rank_settings, mesh=mesh)
        with FakeTensorMode(allow_non_fake_inputs=True):
            part = parallel.models[0]
            part.to_empty(device="cpu")
            rank_inputs = tree_map(
                lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype),
                example,
            )
            rank_inputs = (rank_inputs,) if isinstance(model, str) else rank_inputs
            received = None
            if hidden is not None:
                is_transformer = isinstance(model, (GptSettings, VitSettings))
                is_low = inputs.low or (degrees.dp_shard > 1 and is_transformer)
                received = torch.empty(
                    hidden.shape,
                    dtype=DTYPES[precision] if is_low else torch.float32,
                )
            passes = _Passes(
                parallel,
                rank_inputs,
                received,
                "fp32" if inputs.low else precision,
            )
            passes.reduces_each = inputs.low and degrees.dp_replicate == 1
            return passes.run(
                min(2, inputs.micro_batches),
                copied=degrees.data > 1 and is_whole,
            )


def _make_own_model(name: str) -> Any:
    module = make_own(name)
    if not hasattr(module, "example"):
        raise ConfigError(
            f"model '{name}' has no method example(samples), which returns a batch of that "
            "many samples: tensors of the shapes and types that its forward takes, such as "
            f"torch.zeros(samples, 6, 3, 256, 704); add it to {type(module).__name__}"
        )
    return module


def example_of(name: str) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of an own model's ``example``, with the samples first.

    Raises ConfigError for a model without one, and StageError for an error of its own.
    """
    with torch.device("meta"):
        model = _make_own_model(name)
        try:
            batch = model.example(1)
        except Exception as error:
            raise stage_error(f"model '{name}': example(1)", error) from error
    return [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _example(model: ModelSettings, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return arguments of the model's forward, as its method ``inputs`` returns them."""
    count = inputs.micro_batch
    cameras = inputs.cameras
    if isinstance(model, GptSettings):
        tokens = torch.zeros(count, model.context + 1, dtype=torch.long)
        return tokens, torch.ones(count)
    return (
        torch.zeros((count, cameras, 3, inputs.height, inputs.width), dtype=torch.uint8),
        torch.ones(count, cameras),
        torch.zeros(count, cameras, 3, 3),
        torch.zeros(count, cameras, 4, 4),
        torch.zeros(count, model.grid**2),
        torch.ones(count),
    )


class _Passes:
    """Forward and backward passes of one rank on fake tensors, with what they hold and send."""

    reduces_each = False

    def __init__(
        self,
        parallel: Parallel,
        pass_inputs: tuple[Any, ...],
        received: Tensor | None,
        precision: Precision,
    ) -> None:
        self._parallel = parallel
        self._inputs = pass_inputs
        self._received = received
        self._precision = precision
        self._part = parallel.models[0]
        self._pipeline = received is not None

    def run(self, count: int, *, copied: bool) -> RankRun:
        """Make ``count`` passes, of which the last reduces the gradients: of ``copied`` models
        by DDP.
        """
        part = self._part
        parts = private_parts()
        sharded = isinstance(part, FSDPModule)
        tracker = parts.sharded_tracker(part) if sharded else parts.tracker()
        watch_growth(tracker, ROWS)
        if sharded:
            tracker.track_inputs(self._inputs)
        else:
            tracker.track_external(part, *tree_leaves(self._inputs))
        learnt = []
        for parameter in part.parameters():
            if parameter.requires_grad:
                learnt.append(parameter)
                continue
            # The tracker asks for gradients' hooks of every parameter, which these do not have.
            hook: Any = lambda _: SimpleNamespace(remove=int)  # noqa: E731
            parameter.register_hook = hook  # type: ignore[method-assign]
            parameter.register_post_accumulate_grad_hook = hook  # type: ignore[method-assign]
        buckets = [torch.empty_like(parameter) for parameter in learnt] if copied else []
        if buckets:  # of DDP, which exist all the time
            tracker.track_external(*buckets)
        passes: list[list[list[Collective]]] = []
        with tracker:
            for number in range(count):
                last = number == count - 1
                if number:
                    tracker.reset_mod_stats()
                if last and copied:
                    for parameter, bucket in zip(learnt, buckets, strict=True):

                        def move(parameter: Tensor, bucket: Tensor = bucket) -> None:
                            parameter.grad = bucket

                        # DDP copies a gradient into its bucket, and frees it, once it is whole.
                        parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
                forward, backward, end, activation_bytes = self._pass(tracker, last=last)
                counters = (forward, backward, end)
                operators = forward.operators + backward.operators
                passes.append([counter.collectives() for counter in counters])
        sent = passes[0]  # which alone gathers all of a stage's weights
        if count > 1:
            first, second = (summed(list(chain.from_iterable(ways))) for ways in passes)
            beyond = summed([*second, *summed(first, -1)])
            sent[2] = [item for item in beyond if item.count > 0]
        kinds = sorted({kind for sizes in (*forward.noted, *backward.noted) for kind in sizes})
        num_parameters = sum(local(parameter).numel() for parameter in learnt)
        flop = sum(counter.flop for counter in counters)
        attention = sum(counter.attention for counter in counters)
        convolution = sum(counter.convolution for counter in counters)
        hidden_bytes = 0 if self._received is None else self._received.nbytes
        input_bytes = sum(leaf.nbytes for leaf in tree_leaves(self._inputs))
        return RankRun(
            parameters=num_parameters,
            tensors=len(learnt),
            flop=(flop // ROWS, attention // ROWS, convolution // ROWS),
            operators=operators,
            hidden_bytes=hidden_bytes // ROWS,
            input_bytes=input_bytes // ROWS,
            kinds=kinds,
            forward=_as_array(forward.noted, kinds),
            backward=_as_array(backward.noted, kinds),
            forward_bytes=activation_bytes,
            sent=sent,
        )

    def _pass(
        self, tracker: Any, *, last: bool
    ) -> tuple[_Memory, _Memory, Counter, tuple[int, int]]:
        """Make a pass; return what counted its forward part, its backward part and its end, and
        the bytes of activations between the first two.
        """
        part = self._part
        mesh = self._parallel.mesh
        if isinstance(part, FSDPModule) and self._pipeline:
            part.set_is_last_backward(False)
            part.set_reshard_after_backward(False)
            part.set_requires_gradient_sync(False)
        elif isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(last or self.reduces_each)
        forward = _Memory(mesh, tracker)
        backward = _Memory(mesh, tracker)
        end = Counter(mesh)
        named = {f"input_{number}": tensor for number, tensor in enumerate(self._inputs)}
        with forward, autocast(torch.device("cpu"), self._precision):
            if self._received is None:
                outputs = part(*self._inputs)
            elif getattr(part, "stem", None) is not None:
                outputs = part(**named)
            else:
                outputs = part(self._received.requires_grad_(), **named)
            result = cast("Tensor", sum(outputs.values()) if isinstance(outputs, dict) else outputs)
        activation_bytes = bytes_by_kind(tracker, ROWS).get("Activation", (0, 0))
        with backward:
            torch.autograd.backward(result, None if result.dim() == 0 else torch.empty_like(result))
        with end:
            if last and self._pipeline:
                stage = cast("PipelineStage", SimpleNamespace(submod=part))
                PipelineStage.perform_reduce_grad(stage, 1)
        return forward, backward, end, activation_bytes


def _as_array(noted: Sequence[Bytes], kinds: Sequence[str]) -> NDArray[np.float64]:
    rows = [[sizes.get(kind, (0, 0)) for kind in kinds] for sizes in noted]
    return np.array(rows, dtype=np.float64)


def is_gather_of_weights(collective: Collective) -> bool:
    """Return whether a collective gathers what the ranks of a sharded model hold."""
    return collective.kind == "all_gather" and collective.axis.startswith("dp_")
