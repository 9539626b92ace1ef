"""What is to be planned: a scenario file, what flags change of it, and what must be asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from fuelrail.bench.planner.hardware import ComputeType
from fuelrail.bench.planner.step_time import (
    CONVOLUTION,
    DECODER,
    MIXTURE,
    Efficiency,
    Software,
)
from fuelrail.bench.trainer.models.settings import (
    MODELS,
    GptSettings,
    ModelName,
    ModelSettings,
    ResNetSettings,
    predictions,
)
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings,
    Precision,
    Schedule,
    Strategy,
)
from fuelrail.pipeline.channels.logits import (
    code_of,
    logits_entry,
    logits_store,
)
from fuelrail.pipeline.channels.table import Channel
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Above0, NotNegative, Settings, flag

Auto = Literal["auto"]
Recompute = Literal["none", "selective", "full"]
TeacherFrom = Annotated[str, msgspec.Meta(pattern="^(model|layer|(topk|sampled):[1-9][0-9]{0,5})$")]
_TOKENS = 2048  # of a shape's sample, where the scenario does not say
# Nothing that is trained comes near these; beyond them planning would not end.
Layers = Annotated[int, msgspec.Meta(gt=0, le=10_000)]
Channels = Annotated[int, msgspec.Meta(gt=0, le=2**22)]
Pixels = Annotated[int, msgspec.Meta(gt=0, le=2**16)]
Samples = Annotated[int, msgspec.Meta(gt=0, le=2**22)]
Tokens = Annotated[int, msgspec.Meta(gt=0, le=2**26)]
Ranks = Annotated[int, msgspec.Meta(gt=0, le=2**20)]
Large = Annotated[int, msgspec.Meta(gt=0, le=2**50)]


class TransformerShape(Settings, frozen=True, kw_only=True, tag_field="kind", tag="transformer"):
    """A decoder by its sizes, as of `GptSettings`; a sample is ``sequence`` tokens of the scenario.

    A token attends to ``window`` tokens before it (default: to all), but for ``global_layers`` of
    the layers. ``tied`` embeddings are the weights of the last layer, too; a pipeline has both.
    """

    layers: Layers
    width: Channels
    heads: Channels
    kv_heads: Channels | None = None
    head_width: Channels | None = None
    ffn: Channels | None = None
    gated: bool = False
    vocabulary: Annotated[int, msgspec.Meta(gt=0, le=2**26)]
    tied: bool = False
    window: Tokens | None = None
    global_layers: NotNegative = 0
    experts: Annotated[int, msgspec.Meta(gt=0, le=2**14)] = 1
    active_experts: Annotated[int, msgspec.Meta(gt=0, le=2**14)] = 1

    def settings(self, context: int) -> GptSettings:
        """Return the size of the decoder that reads this number of tokens."""
        return GptSettings(
            depth=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            ffn=self.ffn,
            gated=self.gated,
            vocabulary=self.vocabulary,
            context=context,
            experts=self.experts,
            active_experts=self.active_experts,
        )

    def attention_share(self, context: int) -> float:
        """Return the share of pairs of tokens that attend to each other within the windows, of
        all that could.
        """
        if self.window is None or self.window >= context:
            return 1.0
        local = self.window * (2 * context - self.window) / context**2
        global_share = min(self.global_layers, self.layers) / self.layers
        return global_share + (1 - global_share) * local


class Facts(Settings, frozen=True, kw_only=True):
    """Facts that a scenario may give and an option may replace; None: not given.

    ``cameras``, ``height`` and ``width`` are of a sample's images, and needed by every model but
    GPT's. ``sample_bytes`` are those stored of a sample. ``teacher`` is a model that the student is
    distilled from.
    """

    max_global_batch: Annotated[
        Samples | None,
        flag("largest global batch that trains as well: ends weak scaling"),
    ] = None
    cameras: Annotated[Pixels | None, flag("images of a sample")] = None
    height: Annotated[Pixels | None, flag("height of an image in pixels")] = None
    width: Annotated[Pixels | None, flag("width of an image in pixels")] = None
    sequence: Annotated[
        Tokens | None,
        flag("tokens of a GPT's sample (default: the model's own)"),
    ] = None
    sample_bytes: Annotated[Large | None, flag("stored bytes of a sample")] = None
    samples_per_epoch: Annotated[Large | None, flag("samples of an epoch")] = None
    failures_per_day: Annotated[Above0 | None, flag("failures of the whole job a day")] = None
    teacher: Annotated[ModelName | None, flag("model that the student is distilled from")] = None
    weights: Annotated[
        Literal["fp32", "bf16"] | None,
        flag(
            "fp32 (default): as Fuelrail's trainer, and whole gradients between "
            "micro-batches; bf16: weights and activations in bf16, fp32 copies in the "
            "optimiser, which copies of the model share, shards reduced after each "
            "micro-batch, the vocabulary's loss divided: as Megatron and others with "
            "torch's FSDP train"
        ),
    ] = None
    gradients: Annotated[
        Literal["fp32", "bf16"] | None,
        flag(
            "type in which gradients are kept and reduced, with weights bf16: fp32 "
            "(default), or bf16 as in NeMo and Megatron Bridge"
        ),
    ] = None
    software: Annotated[
        Software | None,
        flag(
            "whose kernels compute in 8 bits: torch (torchao, as torchtitan trains) or "
            "nvidia (Transformer Engine, as NeMo and Megatron Bridge train); without it the "
            "range is that of both"
        ),
    ] = None
    context_parallel: Annotated[
        Ranks | None,
        flag("data-parallel ranks that share the tokens of a sample (default: 1)"),
    ] = None
    attention: Annotated[
        Literal["fused", "unfused"] | None,
        flag(
            "fused (default): one kernel, as FlashAttention; unfused: its scores pass "
            "through memory"
        ),
    ] = None
    expert_parallel: Annotated[
        Ranks | None,
        flag("data-parallel ranks that share the experts of a mixture (default: 1)"),
    ] = None
    virtual_stages: Annotated[
        Layers | None,
        flag("stages of a rank in Interleaved1F1B (default: the trainer's 2)"),
    ] = None
    accelerator: Annotated[
        str | None,
        flag(
            "measured times of the network on a device: a name of configs/accelerators, or "
            "a .yaml file"
        ),
    ] = None


class Scenario(Facts, frozen=True, kw_only=True):
    """What is to be trained, on what.

    ``parallel`` auto: the simplest strategy that fits is looked for.

    ``model`` is a name, a shape, or MODULE:FUNCTION, which makes an own module. A teacher predicts
    beside the student, or its logits are read with the samples from a layer: whole in float16
    (``layer``), or of tokens as ``annotate --store`` makes them (``topk:64``, ``sampled:50``).
    ``efficiency`` replaces that of the device's generation; ``measured_step_s`` is what a step
    took, for --measure.
    """

    name: str
    model: str | TransformerShape
    cluster: str
    global_batch: Samples
    micro_batch: Samples = 1
    precision: ComputeType = "bf16"
    parallel: ParallelSettings | Auto = "auto"
    teacher_from: TeacherFrom = "model"
    efficiency: Efficiency | None = None
    measured_step_s: Above0 | None = None

    @property
    def settings(self) -> ModelSettings | str:
        """Size of the model, with the scenario's number of tokens; an own model's name."""
        if isinstance(self.model, TransformerShape):
            return self.model.settings(self.sequence or _TOKENS)
        if self.is_own:
            return self.model
        return self.sized(self.model)

    @property
    def is_own(self) -> bool:
        """Whether the model is made by a function of the caller's."""
        return isinstance(self.model, str) and ":" in self.model

    @property
    def family(self) -> str:
        """What models have in common whose steps say how far a plan of this one may be from its
        step.

        That is a kind of network that published steps are of; any other model is a family of its
        own.
        """
        size = self.settings
        if isinstance(size, GptSettings):
            return MIXTURE if size.experts > 1 else DECODER
        if isinstance(size, ResNetSettings):
            return CONVOLUTION
        return self.named

    @property
    def named(self) -> str:
        """The model's name."""
        if isinstance(self.model, str):
            return self.model
        return f"transformer of {self.model.layers} layers of {self.model.width}"

    @property
    def low(self) -> bool:
        """Whether weights and activations are in bf16."""
        return self.weights == "bf16"

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient as it is kept and reduced."""
        return 2 if self.gradients == "bf16" else 4

    @property
    def tied_parameters(self) -> int:
        """Number of the parameters that embedding and last layer share."""
        if isinstance(self.model, TransformerShape) and self.model.tied:
            return self.model.vocabulary * self.model.width
        return 0

    @property
    def attention_share(self) -> float:
        """Share of pairs of tokens that attend to each other within windows, of all that could."""
        if isinstance(self.model, TransformerShape):
            return self.model.attention_share(self.sequence or _TOKENS)
        return 1.0

    @property
    def run_precision(self) -> Precision:
        """The type in which torch runs it: 8 bits are of some products alone, and tf32 is a way
        to compute fp32.
        """
        if self.precision == "fp8":
            return "bf16"
        if self.precision == "tf32":
            return "fp32"
        return self.precision

    def sized(self, name: ModelName) -> ModelSettings:
        """Return the size of a model, with the scenario's number of tokens."""
        settings = MODELS[name]
        if isinstance(settings, GptSettings) and self.sequence is not None:
            return msgspec.structs.replace(settings, context=self.sequence)
        return settings

    @property
    def layer_bytes(self) -> int:
        """Bytes of a teacher's logits of a sample in a layer; beside the student, of those that
        there would be.
        """
        if self.teacher is None:
            return 0
        shape, _ = predictions(self.sized(self.teacher), self.cameras or 1)
        stored = logits_store(self.teacher_from)
        if stored is None:
            return 2 * math.prod(shape)
        num_positions, num_classes = shape
        entry = logits_entry("logits", stored, num_positions, num_classes)
        channel = msgspec.convert(entry, Channel)
        return num_positions * code_of(channel).row_bytes

    @property
    def layer_tokens(self) -> int:
        """Tokens of a sample whose logits a layer would hold; 1 for a teacher of anything else."""
        if self.teacher is None:
            return 1
        size = self.sized(self.teacher)
        return size.context if isinstance(size, GptSettings) else 1

    @property
    def stored_bytes(self) -> int | None:
        """Bytes that are read of a sample, the teacher's layer included."""
        if self.sample_bytes is None or self.teacher_from == "model":
            return self.sample_bytes
        return self.sample_bytes + self.layer_bytes

    @property
    def reads_images(self) -> bool:
        """Whether a sample is images, rather than tokens."""
        if self.is_own:
            return self.cameras is not None
        return not isinstance(self.settings, GptSettings)


class PlanOptions(Facts, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.plan`, and flags of ``fuelrail plan``.

    What a scenario says, they replace.
    """

    model: Annotated[
        str | None,
        flag(
            "model to train: one of ours, or MODULE:FUNCTION, which makes a module with "
            "example(samples)"
        ),
    ] = None
    cluster: Annotated[
        str | None,
        flag("cluster to train on: a name of configs/clusters, or a .yaml file"),
    ] = None
    global_batch: Annotated[Samples | None, flag("samples of an optimiser step")] = None
    micro_batch: Annotated[
        Samples | None,
        flag("samples of a data-parallel rank at once (default: 1)"),
    ] = None
    precision: Annotated[ComputeType | None, flag("compute type (default: bf16)")] = None
    strategy: Annotated[
        Strategy | Auto | None,
        flag("how ranks share the model; auto: the simplest strategy that fits (default)"),
    ] = None
    mesh: Annotated[
        str | None,
        flag(
            "degrees of a composed strategy, as in bench train",
            metavar="AXIS=N",
        ),
    ] = None
    recompute: Annotated[Recompute | None, flag("activation checkpointing, with a strategy")] = None
    pipeline_schedule: Annotated[Schedule | None, flag("order of work in a pipeline")] = None
    teacher_from: Annotated[
        TeacherFrom | None,
        flag(
            "model: it predicts beside the student (default); layer: its logits are read, "
            "as float16; topk:K or sampled:K: K tokens a position are read"
        ),
    ] = None
    data: Annotated[
        str | None,
        flag(
            "Fuelrail dataset: says bytes, cameras and number of samples",
            metavar="DATASET",
        ),
    ] = None
    split: Annotated[str, flag("split of --data")] = "train"
    loader_report: Annotated[
        str | None,
        flag(
            "report.json of `fuelrail bench loader` on a host of the cluster: images a second of a "
            "CPU, bytes of a sample, and the rate of storage where that was the loader's limit",
            metavar="FILE",
        ),
    ] = None
    measure: Annotated[
        tuple[str, ...],
        flag(
            "a measured step on this cluster: report.json of `fuelrail bench train`, or a "
            "scenario.yaml with measured_step_s; efficiencies are fitted to two or three of them",
            metavar="FILE",
        ),
    ] = ()
    recipe: Annotated[
        Literal["slurm", "kubernetes", "torchrun"] | None,
        flag("write the file that launches the plan so, to --out"),
    ] = None
    sweep: Annotated[bool, flag("plan every strategy, micro-batch and recomputation")] = False
    explain: Annotated[bool, flag("show formula, inputs and source of each figure")] = False


def with_options(scenario: Scenario | None, options: PlanOptions) -> Scenario:
    """Return the scenario with what the options replace.

    Raises ConfigError for what neither of them says.
    """
    facts = _stated(options, Scenario.__struct_fields__)
    # The precision is the scenario's: automatic strategies and teachers have it too.
    names = set(ParallelSettings.__struct_fields__) - set(Scenario.__struct_fields__)
    settings = _stated(options, names)
    if scenario is None:
        missing = [name for name in ("model", "cluster", "global_batch") if name not in facts]
        if missing:
            flags = " ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ConfigError(
                f"a plan needs {', '.join(missing)}: name a scenario (`fuelrail presets` "
                f"lists them), or give {flags}"
            )
        scenario = Scenario(name=f"{facts['model']} on {facts['cluster']}", **facts)
    else:
        scenario = msgspec.structs.replace(scenario, **facts)
    if settings.get("strategy") == "auto":
        rest = [name for name in settings if name != "strategy"]
        if rest:
            raise ConfigError(
                f"strategy auto looks for the rest itself, and {', '.join(rest)} is given too; "
                "leave it out, or name a strategy"
            )
        return msgspec.structs.replace(scenario, parallel="auto")
    if not settings:
        return scenario
    if scenario.parallel != "auto":
        parallel = msgspec.structs.replace(scenario.parallel, **settings)
    elif {"strategy", "mesh"} & settings.keys():
        parallel = ParallelSettings(**settings)
    else:
        raise ConfigError(
            f"{', '.join(settings)} is given without a strategy; add --strategy or --mesh, "
            "or leave it out: strategy auto tries it"
        )
    return msgspec.structs.replace(scenario, parallel=parallel)


def _stated(options: PlanOptions, names: Iterable[str]) -> dict[str, Any]:
    """Return the options that are given, of those named."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def check(scenario: Scenario) -> None:
    """Raise ConfigError where the scenario does not say what the model reads, or has a teacher
    of other predictions.
    """
    if isinstance(scenario.model, str) and not scenario.is_own and scenario.model not in MODELS:
        raise ConfigError(
            f"model '{scenario.model}' is not known; known: {', '.join(MODELS)}; or give a shape "
            "({kind: transformer, ...}) in a scenario, or MODULE:FUNCTION for a module of your "
            "own"
        )
    if not isinstance(scenario.settings, GptSettings):
        is_given = {
            "weights": scenario.low,
            "context_parallel": (scenario.context_parallel or 1) > 1,
            "expert_parallel": (scenario.expert_parallel or 1) > 1,
            "teacher": scenario.is_own and scenario.teacher is not None,
        }
        for name in is_given:
            if is_given[name]:
                raise ConfigError(
                    f"{name} is planned of decoders, and model '{scenario.named}' is none; leave "
                    "it out"
                )
    if scenario.gradients is not None and not scenario.low:
        raise ConfigError(
            f"gradients '{scenario.gradients}' is given without weights: bf16; Fuelrail's "
            "own trainer keeps gradients as it keeps weights: leave it out, or add weights: bf16"
        )
    if scenario.software is not None and scenario.precision != "fp8":
        raise ConfigError(
            f"software '{scenario.software}' is given with precision {scenario.precision}; "
            "it says whose kernels compute in 8 bits: leave it out, or use precision: fp8"
        )
    ranks = scenario.expert_parallel or 1
    size = scenario.settings
    experts = size.experts if isinstance(size, GptSettings) else 1
    if ranks > 1 and experts % ranks:
        raise ConfigError(
            f"expert_parallel is {ranks}, which does not divide the {experts} experts of "
            f"model '{scenario.named}'; use a divisor"
        )
    if isinstance(scenario.model, TransformerShape) and scenario.model.active_experts > experts:
        raise ConfigError(
            f"active_experts is {scenario.model.active_experts}, and the model has {experts}; "
            "use at most that"
        )
    if scenario.is_own:
        return
    if scenario.teacher is not None:
        if not isinstance(scenario.model, str):
            raise ConfigError(
                f"scenario '{scenario.name}': a teacher needs a model by name; leave it out"
            )
        num_cameras = scenario.cameras or 1
        teacher = scenario.sized(scenario.teacher)
        teacher_shape, teacher_meaning = predictions(teacher, num_cameras)
        shape, meaning = predictions(scenario.sized(scenario.model), num_cameras)
        if (shape, meaning) != (teacher_shape, teacher_meaning):
            raise ConfigError(
                f"scenario '{scenario.name}': teacher '{scenario.teacher}' predicts "
                f"{list(teacher_shape)} ({teacher_meaning}), model '{scenario.model}' "
                f"{list(shape)} ({meaning}); use a teacher of the same predictions"
            )
        has_tokens = isinstance(teacher, GptSettings)
        if logits_store(scenario.teacher_from) is not None and not has_tokens:
            raise ConfigError(
                f"scenario '{scenario.name}': teacher_from '{scenario.teacher_from}' is of "
                f"a teacher of tokens, and '{scenario.teacher}' says {teacher_meaning}; use "
                "'layer'"
            )
    elif scenario.teacher_from != "model":
        raise ConfigError(
            f"scenario '{scenario.name}': teacher_from is given without a teacher; add "
            "teacher: MODEL"
        )
    if scenario.max_global_batch is not None and scenario.max_global_batch < scenario.global_batch:
        raise ConfigError(
            f"scenario '{scenario.name}': global_batch is {scenario.global_batch}, and "
            "max_global_batch, the largest that trains as well, "
            f"{scenario.max_global_batch}; use a smaller global_batch, or a larger limit"
        )
    sizes = ("cameras", "height", "width")
    reads = "images" if scenario.reads_images else "tokens"
    foreign = ("sequence",) if scenario.reads_images else sizes
    stated = [name for name in foreign if getattr(scenario, name) is not None]
    if stated:
        raise ConfigError(
            f"scenario '{scenario.name}': model '{scenario.named}' reads {reads}, and "
            f"{', '.join(stated)} is given; leave it out, or choose another model"
        )
    if not scenario.reads_images:
        return
    missing = [name for name in sizes if getattr(scenario, name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        pronoun = "it" if len(missing) == 1 else "them"
        raise ConfigError(
            f"scenario '{scenario.name}': model '{scenario.model}' reads images, and "
            f"{', '.join(missing)} of a sample {verb} not given; add {pronoun}, such as "
            "cameras: 6, height: 256, width: 704"
        )


def questions(scenario: Scenario) -> list[str]:
    """Return what only the user can know and has not said; each with the assumption made
    instead.
    """
    size = scenario.settings
    missing = {
        "max_global_batch": "the largest global batch that trains as well: weak scaling is shown "
        "without a limit",
        "sample_bytes": "stored bytes of a sample (or --data): storage is taken to keep up",
        "samples_per_epoch": "samples of an epoch (or --data): no cost of an epoch is given",
        "failures_per_day": "failures of the job a day: no interval of checkpoints is given",
    }
    if isinstance(size, GptSettings):
        missing["sequence"] = f"tokens of a sample: the model's {size.context} are taken"
    return [f"{name}, {text}" for name, text in missing.items() if getattr(scenario, name) is None]
