"""A rank that takes batches from the process of its host, and writes a digest of each to a file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import fuelrail as fr
from fuelrail.loaders.distributed import batch_digest


def run(
    dataset: Path,
    parallel: int,
    folder: Path,
    out: Path,
    environment: dict[str, str],
) -> None:
    """Be a rank with these variables; ``parallel``: how many ranks divide a model."""
    os.environ.update(environment)
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    loader = fr.DataLoader(
        dataset,
        2,
        shuffle=True,
        seed=3,
        where=os.environ.get("WHERE") or None,
        transforms=fr.Transforms(image=fr.ImageAugment(height=8, width=8, resize="stretch")),
        world=fr.World(rank // parallel, size // parallel),
    )
    with out.open("w", buffering=1) as file:
        for epoch in range(3):
            for step, batch in enumerate(loader):
                print(epoch, step, batch_digest(batch), file=file)
                if (victim := folder / f"kill-{rank}-{epoch}-{step}").exists():
                    victim.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                while (folder / f"wait-{epoch}-{step}").exists():
                    time.sleep(0.01)
