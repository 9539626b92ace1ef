"""What the example trainers share: arguments, a small model, a loss, and a line of output for each step.

Each example is one file that trains on a Fuelrail dataset (`make demo` writes one to .demo/dataset), saves a checkpoint
with the loader's position in it through its framework's own means, and continues from there when it is run again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fuelrail.loaders import ImageAugment, Transforms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TRANSFORMS = Transforms(image=ImageAugment(height=64, width=176))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of every example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dataset", metavar="DATASET", help="folder of a Fuelrail dataset")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps in all, those before a resume included")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path(".checkpoint"), metavar="DIR", help="where to save and resume"
    )
    options = parser.parse_args(argv)
    options.checkpoint.mkdir(parents=True, exist_ok=True)
    return options


def build_model() -> nn.Sequential:
    """Guesses, from one image, how many boxes its sample has."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    return nn.Sequential(backbone, nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1))


def inputs(batch: dict[str, Any]) -> torch.Tensor:
    """The batch's images as the model wants them: float32 [B * N, 3, H, W] in 0 .. 1."""
    images: torch.Tensor = batch["img"]
    return images.flatten(0, 1).float() / 255


def targets(batch: dict[str, Any]) -> torch.Tensor:
    """Number of boxes of each sample, for each of its images: float32 [B * N, 1]."""
    counts = torch.tensor([float(len(boxes)) for boxes in batch["gt_boxes_3d"]])
    return counts.repeat_interleave(batch["img"].shape[1])[:, None].to(batch["img"].device, non_blocking=True)


def own_device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def join_group() -> None:
    """Join the process group of this launch: NCCL's bound to this rank's GPU, so that it connects now, or Gloo's."""
    device = own_device()
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def forever(loader: Any) -> Iterator[Any]:  # noqa: ANN401 - a loader, or what a framework makes of one
    """Epoch after epoch; the loader advances automatically, a restored one from its position."""
    while True:
        yield from loader


def latest(folder: Path) -> Path | None:
    """The checkpoint of the most steps in a folder of ``step-N``, None if there is none."""
    return max(folder.glob("step-*"), key=lambda path: int(path.name[5:]), default=None)


def report(step: int, loss: float | None, batch: dict[str, Any]) -> None:
    """One line for a step; a rank that does not know the loss leaves it out."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    result = "" if loss is None else f" loss {loss:.4f}"
    print(f"rank {rank} step {step} epoch {batch['epoch']}{result} samples {' '.join(batch['sample_key'])}", flush=True)  # noqa: T201
