"""A training run as plain values: what a caller asks for, and what the ranks get as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fuelrail.bench.measure.accelerator import DEFAULT_PROFILE, AcceleratorProfile, profile_names
from fuelrail.bench.trainer.distill.settings import DISTILL, DistillSettings
from fuelrail.bench.trainer.injection import Injection
from fuelrail.bench.trainer.models.settings import ModelName, NotNegative, Positive  # noqa: TC001 (msgspec resolves the fields' types)
from fuelrail.bench.trainer.strategies.settings import ParallelSettings, Precision
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings, check_types

# What a counterfactual run leaves out, in the order of the data's way.
LeaveOut = Literal[
    "loading", "storage", "decompression", "decode", "transform", "copy", "launches", "all-reduce", "training"
]


_LARGE = 1e9  # a bound for figures: msgspec knows no "finite"


class TrainOptions(ParallelSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.train`. What has a description is a flag of ``fuelrail bench train`` too.

    ``profile`` is an emulated accelerator of your own, in place of ``accelerator``. ``inject`` puts faults into the
    run. ``look_ahead_bytes`` is the DataLoader's.
    """

    split: Annotated[str, msgspec.Meta(description="split to train on")] = "train"
    ranks: Annotated[Positive, msgspec.Meta(description="number of ranks on this host")] = 1
    batch_size: Annotated[Positive, msgspec.Meta(description="samples per data-parallel rank in a batch")] = 4
    steps: (
        Annotated[Positive, msgspec.Meta(description="optimiser steps (default: 60, unless --epochs is given)")] | None
    ) = None
    epochs: Annotated[Positive, msgspec.Meta(description="whole epochs instead of a number of steps")] | None = None
    warmup: Annotated[NotNegative, msgspec.Meta(description="warm-up steps, excluded from all results")] = 10
    accelerator: Annotated[
        str,
        msgspec.Meta(
            description=f"cuda, emulated:PROFILE, or auto: cuda if there is a GPU, else emulated:{DEFAULT_PROFILE}; "
            f"profiles: {', '.join(profile_names())}, or a .yaml file (default: auto)"
        ),
    ] = "auto"
    model: (
        Annotated[ModelName, msgspec.Meta(description="model to train (default: stand-in if emulated, base on cuda)")]
        | None
    ) = None
    precision: (
        Annotated[
            Precision,
            msgspec.Meta(
                description="fp32, or autocast to bf16, or to fp16 with scaled loss (default: bf16 on cuda, else fp32)"
            ),
        ]
        | None
    ) = None
    accumulation: Annotated[Positive, msgspec.Meta(description="batches accumulated into one optimiser step")] = 1
    learning_rate: Annotated[float, msgspec.Meta(ge=0, le=_LARGE, description="learning rate")] = 2e-3
    workers: (
        Annotated[
            Positive, msgspec.Meta(description="decoding threads per rank (default: the rank's share of the CPUs)")
        ]
        | None
    ) = None
    decoder: Annotated[str, msgspec.Meta(description="decode backend, as in the DataLoader")] = "auto"
    prefetch_factor: Annotated[Positive, msgspec.Meta(description="number of finished batches to keep ready")] = 2
    storage: Annotated[str, msgspec.Meta(description="storage backend, as in the DataLoader")] = "auto"
    cache_dir: Annotated[str, msgspec.Meta(description="folder on a local disk to cache samples in")] | None = None
    window: (
        Annotated[Positive, msgspec.Meta(description="shuffle in windows of N shards instead of the whole split")]
        | None
    ) = None
    verify: Annotated[bool, msgspec.Meta(description="skip checksum verification")] = True
    transform: (
        Annotated[
            str,
            msgspec.Meta(description="function to call with each sample", extra={"metavar": "MODULE:FUNCTION"}),
        ]
        | None
    ) = None
    transforms: (
        Annotated[
            str,
            msgspec.Meta(description="YAML file of size and augmentation of the samples", extra={"metavar": "FILE"}),
        ]
        | None
    ) = None
    teacher: (
        Annotated[
            str,
            msgspec.Meta(description="distil from the model of these checkpoints", extra={"metavar": "FOLDER_OR_URL"}),
        ]
        | None
    ) = None
    teacher_layer: (
        Annotated[
            str,
            msgspec.Meta(description="distil from this layer of predictions", extra={"metavar": "FOLDER_OR_URL"}),
        ]
        | None
    ) = None
    distill: (
        Annotated[
            str,
            msgspec.Meta(
                description=f"weights of labels, logits, features and targets with a teacher (default: {DISTILL})",
                extra={"metavar": "PART=WEIGHT,..."},
            ),
        ]
        | None
    ) = None
    temperature: (
        Annotated[float, msgspec.Meta(gt=0, le=_LARGE, description="softens the logits for distillation (default: 2)")]
        | None
    ) = None
    seed: Annotated[NotNegative, msgspec.Meta(description="random seed for order, augmentation and weights")] = 0
    checkpoint: (
        Annotated[
            str,
            msgspec.Meta(
                description="save checkpoints there, and continue from the newest one",
                extra={"metavar": "FOLDER_OR_URL"},
            ),
        ]
        | None
    ) = None
    every: Annotated[Positive, msgspec.Meta(description="steps between two checkpoints")] = 100
    keep: Annotated[Positive, msgspec.Meta(description="number of checkpoints to keep")] = 3
    failures_per_day: (
        Annotated[
            float,
            msgspec.Meta(
                gt=0, le=_LARGE, description="failures of the whole job a day; adds the best interval of checkpoints"
            ),
        ]
        | None
    ) = None
    memory: Annotated[bool, msgspec.Meta(description="follow the memory of the third warm-up step, by kind")] = False
    against: (
        Annotated[
            str,
            msgspec.Meta(description="compare the loss with that of this report.json", extra={"metavar": "REPORT"}),
        ]
        | None
    ) = None
    check_batch: (
        Annotated[
            Positive,
            msgspec.Meta(
                description="train as many samples again with N in a batch and the learning rate scaled with it, and "
                "compare the loss: a check before a larger batch"
            ),
        ]
        | None
    ) = None
    target_loss: (
        Annotated[float, msgspec.Meta(ge=-_LARGE, le=_LARGE, description="report when the loss was as low as this")]
        | None
    ) = None
    price_per_gpu_hour: (
        Annotated[
            float,
            msgspec.Meta(
                ge=0,
                le=_LARGE,
                description="price of a GPU-hour; adds the cost per million samples, in the same currency",
                extra={"metavar": "PRICE"},
            ),
        ]
        | None
    ) = None
    timeout_s: Annotated[
        Positive, msgspec.Meta(description="seconds after which a rank that does not answer the others is given up")
    ] = 300
    trace: Annotated[
        bool,
        msgspec.Meta(
            description="write trace.json for ui.perfetto.dev: the loader's stages, the trainer's phases and, for a "
            "few steps, the events of torch's profiler, on one clock"
        ),
    ] = False
    leave_out: Annotated[
        tuple[LeaveOut, ...],
        msgspec.Meta(
            description="disable one part to measure its cost; may be repeated: loading (train on batches in memory), "
            "all-reduce (each rank trains alone), or the work of a loader stage",
            extra={"repeat": True},
        ),
    ] = ()
    profile: AcceleratorProfile | None = None
    inject: Injection = Injection()
    look_ahead_bytes: Positive | None = None

    def __post_init__(self) -> None:
        check_types(self, ConfigError)


class TrainSettings(Settings, frozen=True):
    """One run of the reference trainer, the same on all its ranks; made from :class:`TrainOptions`.

    ``num_steps`` counts optimiser steps; None runs ``num_epochs`` epochs. ``batch_size`` is the number of samples per
    rank in a micro-batch; ``accumulation`` micro-batches make a step. ``profile`` is None on CUDA. ``leave_out`` makes
    it a counterfactual: without ``loading`` the first batches are repeated and the loader is closed; without
    ``storage``, ``decompression``, ``decode`` or ``transform`` the loader runs, but skips that work; without ``copy``
    and ``launches`` the emulated device has a free bus and a fast host; without ``all-reduce`` each rank trains alone;
    without ``training`` batches are taken as fast as they come, and dropped.

    ``transform`` names the function of each sample as ``MODULE:FUNCTION``; ``trace``: folder for the ranks' traces.
    ``checkpoint`` is the folder or URL of checkpoints; one is saved ``every`` steps and at the end. ``memory`` follows
    the memory of the third step.
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
    checkpoint: str | None = None
    every: Positive = 100
    keep: Positive = 3
    failures_per_day: float | None = None
    memory: bool = False
    parallel: ParallelSettings = ParallelSettings()
    timeout_s: Positive = 300
    transforms: str | None = None
    distill: DistillSettings | None = None
