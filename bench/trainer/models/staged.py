"""What the models have in common, so that every strategy can be applied to each; the block of
both transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import ModelSettings

# Tensor parallel with sequence parallel (arXiv 2205.05198): tokens are divided wherever channels
# are not.
_GATHER = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
TRANSFORMER_PLAN: dict[str, ParallelStyle] = {
    "stem": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    "blocks.*.attention_norm": SequenceParallel(),
    # Once for query, key and value: three separate inputs would reduce their gradient three times.
    "blocks.*.attention": _GATHER,
    "blocks.*.attention.query": ColwiseParallel(),
    "blocks.*.attention.key": ColwiseParallel(),
    "blocks.*.attention.value": ColwiseParallel(),
    "blocks.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.mlp_norm": SequenceParallel(),
    "blocks.*.mlp": _GATHER,
    "blocks.*.mlp.0": ColwiseParallel(),
    "blocks.*.mlp.2": RowwiseParallel(output_layouts=Shard(1)),
}


class StagedModel(nn.Module, ABC):
    """``stem(*inputs)`` makes the hidden tensor, each of ``blocks`` changes it, ``head(hidden,
    *inputs)`` the logits.

    Sharding is by block, recomputation by block, and a pipeline cuts between any two blocks. All
    inputs have the batch's samples along their first axis; the last one is their weight, 0 of
    samples that only fill up a batch; the hidden tensor has a multiple of them. The loss is the
    mean over the batch's real samples. A step weighs its parts (ranks, micro-batches, parts in a
    pipeline) by `real_share`, so that its loss and gradients are the mean over all real samples,
    however few a part has.

    A module has its first values before another one takes it as a part: then a rank may keep its
    share alone (`draft`).
    """

    stem: nn.Module
    blocks: nn.ModuleList
    head: nn.Module
    # What tensor parallel shards, as for `parallelize_module`; `blocks.*` is each block. What is
    # not named is computed by every rank of the tensor-parallel group alike.
    plan: Mapping[str, ParallelStyle] = {}

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the mean loss over the batch's real samples."""
        _, logits = self.predict(*inputs)
        return self.loss(logits, *inputs)

    def predict(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last hidden tensor, and the logits."""
        hidden: Tensor = self.stem(*inputs)
        beside = self.beside(*inputs)
        for block in self.blocks:
            hidden = block(hidden, **beside)
        return hidden, self.head(hidden, *inputs)

    def beside(self, *inputs: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 - blocks may need more
        """Return what each block takes besides the hidden tensor; needs no part of the model."""
        return {}

    def loss(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the mean loss over the batch's real samples; needs no part of the model."""
        losses = self.losses(logits, *inputs)
        weight = inputs[-1]
        return mean_over_samples(self.by_sample(losses, *inputs), weight)

    @abstractmethod
    def losses(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the loss of each prediction [B, ...]; the shape is that of the logits, without
        classes.
        """

    def real_share(self, *inputs: Tensor) -> Tensor:
        """Return the share of the batch's samples that are real: the loss is the mean over them."""
        weight = inputs[-1]
        return weight.float().mean()

    def feature_map(self, hidden: Tensor, *inputs: Tensor) -> Tensor:
        """Return the hidden tensor as maps of the images [B, N, C, h, w]."""
        num_samples, num_cameras = inputs[0].shape[:2]
        return hidden.reshape(num_samples, num_cameras, *hidden.shape[1:])

    def by_sample(self, losses: Tensor, *inputs: Tensor) -> Tensor:  # noqa: ARG002 - some leave out
        """Return the mean of a sample's predictions [B]."""
        return losses.flatten(1).mean(dim=1)

    @abstractmethod
    def inputs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the arguments of :meth:`forward` out of a loader's batch, on the batch's
        device.
        """


def mean_over_samples(losses: Tensor, weight: Tensor) -> Tensor:
    """Return the mean of losses, weighed by weights of their shape, 0 for padding; 0 without
    any.
    """
    weighed = (losses * weight).sum()
    total = weight.sum()
    return weighed / (total + (total == 0))


# Of perceptrons that a product gates.
GATED_PLAN: dict[str, ParallelStyle] = {
    **{name: style for name, style in TRANSFORMER_PLAN.items() if name != "blocks.*.mlp.0"},
    "blocks.*.mlp.0.gate": ColwiseParallel(),
    "blocks.*.mlp.0.up": ColwiseParallel(),
}


class Block(nn.Module):
    """The pre-norm block of GPT-2 and ViT: attention, and a perceptron of four times the width
    unless ``mlp`` is given.

    ``kv_heads`` are the heads of keys and values, each of which a group of queries shares;
    ``head_width`` is the number of channels of a head (default: ``width`` over ``heads``).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        kv_heads: int | None = None,
        head_width: int | None = None,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(
            width,
            heads,
            kv_heads or heads,
            head_width or width // heads,
            causal=causal,
        )
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp or perceptron(width, 4 * width)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute hidden states [B, T, C] of the same shape; ``mask`` bool [B, 1, T, T]: what a
        token attends to.
        """
        hidden = hidden + self.attention(self.attention_norm(hidden), mask=mask)
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result


def perceptron(width: int, inner: int, *, gated: bool = False) -> nn.Sequential:
    """Return two matrices with GELU between them, or three, of which one gates another (arXiv
    2002.05202, SwiGLU).
    """
    if gated:
        return nn.Sequential(
            _Gate(width, inner),
            nn.Identity(),
            nn.Linear(inner, width),
        )
    return nn.Sequential(
        nn.Linear(width, inner),
        nn.GELU(),
        nn.Linear(inner, width),
    )


class _Gate(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner)
        self.up = nn.Linear(width, inner)

    def forward(self, hidden: Tensor) -> Tensor:
        gate = F.silu(self.gate(hidden))
        result: Tensor = gate * self.up(hidden)
        return result


class Experts(nn.Module):
    """Perceptrons of which each takes the tokens of a sequence that it weighs most (arXiv
    2202.09368, expert choice).

    An expert takes ``active / number`` of the tokens, so all compute equally much, and a token
    passes ``active`` of them on average. Which tokens an expert takes depends on the later ones
    too.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        number: int,
        active: float,
        *,
        gated: bool,
    ) -> None:
        super().__init__()
        self.router = nn.Linear(width, number, bias=False)
        self.experts = nn.ModuleList(perceptron(width, inner, gated=gated) for _ in range(number))
        self.active = active

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute hidden states [B, T, C] of the same shape."""
        _, num_tokens, width = hidden.shape
        weights = self.router(hidden).softmax(-1).transpose(1, 2)  # [B, E, T]
        share = max(1, int(num_tokens * self.active // len(self.experts)))
        weight, place = weights.topk(min(share, num_tokens))
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            indices = place[:, number, :, None].expand(-1, -1, width)
            output = expert(hidden.gather(1, indices))
            output = output * weight[:, number, :, None]
            result = result.scatter_add(1, indices, output.to(result.dtype))
        return result


class Attention(nn.Module):
    """Attention between tokens; groups of query heads share heads of keys and values."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        *,
        causal: bool,
    ) -> None:
        super().__init__()
        self.head_width = head_width
        self.causal = causal
        self.grouped = kv_heads != heads
        # Apart, not fused: tensor parallel cuts each of them between heads.
        self.query = nn.Linear(width, heads * head_width)
        self.key = nn.Linear(width, kv_heads * head_width)
        self.value = nn.Linear(width, kv_heads * head_width)
        self.output = nn.Linear(heads * head_width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute hidden states [B, T, C] of the same shape; ``mask`` as in `Block.forward`."""
        query = self._split_heads(self.query(hidden))
        key = self._split_heads(self.key(hidden))
        value = self._split_heads(self.value(hidden))
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=self.grouped,
        )
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _split_heads(self, channels: Tensor) -> Tensor:
        """Return [B, heads, T, head width] of [B, T, C]: as many heads as this rank has."""
        sizes = (-1, self.head_width)
        heads: Tensor = channels.unflatten(-1, sizes)  # type: ignore[no-untyped-call]
        return heads.transpose(1, 2)
