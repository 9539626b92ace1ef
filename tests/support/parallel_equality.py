"""Does every way of dividing a model over ranks train as one process does? Losses side by side, step by step.

Worlds of 2, 4 and 8 ranks on this host (gloo) train each tiny model under each strategy and composition, on batches of
the loader. Rank 0 then trains the undivided model alone on the same global batches, in the parts that the ranks (and a
pipeline's micro-batches) had, one after another, so that BatchNorm sees the same samples together. Compared are the
losses of all steps, the mean over the global batch, and the samples' keys.

The optimiser is SGD without clipping unless a case names another: AdamW's steps, and clipped ones, stay the same where
all gradients are multiplied by a number, such as that of the ranks.

Every image is cut, turned and mirrored by a draw of its own. Of equal images BatchNorm has nearly no variance to divide
by, and makes last digits of the sums a thousand times larger in a few steps. ResNet learns at a rate of 1e-6, others
at 1e-3: in micro-batches of four images a single ReLU that switches on another last digit is seen in the loss. At 1e-6
the steps still change the loss by 2,000 times the bound, so a gradient that is wrong shows.

Low precision: losses of bf16 and fp16 against fp32 in one process, as means over windows of 20 of 200 steps, at 1e-5:
of a loss that is nearly 0 a percentage says nothing.

``tests/slow/test_parallel_equality.py`` runs all cases, ``tests/bench/trainer/strategies/test_equality.py`` a few.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings,
    Precision,
    check_fits,
    degrees_of,
)
from support.cameras import write_cameras
from support.ranks import run_ranks

if TYPE_CHECKING:
    from fuelrail.bench.trainer.strategies.step import Parallel

GLOBAL_BATCH = 16
EXACT = 2e-6
LOW = 0.01
TINY = ("bev-tiny", "resnet-tiny", "vit-tiny", "gpt-tiny")
_IMAGE = (64, 128)
_NUM_BATCHES = 20
_WINDOW = 20
_PATIENCE_S = 3000


def divided(**options: Any) -> ParallelSettings:
    """Return settings that show a gradient of the wrong size, unless the options say other ones."""
    return ParallelSettings(**{"optimiser": "sgd", **options})


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One training: a model, how it is divided, and how long."""

    model: str
    parallel: ParallelSettings = divided()
    precision: Precision = "fp32"
    steps: int = 20

    @property
    def rate(self) -> float:
        """Learning rate; see the module's docstring."""
        if self.precision != "fp32":
            return 1e-5
        return 1e-6 if self.model.startswith("resnet") else 1e-3


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What came out: the largest difference of a loss (in low precision: relative, of a window's mean)."""

    world: int
    degrees: str
    case: Case
    same_samples: bool
    difference: float
    first_loss: float
    last_loss: float
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether it is within the bound."""
        return self.same_samples and self.difference <= (
            EXACT if self.case.precision == "fp32" else LOW
        )


def cases_of(world: int) -> Iterator[Case]:
    """All cases of a world."""
    meshes = {
        2: [],
        4: [
            "pp=2,dp_shard=2",
            "pp=2,tp=2",
            "dp_shard=2,tp=2",
            "dp_replicate=2,tp=2",
            "pp=2,dp_replicate=2",
        ],
        8: [
            *(
                "pp=2,dp_shard=2,tp=2",
                "pp=2,dp_replicate=2,tp=2",
                "dp_replicate=2,dp_shard=2,tp=2",
            ),
            *(
                "pp=2,dp_replicate=2,dp_shard=2",
                "pp=4,dp_shard=2",
                "pp=2,tp=4",
                "dp_shard=4,tp=2",
            ),
        ],
    }[world]
    for model in TINY:
        for strategy in (
            "ddp",
            "zero1",
            "zero2",
            "fsdp2",
            "hsdp",
            "tensor",
            "pipeline",
        ):
            micro = 8 if strategy == "pipeline" else None
            yield Case(
                model=model,
                parallel=divided(strategy=strategy, micro_batches=micro),
            )
        for mesh in meshes:
            micro = 4 if "pp" in mesh else None
            yield Case(model=model, parallel=divided(mesh=mesh, micro_batches=micro))
    if world == 2:
        yield from _variations()


def _variations() -> Iterator[Case]:
    """Schedules, recomputation, offload, compilation, clipping and optimisers, each once; and low precision."""
    for schedule in (
        "GPipe",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ):
        for model in ("gpt-tiny", "vit-tiny"):
            pipeline = divided(strategy="pipeline", pipeline_schedule=schedule, micro_batches=8)
            yield Case(model=model, parallel=pipeline)
    listed: tuple[dict[str, Any], ...] = (
        {"strategy": "fsdp2", "recompute": "full"},
        {"strategy": "fsdp2", "recompute": "selective"},
        {"strategy": "tensor", "recompute": "selective"},
        {"strategy": "fsdp2", "offload": True},
        {"strategy": "fsdp2", "compile": "aot_eager"},
        {"strategy": "ddp", "bucket_mib": 0.01},
        *({"strategy": name, "clip_norm": 0.1} for name in ("ddp", "fsdp2", "tensor", "pipeline")),
        *({"strategy": name, "rate_warmup": 10} for name in ("ddp", "fsdp2", "tensor")),
        *(
            {"strategy": name, "optimiser": "adamw"}
            for name in ("ddp", "zero1", "zero2", "fsdp2", "tensor", "pipeline")
        ),
    )
    for options in listed:
        yield Case(model="gpt-tiny", parallel=divided(**options))
    low = (
        ("bev-tiny", "ddp"),
        ("resnet-tiny", "ddp"),
        ("vit-tiny", "ddp"),
        ("gpt-tiny", "fsdp2"),
        ("gpt-tiny", "tensor"),
    )
    for precision, (model, strategy) in itertools.product(("bf16", "fp16"), low):
        yield Case(
            model=model,
            parallel=divided(strategy=strategy),
            precision=precision,
            steps=200,
        )  # type: ignore[arg-type]


class Comparison:
    """One rank: trains cases and compares them; batches and references are kept."""

    def __init__(self, dataset: str, num_batches: int) -> None:
        import torch.distributed as dist

        self._dataset = dataset
        self._num_batches = num_batches
        self._world = dist.get_world_size()
        self._batches: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
        self._alone: dict[bytes, list[float]] = {}

    def compare(self, case: Case) -> Compared:
        """Train a case on all ranks and compare it; all ranks must call this."""
        import torch.distributed as dist

        from fuelrail.bench.trainer.models.build import build_model
        from fuelrail.bench.trainer.strategies.parallel import (
            make_mesh,
            parallelise,
        )
        from fuelrail.loaders.distributed import resolve_world

        degrees = degrees_of(case.parallel, self._world)
        rows = GLOBAL_BATCH // degrees.data
        check_fits(
            case.parallel,
            degrees=degrees,
            model=MODELS[case.model],
            batch_size=rows,
            image=_IMAGE,
        )
        mesh = make_mesh(degrees, "cpu")
        place = resolve_world(mesh)
        batches = self._load(place.rank, place.size)
        started_s = time.perf_counter()
        parallel = parallelise(
            partial(build_model, MODELS[case.model]),
            case.parallel,
            mesh=mesh,
            micro_batches=case.parallel.micro_batches or rows,
            learning_rate=case.rate,
            precision=case.precision,
        )
        losses = [
            train_step(parallel, batch)
            for batch in itertools.islice(itertools.cycle(batches), case.steps)
        ]
        seconds = time.perf_counter() - started_s
        keys: list[Any] = [None] * self._world
        dist.all_gather_object(keys, (place.rank, [batch["sample_key"] for batch in batches]))
        same = True
        difference = 0.0
        if dist.get_rank() == 0:
            micro = (case.parallel.micro_batches or rows) if degrees.pp > 1 else 1
            expected = self._train_alone(case, degrees.data * micro)
            difference = _difference(losses, expected, case)
            ranks = dict(keys)
            keys_by_step = [
                [key for rank in sorted(ranks) for key in ranks[rank][step]]
                for step in range(self._num_batches)
            ]
            same = keys_by_step == [batch["sample_key"] for batch in self._load(0, 1)]
        return Compared(
            world=self._world,
            degrees=str(degrees),
            case=case,
            same_samples=same,
            difference=difference,
            first_loss=losses[0],
            last_loss=losses[-1],
            seconds=round(seconds, 2),
        )

    def _load(self, rank: int, size: int) -> list[Mapping[str, Any]]:
        from fuelrail import DataLoader, ImageAugment, Transforms
        from fuelrail.pipeline.order.batching import World

        if (rank, size) not in self._batches:
            image_augment = ImageAugment(
                height=_IMAGE[0],
                width=_IMAGE[1],
                train=True,
                resize_range=(0.08, 0.4),
                crop_y="random",
                flip_prob=0.5,
                rotate_deg=(-45.0, 45.0),
            )
            transforms = Transforms(image=image_augment)
            with DataLoader(
                self._dataset,
                GLOBAL_BATCH // size,
                shuffle=True,
                drop_last=True,
                seed=7,
                num_workers=1,
                transforms=transforms,
                world=World(rank, size),
                check_ranks=False,
            ) as loader:
                self._batches[rank, size] = list(itertools.islice(loader, self._num_batches))
        return self._batches[rank, size]

    def _train_alone(self, case: Case, num_parts: int) -> list[float]:
        """Losses of one process, in fp32, that adds up the gradients of the parts."""
        from fuelrail.bench.trainer.models.build import build_model
        from fuelrail.bench.trainer.strategies.parallel import parallelise

        options = {
            name: getattr(case.parallel, name) for name in ("clip_norm", "optimiser", "rate_warmup")
        }
        key = msgspec.json.encode([case.model, case.rate, case.steps, options, num_parts])
        if key not in self._alone:
            model = partial(build_model, MODELS[case.model])
            alone = parallelise(
                model,
                ParallelSettings(**options, alone=True, learning_rate=case.rate),
            )
            losses = []
            for batch in itertools.islice(itertools.cycle(self._load(0, 1)), case.steps):
                parts = zip(
                    *(tensor.chunk(num_parts) for tensor in alone.inputs(batch)),
                    strict=True,
                )
                losses.append(
                    sum(
                        float(alone.forward_backward(part, accumulation=num_parts))
                        for part in parts
                    )
                )
                alone.update()
            self._alone[key] = losses
        return self._alone[key]


def train_step(parallel: Parallel, batch: Mapping[str, Any]) -> float:
    """Train on one batch of this rank; return the loss, the mean over all ranks."""
    import torch.distributed as dist

    loss = parallel.forward_backward(parallel.inputs(batch))
    parallel.update()
    loss = parallel.own_loss(loss)
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss)


def _difference(losses: Sequence[float], expected: Sequence[float], case: Case) -> float:
    if case.precision == "fp32":
        return max(abs(loss - reference) for loss, reference in zip(losses, expected, strict=True))
    windows = range(0, case.steps, _WINDOW)
    sums = [
        (
            sum(losses[start : start + _WINDOW]),
            sum(expected[start : start + _WINDOW]),
        )
        for start in windows
    ]
    return max(abs(loss / reference - 1) for loss, reference in sums)


def _num_batches(cases: Sequence[Case]) -> int:
    """Return the number of batches that differ; longer cases take them again."""
    return min(_NUM_BATCHES, max(case.steps for case in cases))


def run_rank(cases: Path, dataset: str, out: Path) -> None:
    """One rank of a world: all cases of a file, one after the other; rank 0 writes what came out."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    listed = msgspec.json.decode(cases.read_bytes(), type=list[Case])
    comparison = Comparison(dataset, _num_batches(listed))
    with out.open("w") if dist.get_rank() == 0 else open("/dev/null", "w") as file:  # noqa: PTH123 - a device
        for case in listed:
            compared = comparison.compare(case)
            file.write(msgspec.json.encode(compared).decode() + "\n")
            file.flush()
    dist.barrier()  # or ZeRO's end aborts the process
    dist.destroy_process_group()


def measure(world: int, cases: Sequence[Case], folder: Path) -> list[Compared]:
    """Run the cases on this number of ranks."""
    write_cameras(
        folder / "cameras",
        GLOBAL_BATCH * _num_batches(cases),
        channels=("cam_front", "cam_front_right"),
    )
    listed = folder / "cases.json"
    out = folder / "compared.jsonl"
    listed.write_bytes(msgspec.json.encode(list(cases)))
    said = run_ranks(
        world,
        "-m",
        "support.parallel_equality",
        listed,
        folder / "cameras",
        out,
        timeout_s=_PATIENCE_S,
    )
    (folder / "ranks.log").write_text(said)
    return [msgspec.json.decode(line, type=Compared) for line in out.read_text().splitlines()]


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
