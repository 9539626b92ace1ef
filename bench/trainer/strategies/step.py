"""A divided model and what trains it: one step, the same for every way to divide."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fuelrail.bench.trainer.strategies.optimiser import (
    SharedGradScaler,
    autocast,
    clip_gradients,
)
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings,
    Precision,
)
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.bench.measure.accelerator import Accelerator
    from fuelrail.bench.trainer.strategies.pipeline import Pipeline

Losses = Tensor | Mapping[str, Tensor]


@dataclass(eq=False)
class Parallel:
    """This rank's part of a model with what trains it.

    ``models`` are the module, or a pipeline's stages on this rank; ``inputs`` makes its arguments
    of a batch; ``mesh`` is None without a composed strategy. Gradients of a step are the mean over
    its micro-batches and over the data-parallel ranks, weighed as said below. ``teacher`` adds to
    the inputs what it makes of them. Of the settings those of a step count. ``accelerator``
    measures the phases of a step; None: nothing does. ``losses`` are the parts of the last step's
    loss by name, the mean over its micro-batches on this rank, where the model names them. With a
    ``decay``, ``average`` holds the exponential moving average of the parameters, of which each
    rank has its part.

    ``real_share`` says of a micro-batch which share of its predictions counts; None: all do. The
    loss of the micro-batch is the mean over all predictions, padding as 0; or, with
    ``mean_of_real``, as of a `StagedModel`, the mean over those that count, which is then
    multiplied by the share. Loss and gradients of a step are divided by the mean share over
    micro-batches and ranks: each prediction counts the same, however they are spread. ``padding``
    is 1 less that of this rank's last step. With ``mean_of_real`` micro-batches may differ in their
    number of rows; the first one must have as many on each rank.
    """

    models: list[nn.Module]
    optimiser: torch.optim.Optimizer
    inputs: Callable[[Any], tuple[Any, ...]]
    _: KW_ONLY
    settings: ParallelSettings = field(default_factory=ParallelSettings)
    mesh: DeviceMesh | None = None
    accelerator: Accelerator | None = None
    pipeline: Pipeline | None = None
    teacher: Callable[..., tuple[Tensor, ...]] | None = None
    loss: Callable[[Any, Any], Losses] | None = None
    make_schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    decay: float | None = None
    real_share: Callable[..., Tensor | None] = lambda *_: None
    mean_of_real: bool = False

    def __post_init__(self) -> None:
        self.precision = precision_of(self.settings, self.device)
        self.scaler = SharedGradScaler(
            self.device.type,
            self.settings.max_skipped,
            enabled=self.precision == "fp16",
        )
        self.average: dict[str, Tensor] = {}
        self.losses: dict[str, Any] = {}
        self._noted: dict[str, Any] = {}
        self._num_rows: int | None = None  # of the first micro-batch
        self._shares: list[Tensor] = []
        self._mean_share: Tensor | None = None
        self._sharing: dist.Work | None = None  # makes it the mean over the ranks
        self._factor: Tensor | float = 1.0
        self.padding: Tensor | None = None
        self._rates = [group["lr"] for group in self.optimiser.param_groups]
        self.start_schedule(0)
        self.start_average()

    def start_schedule(self, num_steps: int) -> None:
        """Set the learning rate to that of the settings, or of the caller's schedule, after a
        number of steps.
        """
        warmup = max(1, self.settings.rate_warmup)
        for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate
            group.pop("initial_lr", None)
        if self.make_schedule is None:
            for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
                group["initial_lr"] = rate  # asked for where a schedule starts late
            self.schedule: LRScheduler = LambdaLR(
                self.optimiser,
                lambda step: min(1.0, (step + 1) / warmup),
                last_epoch=num_steps - 1,
            )
            return
        self.schedule = self.make_schedule(self.optimiser)
        with warnings.catch_warnings():
            # Its own state is restored.
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler", UserWarning)
            for _ in range(num_steps):
                self.schedule.step()

    @property
    def world(self) -> int:
        """Number of ranks that train together."""
        if self.settings.alone or not dist.is_initialized():
            return 1
        return dist.get_world_size()

    @property
    def counts(self) -> bool:
        """Whether this rank counts its samples: others of its model-parallel group have the
        same.
        """
        if self.mesh is None:
            return True
        axes = {"pp", "tp"}.intersection(self.mesh.mesh_dim_names or ())
        return all(self.mesh.get_local_rank(axis) == 0 for axis in axes)

    def forward_backward(
        self,
        inputs: tuple[Any, ...],
        rows: tuple[int, int] = (0, 0),
        *,
        accumulation: int = 1,
        last: bool = True,
    ) -> Tensor:
        """Add one micro-batch's share of ``accumulation`` to the gradients; return that share of
        its loss.

        ``inputs`` are what :meth:`inputs` returned, on the model's device; ``rows`` are its numbers
        of samples and images, for the accelerator. Gradients are reduced over the ranks with the
        ``last`` micro-batch of a step.
        """
        precise = autocast(self.device, self.precision)
        timer = self.accelerator
        if self.teacher is not None:
            with (
                nullcontext() if timer is None else timer.forward(*rows),
                torch.no_grad(),
                precise,
            ):
                inputs = (*inputs, *self.teacher(*inputs))
        share = self.real_share(*inputs)
        size = 1.0
        if share is not None and self.mean_of_real:
            # The rows of this micro-batch in parts of those of the first one.
            self._num_rows = self._num_rows or len(inputs[0])
            size = len(inputs[0]) / self._num_rows
        if share is not None:
            self._shares.append(share * size)
        if share is not None and last:
            # The mean over micro-batches and ranks is wanted after the backward pass. Begun
            # before, it is done by then: nothing waits.
            mean = torch.stack(self._shares).mean()
            self._shares = []
            self.padding = 1 - mean
            self._mean_share = mean / self.world
            if self.world > 1:
                self._sharing = dist.all_reduce(self._mean_share, async_op=True)
        if self.pipeline is not None:
            scale = self.scaler.scale(inputs[0].new_ones((), dtype=torch.float))
            with precise:
                return self.pipeline.run(inputs, rows, scale, accumulation / size)
        weight: Tensor | float = 1.0
        if share is not None and self.mean_of_real:
            weight = share * size
        (model,) = self.models
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        reduction: AbstractContextManager[None] = nullcontext()
        if isinstance(model, DistributedDataParallel) and not last:
            reduction = model.no_sync()
        with reduction:
            with nullcontext() if timer is None else timer.forward(*rows), precise:
                with naming_keys(inputs[0]):
                    outputs = model(*inputs)
                loss = self._total(outputs, inputs, weight / accumulation)
            with nullcontext() if timer is None else timer.backward():
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _total(
        self,
        outputs: Any,
        inputs: tuple[Any, ...],
        weight: Tensor | float,
    ) -> Tensor:
        """Return a micro-batch's loss times its weight in the step, and note its parts.

        Raises ConfigError for what is no loss that can be trained, with what returned it.
        """
        losses: Losses = outputs
        if self.loss is not None:
            with naming_keys(inputs[0]):
                losses = self.loss(outputs, *inputs)
        parts: list[Any] = list(losses.values()) if isinstance(losses, Mapping) else [losses]
        problem = None
        if not parts:
            problem = "an empty dict"
        for part in parts:
            if not isinstance(part, Tensor):
                problem = "None" if part is None else type(part).__name__
                if isinstance(losses, Mapping):
                    problem = f"a dict with {problem}"
            elif part.numel() != 1:
                problem = f"a tensor of shape {list(part.shape)}"
            if problem is not None:
                break
        else:
            if parts and not any(part.requires_grad for part in parts):
                problem = "a loss that depends on no parameter that is trained (it has no gradient)"
        if problem is not None:
            (model,) = self.models
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            function = type(inner).forward if self.loss is None else self.loss
            name = getattr(function, "__qualname__", type(function).__name__)
            place = f"'{name}'"
            code = getattr(inspect.unwrap(function), "__code__", None)
            if code is not None:
                file = Path(code.co_filename).name
                place += f" ({file}:{code.co_firstlineno})"
            text = (
                f"{place} returned {problem}: return the loss, a tensor without axes "
                "such as a mean, or a dict of such tensors, whose sum is trained"
            )
            if self.loss is None:
                text += "; or give loss=function(outputs, batch)"
            raise ConfigError(text)
        if isinstance(losses, Tensor):
            return losses * weight
        for name, value in losses.items():
            sum_before = self._noted.get(name, 0)
            self._noted[name] = sum_before + value.detach() * weight
        wide_parts = []
        for part in parts:
            dtype = torch.promote_types(part.dtype, torch.float)
            wide_parts.append(part.to(dtype))
        return torch.stack(wide_parts).sum() * weight

    def step(self, batches: Iterable[Any]) -> Tensor:
        """Train on the micro-batches of a step, at least one; return this rank's loss, the mean
        over them.

        Batches are moved to the device. The gradients of all are added up, reduced over the ranks,
        clipped and, in fp16, scaled, as the settings say; then the optimiser steps.
        """
        parts = list(batches)
        losses = []
        for number, batch in enumerate(parts, start=1):
            with naming_keys(batch):
                inputs = to_device(self.inputs(batch), self.device)
            loss = self.forward_backward(
                inputs,
                accumulation=len(parts),
                last=number == len(parts),
            )
            losses.append(loss)
        self.update()
        return self.own_loss(torch.stack(losses).sum())

    def update(self) -> None:
        """Clip the gradients, let the optimiser step, unless fp16 overflowed, and forget the
        gradients.
        """
        self.scaler.unscale_(self.optimiser)
        # Gradients are divided by the mean share of predictions that count, kept for the losses.
        self._factor = 1.0
        if self._mean_share is not None:
            if self._sharing is not None:
                self._sharing.wait()
            self._factor = 1 / self._mean_share.clamp(min=1e-9)
            self._mean_share = self._sharing = None
            for _, parameter in named_parameters(self.models):
                if parameter.grad is not None:
                    gradient = local(parameter.grad)
                    gradient.mul_(self._factor.to(gradient.device))
        if self.settings.clip_norm is not None:
            group = None if self.pipeline is None else self.pipeline.group
            parameters = itertools.chain.from_iterable(model.parameters() for model in self.models)
            clip_gradients(parameters, self.settings.clip_norm, group)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad()
        self.losses = {name: value * self._factor for name, value in self._noted.items()}
        self._noted = {}
        if not self.scaler.num_skipped:
            self.schedule.step()
            for name, parameter in named_parameters(self.models):
                if self.decay is not None and name in self.average:
                    average = local(self.average[name])
                    average.lerp_(local(parameter.detach()), 1 - self.decay)

    def start_average(self) -> None:
        """Start the average, if there is one, at the parameters."""
        if self.decay is None:
            return
        self.average = {}
        for name, parameter in named_parameters(self.models):
            if parameter.requires_grad:
                self.average[name] = parameter.detach().clone()

    def over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the means of values over all ranks, which must give the same names."""
        sums = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(sums)
            sums /= self.world
        return dict(zip(values, sums.tolist(), strict=True))

    @contextmanager
    def evaluating(self) -> Iterator[Callable[..., Any]]:
        """Yield the model to call with a batch on its device, in evaluation mode, without
        gradients, averaged.

        Raises ConfigError for a pipeline, whose stages make no predictions by themselves.
        """
        if self.pipeline is not None:
            raise ConfigError(
                "a pipeline's stages cannot be evaluated; save a checkpoint, and evaluate "
                "under fsdp2"
            )
        (model,) = self.models
        pairs = []
        for name, parameter in named_parameters(self.models):
            if name in self.average:
                average = local(self.average[name])
                pairs.append((local(parameter.detach()), average))
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        was_training = model.training
        model.eval()
        _swap(model, pairs)
        try:
            with torch.no_grad(), autocast(self.device, self.precision):
                yield lambda batch: inner(*self.inputs(batch))
        finally:
            _swap(model, pairs)
            model.train(was_training)

    def own_loss(self, loss: Tensor) -> Tensor:
        """Return this rank's loss of a step, of what `forward_backward` returned: its mean over
        ranks is the step's.

        In a pipeline the rank of the last stage sends it to the others.
        """
        if self.pipeline is not None:
            dist.all_reduce(loss, group=self.pipeline.group)
        return loss * self._factor


@contextmanager
def naming_keys(batch: Any) -> Iterator[None]:
    """Note on an error of a key that a batch has not which keys it has."""
    try:
        yield
    except KeyError as error:
        if isinstance(batch, Mapping) and error.args and error.args[0] not in batch:
            error.add_note(f"the batch has {', '.join(map(str, batch))}")
        raise


def _swap(model: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Exchange the values of tensors, of which no gathered copies stay."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    for first, second in pairs:
        copy = first.clone()
        first.copy_(second)
        second.copy_(copy)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def precision_of(settings: ParallelSettings, device: torch.device) -> Precision:
    """Return the precision that settings leave open."""
    if settings.precision:
        return settings.precision
    return "bf16" if device.type == "cuda" else "fp32"


def named_parameters(
    models: Iterable[nn.Module],
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of parts of a model by the names that they have in the undivided
    model.
    """
    for model in models:
        prefix = "module." if isinstance(model, DistributedDataParallel) else ""
        for name, parameter in model.named_parameters():
            yield name.removeprefix(prefix), parameter


def to_device(value: Any, device: torch.device) -> Any:
    """Return tensors, and those in mappings, lists and tuples, on a device; everything else as
    it is.
    """
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: to_device(item, device) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_device(item, device) for item in value)
    return value
