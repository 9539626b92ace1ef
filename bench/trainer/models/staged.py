"""What all models have in common: a stem, blocks and a head, so that every strategy can be applied to each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.tensor.parallel import ParallelStyle


class StagedModel(nn.Module, ABC):
    """``stem(*inputs)`` makes the hidden tensor, each of ``blocks`` changes it, ``head(hidden, *inputs)`` is the loss.

    Sharding is by block, recomputation by block, and a pipeline cuts between any two blocks. All inputs have the
    batch's samples along their first axis, and the hidden tensor a multiple of them. The loss is the mean over the
    batch's real samples, so means over parts of a batch average to the mean over the batch.
    """

    stem: nn.Module
    blocks: nn.ModuleList
    head: nn.Module

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the mean loss over the batch's real samples."""
        hidden: Tensor = self.stem(*inputs)
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.head(hidden, *inputs)
        return loss

    @abstractmethod
    def inputs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the arguments of :meth:`forward` out of a loader's batch, on the batch's device."""

    def tensor_plans(self) -> TensorPlans:
        """Return what tensor parallel shards, in the form of ``parallelize_module``: of stem, each block, and head.

        The key "" is the part itself. What no plan names is computed by every rank of the tensor-parallel group alike.
        """
        return {}, {}, {}


TensorPlans = tuple["dict[str, ParallelStyle]", "dict[str, ParallelStyle]", "dict[str, ParallelStyle]"]


def mean_over_samples(losses: Tensor, weight: Tensor) -> Tensor:
    """Mean of a loss per sample [B] over samples whose weight [B] is 1; padding has 0."""
    return (losses * weight).sum() / weight.sum().clamp(min=1)
