"""How a model is divided and trained, as plain values, and whether that is possible; nothing
here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from fuelrail.bench.trainer.models.settings import (
    GptSettings,
    ModelSettings,
    VitSettings,
    num_blocks,
    tensor_sizes,
)
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import (
    Above0,
    AtLeast0,
    NotNegative,
    Positive,
    Settings,
    convert,
    flag,
    read_pairs,
)

Strategy = Literal["ddp", "zero1", "zero2", "fsdp2", "hsdp", "tensor", "pipeline"]
Schedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
Precision = Literal["fp32", "bf16", "fp16"]
# Strategies by the axis that all ranks make; hsdp has two axes.
_AXES = {
    "pp": ("pipeline",),
    "dp_replicate": ("ddp", "zero1"),
    "dp_shard": ("zero2", "fsdp2"),
    "tp": ("tensor",),
}
# Of which a rank has one stage; of the others two.
_ONE_STAGE = ("GPipe", "1F1B")
# They compute gradients of weights apart, with `torch.autograd.grad`, of which FSDP's hooks see
# nothing: it loses them.
_APART = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


class ParallelSettings(Settings, frozen=True, kw_only=True):
    """How the ranks share a model and how a step is computed.

    What has a description is a flag of ``bench train``.

    ``alone``: this rank trains by itself in any world.
    """

    strategy: Annotated[
        Strategy,
        flag(
            "how ranks share the model: ddp, zero1 (optimiser state sharded), zero2 (and "
            "gradients), fsdp2 (and parameters), hsdp (fsdp2 within pairs, copies across), "
            "tensor, pipeline; --mesh composes them"
        ),
    ] = "ddp"
    mesh: Annotated[
        str | None,
        flag(
            "degrees of a composed strategy, whose product is the number of ranks: "
            "pp=2,dp_replicate=1,dp_shard=2,tp=2; an axis left out is 1",
            metavar="AXIS=N,...",
        ),
    ] = None
    pipeline_schedule: Annotated[Schedule, flag("order of work in a pipeline")] = "1F1B"
    micro_batches: Annotated[
        Positive | None,
        flag("parts of a rank's batch in a pipeline (default: one sample each)"),
    ] = None
    bucket_mib: Annotated[
        Above0 | None,
        flag("DDP's buckets (default: torch's, 1 MiB and then 25)"),
    ] = None
    compression: Annotated[
        Literal["none", "fp16", "powersgd"],
        flag("compression of DDP's gradients"),
    ] = "none"
    offload: Annotated[bool, flag("keep sharded parameters and optimiser in host memory")] = False
    recompute: Annotated[
        Literal["none", "selective", "full"],
        flag("activation checkpointing: selective keeps the results of matrix products"),
    ] = "none"
    compile: Annotated[
        Literal["none", "inductor", "aot_eager"],
        flag("torch.compile for each block, by backend"),
    ] = "none"
    optimiser: Annotated[
        Literal["adamw", "sgd"],
        flag("optimiser: adamw, or sgd with a momentum of 0.9"),
    ] = "adamw"
    clip_norm: Annotated[
        Above0 | None, flag("largest norm of all gradients (default: no limit)")
    ] = None
    rate_warmup: Annotated[NotNegative, flag("steps in which the learning rate grows from 0")] = 0
    max_skipped: Annotated[
        Positive,
        flag("stop after this number of steps in a row without finite gradients (fp16)"),
    ] = 25
    deterministic: Annotated[bool, flag("deterministic kernels, where torch has them")] = False
    precision: Annotated[
        Precision | None,
        flag(
            "fp32, or autocast to bf16, or to fp16 with scaled loss (default: bf16 on cuda, "
            "else fp32)"
        ),
    ] = None
    learning_rate: Annotated[AtLeast0, flag("learning rate")] = 2e-3
    seed: Annotated[NotNegative, flag("random seed for order, augmentation and weights")] = 0
    batch_norm: Annotated[
        Literal["local", "sync", "frozen"],
        flag(
            "batch norm: statistics of each rank (local), of all data-parallel ranks (sync, "
            "GPUs only), or as loaded"
        ),
    ] = "local"
    find_unused: Annotated[bool, flag("DDP looks for parameters that a step does not use")] = False
    alone: bool = False

    @classmethod
    def among(cls, options: Mapping[str, Any], where: str) -> Self:
        """Return those among a report's options. Raises ConfigError."""
        return convert(
            {name: options[name] for name in cls.__struct_fields__ if name in options},
            cls,
            where,
        )

    @property
    def shards_optimiser(self) -> bool:
        """Whether copies of the model share the optimiser's state."""
        return self.strategy == "zero1" and self.mesh is None and not self.alone


class Degrees(NamedTuple):
    """Sizes of the mesh's axes, the outermost first."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def data(self) -> int:
        """Number of data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def composed(self) -> bool:
        """Whether it takes more than plain data parallel on whole models."""
        return self.pp * self.dp_shard * self.tp > 1

    def __str__(self) -> str:
        return (
            ",".join(f"{axis}={size}" for axis, size in self._asdict().items() if size > 1)
            or "one rank"
        )


def degrees_of(settings: ParallelSettings, world: int) -> Degrees:
    """Return the mesh's axes for this number of ranks.

    Raises ConfigError, which says what would fit.
    """
    strategy = settings.strategy
    mesh = settings.mesh
    if settings.alone:
        return Degrees()
    if mesh is not None:
        rule = "AXIS=N with N of at least 1, each axis once; axes"
        degrees = Degrees(
            **read_pairs("mesh", text=mesh, names=Degrees._fields, number=int, rule=rule)
        )
    elif strategy == "hsdp":
        odd = (
            f"strategy 'hsdp' shards over two ranks, which do not divide {world}; use "
            f"ranks={world + 1}"
        )
        _refuse(world % 2, odd)
        degrees = Degrees(dp_replicate=world // 2, dp_shard=2)
    else:
        degrees = Degrees(*(world if strategy in names else 1 for names in _AXES.values()))
    size = math.prod(degrees)
    rest = size // degrees.dp_shard
    hint = f"ranks={size}" + (f" or dp_shard={world // rest}" if world % rest == 0 else "")
    _refuse(
        size != world,
        f"mesh '{mesh}' is for {size} ranks, the run has {world}; use {hint}",
    )
    requirement = f"needs whole models on each rank, and the mesh is {degrees}; use strategy=ddp"
    _refuse(degrees.composed and strategy == "zero1", f"zero1 {requirement}")
    _refuse(
        degrees.composed and settings.compression != "none",
        f"compression {requirement}",
    )
    small = settings.compile != "none" and (settings.bucket_mib or 1) < 1
    _refuse(
        small,
        f"compile takes no bucket_mib below 1, and it is {settings.bucket_mib}; use 1 or more",
    )
    alone = settings.offload and degrees.dp_shard == 1
    _refuse(
        alone,
        f"offload needs sharded parameters, and the mesh is {degrees}; use dp_shard=2 or more",
    )
    return degrees


def _refuse(wrong: object, message: str) -> None:
    if wrong:
        raise ConfigError(message)


def stages_of(settings: ParallelSettings, degrees: Degrees) -> int:
    """Return the number of stages of the whole pipeline."""
    return degrees.pp * (1 if settings.pipeline_schedule in _ONE_STAGE else 2)


def check_fits(
    settings: ParallelSettings,
    degrees: Degrees,
    model: ModelSettings,
    batch_size: int,
    image: tuple[int, int] = (0, 0),
) -> None:
    """Check that the degrees divide model and batch.

    ``image``: height and width of images; (0, 0): not checked.

    Raises ConfigError, which says what would fit.
    """
    pp = degrees.pp
    tp = degrees.tp
    schedule = settings.pipeline_schedule
    for name, size in tensor_sizes(model, image).items():
        _refuse(
            size % tp,
            f"tp={tp} does not divide the {size} {name} of the model; {divisors('tp', size)}",
        )
    if isinstance(model, VitSettings | GptSettings):
        divides = model.width % model.heads == 0 or getattr(model, "head_width", None) is not None
        _refuse(
            not divides,
            f"{model.heads} heads do not divide the model's width of {model.width}",
        )
    if isinstance(model, GptSettings):
        groups = model.heads % (model.kv_heads or 1)
        _refuse(
            groups,
            f"{model.kv_heads} key-value heads do not divide the model's {model.heads} heads",
        )
        _refuse(
            tp > 1 and model.experts > 1,
            (
                f"tp={tp} divides no experts, and the model has {model.experts}; use tp=1, and "
                "dp_shard to divide them"
            ),
        )
    if pp == 1:
        return
    blocks = num_blocks(model)
    stages = stages_of(settings, degrees)
    parts = settings.micro_batches or batch_size
    uneven = isinstance(model, VitSettings | GptSettings) and blocks % stages
    _refuse(
        uneven,
        f"{stages} stages ({schedule}, pp={pp}) do not divide the model's {blocks} layers; "
        f"{divisors('stages', blocks)}",
    )
    would = divisors("micro_batches", batch_size)
    of_batch = f"the batch of {batch_size} samples per rank"
    _refuse(
        batch_size % parts,
        f"micro_batches={parts} does not divide {of_batch}; {would}",
    )
    check_pipeline(settings, degrees, blocks, parts)


def check_pipeline(
    settings: ParallelSettings,
    degrees: Degrees,
    blocks: int,
    micro_batches: int,
) -> None:
    """Check that a pipeline's schedule can run the blocks of a model in these stages, and a batch
    in this number of parts.

    Raises ConfigError, which says what would fit.
    """
    pp = degrees.pp
    schedule = settings.pipeline_schedule
    stages = stages_of(settings, degrees)
    _refuse(
        schedule in _APART and degrees.data > 1,
        f"{schedule} loses gradients where data-parallel ranks share a pipeline "
        f"(dp_shard={degrees.dp_shard}, dp_replicate={degrees.dp_replicate}); use "
        "Interleaved1F1B, or pp and tp alone",
    )
    _refuse(
        blocks < stages,
        f"{stages} stages ({schedule}, pp={pp}) are more than the model's {blocks} layers; use a "
        "model of more, or a smaller pp",
    )
    fewest = {
        "1F1B": stages,
        "DualPipeV": stages,
        "GPipe": 1,
        "LoopedBFS": 1,
    }.get(schedule, pp)
    is_multiple = "Interleaved" in schedule
    _refuse(
        micro_batches < fewest or (is_multiple and micro_batches % pp),
        f"{schedule} with pp={pp} needs {fewest} "
        f"micro-batches{' or a multiple' if is_multiple else ' or more'}, and a rank's batch is "
        f"cut into {micro_batches}; use micro_batches={fewest}, and a batch_size that it divides",
    )


def divisors(name: str, size: int) -> str:
    """Say which values of a setting would divide a size."""
    values = [str(value) for value in range(1, min(size, 128) + 1) if size % value == 0]
    return f"{name} of {', '.join(values)} would"
