"""The block of both transformers (pre-norm, as GPT-2 and ViT have it), and how tensor parallel divides it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class Block(nn.Module):
    """Attention and a perceptron of four times the width, each behind a norm and beside a residual path."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, causal=causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T, C] to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.head_width, self.causal = width // heads, causal
        # Apart, not fused: tensor parallel cuts each of them between heads.
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            # As many heads as this rank has of them.
            part(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


def block_plan() -> dict[str, ParallelStyle]:
    """Tensor parallel with sequence parallel (arXiv 2205.05198): tokens are divided wherever channels are not."""

    def gather() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    return {
        "attention_norm": SequenceParallel(),
        # Once for query, key and value: three separate inputs would reduce their gradient three times.
        "attention": gather(),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": gather(),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
    }
