"""Ranges around the loader's work for Nsight Systems, where CUDA is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuelrail.pipeline.stages import Stage


def with_ranges(
    stage: Stage,
    push: Callable[[str], object] = torch.cuda.nvtx.range_push,
    pop: Callable[[], object] = torch.cuda.nvtx.range_pop,
) -> Stage:
    """The stage with an NVTX range ``fuelrail NAME`` around each call of its work, on the thread that does it."""
    work, name = stage.work, f"fuelrail {stage.name}"

    def ranged(item: Any) -> Any:  # noqa: ANN401
        push(name)
        try:
            return work(item)
        finally:
            pop()

    return replace(stage, work=ranged)
