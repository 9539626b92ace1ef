"""Does a student learn more from a teacher and labels than from labels alone, in the same steps?

A ViT learns the occupancy of a drive; then the BEV model learns it for each seed (weights, order) twice, in the same
steps: from the labels, and from labels and the ViT's logits. Both see the same batches and start from the same weights.
Compared is the cross-entropy on every fifth frame of the drives, which nobody trained on; that on the drives of the
split `val` is given too. The dataset is `fuelrail synth`'s, or any with boxes.

    python -m fuelrail.bench.micro.trainer.distillation DATASET --out bench/results/distillation.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
from fuelrail.bench.trainer.distill.student import distilled
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.models.staged import StagedModel
from fuelrail.bench.trainer.strategies.parallel import build, parallelise
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings
from fuelrail.loaders import DataLoader, ImageAugment, Transforms

if TYPE_CHECKING:
    from fuelrail.bench.trainer.strategies.parallel import Parallel

_TEACHER, _STUDENT = "vit-tiny", "bev-tiny"
_IMAGE = ImageAugment(height=64, width=96)
_BATCH, _RATE = 8, 1e-3
_HELD_OUT = 5


class Seed(msgspec.Struct, frozen=True, kw_only=True):
    """Cross-entropy of the student of one seed, both ways: on frames held out of the drives, and on other drives."""

    seed: int
    labels: float
    distilled: float
    labels_elsewhere: float
    distilled_elsewhere: float


class Distillation(msgspec.Struct, frozen=True, kw_only=True):
    """The result file; ``base_rate_loss``: of saying of each cell how often it is occupied in training."""

    benchmark: str
    machine: MachineFacts
    teacher: str
    student: str
    samples: int
    steps: int
    teacher_steps: int
    learning_rate: float
    weights: str
    temperature: float
    teacher_loss: float
    base_rate_loss: float
    seeds: list[Seed]
    better: int


class Drive:
    """The inputs of a dataset's samples, in memory: the tiny models are faster than images are decoded."""

    def __init__(self, dataset: str) -> None:
        self.loader = DataLoader(dataset, _BATCH, num_workers=2, transforms=Transforms(image=_IMAGE))
        self._inputs = build(MODELS[_STUDENT], "cpu", 0).inputs
        frames, self.elsewhere = (self._read(split) for split in ("train", "val"))
        held_out = torch.arange(len(frames[0])) % _HELD_OUT == 0
        self.training, self.held_out = (tuple(tensor[kept] for tensor in frames) for kept in (~held_out, held_out))

    def _read(self, split: str) -> tuple[Tensor, ...]:
        """Read a split; each tensor has all its samples."""
        with DataLoader(
            self.loader.dataset, 1, split=split, shuffle=False, num_workers=2, transforms=self.loader.transforms
        ) as loader:
            return tuple(torch.cat(tensors) for tensors in zip(*map(self._inputs, loader), strict=True))

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield batches of the training split in a random order."""
        draw = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            rows = torch.randint(len(self.training[0]), (_BATCH,), generator=draw)
            yield tuple(tensor[rows] for tensor in self.training)

    def base_rate_loss(self) -> float:
        """Cross-entropy on the held-out frames of saying of each cell how often it is occupied in training."""
        often = self.training[-2].mean(dim=0).clamp(1e-3, 1 - 1e-3)
        return float(F.binary_cross_entropy(often.expand_as(self.held_out[-2]), self.held_out[-2]))


def train(drive: Drive, name: str, seed: int, steps: int, lesson: Mapping[str, Any] | None = None) -> Parallel:
    """Train a model from the weights of a seed, at a rate that falls to 0."""
    wrap, teaches = (None, None) if lesson is None else distilled(MODELS[name], drive.loader, "cpu", **lesson)
    model = build(MODELS[name], "cpu", seed, None, wrap)
    parallel = parallelise(model, ParallelSettings(), Degrees(), None, batch_size=_BATCH, learning_rate=_RATE)
    parallel.teacher = teaches
    parallel.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(parallel.optimiser, steps)
    for inputs in drive.batches(seed, steps):
        parallel.forward_backward(inputs)
        parallel.update()
    return parallel


@torch.no_grad()
def loss_on(inputs: tuple[Tensor, ...], parallel: Parallel) -> float:
    """Cross-entropy of what a model predicts from the labels."""
    (model,) = parallel.models
    assert isinstance(model, StagedModel), "one rank trains whole models"
    model.eval()
    batches = zip(*(torch.split(tensor, _BATCH) for tensor in inputs), strict=True)
    said: list[Any] = [model.predict(*part)[1] for part in batches]
    logits = [one[0] if isinstance(one, tuple) else one for one in said]  # learning features, the head returns them too
    return float(F.binary_cross_entropy_with_logits(torch.cat(logits), inputs[-2]))


def measure(dataset: str, seeds: int, steps: int, teacher_steps: int, weights: str, temperature: float) -> Distillation:
    """Train the teacher, and the students of all seeds both ways."""
    machine, drive = machine_facts(), Drive(dataset)
    teacher = train(drive, _TEACHER, 1000, teacher_steps)
    found = []
    with tempfile.TemporaryDirectory(prefix="fuelrail-distillation-") as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        checkpoints = Checkpoints(folder, keep=1, identity={"model": _TEACHER})
        checkpoints.save(teacher_steps, teacher, {})
        checkpoints.close()
        dist.destroy_process_group()
        lesson = {"teacher": folder, "weights": weights, "temperature": temperature}
        for seed in range(seeds):
            alone, taught = (train(drive, _STUDENT, seed, steps, one) for one in (None, lesson))
            found.append(
                Seed(
                    seed=seed,
                    labels=loss_on(drive.held_out, alone),
                    distilled=loss_on(drive.held_out, taught),
                    labels_elsewhere=loss_on(drive.elsewhere, alone),
                    distilled_elsewhere=loss_on(drive.elsewhere, taught),
                )
            )
            print(found[-1], flush=True)  # noqa: T201
    return Distillation(
        benchmark="distillation",
        machine=machine,
        teacher=_TEACHER,
        student=_STUDENT,
        samples=len(drive.training[0]),
        steps=steps,
        teacher_steps=teacher_steps,
        learning_rate=_RATE,
        weights=weights,
        temperature=temperature,
        teacher_loss=loss_on(drive.held_out, teacher),
        base_rate_loss=drive.base_rate_loss(),
        seeds=found,
        better=sum(one.distilled < one.labels for one in found),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 if a student of labels alone is as good in any seed."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.trainer.distillation", description=__doc__)
    parser.add_argument("dataset", metavar="DATASET", help="with splits 'train' and 'val', and boxes")
    parser.add_argument("--seeds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=700, help="of a student (default: %(default)s)")
    parser.add_argument("--teacher-steps", type=int, default=900, help="(default: %(default)s)")
    parser.add_argument(
        "--distill", default="labels=0.25,logits=1", help="weights of the parts of the loss (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = measure(
        options.dataset, options.seeds, options.steps, options.teacher_steps, options.distill, options.temperature
    )
    print(  # noqa: T201
        f"teacher {result.teacher_loss:.4f}, base rates {result.base_rate_loss:.4f}; better in {result.better} of "
        f"{len(result.seeds)} seeds"
    )
    if options.out is not None:
        publish_json(options.out, result)
    return 0 if result.better == len(result.seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
