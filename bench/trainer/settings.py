"""What a training run is: plain values, handed from the command line to the ranks as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fuelrail.bench.accelerator import AcceleratorProfile  # noqa: TC001 (msgspec resolves the field's type)
from fuelrail.pipeline.settings import Settings

Positive = Annotated[int, msgspec.Meta(gt=0)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Precision = Literal["fp32", "bf16"]
LeaveOut = Literal["loading", "all-reduce"]


class ModelSettings(Settings, frozen=True):
    """Size of the reference model.

    ``subsample`` takes every n-th pixel in both directions before the first layer: the emulated accelerator's stand-in
    looks at little of the image, so that the host's time is left to the loader.
    """

    width: Positive
    num_stages: Positive
    blocks_per_stage: NotNegative
    subsample: Positive
    grid: Positive = 16
    range_m: float = 51.2


# `stand-in` costs a host CPU a few milliseconds a sample; `base` is a ResNet-like backbone at full resolution.
MODELS = {
    "stand-in": ModelSettings(width=16, num_stages=2, blocks_per_stage=0, subsample=8),
    "base": ModelSettings(width=64, num_stages=4, blocks_per_stage=2, subsample=1, grid=48),
}


class TrainSettings(Settings, frozen=True):
    """One run of the reference trainer, the same on all its ranks.

    ``num_steps`` counts optimiser steps; None runs ``num_epochs`` epochs. ``batch_size`` is samples a rank takes in one
    micro-batch; ``accumulation`` micro-batches make a step. ``profile`` is None on CUDA. ``leave_out`` makes it a
    counterfactual: without ``loading`` the first batches are trained on again and again, and the loader stands still;
    without ``all-reduce`` each rank trains alone.
    """

    dataset: str
    split: str
    batch_size: Positive
    num_steps: Positive | None
    num_epochs: Positive | None
    num_warmup_steps: NotNegative
    num_workers: Positive | None
    decoder: str
    seed: NotNegative
    accumulation: Positive
    precision: Precision
    learning_rate: float
    model_name: str
    profile: AcceleratorProfile | None
    records: str
    leave_out: tuple[LeaveOut, ...] = ()
