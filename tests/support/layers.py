"""Layers of small datasets, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.write.layers.writer import LayerWriter
from support.sharding import digests as digests

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FIXED = {"name": "fixed"}
TABLE = [
    {
        "name": "logits",
        "kind": "array",
        "field": "logits.npy",
        "law": FIXED,
        "dtype": "float16",
        "axes": ["class"],
        "shape": [10],
    },
    {
        "name": "loss",
        "kind": "array",
        "field": "loss.npy",
        "law": FIXED,
        "dtype": "float32",
    },
    {
        "name": "caption",
        "kind": "text",
        "field": "caption.txt",
        "law": FIXED,
        "optional": True,
    },
]


def values_of(position: int) -> dict[str, Any]:
    """The values of one row: odd positions have a caption."""
    logits = np.random.default_rng(position).normal(size=10).astype(np.float16)
    values = {"logits": logits, "loss": np.float32(position / 2)}
    return values if position % 2 == 0 else {**values, "caption": f"row {position}"}


def write_layer(
    base: Path,
    out: Path,
    positions: Iterable[int] | None = None,
    **options: Any,
) -> Path:
    """Write a layer of these positions; None: of all."""
    with LayerWriter(base, out, channels=TABLE, **options) as writer:
        for position in range(len(open_dataset(base))) if positions is None else positions:
            writer.write(position, values_of(position))
    writer.finish(partial=positions is not None)
    return out
