"""One rank of a model that is larger than the memory that a rank may take. Arguments: DATASET STRATEGY FOLDER.

A rank may allocate half of the bytes of all weights, gradients and moments. It trains, saves, and restores what it
saved into a new model. Each rank prints the bytes that it had at most, beyond those at its start.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fuelrail import bench
from support.own_model import load

WIDTH = 2048
DEPTH = 20
STATE_BYTES = 16 * DEPTH * WIDTH**2
LIMIT = STATE_BYTES // 2
M_MMAP_THRESHOLD = -3  # of malloc.h


class Tall(nn.Module):
    """Layers of which one is a twentieth of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, batch):
        activations = batch["img"].flatten(1)[:, :WIDTH].float() / 255
        for layer in self.layers:
            activations = torch.tanh(2 * layer(activations))
        return (activations - 0.5).square().mean()


def status(name: str) -> int:
    """A line of this process's status, in bytes."""
    match = re.search(
        rf"{name}:\s*(\d+) kB",
        Path("/proc/self/status").read_text(encoding="ascii"),
    )
    return int(match[1]) * 1024


def train(dataset: str, strategy: str, folder: str, steps: int) -> list[float]:
    """Train from the newest checkpoint to a number of steps, and save; returns the losses."""
    parallel = bench.parallelise(
        Tall, strategy=strategy, wrap=[nn.Linear], learning_rate=1e-4, seed=5
    )
    losses = []
    with (
        load(dataset, batch_size=4, world=parallel.mesh) as loader,
        bench.Checkpoints(folder) as checkpoints,
    ):
        bench.train(
            parallel,
            loader,
            steps=steps,
            checkpoints=checkpoints,
            on_step=lambda record, step_losses: losses.append(step_losses["loss"]),
        )
    return losses


def main(dataset: str, strategy: str, folder: str) -> None:
    torch.set_num_threads(1)
    # Blocks of the size of a layer go back to the host when they are freed. Without this glibc keeps them, in pieces.
    ctypes.CDLL(None).mallopt(ctypes.c_int(M_MMAP_THRESHOLD), ctypes.c_int(1 << 20))
    dist.init_process_group("gloo")
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text(
        "5", encoding="ascii"
    )  # forgets what the process had at most
    limit = status("VmData") + LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    first = train(dataset, strategy, folder, 2)
    rest = train(dataset, strategy, folder, 4)
    assert len(first) == len(rest) == 2 and rest[1] < first[0]
    sys.stdout.write(f"rank {os.environ['RANK']} had {status('VmHWM') - before} bytes\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
