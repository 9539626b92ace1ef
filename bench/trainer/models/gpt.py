"""A GPT-2-style decoder: token and position embeddings, causal blocks, the next token's cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from fuelrail.bench.trainer.models.staged import GATED_PLAN, TRANSFORMER_PLAN, Block, Experts, StagedModel, perceptron

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import GptSettings

_MAX_STRIDE = 8
# Of a head that is made with this rank's part of the vocabulary alone, for the planner.
VOCABULARY_PART = PrepareModuleInput(
    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
)


class Gpt(StagedModel):
    """Tokens to the mean loss of predicting each of them from those before it."""

    settings: GptSettings

    def __init__(self, settings: GptSettings) -> None:
        super().__init__(settings)
        self.plan = {
            "stem.tokens": RowwiseParallel(input_layouts=Replicate()),
            **(GATED_PLAN if settings.gated else TRANSFORMER_PLAN),
            "head.norm": SequenceParallel(),
            "head.vocabulary": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        self.stem = _Embeddings(settings)
        self.blocks = nn.ModuleList(_block(settings) for _ in range(settings.depth))
        self.head = _NextToken(settings)

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return tokens int64 [B, context + 1] and weight float [B]."""
        return tokens_of(batch, self.settings), batch["valid"].float()

    def losses(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the cross-entropy of each token but the first [B, context]."""
        next_tokens = inputs[0][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten(), reduction="none").view(next_tokens.shape)

    def feature_map(self, hidden: Tensor, *inputs: Tensor) -> Tensor:  # noqa: ARG002 - there is no image
        """Return the tokens as one map of a single row [B, 1, C, 1, T]."""
        return hidden.transpose(1, 2)[:, None, :, None]


def _block(settings: GptSettings) -> Block:
    width, inner, gated = settings.width, settings.ffn or 4 * settings.width, settings.gated
    if settings.experts > 1:
        mlp: nn.Module = Experts(width, inner, settings.experts, settings.active_experts, gated=gated)
    else:
        mlp = perceptron(width, inner, gated=gated)
    return Block(width, settings.heads, causal=True, kv_heads=settings.kv_heads, mlp=mlp)


class _Embeddings(nn.Module):
    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        tokens, positions = (nn.Embedding(size, settings.width) for size in (settings.vocabulary, settings.context))
        for embedding in (tokens, positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.tokens, self.positions = tokens, positions

    def forward(self, tokens: Tensor, *_: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        hidden: Tensor = self.tokens(tokens[:, :-1]) + self.positions(places)
        return hidden


class _NextToken(nn.Module):
    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.width)
        # Not tied to the embedding: in a pipeline they lie on different ranks.
        self.vocabulary = nn.Linear(settings.width, settings.vocabulary, bias=False)

    def forward(self, hidden: Tensor, *_: Tensor) -> Tensor:
        logits: Tensor = self.vocabulary(self.norm(hidden)).float()
        return logits


def tokens_of(batch: Mapping[str, Any], settings: GptSettings) -> Tensor:
    """Return tokens int64 [B, context + 1] of a batch: the first ones of its channel `tokens`.

    A dataset without that channel gets tokens made of the samples' keys: equal steps through the vocabulary from a
    start, both of which the key decides. They can be learnt, and are the same in every run.
    """
    if "tokens" in batch:
        found: Tensor = batch["tokens"][:, : settings.context + 1].long()
        return found
    digests = [xxhash.xxh3_64_intdigest(key.encode()) for key in batch["sample_key"]]
    starts = torch.tensor([(digest >> 8) % settings.vocabulary for digest in digests])
    strides = torch.tensor([digest % _MAX_STRIDE + 1 for digest in digests])
    tokens = (starts[:, None] + strides[:, None] * torch.arange(settings.context + 1)) % settings.vocabulary
    return tokens.to(batch["valid"].device)
