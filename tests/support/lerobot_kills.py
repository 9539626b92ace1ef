"""Ranks that train on episodes with LeRobot's batch a rank, killed at random and resumed as another number of ranks.

The frames up to each checkpoint that was resumed are given to a witness, and compared with those of one rank alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import fuelrail as fr
from fuelrail.loaders.integrations.lerobot import EpisodeSampler
from support.forked import fork, join

ENDS = np.cumsum([20, 3, 25, 14, 9, 30, 41]).tolist()
STARTS = [0, *ENDS[:-1]]
FRAMES = range(ENDS[-1])
KEPT = [frame for start, end in zip(STARTS, ENDS, strict=True) for frame in range(start, end - 2)]
ORDERS = {
    "shuffled": None,
    "weighted": fr.OrderSpec(
        seed=5, weights=(fr.AttributeWeights(attribute="task", values={"0": 3.0}),)
    ),
}


def make_sampler(order: fr.OrderSpec | None, world: fr.World, batch: int) -> EpisodeSampler:
    return EpisodeSampler(
        STARTS,
        ENDS,
        drop_n_last_frames=2,
        shuffle=True,
        seed=5,
        order=order,
        columns={"task": [frame % 2 for frame in FRAMES]},
        global_batch=batch * world.size,
        world=world,
    )


def train(folder: Path, world: fr.World, *, batch: int, order: Any, barrier: Any) -> None:
    """Append a line for each step to the file of the rank; the first rank saves each third step."""
    sampler = make_sampler(order, world, batch)
    loader = sampler.count(DataLoader(FRAMES, batch_size=batch, sampler=sampler))
    checkpoint = folder / "checkpoint.json"
    step = 0
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        step = saved["step"]
        loader.load_state_dict(saved["state"])
    with (folder / f"rank-{world.rank}.jsonl").open("ab", buffering=0) as log:
        while True:
            epoch = loader.state_dict()["epoch"]
            for frames in loader:
                step += 1
                line = {"step": step, "epoch": epoch, "frames": frames.tolist()}
                log.write(json.dumps(line).encode() + b"\n")
                barrier.wait()  # as the gradients' all-reduce
                if world.rank == 0 and step % 3 == 0:
                    new = checkpoint.with_suffix(".new")
                    new.write_text(json.dumps({"step": step, "state": loader.state_dict()}))
                    new.replace(checkpoint)


def take_steps(folder: Path, first: int, last: int) -> list[tuple[int, list[int]]]:
    """Take the ranks' logs; return epoch and frames of the steps after ``first``, up to ``last``."""
    steps: dict[int, list[Any]] = {}
    for file in sorted(folder.glob("rank-*.jsonl")):
        data = file.read_bytes()
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            record = json.loads(line)
            steps.setdefault(record["step"], []).append(record)
        file.unlink()
    return [
        (steps[step][0]["epoch"], [frame for rank in steps[step] for frame in rank["frames"]])
        for step in range(first + 1, last + 1)
    ]


def run_kills(folder: Path, num_kills: int, *, seed: int, order: str) -> int:
    """Kill this number of times; return the steps, of which each has the frames of an unbroken run."""
    draw = random.Random(seed)
    checkpoint = folder / "checkpoint.json"
    unbroken = make_sampler(ORDERS[order], fr.World(), batch=1)
    tail = "repeat" if order == "weighted" else "exact"
    witness = fr.witness((), expected=KEPT, tail=tail, on_fault="raise")
    epoch = position = step = num_steps = 0
    in_order = list(unbroken)
    for _ in range(num_kills):
        size = draw.randint(1, 6)
        options = {"batch": draw.randint(1, 6), "order": ORDERS[order]}
        barrier = multiprocessing.get_context("fork").Barrier(size)
        pids = [
            fork(partial(train, folder, fr.World(rank, size), **options, barrier=barrier))
            for rank in range(size)
        ]
        first = checkpoint.read_bytes() if checkpoint.exists() else b""
        while not checkpoint.exists() or checkpoint.read_bytes() == first:
            assert os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.03))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert {join(pid) for pid in pids} == {-signal.SIGKILL}
        saved = json.loads(checkpoint.read_text())["step"]
        for of_epoch, frames in take_steps(folder, step, saved):
            if of_epoch > epoch:
                assert position == len(in_order)
                witness.end_epoch()
                epoch, position, in_order = of_epoch, 0, list(unbroken)
            expected = in_order[position : position + len(frames)]
            assert frames == [*expected, *in_order[: len(frames) - len(expected)]]
            witness.note({"index": expected})
            position += len(expected)
            num_steps += 1
        step = saved
    return num_steps
