"""What all models have in common: a stem, blocks and a head, so that every strategy can be applied to each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.tensor.parallel import ParallelStyle

    from fuelrail.bench.trainer.models.settings import ModelSettings


class StagedModel(nn.Module, ABC):
    """``stem(*inputs)`` makes the hidden tensor, each of ``blocks`` changes it, ``head(hidden, *inputs)`` the logits.

    Sharding is by block, recomputation by block, and a pipeline cuts between any two blocks. All inputs have the
    batch's samples along their first axis, the last one is their weight; the hidden tensor has a multiple of them. The
    loss is the mean over the batch's real samples, so means over parts of a batch average to the mean over the batch.
    """

    settings: ModelSettings
    stem: nn.Module
    blocks: nn.ModuleList
    head: nn.Module

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the mean loss over the batch's real samples."""
        return self.loss(self.predict(*inputs)[1], *inputs)

    def predict(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last hidden tensor, and the logits."""
        hidden: Tensor = self.stem(*inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden, self.head(hidden, *inputs)

    def loss(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the mean loss over the batch's real samples; needs no part of the model."""
        return mean_over_samples(self.by_sample(self.losses(logits, *inputs), *inputs), inputs[-1])

    @abstractmethod
    def losses(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the loss of each prediction [B, ...]; the shape is that of the logits, without classes."""

    def feature_map(self, hidden: Tensor, *inputs: Tensor) -> Tensor:
        """Return the hidden tensor as maps of the images [B, N, C, h, w]."""
        return hidden.reshape(*inputs[0].shape[:2], *hidden.shape[1:])

    def by_sample(self, losses: Tensor, *inputs: Tensor) -> Tensor:  # noqa: ARG002 - for models that leave some out
        """Return the mean of a sample's predictions [B]."""
        return losses.flatten(1).mean(dim=1)

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
