"""A trainer with torch's DataLoader and worker processes over `fr.order`, killed at random moments and resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import cache, partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from fuelrail.loaders.integrations.sampler import BatchSampler
from fuelrail.pipeline.order.balance import Balance
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.bucket import Bucket
from fuelrail.pipeline.order.pack import Pack
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage
from fuelrail.pipeline.order.weights import AttributeWeights
from support.forked import fork, join

NUM_ROWS = 1000
GLOBAL_BATCH = 24
NUM_STEPS = 150
_LONGEST_S = 0.15
_SIZES = (1, 2, 3, 4, 6, 8, 12, 24)


class Rows(torch.utils.data.Dataset):
    """Row number i is the tensor i; now and then one takes longer, so that batches wait for each other."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> int:
        time.sleep(0.002 if row % 50 == 0 else 0.0)
        return row


LOSSES = {f"v{version}": [row * version % 17 for row in range(NUM_ROWS)] for version in (3, 5)}
STAGES = (  # all rows, a ramp from one version of the losses to the next one, and that one
    OrderStage(until=600),
    OrderStage(weights=(AttributeWeights(attribute="v3"),), until=2400, ramp=True),
    OrderStage(weights=(AttributeWeights(attribute="v5"),)),
)


PLAIN = OrderSpec(seed=5, stages=STAGES)
PACKED = OrderSpec(seed=5, pack=Pack(budget=50, cost="v5", window=128), filter="v5 > 0")
"""About six rows in a pack, and six steps in an epoch."""
BALANCED = OrderSpec(seed=5, pack=PACKED.pack, filter="v5 > 0", balance=Balance(cost="v3"))
BUCKETED = OrderSpec(seed=5, bucket=Bucket(by="v3", bounds=(2, 6, 7, 16), window=128))


def make_sampler(spec: OrderSpec, world: World) -> BatchSampler:
    return BatchSampler(LOSSES, spec, global_batch=GLOBAL_BATCH, world=world)


def train(file: Path, world: World, first: int, spec: OrderSpec) -> None:
    """Append a line for each step, in one write: its number, its rows and the state after it."""
    os.setpgid(0, 0)  # so that a kill takes the workers along
    torch.set_num_threads(1)
    sampler = make_sampler(spec, world)
    loader = sampler.count(
        DataLoader(
            Rows(),
            batch_sampler=sampler,
            num_workers=2,
            prefetch_factor=3,
            persistent_workers=True,
        )
    )
    states = [json.loads(line)["state"] for line in lines_of(file)]
    if states:
        loader.load_state_dict(states[-1])
    step = first
    with file.open("ab", buffering=0) as out:
        while step < NUM_STEPS:
            for batch in loader:
                line = {
                    "step": step,
                    "rank": world.rank,
                    "world": world.size,
                    "rows": batch.tolist(),
                }
                out.write(json.dumps(line | {"state": loader.state_dict()}).encode() + b"\n")
                step += 1
                if step == NUM_STEPS:
                    break


def run_kills(work: Path, num_kills: int, seed: int, spec: OrderSpec = PLAIN) -> int:
    """Kill this number of trainers and compare each line with the uninterrupted run; returns the steps compared.

    That run is of the line's own rank and world; all ranks of any world have the same rows.
    """
    draw = random.Random(seed)
    compared = 0
    kills = 0
    run = 0

    @cache
    def reference(rank: int, size: int) -> list[list[int]]:
        sampler = make_sampler(spec, World(rank, size))
        return [sampler[number] for number in range(NUM_STEPS)]

    while True:
        file = work / f"run-{run}.jsonl"
        lines = lines_of(file)
        size = draw.choice(_SIZES)
        world = World(draw.randrange(size), size)
        pid = fork(partial(train, file, world, len(lines), spec))
        if kills < num_kills:
            while (
                len(lines_of(file)) == len(lines)
                and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            ):
                time.sleep(0.001)  # until it trains
            time.sleep(draw.uniform(0, _LONGEST_S))
            os.killpg(pid, signal.SIGKILL)
            kills += join(pid) == -signal.SIGKILL
        else:
            assert join(pid) == 0
        for number, line in enumerate(lines_of(file)):
            record = json.loads(line)
            rows = reference(record["rank"], record["world"])[number]
            assert (record["step"], record["rows"]) == (number, rows), f"{file}:{number + 1}"
            compared += number >= len(lines)
        if len(lines_of(file)) == NUM_STEPS:
            if kills == num_kills:
                return compared
            run += 1


def lines_of(file: Path) -> list[bytes]:
    """The whole lines of a file that a process writes."""
    data = file.read_bytes() if file.exists() else b""
    return data[: data.rfind(b"\n") + 1].splitlines()
