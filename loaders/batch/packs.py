"""Batches of packs: rows of several samples each (``OrderSpec(pack=...)``).

A batch of B packs holds S samples, pack by pack. Every entry of a batch has S in the place of B,
and ``pack``, ``pack_offsets``, ``cu_seqlens``, ``max_seqlen``, ``position_ids`` and
``sequence_ids`` are added (`fuelrail.loaders.records.Batch`): pack p has the samples
``pack_offsets[p] : pack_offsets[p + 1]``, sample s has the tokens ``cu_seqlens[s] : cu_seqlens[s +
1]``.

The last four describe the first selected channel of kind ``tokens`` whose length is open, whose
`Packed` has the tokens of all samples in a row: ``batch["tokens"].values`` is what attention with
``cu_seqlens`` takes. Without such a channel they are absent. The samples that fill up an epoch's
last batch have ``valid`` False.

With ``Transforms(static=...)`` S is B times the packs' ``max_samples``, and the number of tokens is
``max_tokens``, or that of B budgets. Rows that are no sample have ``valid`` False, ``pack`` -1 and
no tokens, and zeros otherwise; tokens that are of no sample follow the others, as zeros with
``sequence_ids`` -1. ``max_seqlen`` is ``max_tokens``, or the budget. Lists, such as keys, are as
without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fuelrail.pipeline.channels.kinds import Packed
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuelrail.loaders.config import Arguments
    from fuelrail.loaders.records import Parsed
    from fuelrail.pipeline.order.pack import Pack


def check_packs(options: Arguments) -> None:
    """Raise ConfigError for settings of a loader that packs, or buckets, do not go with, where
    its order has these.
    """
    if options.order is None or not (options.order.pack or options.order.bucket):
        return
    refused = {
        "bad_samples.on_error='substitute'": (
            options.bad_samples.on_error == "substitute",
            (
                "another sample would not fit: take on_error='raise', and leave bad samples out "
                "by a filter"
            ),
        )
    }
    if options.order.pack is not None:
        refused |= {
            "transform": (
                options.transform is not None,
                "use batch_transform, which gets whole batches",
            ),
            "collate_fn": (
                options.collate_fn is not None,
                "use batch_transform, which gets whole batches",
            ),
            "window": (
                options.window is not None,
                "a pack holds samples of one frame",
            ),
            "transforms.two_views": (
                options.transforms.two_views,
                "load each view by a loader of its own",
            ),
            "transforms.static": (
                options.transforms.static_batches is not None
                and options.order.pack.max_samples is None,
                "the number of samples in a pack varies: set a largest one, Pack(max_samples=...)",
            ),
        }
    kind = "buckets" if options.order.pack is None else "packs"
    for name, (is_given, fix) in refused.items():
        if is_given:
            raise ConfigError(f"{name} cannot be used with an order in {kind}: {fix}")


def max_tokens(pack: Pack | None) -> int | None:
    """Return how many tokens of a sample packs take, where they are asked to cut them."""
    if pack is not None and pack.truncate:
        return pack.budget
    return None


def rows_of_batch(item: Parsed) -> int:
    """Return the samples of the batch of packs that a parsed or decoded sample is in."""
    return len(item.slot.flags["pack"])


def packed_entries(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that a batch with the entry ``pack`` has more; see the module's table.

    Raises ConfigError for 2**31 tokens or more.
    """
    pack = batch["pack"]
    numbers = torch.arange(int(pack[-1]) + 2)
    pack_offsets = torch.searchsorted(pack, numbers)
    entries: dict[str, Any] = {"pack_offsets": pack_offsets.to(torch.int32)}
    tokens = next((value for value in batch.values() if isinstance(value, Packed)), None)
    if tokens is None:
        return entries
    offsets = torch.as_tensor(tokens.offsets)
    if int(offsets[-1]) >= 2**31:
        raise ConfigError(
            f"a batch has {int(offsets[-1])} tokens, and cu_seqlens counts to 2**31 - 1: "
            "take fewer packs"
        )
    lengths = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return entries | {
        "cu_seqlens": offsets.to(torch.int32),
        "max_seqlen": int(lengths.max()),
        "position_ids": torch.arange(len(rows)) - offsets[rows],
        "sequence_ids": rows.to(torch.int32),
    }


def pad_packs(
    pack: Pack,
    num_packs: int,
    max_tokens: int | None,
    batch: dict[str, Any],
    fills: Mapping[str, float],
) -> dict[str, Any]:
    """Return a batch of packs, its lists padded already, with fixed numbers of rows and tokens; see
    the module's text.

    ``fills`` has the content of rows that are no sample, where it is not 0. Raises ConfigError for
    too many tokens.
    """
    assert pack.max_samples is not None  # `check_packs`
    rows = num_packs * pack.max_samples
    max_total = max_tokens or num_packs * pack.budget
    longest = max_tokens or pack.budget
    fills = {**fills, "pack": -1, "sequence_ids": -1}

    def padded(
        name: str,
        tensor: torch.Tensor,
        length: int,
        fill: float,
    ) -> torch.Tensor:
        if len(tensor) > length:
            raise ConfigError(
                f"{name!r} has {len(tensor)} tokens, static batches hold {length}: raise max_tokens"
            )
        shape = (length - len(tensor), *tensor.shape[1:])
        padding = tensor.new_full(shape, fill)
        return torch.cat([tensor, padding])

    padded_batch = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Packed):
            values, offsets = map(torch.as_tensor, value)
            values = padded(name, values, max_total, 0)
            offsets = padded(name, offsets, rows + 1, int(offsets[-1]))
            padded_batch[name] = Packed._make((values, offsets))
        elif name == "max_seqlen":
            if value > longest:
                raise ConfigError(
                    f"a sample has {value} tokens, static batches hold {longest}: raise max_tokens"
                )
            padded_batch[name] = longest
        elif name == "cu_seqlens":
            num_tokens = int(value[-1])
            padded_batch[name] = padded(name, value, rows + 1, num_tokens)
        elif isinstance(value, dict):
            padded_batch[name] = {key: padded(name, part, rows, 0) for key, part in value.items()}
        elif isinstance(value, torch.Tensor) and name != "pack_offsets":
            length = max_total if name in ("position_ids", "sequence_ids") else rows
            padded_batch[name] = padded(name, value, length, fills.get(name, 0))
    return padded_batch
