"""Training with a ledger, killed at random moments: what the weights have seen is what the ledger says."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

from fuelrail.loaders.integrations.sampler import BatchSampler
from fuelrail.pipeline.format.ledger import read_ledger, seen_by_weights
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.spec import OrderSpec
from support.forked import fork, join

NUM_ROWS = 1000
NUM_STEPS = 400
EVERY = 7


def train(folder: Path, global_batch: int) -> None:
    """Continue from the checkpoint; the weights are the list of all rows that they were trained on."""
    sampler = BatchSampler(
        NUM_ROWS,
        OrderSpec(seed=5),
        global_batch=global_batch,
        world=World(),
        ledger=folder / "run.ledger",
    )
    loader = sampler.count()
    file = folder / "checkpoint.json"
    weights: list[int] = []
    if file.exists():
        saved = json.loads(file.read_bytes())
        weights = saved["weights"]
        loader.load_state_dict(saved["state"])
    step = 0
    while len(weights) < NUM_STEPS * 24:
        for batch in loader:
            weights += batch
            step += 1
            time.sleep(0.0005)
            if step % EVERY == 0:
                part = file.with_suffix(".part")
                part.write_text(json.dumps({"state": loader.state_dict(), "weights": weights}))
                part.replace(file)


def rows_of(folder: Path, state: dict[str, int]) -> list[int]:
    """Return the rows that the weights of a checkpoint have seen, as the ledger says."""
    stretches, _ = seen_by_weights(read_ledger(folder / "run.ledger", open_end=True).records)
    end = (state["epoch"], state["samples_consumed"])
    rows: list[int] = []
    for index, stretch in enumerate(stretches):
        assert not stretch.skipped, "a gap"
        assert index == 0 or stretches[index - 1].end == stretch.start.restored, "an overlap"
        sampler = BatchSampler(
            NUM_ROWS,
            OrderSpec(seed=5),
            global_batch=stretch.start.global_batch,
            world=World(),
        )
        until = min(stretch.end, end)
        (epoch, consumed) = stretch.start.place
        while (epoch, consumed) < until:
            state = {
                **sampler.state_dict(),
                "epoch": epoch,
                "samples_consumed": consumed,
            }
            sampler.load_state_dict(state)
            for batch in sampler:
                if (epoch, consumed) >= until:
                    break
                rows += batch
                consumed += len(batch)
            else:
                epoch = epoch + 1
                consumed = 0
            sampler = BatchSampler(
                NUM_ROWS,
                OrderSpec(seed=5),
                global_batch=stretch.start.global_batch,
                world=World(),
            )
    return rows


def run_kills(work: Path, num_kills: int, seed: int) -> int:
    """Kill this number of trainers, compare after each; return the rows compared."""
    draw = random.Random(seed)
    kills = 0
    compared = 0
    run = 0
    folder = work / "run-0"
    folder.mkdir()
    while True:
        pid = fork(partial(train, folder, draw.choice([8, 16, 24, 40])))
        if kills < num_kills:
            time.sleep(draw.uniform(0.01, 0.2))
            os.kill(pid, signal.SIGKILL)
            kills += join(pid) == -signal.SIGKILL
        else:
            assert join(pid) == 0
        file = folder / "checkpoint.json"
        if file.exists():
            saved = json.loads(file.read_bytes())
            assert rows_of(folder, saved["state"]) == saved["weights"], (
                f"{folder} after {kills} kills"
            )
            compared += len(saved["weights"])
            if len(saved["weights"]) >= NUM_STEPS * 24 - 40 * EVERY:
                if kills == num_kills:
                    return compared
                run += 1
                folder = work / f"run-{run}"
                folder.mkdir()
