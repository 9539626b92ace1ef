"""A rank that takes batches from the process of its host, and prints a digest of each: DATASET, model-parallel size."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import fuelrail as fr
from fuelrail.loaders.distributed import batch_digest


def main(dataset: str, parallel: int, folder: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    loader = fr.DataLoader(
        dataset,
        2,
        shuffle=True,
        seed=3,
        where=os.environ.get("WHERE") or None,
        transforms=fr.Transforms(image=fr.ImageAugment(height=8, width=8, resize="stretch")),
        world=fr.World(rank // parallel, size // parallel),
    )
    for epoch in range(3):
        for step, batch in enumerate(loader):
            print(epoch, step, batch_digest(batch), flush=True)
            if (victim := Path(folder) / f"kill-{rank}-{epoch}-{step}").exists():
                victim.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            while (Path(folder) / f"wait-{epoch}-{step}").exists():
                time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
