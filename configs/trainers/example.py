"""What the example trainers share: arguments, a small model, a loss, checkpoints, a line of output
for each step.

Each example is one file that trains on a Fuelrail dataset (`make demo` writes one to
.demo/dataset), saves checkpoints with the loader's position in them through its framework's own
means, and continues from the newest when it runs again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fuelrail import ImageAugment, Transforms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TRANSFORMS = Transforms(image=ImageAugment(height=64, width=176))


def arguments(
    argv: Sequence[str] | None = None,
    *,
    takes_actors: bool = False,
) -> argparse.Namespace:
    """Parse the command line of every example; of one that can have its batches made elsewhere,
    the number of actors too.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("dataset", metavar="DATASET", help="folder of a Fuelrail dataset")
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="optimiser steps in all, those before a resume included",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(".checkpoint"),
        metavar="DIR",
        help="where to save and resume",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=5,
        metavar="STEPS",
        help="steps between two checkpoints",
    )
    if takes_actors:
        parser.add_argument(
            "--actors",
            type=int,
            help="number of actors of this node's Ray cluster that make the batches",
        )
    options = parser.parse_args(argv)
    options.checkpoint.mkdir(parents=True, exist_ok=True)
    return options


def build_model() -> nn.Sequential:
    """Return a model that guesses, from one image, how many boxes its sample has."""
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 8, stride=8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Dropout(0.1),
    )
    return nn.Sequential(
        backbone,
        nn.Linear(128, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )


def inputs(batch: dict[str, Any]) -> torch.Tensor:
    """Return the batch's images as the model takes them: float32 [B * N, 3, H, W] in 0 .. 1."""
    images: torch.Tensor = batch["img"]
    return images.flatten(0, 1).float() / 255


def targets(batch: dict[str, Any]) -> torch.Tensor:
    """Return the number of boxes of each sample, for each of its images: float32 [B * N, 1]."""
    images: torch.Tensor = batch["img"]
    counts = torch.tensor([float(len(boxes)) for boxes in batch["gt_boxes_3d"]])
    counts_of_images = counts.repeat_interleave(images.shape[1])[:, None]
    return counts_of_images.to(images.device, non_blocking=True)


def own_device() -> torch.device:
    """Return this rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def join_group() -> None:
    """Join the process group of this launch: NCCL's bound to this rank's GPU, so that it
    connects now, or Gloo's.
    """
    device = own_device()
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def forever(loader: Any) -> Iterator[Any]:
    """Yield epoch after epoch; the loader advances automatically, a restored one from its
    position.
    """
    while True:
        yield from loader


class Checkpoints:
    """A run's checkpoints: folders ``step-N``, which appear by one rename once all ranks have
    written all their files.

    So each that is found is whole, whenever a run was killed. They hold the random generators of
    each rank too. SIGTERM makes all ranks save after this step, and stop. All ranks call the same
    methods, and see the same folder.
    """

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.stopped = False
        self._terminated = False
        self._folder: Path = options.checkpoint / name
        self._every: int = options.every
        self._steps: int = options.steps
        self._saved: Path | None = None
        self._rank = int(os.environ.get("RANK", "0"))
        self.listen()

    def listen(self) -> None:
        """Note SIGTERM from here on; again where a framework has set a handler of its own."""

        def note_signal(*_: object) -> None:
            self._terminated = True

        signal.signal(signal.SIGTERM, note_signal)

    def newest(self) -> Path | None:
        """Return the checkpoint of the most steps, None if there is none; what killed saves left
        is removed.
        """
        if self._rank == 0:
            for folder in self._folder.glob("unfinished-*"):
                shutil.rmtree(folder)
        self._saved = max(self._folder.glob("step-*"), key=count_steps, default=None)
        return self._saved

    def batches(self, loader: Any, first: int) -> Iterator[tuple[int, Any]]:
        """Yield the steps from ``first`` to the last, each with its batch."""
        for step, batch in zip(range(first, self._steps), forever(loader), strict=False):
            self.restore_generators()
            yield step, batch
            if self.stopped:
                return

    def restore_generators(self) -> None:
        """Before the first step: set this rank's random generators to those of the newest
        checkpoint.
        """
        folder = self._saved
        self._saved = None
        if folder is None:
            return
        file = folder / f"generators-{self._rank}.pt"
        if file.exists():  # not on more ranks than it was saved on
            states = torch.load(file, weights_only=True)
            torch.set_rng_state(states["cpu"])
            if torch.cuda.is_available() and "cuda" in states:
                torch.cuda.set_rng_state(states["cuda"])

    def due(self, num_steps: int) -> bool:
        """Return whether to save now that this number of steps is done."""
        terminated = torch.tensor(float(self._terminated), device=own_device())
        if dist.is_initialized():
            dist.all_reduce(terminated)  # the signal reaches the ranks in different steps
        self.stopped = bool(terminated)
        return self.stopped or num_steps % self._every == 0 or num_steps == self._steps

    @contextmanager
    def saving(self, num_steps: int) -> Iterator[Path]:
        """Yield a folder for the files of all ranks, which is then the newest checkpoint; of the
        others one is kept.
        """
        folder = self._folder / f"unfinished-{num_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        torch.save(generators, folder / f"generators-{self._rank}.pt")
        barrier()
        if self._rank == 0:
            for path in (*folder.rglob("*"), folder):
                sync(path)
            folder.rename(self._folder / f"step-{num_steps}")
            sync(self._folder)
            checkpoints = sorted(self._folder.glob("step-*"), key=count_steps)
            for checkpoint in checkpoints[:-2]:
                unfinished = self._folder / f"unfinished-{count_steps(checkpoint)}"
                checkpoint.rename(unfinished)
                shutil.rmtree(unfinished)
        barrier()


def count_steps(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was saved, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def sync(path: Path) -> None:
    """Have a file or folder survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def report(step: int, loss: float | None, batch: dict[str, Any]) -> None:
    """Print a line for a step; a rank that does not know the loss leaves it out."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    result = "" if loss is None else f" loss {loss:.6f}"
    keys = " ".join(batch["sample_key"])
    print(  # noqa: T201
        f"rank {rank} step {step} epoch {batch['epoch']}{result} samples {keys}",
        flush=True,
    )
