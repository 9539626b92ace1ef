"""Time that a checkpoint takes from the training: saved in the background, and saved while the training waits.

``python -m fuelrail.bench.micro.trainer.checkpoint_stall WORK [--megabytes N] [--rounds N] [--out FILE]``.

A loop of short steps runs without a checkpoint, with one in the background and with one that is waited for, in turns.
The stall is the time by which the loop takes longer, so it includes what the background work takes from the steps. The
steps sleep, as a host does while a GPU computes, or compute on one core. The state is that of AdamW: a third each are
parameters and the two moments. It goes to the disk of WORK, synchronised.

The two loops need two cores: where other processes take them, the background work takes from the steps what they leave.
On a busy machine ``chrt -f 1 python -m ...`` keeps the others away.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
from fuelrail.bench.trainer.strategies.parallel import Parallel

_STEP_S = 0.02
_WIDTH = 1024
_ALONE_STEPS = 5
Kind = Literal["none", "background", "waited for"]
KINDS: tuple[Kind, ...] = ("none", "background", "waited for")


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds [s]. ``call_s``: until the save in the background returned to the training."""

    steps: Literal["sleep", "compute"]
    num_steps: int
    without_s: float
    background_stall_s: float
    waited_stall_s: float
    call_s: float
    save_s: float
    ratio: float
    """Stall in the background over stall of a save that is waited for."""


class StallReport(msgspec.Struct, frozen=True, kw_only=True):
    """Both kinds of steps, and the machine."""

    benchmark: str
    machine: MachineFacts
    rounds: int
    state_mb: float
    stalls: list[Stall]


def measure(work: Path, megabytes: int, rounds: int, steps: Literal["sleep", "compute"]) -> tuple[Stall, float]:
    """Run the loops in turns; returns the stalls and the bytes of a checkpoint [MB]. Needs a process group."""
    layers = max(1, round(megabytes * 1e6 / 3 / 4 / _WIDTH**2))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    parallel = Parallel([model], torch.optim.AdamW(model.parameters()), lambda _: ())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    parallel.update()
    square = torch.randn(_WIDTH, _WIDTH)

    def step() -> None:
        end_s = time.perf_counter() + _STEP_S
        if steps == "sleep":
            time.sleep(_STEP_S)
            return
        while time.perf_counter() < end_s:
            torch.mm(square[:64], square)

    checkpoints = Checkpoints(str(work / "checkpoints"), keep=1, identity={})
    checkpoints.save(1, parallel, {})  # the first one also gets its memory
    warm = checkpoints.wait()
    assert warm is not None
    num_steps = int(2 * warm.total_ns / 1e9 / _STEP_S) + _ALONE_STEPS
    walls: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    calls, saves = [], []
    for number in range(rounds * len(KINDS)):
        kind = KINDS[number % len(KINDS)]
        start_s = time.perf_counter()
        for at in range(num_steps):
            step()
            if at == _ALONE_STEPS and kind != "none":
                checkpoints.save(number + 2, parallel, {})
                if kind == "waited for":
                    checkpoints.wait()
        walls[kind].append(time.perf_counter() - start_s)
        done = checkpoints.wait()
        if done is not None:
            calls.append(done.stall_ns / 1e9)
            saves.append(done.total_ns / 1e9)
    checkpoints.close()
    without = median(walls["none"])
    background, waited = (median(walls[kind]) - without for kind in KINDS[1:])
    stall = Stall(
        steps=steps, num_steps=num_steps, without_s=without, background_stall_s=background, waited_stall_s=waited,
        call_s=median(calls), save_s=median(saves), ratio=background / waited,
    )  # fmt: skip
    return stall, warm.num_bytes / 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; print and, with ``--out``, write the report."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.trainer.checkpoint_stall")
    parser.add_argument("work", type=Path, metavar="WORK", help="new folder for checkpoints, on the disk to measure")
    parser.add_argument("--megabytes", type=int, default=600, help="size of the state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of three loops (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    stalls, size = [], 0.0
    for steps in ("sleep", "compute"):
        stall, size = measure(options.work, options.megabytes, options.rounds, steps)
        stalls.append(stall)
        shutil.rmtree(options.work / "checkpoints")
    dist.destroy_process_group()
    report = StallReport(
        benchmark="checkpoint-stall", machine=machine_facts(), rounds=options.rounds, state_mb=size, stalls=stalls
    )
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
