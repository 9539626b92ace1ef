"""A training run as plain values: what a caller asks for, and what the ranks get as JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from fuelrail.bench.measure.accelerator import (
    DEFAULT_PROFILE,
    AcceleratorProfile,
    load_profile,
    profile_names,
)
from fuelrail.bench.measure.machine import (
    DatasetFacts,
    dataset_facts,
    installed_gpus,
)
from fuelrail.bench.trainer.distill.settings import DISTILL, weights_of
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings,
    Precision,
    check_fits,
    degrees_of,
)
from fuelrail.loaders.config import Transforms
from fuelrail.loaders.storage import Backend
from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.settings import (
    Above0,
    AtLeast0,
    NotNegative,
    Positive,
    as_settings,
    check_types,
    flag,
)
from fuelrail.pipeline.storage.filesystem import filesystem, is_url

RECORDS = "records"
_DEFAULT_STEPS = 60
_TEACHERS = ("teacher", "teacher_layer")

AcceleratorKind = Literal["cuda", "cpu", "emulated"]

# What a counterfactual run leaves out, in the order of the data's way.
LeaveOut = Literal["loading", "storage", "decompression", "decode", "transform", "all-reduce"]


class TrainOptions(ParallelSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.bench_train`.

    What has a description is a flag of ``fuelrail bench train`` too.

    ``profile`` is an emulated accelerator of your own, in place of ``accelerator``.
    ``look_ahead_bytes`` is the DataLoader's.
    """

    split: Annotated[str, flag("split to train on")] = "train"
    ranks: Annotated[Positive, flag("number of ranks, all on this host")] = 1
    batch_size: Annotated[
        Positive, flag("samples, or packs, per data-parallel rank in a batch")
    ] = 4
    steps: Annotated[
        Positive | None,
        flag("optimiser steps (default: 60, unless --epochs is given)"),
    ] = None
    epochs: Annotated[Positive | None, flag("whole epochs instead of a number of steps")] = None
    warmup: Annotated[NotNegative, flag("warm-up steps, excluded from all results")] = 10
    accelerator: Annotated[
        str,
        flag(
            "cuda; cpu: forward, backward and optimiser as this machine's CPUs take them; "
            "emulated:PROFILE: a GPU's published times, whatever the model; or auto: cuda if there "
            f"is a GPU, else cpu for a model of your own, else emulated:{DEFAULT_PROFILE}; "
            f"profiles: {', '.join(profile_names())}, or a .yaml file (default: auto)"
        ),
    ] = "auto"
    model: Annotated[
        str | None,
        flag(
            f"model to train: {', '.join(MODELS)}, or MODULE:FUNCTION that makes one of "
            "your own (default: base on cuda, bev-tiny on cpu; emulated stand-in, bev-tiny "
            "in a pipeline)"
        ),
    ] = None
    accumulation: Annotated[Positive, flag("batches accumulated into one optimiser step")] = 1
    workers: Annotated[
        Positive | None,
        flag("decoding threads per rank (default: the rank's share of the CPUs)"),
    ] = None
    decoder: Annotated[str, flag("decode backend, as in the DataLoader")] = "auto"
    prefetch_factor: Annotated[Positive, flag("number of finished batches to keep ready")] = 2
    storage: Annotated[Backend, flag("storage backend, as in the DataLoader")] = "auto"
    cache_dir: Annotated[str | None, flag("folder on a local disk to cache samples in")] = None
    window: Annotated[
        Positive | None,
        flag("shuffle in windows of N shards instead of the whole split"),
    ] = None
    cost: Annotated[
        tuple[str, ...],
        flag(
            "fit the step's time to this column of the samples; may be repeated",
            repeat=True,
        ),
    ] = ()
    order: Annotated[
        OrderSpec | None,
        flag("a whole order, with its own seed: filter, weights, packs, balance"),
    ] = None
    verify: Annotated[bool, flag("skip checksum verification")] = True
    transform: Annotated[
        str | None,
        flag("function to call with each sample", metavar="MODULE:FUNCTION"),
    ] = None
    transforms: Annotated[
        str | None,
        flag("YAML file of size and augmentation of the samples", metavar="FILE"),
    ] = None
    teacher: Annotated[
        str | None,
        flag(
            "distil from the model of these checkpoints",
            metavar="FOLDER_OR_URL",
        ),
    ] = None
    teacher_layer: Annotated[
        str | None,
        flag("distil from this layer of predictions", metavar="FOLDER_OR_URL"),
    ] = None
    distill: Annotated[
        str | None,
        flag(
            f"weights of labels, logits, features and targets with a teacher (default: {DISTILL})",
            metavar="PART=WEIGHT,...",
        ),
    ] = None
    temperature: Annotated[
        Above0 | None,
        flag(
            "softens the logits for distillation (default: 2, or that of a layer of top-k or draws)"
        ),
    ] = None
    checkpoint: Annotated[
        str | None,
        flag(
            "save checkpoints there, and continue from the newest one",
            metavar="FOLDER_OR_URL",
        ),
    ] = None
    every: Annotated[Positive, flag("steps between two checkpoints")] = 100
    keep: Annotated[Positive, flag("number of checkpoints to keep")] = 3
    ledger: Annotated[
        str | None,
        flag(
            "record in this file which samples the weights have seen",
            metavar="FILE",
        ),
    ] = None
    price_per_gpu_hour: Annotated[
        AtLeast0 | None,
        flag(
            "price of a GPU-hour; adds the cost per million samples, in the same currency",
            metavar="PRICE",
        ),
    ] = None
    timeout_s: Annotated[
        Positive,
        flag("seconds after which a rank that does not answer ends the run"),
    ] = 300
    trace: Annotated[
        bool,
        flag(
            "write trace.json for ui.perfetto.dev: the loader's stages, the trainer's "
            "phases and, for a few steps, the events of torch's profiler, on one clock"
        ),
    ] = False
    leave_out: Annotated[
        tuple[LeaveOut, ...],
        flag(
            "disable one part to measure its cost; may be repeated: loading (train on "
            "batches in memory), all-reduce (each rank trains alone), or the work of a loader "
            "stage",
            repeat=True,
        ),
    ] = ()
    profile: AcceleratorProfile | None = None
    look_ahead_bytes: Positive | None = None

    def __post_init__(self) -> None:
        check_types(self, ConfigError)


class TrainSettings(TrainOptions, frozen=True, kw_only=True):
    """One run, the same on all its ranks: options without open choices, and with absolute places.

    ``accelerator`` is cuda, cpu or emulated, which alone has a ``profile``. The ranks' ``records``
    have a folder of their own, beside that of their traces. ``leave_out`` makes a run a
    counterfactual: without ``loading`` the first batches are repeated and the loader is closed;
    without ``storage``, ``decompression``, ``decode`` or ``transform`` the loader runs, but skips
    that work; without ``all-reduce`` each rank trains alone.
    """

    dataset: str
    records: str
    model: str
    precision: Precision
    accelerator: AcceleratorKind

    @property
    def traces(self) -> Path:
        """Folder of the ranks' traces."""
        return Path(self.records).parent / "trace"


class RunPlan(NamedTuple):
    """One run that options ask for: its settings, with nothing left open, and the facts of its
    split.
    """

    settings: TrainSettings
    dataset: DatasetFacts


def ask(
    dataset: str | os.PathLike[str],
    options: TrainOptions,
    records: Path,
) -> RunPlan:
    """Answer everything that options leave open, before a rank is started.

    ``records`` is the folder for the ranks' records. Raises DatasetErrors, and ConfigError for what
    the ranks would refuse: in one sentence, without torch where possible.
    """
    if options.steps is not None and options.epochs is not None:
        raise ConfigError(
            f"steps={options.steps} and epochs={options.epochs} exclude each other: give "
            "one of them"
        )
    if options.ledger is not None and options.leave_out:
        raise ConfigError(
            "ledger and leave_out exclude each other: a run without a part is not a run to record"
        )
    if options.order is not None and options.window is not None:
        raise ConfigError(
            f"order and window={options.window} exclude each other: give the window in the order"
        )
    if options.order is not None and options.order.balance is not None and options.cost:
        raise ConfigError(
            f"cost={options.cost} is fitted to steps of unequal cost: leave out the order's balance"
        )
    places = [name for name in _TEACHERS if getattr(options, name) is not None]
    lone = [name for name in ("distill", "temperature") if getattr(options, name) is not None]
    if lone and not places:
        raise ConfigError(
            f"{lone[0]}={getattr(options, lone[0])} needs a teacher: give teacher or teacher_layer"
        )
    if len(places) == 2:
        raise ConfigError(
            f"teacher={options.teacher} and teacher_layer={options.teacher_layer} exclude "
            "each other: give one of them"
        )
    accelerator, profile = _accelerator(options)
    changes: dict[str, Any] = {
        name: _absolute(getattr(options, name))
        for name in ("cache_dir", "transforms", "ledger", *_TEACHERS)
    }
    changes["checkpoint"] = _checkpoint_place(options)
    weights_of(options.distill or DISTILL)
    if options.transforms is not None:
        as_settings(
            options.transforms, Transforms, "transforms"
        )  # refused before ranks are started
    degrees = degrees_of(options, options.ranks)
    defaults = {"cuda": "base", "cpu": "bev-tiny", "emulated": "stand-in"}
    if accelerator == "emulated" and degrees.pp > 1:
        defaults["emulated"] = "bev-tiny"  # one layer cannot be cut
    changes |= {
        "dataset": _absolute(os.fspath(dataset)),
        "records": str(records.absolute()),
        "steps": _DEFAULT_STEPS
        if options.steps is None and options.epochs is None
        else options.steps,
        "precision": options.precision or ("bf16" if accelerator == "cuda" else "fp32"),
        "model": options.model or defaults[accelerator],
        "accelerator": accelerator,
        "profile": profile,
    }
    settings = TrainSettings(**{**msgspec.structs.asdict(options), **changes})
    if settings.model in MODELS:
        check_fits(settings, degrees, MODELS[settings.model], settings.batch_size)
    elif ":" not in settings.model:
        raise ConfigError(
            f"model '{settings.model}' must be {', '.join(MODELS)}, or MODULE:FUNCTION of your own"
        )
    elif any(getattr(options, name) is not None for name in _TEACHERS):
        raise ConfigError(
            f"model '{settings.model}' has a loss of its own: make it a "
            "fuelrail.bench.Distilling, without teacher"
        )
    facts = dataset_facts(open_dataset(dataset), options.split)
    if degrees.composed and "all-reduce" in settings.leave_out:
        raise ConfigError(
            "leave_out all-reduce needs whole models on each rank, and the mesh is "
            f"{degrees}; use ddp"
        )
    global_batch = degrees.data * settings.batch_size * settings.accumulation
    if facts.num_samples < global_batch:
        raise ConfigError(
            f"split '{facts.split}' has {facts.num_samples} samples, one step takes "
            f"{global_batch} = {counted(degrees.data, 'data-parallel rank')} x "
            f"{counted(settings.batch_size, 'sample')} x {settings.accumulation} "
            f"{'batch' if settings.accumulation == 1 else 'batches'}: use fewer ranks or smaller "
            "batches"
        )
    num_gpus = len(installed_gpus())
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", settings.ranks))
    if settings.accelerator == "cuda" and ranks > num_gpus:
        raise ConfigError(
            f"the run has {counted(ranks, 'rank')}, each of which needs a GPU, and the NVIDIA "
            f"driver shows {num_gpus} here; use fewer ranks, or --accelerator cpu"
        )
    if settings.decoder != "auto":
        from fuelrail.loaders.decode import make_decoder

        make_decoder(settings.decoder)
    return RunPlan(settings, facts)


def _absolute(place: str | None) -> str | None:
    """Return a place as all ranks see it."""
    return place if place is None or is_url(place) else str(Path(place).absolute())


def _checkpoint_place(options: TrainOptions) -> str | None:
    """Return the place of checkpoints as all ranks see it.

    Raise ConfigError where it cannot be one.
    """
    place = options.checkpoint
    if place is None:
        return None
    if options.leave_out:
        raise ConfigError(
            f"checkpoint={place!r} and leave_out={options.leave_out} exclude each other: a "
            "run without a part measures what that costs, it does not train"
        )
    if is_url(place):
        filesystem(place)
        if place.startswith("memory:"):
            raise ConfigError(
                f"checkpoint={place!r} would end with each rank's process; use a folder or "
                "another URL"
            )
        return place
    folder = Path(place.removeprefix("file://")).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--checkpoint '{place}' cannot be a folder: {error.strerror}; choose another one"
        ) from error
    return str(folder)


def _accelerator(
    options: TrainOptions,
) -> tuple[AcceleratorKind, AcceleratorProfile | None]:
    """Return the kind of accelerator that options ask for, and the profile of an emulated one."""
    choice = options.accelerator
    if options.profile is not None:
        return "emulated", options.profile
    if choice == "auto":
        if installed_gpus():
            return "cuda", None
        if is_own(options.model):
            return "cpu", None
        return "emulated", load_profile(DEFAULT_PROFILE)
    if choice == "cpu":
        return "cpu", None
    if choice == "cuda":
        if not installed_gpus():
            raise ConfigError(
                "accelerator 'cuda' needs a GPU, and the NVIDIA driver shows no GPU here; use cpu, "
                "or emulated:PROFILE"
            )
        return "cuda", None
    kind, _, name = choice.partition(":")
    if kind != "emulated" or not name:
        raise ConfigError(
            f"accelerator {choice!r} must be auto, cuda, cpu or emulated:PROFILE; profiles: "
            f"{', '.join(profile_names())}"
        )
    return "emulated", load_profile(name)


def is_own(model: str | None) -> bool:
    """Return whether a model is the caller's own, as MODULE:FUNCTION."""
    return model is not None and model not in MODELS
