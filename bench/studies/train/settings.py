"""A training run as plain values: what a caller asks for, and what the ranks get as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from fuelrail.bench.measure.accelerator import DEFAULT_PROFILE, AcceleratorProfile, profile_names
from fuelrail.bench.ranks.injection import Injection
from fuelrail.bench.trainer.distill.settings import DISTILL
from fuelrail.bench.trainer.models.settings import ModelName
from fuelrail.bench.trainer.strategies.settings import ParallelSettings, Precision
from fuelrail.loaders.storage import Backend
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Above0, AtLeast0, Finite, NotNegative, Positive, check_types, flag

# What a counterfactual run leaves out, in the order of the data's way.
LeaveOut = Literal[
    "loading", "storage", "decompression", "decode", "transform", "copy", "launches", "all-reduce", "training"
]


class TrainOptions(ParallelSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.train`. What has a description is a flag of ``fuelrail bench train`` too.

    ``profile`` is an emulated accelerator of your own, in place of ``accelerator``. ``inject`` puts faults into the
    run. ``look_ahead_bytes`` is the DataLoader's.
    """

    split: Annotated[str, flag("split to train on")] = "train"
    ranks: Annotated[Positive, flag("number of ranks, all on this host")] = 1
    batch_size: Annotated[Positive, flag("samples per data-parallel rank in a batch")] = 4
    steps: Annotated[Positive | None, flag("optimiser steps (default: 60, unless --epochs is given)")] = None
    epochs: Annotated[Positive | None, flag("whole epochs instead of a number of steps")] = None
    warmup: Annotated[NotNegative, flag("warm-up steps, excluded from all results")] = 10
    accelerator: Annotated[
        str,
        flag(
            f"cuda, emulated:PROFILE, or auto: cuda if there is a GPU, else emulated:{DEFAULT_PROFILE}; "
            f"profiles: {', '.join(profile_names())}, or a .yaml file (default: auto)"
        ),
    ] = "auto"
    model: Annotated[
        ModelName | None, flag("model to train (default: base on cuda; emulated stand-in, bev-tiny in a pipeline)")
    ] = None
    precision: Annotated[
        Precision | None,
        flag("fp32, or autocast to bf16, or to fp16 with scaled loss (default: bf16 on cuda, else fp32)"),
    ] = None
    accumulation: Annotated[Positive, flag("batches accumulated into one optimiser step")] = 1
    learning_rate: Annotated[AtLeast0, flag("learning rate")] = 2e-3
    workers: Annotated[Positive | None, flag("decoding threads per rank (default: the rank's share of the CPUs)")] = (
        None
    )
    decoder: Annotated[str, flag("decode backend, as in the DataLoader")] = "auto"
    prefetch_factor: Annotated[Positive, flag("number of finished batches to keep ready")] = 2
    storage: Annotated[Backend, flag("storage backend, as in the DataLoader")] = "auto"
    cache_dir: Annotated[str | None, flag("folder on a local disk to cache samples in")] = None
    window: Annotated[Positive | None, flag("shuffle in windows of N shards instead of the whole split")] = None
    verify: Annotated[bool, flag("skip checksum verification")] = True
    transform: Annotated[str | None, flag("function to call with each sample", metavar="MODULE:FUNCTION")] = None
    transforms: Annotated[str | None, flag("YAML file of size and augmentation of the samples", metavar="FILE")] = None
    teacher: Annotated[str | None, flag("distil from the model of these checkpoints", metavar="FOLDER_OR_URL")] = None
    teacher_layer: Annotated[str | None, flag("distil from this layer of predictions", metavar="FOLDER_OR_URL")] = None
    distill: Annotated[
        str | None,
        flag(
            f"weights of labels, logits, features and targets with a teacher (default: {DISTILL})",
            metavar="PART=WEIGHT,...",
        ),
    ] = None
    temperature: Annotated[Above0 | None, flag("softens the logits for distillation (default: 2)")] = None
    seed: Annotated[NotNegative, flag("random seed for order, augmentation and weights")] = 0
    checkpoint: Annotated[
        str | None, flag("save checkpoints there, and continue from the newest one", metavar="FOLDER_OR_URL")
    ] = None
    every: Annotated[Positive, flag("steps between two checkpoints")] = 100
    keep: Annotated[Positive, flag("number of checkpoints to keep")] = 3
    failures_per_day: Annotated[
        Above0 | None, flag("failures of the whole job a day; adds the best interval of checkpoints")
    ] = None
    memory: Annotated[bool, flag("follow the memory of the third warm-up step, by kind")] = False
    against: Annotated[str | None, flag("compare the loss with that of this report.json", metavar="REPORT")] = None
    check_batch: Annotated[
        Positive | None,
        flag(
            "train as many samples again with N in a batch and the learning rate scaled with it, and "
            "compare the loss: a check before a larger batch"
        ),
    ] = None
    target_loss: Annotated[Finite | None, flag("report when the loss was as low as this")] = None
    price_per_gpu_hour: Annotated[
        AtLeast0 | None,
        flag("price of a GPU-hour; adds the cost per million samples, in the same currency", metavar="PRICE"),
    ] = None
    timeout_s: Annotated[Positive, flag("seconds after which a rank that does not answer ends the run")] = 300
    trace: Annotated[
        bool,
        flag(
            "write trace.json for ui.perfetto.dev: the loader's stages, the trainer's phases and, for a "
            "few steps, the events of torch's profiler, on one clock"
        ),
    ] = False
    leave_out: Annotated[
        tuple[LeaveOut, ...],
        flag(
            "disable one part to measure its cost; may be repeated: loading (train on batches in memory), "
            "all-reduce (each rank trains alone), or the work of a loader stage",
            repeat=True,
        ),
    ] = ()
    profile: AcceleratorProfile | None = None
    inject: Injection = Injection()
    look_ahead_bytes: Positive | None = None

    def __post_init__(self) -> None:
        check_types(self, ConfigError)


class TrainSettings(TrainOptions, frozen=True, kw_only=True):
    """One run, the same on all its ranks: options without open choices, and with absolute places.

    ``profile`` is None on CUDA. The ranks' ``records`` have a folder of their own, beside that of their traces.
    ``leave_out`` makes a run a counterfactual: without ``loading`` the first batches are repeated and the loader is
    closed; without ``storage``, ``decompression``, ``decode`` or ``transform`` the loader runs, but skips that work;
    without ``copy`` and ``launches`` the emulated device has a free bus and a fast host; without ``all-reduce`` each
    rank trains alone; without ``training`` batches are taken as fast as they come, and dropped.
    """

    dataset: str
    records: str
    model: ModelName
    precision: Precision

    @property
    def traces(self) -> Path:
        """Folder of the ranks' traces."""
        return Path(self.records).parent / "trace"
