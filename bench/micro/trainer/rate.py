"""The reference trainer's rate against a bare DDP loop: what do its clocks, strategies and records cost?

Two ranks on this host (gloo) train the same model on the same batches in memory, in laps by turns: one lap by the loop
of :func:`bare_lap`, one by the trainer with all it does for a record of each step, on an emulated accelerator that
takes no time. The figure is the median over the pairs of laps.

    python -m fuelrail.bench.micro.trainer.rate --out bench/results/trainer_rate.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fuelrail.bench.measure.accelerator import EmulatedAccelerator
from fuelrail.bench.measure.clock import MonotonicClock
from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.measure.records import RankWriter
from fuelrail.bench.micro.profiles import made_profile
from fuelrail.bench.ranks.launch import run_ranks
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.trainer.loop import train
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.parallel import build, parallelise
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings
from fuelrail.loaders import DataLoader, ImageAugment, Transforms
from fuelrail.pipeline.errors import FuelrailError
from support.cameras import write_cameras

AT_LEAST = 0.98
_MODEL, _NUM_RANKS, _BATCH_SIZE = "vit-tiny", 2, 8
_NUM_BATCHES = 4
_INSTANT = made_profile("instant", "none", forward_ms=1e-6, backward_ms=1e-6, optimiser_ms=1e-6)


class TrainerRate(msgspec.Struct, frozen=True, kw_only=True):
    """The result file: rates in steps a second, and the trainer's over the bare loop's, pair by pair of laps."""

    benchmark: str
    machine: MachineFacts
    model: str
    num_ranks: int
    batch_size: int
    bare_steps_per_s: float
    trainer_steps_per_s: float
    ratios: list[float]
    ratio: float


def bare_lap(
    model: DistributedDataParallel, optimiser: torch.optim.Optimizer, batches: Iterator[Mapping[str, Any]], steps: int
) -> float:
    """Train for this number of steps with nothing but torch, as one writes it down; return the seconds."""
    started_s = time.perf_counter()
    total = 0.0
    for batch in itertools.islice(batches, steps):
        loss = model(*model.module.inputs(batch))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        total += loss.item()
    return time.perf_counter() - started_s


def run_rank(dataset: str, out: Path, laps: int, steps: int) -> None:
    """One rank: laps by turns; rank 0 writes the seconds of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transforms = Transforms(image=ImageAugment(height=128, width=256))
    with DataLoader(dataset, _BATCH_SIZE, shuffle=True, drop_last=True, num_workers=1, transforms=transforms) as loader:
        batches = itertools.cycle(list(itertools.islice(loader, _NUM_BATCHES)))
    bare = DistributedDataParallel(build(MODELS[_MODEL], "cpu", 0), gradient_as_bucket_view=True)
    optimiser = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    clock = MonotonicClock()
    accelerator = EmulatedAccelerator(_INSTANT, clock)
    parallel = parallelise(
        build(MODELS[_MODEL], "cpu", 0), ParallelSettings(), Degrees(dp_replicate=_NUM_RANKS), None,
        batch_size=_BATCH_SIZE, accelerator=accelerator,
    )  # fmt: skip
    found = []
    with RankWriter(out.with_name(f"records-{dist.get_rank()}.jsonl")) as writer:
        for lap in range(laps + 1):
            dist.barrier()
            bare_s = bare_lap(bare, optimiser, batches, steps)
            dist.barrier()
            started_s = time.perf_counter()
            for record in train(parallel, batches, clock, num_steps=steps):
                writer.write(record)
            if lap:  # in the first one torch makes its buckets
                found.append((bare_s, time.perf_counter() - started_s))
    if dist.get_rank() == 0:
        out.write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(folder: Path, laps: int, steps: int) -> TrainerRate:
    """Run the ranks. Raises FuelrailError where they end early."""
    machine = machine_facts()
    write_cameras(folder / "cameras", _NUM_RANKS * _BATCH_SIZE * _NUM_BATCHES, channels=("cam_front",))
    out, log = folder / "laps.json", folder / "ranks.log"
    program = [__spec__.name, "--rank", str(folder / "cameras"), str(out), str(laps), str(steps)]
    if run_ranks(program, _NUM_RANKS, log, lambda: None).exit_code:
        raise FuelrailError(f"the ranks ended early: {log.read_text()[-4000:]}")
    seconds = msgspec.json.decode(out.read_bytes(), type=list[tuple[float, float]])
    ratios = [bare_s / own_s for bare_s, own_s in seconds]
    return TrainerRate(
        benchmark="trainer_rate", machine=machine, model=_MODEL, num_ranks=_NUM_RANKS, batch_size=_BATCH_SIZE,
        bare_steps_per_s=steps / statistics.median(bare_s for bare_s, _ in seconds),
        trainer_steps_per_s=steps / statistics.median(own_s for _, own_s in seconds),
        ratios=ratios, ratio=statistics.median(ratios),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 if the trainer is slower than it may be."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.trainer.rate", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--laps", type=int, default=15, help="pairs of laps (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a lap (default: %(default)s)")
    parser.add_argument("--rank", nargs=5, metavar="ARGUMENT", help="run as a rank (used by the command itself)")
    options = parser.parse_args(argv)
    if options.rank:
        run_rank(options.rank[0], Path(options.rank[1]), int(options.rank[2]), int(options.rank[3]))
        return 0
    with tempfile.TemporaryDirectory(prefix="fuelrail-trainer-rate-") as folder:
        result = measure(Path(folder), options.laps, options.steps)
    print(  # noqa: T201
        f"trainer {result.trainer_steps_per_s:.2f} steps/s, bare DDP loop {result.bare_steps_per_s:.2f}: "
        f"{result.ratio:.3f}  {'holds' if result.ratio >= AT_LEAST else 'TOO SLOW'}"
    )
    if options.out is not None:
        publish_json(options.out, result)
    return 0 if result.ratio >= AT_LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
