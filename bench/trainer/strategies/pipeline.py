"""Pipeline parallel: stages cut from a model between its blocks, and torch's schedules that run
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    get_schedule_class,
)

from fuelrail.bench.trainer.strategies.settings import divisors
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.measure.accelerator import Accelerator
    from fuelrail.bench.trainer.models.staged import StagedModel
    from fuelrail.bench.trainer.strategies.settings import Schedule

# Schedules whose way through the stages turns at the last rank: rank r has the stages r and 2 p - 1
# - r.
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Stage(nn.Module):
    """Some successive blocks of a model, with its stem and head at the ends; parameters keep the
    model's names.

    Inputs of the model are named ``input_0``, ``input_1``, ...: every rank of a pipeline gets the
    same batch, so that only the hidden tensor travels.
    """

    def __init__(self, model: StagedModel, number: int, num_stages: int) -> None:
        super().__init__()
        num_blocks = len(model.blocks)
        first = num_blocks * number // num_stages
        end = num_blocks * (number + 1) // num_stages
        self.stem = model.stem if number == 0 else None
        self.blocks = nn.ModuleDict()
        for block in range(first, end):
            self.blocks[str(block)] = model.blocks[block]
        self.head = model.head if number == num_stages - 1 else None
        self._loss = model.loss
        self._beside = model.beside
        self._real_share = model.real_share

    def forward(self, *hidden: Tensor, **named: Tensor) -> Tensor:
        """Return the hidden tensor, or the loss of this part of the batch.

        The loss is the mean over the predictions that count, times their share, so that the mean
        over parts of equal size weighs each prediction alike.
        """
        inputs = [named[f"input_{number}"] for number in range(len(named))]
        value: Tensor = hidden[0].view_as(hidden[0]) if self.stem is None else self.stem(*inputs)
        if self.stem is None and value.requires_grad:
            # A gradient that is not contiguous cannot be sent.
            value.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        beside = self._beside(*inputs)
        for block in self.blocks.values():
            value = block(value, **beside)
        if self.head is None:
            return value.contiguous()  # convolutions may leave another layout, which cannot be sent
        loss: Tensor = self._loss(self.head(value, *inputs), *inputs) * self._real_share(*inputs)
        return loss


class _TimedStage(PipelineStage):
    """A stage that reports to the accelerator when it computes; what it waits for others is in
    no phase.
    """

    accelerator: Accelerator | None = None
    share = (0.0, 0.0)
    """Samples and images of a part of the batch, times this stage's share of the model."""
    has_shapes = False

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.has_shapes = True
        self.submod.train()
        with nullcontext() if self.accelerator is None else self.accelerator.forward(*self.share):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.accelerator is None else self.accelerator.backward():
            return super().backward_one_chunk(*args, **kwargs)


class Pipeline:
    """The stages of one rank, by their numbers, and the schedule that runs them with those of
    the others.
    """

    def __init__(
        self,
        modules: dict[int, nn.Module],
        num_stages: int,
        group: dist.ProcessGroup,
        schedule: Schedule,
        micro_batches: int,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.group = group
        device = next(nn.ModuleList(modules.values()).parameters()).device
        self._micro_batches = micro_batches
        self._parts: float = micro_batches
        self._scale = torch.ones(())
        self._stages: list[_TimedStage] = []
        for number, module in modules.items():
            stage = _TimedStage(module, number, num_stages, device, group=group)
            stage.accelerator = accelerator
            self._stages.append(stage)
        schedule_class = get_schedule_class(schedule)
        stages: Any = self._stages
        if not issubclass(schedule_class, PipelineScheduleMulti):
            stages = self._stages[0]
        self._schedule = schedule_class(
            stages,
            micro_batches,
            loss_fn=lambda loss, _: loss * self._scale / self._parts,
            scale_grads=False,
        )

    def run(
        self,
        inputs: Sequence[Tensor],
        rows: tuple[int, int],
        scale: Tensor,
        accumulation: float,
    ) -> Tensor:
        """Forward and backward pass of a batch; return its share of the loss, 0 on ranks without
        the last stage.

        The share is one of ``accumulation`` parts. Gradients are those of the loss times ``scale``.
        Raises ConfigError for a batch that the number of parts does not divide.
        """
        num_samples = len(inputs[0])
        if num_samples % self._micro_batches:
            raise ConfigError(
                f"micro_batches={self._micro_batches} does not divide the batch of {num_samples} "
                f"samples per rank; {divisors('micro_batches', num_samples)}"
            )
        num_stages = self._stages[0].num_stages
        share = 1 / self._micro_batches / num_stages
        num_rows, num_images = rows
        self._scale = scale
        self._parts = self._micro_batches * accumulation
        for stage in self._stages:
            # Torch finds the shapes by a pass over memory of any content: it must leave no trace in
            # statistics.
            stage.submod.train(stage.has_shapes)
            stage.share = num_rows * share, num_images * share
        losses: list[Tensor] = []
        named = {f"input_{number}": tensor for number, tensor in enumerate(inputs)}
        # The target only says how many parts there are; the last stage's output is the loss.
        self._schedule.step(target=inputs[-1], losses=losses, return_outputs=False, **named)
        if not losses:
            return torch.zeros((), device=inputs[0].device)
        total = torch.stack([loss.detach() for loss in losses]).sum()
        return total / scale
