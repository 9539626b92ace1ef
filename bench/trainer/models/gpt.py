"""A GPT-2-style decoder: token and position embeddings, causal blocks, the next token's
cross-entropy.
"""

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

from fuelrail.bench.trainer.models.staged import (
    GATED_PLAN,
    TRANSFORMER_PLAN,
    Block,
    Experts,
    StagedModel,
    mean_over_samples,
    perceptron,
)
from fuelrail.pipeline.channels.kinds import Packed
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import GptSettings

_MAX_STRIDE = 8
# Of a head that is made with this rank's part of the vocabulary alone, for the planner.
VOCABULARY_PART = PrepareModuleInput(
    input_layouts=(Shard(1),),
    desired_input_layouts=(Replicate(),),
    use_local_output=True,
)


class Gpt(StagedModel):
    """Tokens to the mean loss of predicting each of them from those before it.

    Documents of any length lie in rows of ``context + 1`` tokens, several in a row where the batch
    has packs. Each is read alone: attention and positions begin with it.
    """

    settings: GptSettings

    def __init__(self, settings: GptSettings) -> None:
        super().__init__(settings)
        blocks_plan = GATED_PLAN if settings.gated else TRANSFORMER_PLAN
        self.plan = {
            "stem.tokens": RowwiseParallel(input_layouts=Replicate()),
            **blocks_plan,
            "head.norm": SequenceParallel(),
            "head.vocabulary": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Replicate(),
            ),
        }
        self.stem = _Embeddings(settings)
        width = settings.width
        inner = settings.ffn or 4 * width
        self.blocks = nn.ModuleList()
        for _ in range(settings.depth):
            if settings.experts > 1:
                mlp: nn.Module = Experts(
                    width,
                    inner,
                    settings.experts,
                    settings.active_experts,
                    gated=settings.gated,
                )
            else:
                mlp = perceptron(width, inner, gated=settings.gated)
            block = Block(
                width,
                settings.heads,
                causal=True,
                kv_heads=settings.kv_heads,
                head_width=settings.head_width,
                mlp=mlp,
            )
            self.blocks.append(block)
        self.head = _NextToken(settings)

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return tokens int64 [B, context + 1] and weight float [B]; for documents of any length
        `packed_rows`.
        """
        if isinstance(batch.get("tokens"), Packed):
            return packed_rows(batch, self.settings.context)
        tokens = tokens_of(batch, self.settings)
        weight = batch["valid"].float()
        return tokens, weight

    def beside(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the mask of attention within documents, bool [B, 1, T, T], where these lie in
        rows.
        """
        if not _in_rows(inputs):
            return {}
        document = inputs[2]
        is_same = document[:, None, :] == document[:, :, None]
        return {"mask": is_same.tril()[:, None]}

    def losses(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the cross-entropy of each token but the first [B, context]."""
        tokens = inputs[0]
        next_tokens = tokens[:, 1:]
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            next_tokens.flatten(),
            reduction="none",
        )
        return losses.view(next_tokens.shape)

    def loss(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the mean loss over real samples; of documents in rows over real predictions."""
        if _in_rows(inputs):
            weight = inputs[-1]
            return mean_over_samples(self.losses(logits, *inputs), weight)
        return super().loss(logits, *inputs)

    def feature_map(self, hidden: Tensor, *inputs: Tensor) -> Tensor:  # noqa: ARG002 - no image
        """Return the tokens as one map of a single row [B, 1, C, 1, T]."""
        channels = hidden.transpose(1, 2)
        return channels[:, None, :, None]


def _in_rows(inputs: tuple[Tensor, ...]) -> bool:
    return len(inputs) == 4


class _Embeddings(nn.Module):
    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        tokens = nn.Embedding(settings.vocabulary, settings.width)
        positions = nn.Embedding(settings.context, settings.width)
        for embedding in (tokens, positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.tokens = tokens
        self.positions = positions

    def forward(self, tokens: Tensor, *rows: Tensor) -> Tensor:
        tokens_read = tokens[:, :-1]
        num_places = tokens_read.shape[1]
        in_rows = _in_rows((tokens, *rows))
        places = rows[0] if in_rows else torch.arange(num_places, device=tokens.device)
        hidden: Tensor = self.tokens(tokens_read) + self.positions(places)
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

    A dataset without that channel gets tokens made of the samples' keys: equal steps through the
    vocabulary from a start, both of which the key decides. They can be learnt, and are the same in
    every run.
    """
    if "tokens" in batch:
        tokens_stored: Tensor = batch["tokens"][:, : settings.context + 1].long()
        return tokens_stored
    digests = [xxhash.xxh3_64_intdigest(key.encode()) for key in batch["sample_key"]]
    starts = torch.tensor([(digest >> 8) % settings.vocabulary for digest in digests])
    strides = torch.tensor([digest % _MAX_STRIDE + 1 for digest in digests])
    positions = torch.arange(settings.context + 1)
    steps = starts[:, None] + strides[:, None] * positions
    tokens = steps % settings.vocabulary
    return tokens.to(batch["valid"].device)


def packed_rows(batch: Mapping[str, Any], context: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay a batch's documents out in padded rows, one row for each pack.

    Without packs there is one row for each document, cut to the row's length. Returns tokens int64
    [B, context + 1], and of each token that is read, [B, context]: its place in its document, the
    document's number (-1: padding), and the weight of its prediction, float: 1 where the next token
    is of the same real document, else 0. Raises ConfigError for a pack of more tokens.
    """
    values, offsets = (torch.as_tensor(part) for part in batch["tokens"])
    num_tokens = len(values)
    number = torch.arange(len(offsets) - 1, device=values.device)
    place = torch.arange(num_tokens, device=values.device)
    pack = batch.get("pack", number)
    num_rows = len(batch.get("pack_offsets", offsets)) - 1
    document = torch.repeat_interleave(number, offsets.diff(), output_size=num_tokens)
    # A row begins with the first document of its pack.
    first_document = torch.searchsorted(pack, pack)
    row_start = offsets[first_document]
    column = place - row_start[document]
    if "pack" in batch and bool((column > context).any()):
        raise ConfigError(
            f"a pack has {int(column.max()) + 1} tokens, and a row of the model "
            f"{context + 1}: let the packs' cost be the number of tokens and their budget "
            "at most that, or use another model"
        )

    def in_rows(of_tokens: Tensor, fill: int) -> Tensor:
        """Scatter a number of each token into rows; an additional column takes what is cut off."""
        rows = of_tokens.new_full((num_rows, context + 2), fill, dtype=torch.int64)
        rows[pack[document], column.clamp(max=context + 1)] = of_tokens.long()
        return rows[:, :-1]

    tokens = in_rows(values, 0)
    places = in_rows(place - offsets[document], 0)
    documents = in_rows(document, -1)
    documents_read = documents[:, :-1]
    next_documents = documents[:, 1:]
    follows = (next_documents == documents_read) & (next_documents >= 0)
    # Padding's document is -1 and reads the flag of the last document; `follows` is False there.
    weight = follows & batch["valid"][next_documents]
    return tokens, places[:, :-1], documents_read, weight.float()
