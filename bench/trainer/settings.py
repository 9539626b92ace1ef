"""What a training run is: plain values, handed from the command line to the ranks as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fuelrail.bench.measure.accelerator import AcceleratorProfile  # noqa: TC001 (msgspec resolves the field's type)
from fuelrail.pipeline.settings import Settings

Positive = Annotated[int, msgspec.Meta(gt=0)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Precision = Literal["fp32", "bf16"]
# What a counterfactual run does without, in the order of the data's way.
LeaveOut = Literal[
    "loading", "storage", "decompression", "decode", "transform", "copy", "launches", "all-reduce", "training"
]


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


# `light` costs a host CPU two milliseconds a step and a fifth of one a sample, `stand-in` a few a sample;
# `base` is a ResNet-like backbone at full resolution. `resnet50` is another network, of which only the grid is read.
MODELS = {
    "light": ModelSettings(width=8, num_stages=2, blocks_per_stage=0, subsample=32, grid=8),
    "stand-in": ModelSettings(width=16, num_stages=2, blocks_per_stage=0, subsample=8),
    "resnet50": ModelSettings(width=64, num_stages=4, blocks_per_stage=3, subsample=1),
    "base": ModelSettings(width=64, num_stages=4, blocks_per_stage=2, subsample=1, grid=48),
}


class Injection(Settings, frozen=True):
    """Faults put into a run on purpose, to see what the harness makes of them; all in milliseconds, 0: none.

    ``stage_lasts`` makes each call of a loader stage (by its name) last that long in all, ``stage_cpu`` and
    ``stage_python`` make it compute more, in C code, or in Python, which holds the interpreter's lock. ``read`` delays
    every read of a local shard (with ``cold_only`` the first one of each place). ``data_wait``, ``host_to_device``,
    ``all_reduce`` and ``other`` stall that phase of every step; ``forward`` is what the host takes for it at least.
    With ``rank`` the phases of that rank alone.
    """

    stage_lasts: dict[str, float] = msgspec.field(default_factory=dict)
    stage_cpu: dict[str, float] = msgspec.field(default_factory=dict)
    stage_python: dict[str, float] = msgspec.field(default_factory=dict)
    read: float = 0.0
    cold_only: bool = False
    data_wait: float = 0.0
    host_to_device: float = 0.0
    forward: float = 0.0
    all_reduce: float = 0.0
    other: float = 0.0
    rank: int | None = None


class TrainSettings(Settings, frozen=True):
    """One run of the reference trainer, the same on all its ranks.

    ``num_steps`` counts optimiser steps; None runs ``num_epochs`` epochs. ``batch_size`` is samples a rank takes in one
    micro-batch; ``accumulation`` micro-batches make a step. ``profile`` is None on CUDA. ``leave_out`` makes it a
    counterfactual: without ``loading`` the first batches are trained on again and again, and the loader stands still;
    without ``storage``, ``decompression``, ``decode`` or ``transform`` the loader runs, but that stage's work is not
    done; without ``copy`` and ``launches`` the emulated device has a free bus and a fast host; without ``all-reduce``
    each rank trains alone; without ``training`` batches are taken as fast as they come, and dropped.

    ``transform`` names the function of each sample as ``MODULE:FUNCTION``; ``trace``: folder for the ranks' traces.
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
    prefetch_factor: Positive = 2
    storage: str = "auto"
    cache_dir: str | None = None
    look_ahead_bytes: Positive | None = None
    window: Positive | None = None
    verify: bool = True
    transform: str | None = None
    inject: Injection = Injection()
    trace: str | None = None
