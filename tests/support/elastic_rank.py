"""One rank of a training job that checkpoints its loader every few steps; one rank may kill itself with SIGKILL.

Arguments: dataset, folder for records and checkpoints, global batch, steps to make in all, rank and step of the kill
(-1: none). Each step is written down, keys and all, once every rank has made it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fuelrail import DataLoader

CHECKPOINT_EVERY = 3


def main(
    root: str,
    out: str,
    global_batch: int,
    num_steps: int,
    kill_rank: int,
    kill_step: int,
) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    loader = DataLoader(
        root,
        global_batch // size,
        shuffle=True,
        drop_last=True,
        transforms={"image": {"height": 64, "width": 96, "resize": 1.0}},
        seed=5,
        num_workers=1,
    )
    progress = {"steps": torch.zeros(1, dtype=torch.int64)}
    newest = max(Path(out).glob("step-*"), default=None)
    if newest is not None:
        dcp.load({"loader": loader, "progress": progress}, checkpoint_id=newest)
    step = int(progress["steps"])
    log = Path(out, f"world{size}-rank{rank}.jsonl")
    batches = iter(loader)
    while step < num_steps:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            continue
        if (rank, step) == (kill_rank, kill_step):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))  # the gradients: a step is made by all ranks or by none
        with log.open("a") as lines:
            lines.write(
                json.dumps([step, batch["epoch"], batch["step"], batch["sample_key"]]) + "\n"
            )
        dist.barrier()  # nobody dies before all have written
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            progress["steps"].fill_(step)
            dcp.save(
                {"loader": loader, "progress": progress},
                checkpoint_id=Path(out, f"step-{step:03d}"),
            )
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
